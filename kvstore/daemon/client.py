"""The daemon as a tier of an engine's store: the same contract as the tiers in its own process.

Payload goes once, between the caller's buffers and shared memory: a put reserves slots, copies and seals frames there,
publishes them; a get acquires read leases, copies out and checks what arrived. Without a daemon everything is a miss or
FAILED, counted (`counters`: link_*, without_daemon), and comes back by itself when there is one again.

Lookups ask the daemon inside the call (a few microseconds; never longer than timeout_seconds, then the link is down and
calls return at once). Transfers run on the executor.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Sequence
from functools import partial
from itertools import islice
from typing import Any

from allocator.errors import ConfigError, TierError, UsageError
from kvstore.copy_key import CopyKey
from kvstore.daemon import protocol
from kvstore.daemon.frames import FrameForm, FrameForms
from kvstore.daemon.greeting import LinkDownError, RefusedByDaemonError, aside
from kvstore.daemon.link import Link, form_message
from kvstore.daemon.protocol import PLACE, Place
from kvstore.daemon.settings import default_socket_path
from kvstore.daemon.telling import looked_messages, runs
from kvstore.executor import Executor, ThreadExecutor
from kvstore.frame.layout import FrameSpec
from kvstore.frame.specs import SpecSource, plain_specs
from kvstore.queued_tier import QueuedTier
from kvstore.tier import Job, Lookup, ResultCode, Transfer

_RESET_SECONDS = 20.0  # the daemon has to empty its tiers, and a remote one lets all hosts notice
_POLL_SECONDS = (0.0002, 0.005)  # while a lower tier brings copies up
_tiers: weakref.WeakSet[DaemonTier] = weakref.WeakSet()


class DaemonTier(QueuedTier):
    """The client. It needs no daemon to be made.

    socket_path      where the daemon listens; "": where `kvstore serve` listens by default
    executor         where payload is copied; None: inline
    specs            what frames say of a copy's shape, see frame.specs (geometry_specs of the store's geometry)
    tenant           whose quota the copies count against
    timeout_seconds  longest wait for one answer
    fetch_seconds    longest wait for copies that the daemon brings up from its disk or remote tier
    """

    def __init__(
        self,
        socket_path: str = "",
        executor: Executor | None = None,
        *,
        name: str = "daemon",
        specs: SpecSource = plain_specs,
        tenant: str = "",
        timeout_seconds: float = 0.25,
        fetch_seconds: float = 1.0,
    ) -> None:
        if not 0 < timeout_seconds <= 60 or not 0 <= fetch_seconds <= 3600:
            raise ConfigError(
                f"daemon tier: got timeout_seconds {timeout_seconds!r}, fetch_seconds {fetch_seconds!r}; expected "
                "up to 60 and up to 3600"
            )
        super().__init__(name, executor)
        self._forms = FrameForms(specs)
        self._families: dict[tuple[object, ...], FrameSpec] = {}
        self._tenant = tenant
        self._fetch_seconds = fetch_seconds
        self._told_speed = 0.0, -1  # and in which session
        self._pins_lock = threading.Lock()
        self._pins: dict[CopyKey, list[int]] = {}  # key -> sessions in which it was granted, one each
        self.link = Link(socket_path or default_socket_path(), f"{name} {os.getpid()}", timeout_seconds)
        _tiers.add(self)

    @property
    def is_up(self) -> bool:
        """Whether there is a daemon now."""
        return self.link.is_up

    # lookups ---------------------------------------------------------------------------------------------------------

    def leading_run(self, key: CopyKey, hashes: Sequence[bytes]) -> int:
        page = protocol.PAGE_HASHES
        if not hashes:
            return 0
        try:
            form = self._form(key)
            if len(hashes) <= page:
                return self.link.call(partial(protocol.Run, form=form, hashes=b"".join(hashes)), protocol.Count).count
            pages = (b"".join(hashes[at : at + page]) for at in range(0, len(hashes), page))
            found = self.link.call_ahead(
                (partial(protocol.Run, form=form, hashes=one) for one in pages),
                protocol.Count,
                lambda answer: answer.count == page,
            )
            return sum(one.count for one in found)
        except (LinkDownError, RefusedByDaemonError):
            self._count("without_daemon")
            return 0

    def contains(self, keys: Sequence[CopyKey]) -> list[bool]:
        return [flag == 1 for flag in self._presence(keys)]

    def pending_count(self, keys: Sequence[CopyKey]) -> int:
        return self._presence(keys).count(2)

    def _presence(self, keys: Sequence[CopyKey]) -> bytes:
        found = bytearray(len(keys))
        try:
            for places in runs(keys, protocol.PAGE_HASHES):
                form = self._form(keys[places[0]])
                joined = b"".join([keys[place].hash for place in places])
                answer = self.link.call(partial(protocol.Contains, form=form, hashes=joined), protocol.Flags)
                if len(answer.flags) == len(places):
                    found[places[0] : places[-1] + 1] = answer.flags
        except (LinkDownError, RefusedByDaemonError):
            self._count("without_daemon", len(keys))
            return bytes(len(keys))
        return bytes(found)

    # small things ----------------------------------------------------------------------------------------------------

    def touch(self, keys: Sequence[CopyKey]) -> None:
        try:
            for places in runs(keys, protocol.PAGE_HASHES):
                joined = b"".join([keys[place].hash for place in places])
                self.link.tell(partial(protocol.Touch, form=self._form(keys[places[0]]), hashes=joined))
        except (LinkDownError, RefusedByDaemonError):
            self._count("without_daemon", len(keys))

    def note_prefill_speed(self, tokens_per_second: float) -> None:
        """Told once a connection, and again when it has changed by a tenth."""
        told, session = self._told_speed
        if session == self.link.session and abs(tokens_per_second - told) < 0.1 * told:
            return
        self._told_speed = tokens_per_second, session
        self.link.tell(partial(protocol.Speed, prefill_tokens_per_second=min(1e9, max(0.01, tokens_per_second))))

    def note_lookup(self, lookup: Lookup) -> None:
        try:
            for message in looked_messages(lookup, self._form):
                self.link.tell(message)
        except (LinkDownError, RefusedByDaemonError):
            self._count("without_daemon")

    def note_reuse(self, key: CopyKey, blocks: int) -> None:
        try:
            self.link.tell(partial(protocol.Reused, form=self._form(key), blocks=blocks))
        except (LinkDownError, RefusedByDaemonError):
            self._count("without_daemon")

    def delete(self, keys: Sequence[CopyKey]) -> int:
        """In the daemon's lower tiers too. 0 where there is no daemon: it drops nothing then."""
        count = 0
        try:
            keys = list(dict.fromkeys(keys))
            for places in runs(keys, protocol.PAGE_HASHES):
                joined = b"".join([keys[place].hash for place in places])
                form = self._form(keys[places[0]])
                count += self.link.call(partial(protocol.Delete, form=form, hashes=joined), protocol.Count).count
        except (LinkDownError, RefusedByDaemonError):
            self._count("without_daemon", len(keys))
        return count

    def clear(self) -> None:
        """Every copy of the roots that this tier has named. TierError without a daemon: it may come back with them."""
        super().clear()
        with self._pins_lock:
            self._pins.clear()
        try:
            with aside(self.link.path, self.link.name, _RESET_SECONDS) as ask:
                for number, spec in enumerate(list(self._families.values())):
                    ask(form_message(number, spec, self._tenant), protocol.Count)
                ask(protocol.Clear, protocol.Count)
        except (LinkDownError, RefusedByDaemonError) as error:
            raise TierError(f"tier {self.name}: could not be cleared ({error or 'no daemon'})") from error

    def read_epoch(self) -> int:
        """The daemon's, which its disk and remote tier keep. TierError without a daemon."""
        if not self.link.is_up:
            raise TierError(f"tier {self.name}: its epoch cannot be read (no daemon)")
        self.link.epoch()
        return self.link.known_epoch

    def raise_epoch(self, least: int) -> int:
        self.follow_epoch(least)
        try:
            with aside(self.link.path, self.link.name, _RESET_SECONDS) as ask:
                epoch = ask(partial(protocol.Epoch, least=least, rising=True), protocol.Count).count
        except (LinkDownError, RefusedByDaemonError) as error:
            raise TierError(f"tier {self.name}: the epoch could not be raised ({error or 'no daemon'})") from error
        self.follow_epoch(epoch)
        return epoch

    def seen_epoch(self) -> int | None:
        """Every call looks. Without a daemon the last one known; what was raised meanwhile is heard of at reconnect."""
        return self.link.epoch()

    def follow_epoch(self, epoch: int) -> None:
        """The daemon is told within a tenth of a second, or when there is one."""
        self.link.known_epoch = max(self.link.known_epoch, epoch)

    def pin(self, keys: Sequence[CopyKey]) -> list[bool]:
        """Pins end with the connection: a daemon that restarts has none."""
        granted = [False] * len(keys)
        try:
            for places in runs(keys, protocol.PAGE_HASHES):
                joined = b"".join([keys[place].hash for place in places])
                form, session = self._form(keys[places[0]]), self.link.session
                flags = self.link.call(partial(protocol.Pin, form=form, hashes=joined), protocol.Flags).flags
                for place, flag in zip(places, flags, strict=False):
                    granted[place] = bool(flag)
                    if flag:
                        with self._pins_lock:
                            self._pins.setdefault(keys[place], []).append(session)
        except (LinkDownError, RefusedByDaemonError):
            self._count("without_daemon", len(keys))
        return granted

    def unpin(self, keys: Sequence[CopyKey]) -> None:
        with self._pins_lock:
            counts = {key: keys.count(key) for key in dict.fromkeys(keys)}
            for key, times in counts.items():
                held = len(self._pins.get(key, ()))
                if held < times:
                    raise UsageError(f"tier {self.name}: unpin x{times} of a copy pinned {held} times: {key}")
            session = self.link.session
            living: list[CopyKey] = []
            for key, times in counts.items():
                sessions = self._pins[key]
                living += [key for _ in range(times) if sessions.pop() == session]
                if not sessions:
                    del self._pins[key]
        try:
            for places in runs(living, protocol.PAGE_HASHES):
                joined = b"".join([living[place].hash for place in places])
                form = self._form(living[places[0]])
                self.link.call(partial(protocol.Unpin, form=form, hashes=joined), protocol.Count)
        except (LinkDownError, RefusedByDaemonError):
            self._count("without_daemon", len(living))

    @property
    def used_bytes(self) -> int:
        """Of the arena that this process's user has; 0 without a daemon."""
        try:
            pong = self.link.call(protocol.Ping, protocol.Pong)
        except (LinkDownError, RefusedByDaemonError):
            return 0
        return pong.used_bytes

    @property
    def capacity_bytes(self) -> int:
        """As the daemon last said; 0 while there has been none."""
        return self.link.capacity_bytes

    def counters(self) -> dict[str, int]:
        return super().counters() | dict(self.link.counts)

    def close(self) -> None:
        super().close()
        self.link.close()

    # put -------------------------------------------------------------------------------------------------------------

    def _put_batch(self, transfer: Transfer, jobs: Sequence[Job]) -> list[ResultCode]:
        results = [ResultCode.FAILED] * len(jobs)
        for places in runs([job.key for job in jobs], protocol.PAGE_ITEMS):
            if transfer.cancelled:
                for place in places:
                    results[place] = ResultCode.CANCELLED
                continue
            try:
                self._put_run(jobs, places, results)
            except LinkDownError:
                self._count("without_daemon", len(places))
            except RefusedByDaemonError as refused:
                self._count("put_refused", len(places))
                if refused.cause == protocol.Cause.LEASES:
                    for place in places:
                        results[place] = ResultCode.FULL
        return results

    def _put_run(self, jobs: Sequence[Job], places: list[int], results: list[ResultCode]) -> None:
        """Copies of one form: reserve, write and seal, publish."""
        wanted: dict[CopyKey, int] = {}
        for place in places:
            if jobs[place].size_bytes:
                wanted.setdefault(jobs[place].key, place)
            else:
                self._count("empty_payload")
        if not wanted:
            return
        first = [jobs[place] for place in wanted.values()]
        form = self._form(first[0].key)
        forms = [self._forms.of(job.key, job.size_bytes) for job in first]
        request = partial(
            protocol.Reserve,
            form=form,
            hashes=b"".join([job.key.hash for job in first]),
            parents=b"".join([job.parent or job.key.root for job in first]),
            frame_bytes=[one.frame_bytes for one in forms],
        )
        granted = list(PLACE.iter_unpack(self.link.call(request, protocol.Places).places))
        outcome = {Place.THERE: ResultCode.OK, Place.FULL: ResultCode.FULL, Place.TOO_LARGE: ResultCode.TOO_LARGE}
        codes = [outcome.get(one[0], ResultCode.FAILED) for one in granted]
        writing = [index for index, one in enumerate(granted) if one[0] == Place.GRANTED]
        if writing:
            self._write(first, forms, granted, writing, codes)
        by_key = {job.key: code for job, code in zip(first, codes, strict=True)}
        for place in places:
            if jobs[place].size_bytes:
                results[place] = by_key[jobs[place].key]

    def _write(
        self,
        jobs: list[Job],
        forms: list[FrameForm],
        granted: list[tuple[Any, ...]],
        writing: list[int],
        codes: list[ResultCode],
    ) -> None:
        segments = [granted[index][1] for index in writing]
        leases = [granted[index][3] for index in writing]
        self.link.begin_writes(segments)
        try:
            memory, checks = self.link.memory(segments, writable=True), self.link.checks
            for index in writing:
                _, segment, offset, _ = granted[index]
                forms[index].write(jobs[index].key, memory[segment], offset, jobs[index].rows, checks)
        except BaseException:
            self.link.tell(partial(protocol.Abandon, leases=leases))
            raise
        finally:
            self.link.end_writes(segments)
        del memory
        flags = self.link.call(partial(protocol.Publish, leases=leases), protocol.Flags).flags
        for index, flag in zip(writing, flags, strict=False):
            codes[index] = ResultCode.OK if flag else ResultCode.FAILED
            if not flag:
                self._count("lease_ended")

    def _put_one(self, job: Job) -> ResultCode:
        raise NotImplementedError  # batches only

    # get -------------------------------------------------------------------------------------------------------------

    def _get_batch(self, transfer: Transfer, jobs: Sequence[Job], claims: Sequence[Any]) -> list[ResultCode]:
        results = [ResultCode.MISS] * len(jobs)
        for places in runs([job.key for job in jobs], protocol.PAGE_ITEMS):
            try:
                self._get_run(transfer, jobs, places, results)
            except LinkDownError:
                self._count("without_daemon", len(places))
            except RefusedByDaemonError:
                self._count("get_refused", len(places))
        return results

    def _get_run(self, transfer: Transfer, jobs: Sequence[Job], places: list[int], results: list[ResultCode]) -> None:
        """Copies of one form; those that come from a lower tier are asked for again until they are there."""
        until, pause = time.monotonic() + self._fetch_seconds, _POLL_SECONDS[0]
        form = self._form(jobs[places[0]].key)
        while places:
            if transfer.cancelled:
                for place in places:
                    results[place] = ResultCode.CANCELLED
                return
            request = partial(
                protocol.Acquire,
                form=form,
                hashes=b"".join([jobs[place].key.hash for place in places]),
                payload_bytes=[jobs[place].size_bytes for place in places],
            )
            asked_seconds, session = time.monotonic(), self.link.session
            answer = self.link.call(request, protocol.Places)
            found = list(zip(places, PLACE.iter_unpack(answer.places), strict=True))
            try:
                self._read(jobs, [one for one in found if one[1][0] == Place.GRANTED], results)
                if self.link.is_unsure(asked_seconds, session):
                    for place, _ in found:
                        results[place] = ResultCode.MISS
            finally:
                if answer.lease:
                    self.link.tell(partial(protocol.Release, leases=[answer.lease]))
            places = [place for place, one in found if one[0] == Place.PENDING]
            if places and time.monotonic() >= until:
                self._count("fetch_deadline", len(places))
                return
            if places:
                time.sleep(pause)
                pause = min(_POLL_SECONDS[1], 1.5 * pause)
                form = self._form(jobs[places[0]].key)

    def _read(self, jobs: Sequence[Job], found: list[tuple[int, tuple[Any, ...]]], results: list[ResultCode]) -> None:
        if not found:
            return
        memory, checks = self.link.memory([one[1] for _, one in found], writable=False), self.link.checks
        suspects: list[CopyKey] = []
        for place, (_, segment, offset, frame_bytes) in found:
            job = jobs[place]
            form = self._forms.of(job.key, job.size_bytes) if job.size_bytes else None
            if form is None or frame_bytes != form.frame_bytes:
                self._count("size_mismatch")
                results[place] = ResultCode.CORRUPT
                continue
            fault = form.read(job.key, memory[segment][offset : offset + frame_bytes], job.rows, checks)
            results[place] = ResultCode.OK if fault is None else ResultCode.CORRUPT
            if fault is not None:
                self._count(f"corrupt_{fault}")
                suspects.append(job.key)
        for places in runs(suspects, protocol.PAGE_ITEMS):
            joined = b"".join([suspects[place].hash for place in places])
            self.link.tell(partial(protocol.Suspect, form=self._form(suspects[places[0]]), hashes=joined))

    def _get_one(self, job: Job, claim: Any) -> ResultCode:
        raise NotImplementedError  # batches only

    # inside ----------------------------------------------------------------------------------------------------------

    def _form(self, key: CopyKey) -> int:
        """The form's number on the connection that is up. LinkDownError."""
        family = key.family
        spec = self._families.get(family)
        if spec is None:
            spec = self._families[family] = self._forms.of(key, 1).spec
        return self.link.form(spec, self._tenant)

    def _after_fork(self) -> None:
        """In the child: transfers under way are the parent's, and so is the executor's thread."""
        self._state, self._pins_lock = threading.Lock(), threading.Lock()
        self._open.clear()
        self._completions.clear()
        self._pins.clear()
        self._told_speed = 0.0, -1
        self._queued_items = 0
        if isinstance(self._executor, ThreadExecutor) and not self._closed:
            self._executor = ThreadExecutor("kvstore-daemon")


def _fork_tiers() -> None:
    for tier in list(islice(_tiers, len(_tiers))):
        tier._after_fork()


os.register_at_fork(after_in_child=_fork_tiers)
