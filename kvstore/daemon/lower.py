"""One tier below the arena: what the policy admits is spilled to it, what is asked for and only there is fetched.

A thread a tier drives it: it verifies a copy while it takes it out of shared memory (a client could still write there),
hands it down, and brings fetched ones up as sealed frames. Spills wait in a queue of bounded bytes; past it the coldest
is dropped and counted. Nothing here makes a client wait.

The daemon's lock guards queue and index and is never held while bytes move or a tier is called.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from allocator.errors import TierError, UsageError
from kvstore.copy_key import CopyKey
from kvstore.daemon.arena import ArenaIndex
from kvstore.daemon.forms import Form
from kvstore.daemon.holder import Holder
from kvstore.daemon.protocol import Place
from kvstore.daemon.slots import ArenaEntry
from kvstore.frame.build import joined_checksum
from kvstore.frame.parsing import FrameFault, build_joined_header, parse_header
from kvstore.tier import ByteRow, Completion, GetItem, PutItem, ResultCode, Tier

_BATCH_COPIES, _BATCH_BYTES = 16, 16 << 20
_SETTLE_SECONDS = 1.0
_LOG = logging.getLogger(__name__)


def taken_out(entry: ArenaEntry, out: ByteRow | None = None, *, checks: bool = True) -> ByteRow | FrameFault:
    """The payload of a published copy, copied and then checked; without `checks` by its header alone."""
    payload_bytes = entry.size_bytes - entry.form.header_bytes
    if payload_bytes <= 0:
        return FrameFault.LENGTH
    spec, memory = entry.form.spec(entry.key, payload_bytes), entry.memory
    header = parse_header(memory, spec, frame_bytes=entry.size_bytes, keyed=False)
    if isinstance(header, FrameFault):
        return header
    target = np.empty(payload_bytes, np.uint8) if out is None else out[:payload_bytes]
    if not checks:
        target[:] = memory[header.header_bytes :]
        return target
    fault = header.copy_payload(memory[header.header_bytes :], target)
    return target if fault is None else fault


@dataclass(slots=True, eq=False)
class _Fetch:
    arena: ArenaIndex
    entry: ArenaEntry


class LowerTier:
    """See the module. `tier` is driven by this object's thread alone, but for contains, delete, clear.

    lock: the daemon's. queue_bytes: most that waits to be spilled, all of it fenced in the arena. checks: whether
    copies of a trust domain carry a checksum.
    """

    def __init__(
        self, tier: Tier, lock: threading.Lock, queue_bytes: int, checks: Callable[[str], bool] = lambda domain: True
    ) -> None:
        self.tier = tier
        self._checks = checks
        self.counts: Counter[str] = Counter()
        self.is_dropped = False
        self._lock = lock
        self._queue_limit_bytes = queue_bytes
        self._queue: deque[tuple[ArenaIndex, ArenaEntry]] = deque()
        self.queued_bytes = 0
        self._wanted: deque[_Fetch] = deque()
        self._fetching: dict[tuple[int, CopyKey], _Fetch] = {}
        self._running: dict[int, Callable[[Sequence[ResultCode]], None]] = {}
        self._spilling: dict[CopyKey, bool] = {}  # under way -> was dropped meanwhile
        self._scratch = np.empty(0, np.uint8)  # of the one batch that is under way
        self._stop = False
        self._wake = threading.Event()
        tier.set_waker(self._wake.set)
        self._thread = threading.Thread(target=self._drive, name=f"kvstore-{tier.name}-driver", daemon=True)
        self._thread.start()

    # asked by sessions -----------------------------------------------------------------------------------------------

    def leading_run(self, form: Form, hashes: Sequence[bytes]) -> int:
        return 0 if self.is_dropped or self.tier.is_resting else self.tier.leading_run(form.lower_template, hashes)

    def presence(self, form: Form, hashes: Sequence[bytes]) -> list[int]:
        """0: not there, 1: there, 2: still being looked up."""
        if self.is_dropped or self.tier.is_resting:  # the second: a client would ask again until its deadline
            return [0] * len(hashes)
        keys = form.lower_template.with_hashes(hashes)
        found = [int(one) for one in self.tier.contains(keys)]
        if not all(found) and self.tier.pending_count(keys):
            found = [one or 2 * bool(self.tier.pending_count([key])) for one, key in zip(found, keys, strict=True)]
        return found

    def offer(self, arena: ArenaIndex, entry: ArenaEntry) -> None:
        """Spill this published copy some time. Under the lock."""
        if self.is_dropped or self._stop:
            return
        while self._queue and self.queued_bytes + entry.slot_bytes > self._queue_limit_bytes:
            arena_of, coldest = self._queue.popleft()
            coldest.is_offered = False  # its next use offers it again
            self._let_go(arena_of, coldest)
            self.counts["spills_dropped"] += 1
        entry.reader_count += 1
        self._queue.append((arena, entry))
        self.queued_bytes += entry.slot_bytes
        self._wake.set()

    def fetch(self, holder: Holder, form: Form, hash: bytes, payload_bytes: int) -> Place:
        """Bring a copy up that `presence` has found. Under the lock."""
        arena, key = holder.arena, form.key(hash)
        if (id(arena), key) in self._fetching:
            return Place.PENDING
        if payload_bytes == 0 or self._stop:
            return Place.MISS
        entry = arena.reserve(holder, form, key, form.header_bytes + payload_bytes, None)
        if isinstance(entry, Place):
            if entry is Place.FULL and arena.is_recalling:
                return Place.PENDING  # there will be room when a client has returned a segment
            self.counts["fetches_without_room"] += 1
            return Place.MISS
        fetch = _Fetch(arena, entry)
        self._fetching[id(arena), key] = fetch
        self._wanted.append(fetch)
        self._wake.set()
        return Place.PENDING

    def is_fetching(self, arena: ArenaIndex, key: CopyKey) -> bool:
        return (id(arena), key) in self._fetching

    def delete(self, form: Form, hashes: Sequence[bytes]) -> int:
        """Copies that are on their way down go when they have arrived."""
        keys = form.lower_template.with_hashes(hashes)
        with self._lock:
            self._purge()
            for key in keys:
                if key in self._spilling:
                    self._spilling[key] = True
        return 0 if self.is_dropped else self.tier.delete(keys)

    def clear(self, roots: set[bytes], *, all_allowed: bool) -> None:
        """Drop every copy of these (lower) roots. TierError where that takes clearing all and that is not allowed."""
        self._settle()
        if self.is_dropped:
            return
        delete_root = getattr(self.tier, "delete_root", None)
        if delete_root is not None:
            for root in roots:
                delete_root(root)
        elif all_allowed:
            self.tier.clear()
        else:
            raise TierError(f"tier {self.tier.name}: others share it; only the daemon's own user may clear it")

    def _settle(self) -> None:
        """Let go of what waits and was dropped above, and wait a while for what is under way."""
        with self._lock:
            self._purge()
            for key in self._spilling:
                self._spilling[key] = True
        until = time.monotonic() + _SETTLE_SECONDS
        while (self._spilling or self._fetching) and time.monotonic() < until and self._thread.is_alive():
            time.sleep(0.0005)

    def _purge(self) -> None:
        """Nothing that is fenced is evicted: what is found no more was dropped on purpose. Under the lock."""
        gone = [pair for pair in self._queue if not pair[1].is_linked]
        if gone:
            self._queue = deque(pair for pair in self._queue if pair[1].is_linked)
            for arena, entry in gone:
                self._let_go(arena, entry)

    @property
    def state(self) -> str:
        """ok; down: it cannot be reached now; dropped: an operator has said so."""
        return "dropped" if self.is_dropped else "down" if self.tier.is_down else "ok"

    @property
    def depths(self) -> dict[str, int]:
        return {"spill": len(self._queue) + len(self._spilling), "fetch": len(self._fetching)}

    # lifecycle -------------------------------------------------------------------------------------------------------

    def drain(self, until: float) -> bool:
        """Wait for what is queued, until a time of time.monotonic(); False when it did not all go."""
        while time.monotonic() < until:
            with self._lock:
                if not self._queue and not self._spilling:
                    return True
            time.sleep(0.005)
        return False

    def drop(self) -> None:
        """Use this tier no more, until the daemon restarts; what it holds stays where it is."""
        self.is_dropped = True
        with self._lock:
            while self._queue:
                self._let_go(*self._queue.popleft())

    def close(self) -> None:
        self._stop = True
        self._wake.set()
        self._thread.join()
        self.tier.close()
        for done in self.tier.poll():
            self._finish(done)
        with self._lock:
            while self._queue:
                self._let_go(*self._queue.popleft())
                self.counts["spills_dropped"] += 1

    # the thread ------------------------------------------------------------------------------------------------------

    def _drive(self) -> None:
        while not self._stop:
            self._wake.wait(0.5)
            self._wake.clear()
            try:
                self.tier.seen_epoch()  # a sign of life: without it a tier that nobody uses could be gone unseen
                for done in self.tier.poll():
                    self._finish(done)
                self._start_fetches()
                if not self._spilling:
                    self._start_spills()
            except Exception as error:  # counted by cause: the daemon lives on without this tier's next batch
                self.counts[f"failed_{type(error).__name__}"] += 1
                _LOG.exception("kvstore: lower tier %s failed", self.tier.name)

    def _finish(self, done: Completion) -> None:
        finish = self._running.pop(done.transfer.id, None)
        if finish is not None:
            finish(done.results)
            self._wake.set()

    def _start_spills(self) -> None:
        batch: list[tuple[ArenaIndex, ArenaEntry]] = []
        with self._lock:
            total = 0
            while self._queue and len(batch) < _BATCH_COPIES and (not batch or total < _BATCH_BYTES):
                batch.append(self._queue.popleft())
                total += batch[-1][1].size_bytes
            self._spilling = {self._lower_key(entry): False for _, entry in batch}
        if self._scratch.nbytes < total:
            self._scratch = np.empty(total, np.uint8)
        items, at = [], 0
        for arena, entry in batch:
            payload = taken_out(entry, self._scratch[at:], checks=self._checks(entry.form.domain))
            at += entry.size_bytes
            if not isinstance(payload, FrameFault):
                items.append(PutItem(self._lower_key(entry), [payload], entry.parent))
            with self._lock:
                if isinstance(payload, FrameFault):
                    self.counts[f"corrupt_{payload}"] += 1
                    if entry.is_linked:
                        arena.unlink(entry)
                self._let_go(arena, entry)

        def finish(results: Sequence[ResultCode]) -> None:
            self.counts["spilled"] += results.count(ResultCode.OK)
            self.counts["spilled_bytes"] += sum(
                item.pieces[0].nbytes for item, code in zip(items, results, strict=False) if code is ResultCode.OK
            )
            self.counts["spills_failed"] += len(results) - results.count(ResultCode.OK)
            with self._lock:
                dropped = [key for key, is_dropped in self._spilling.items() if is_dropped]
                self._spilling = {}
            if dropped:
                self.tier.delete(dropped)

        if not items:
            finish([])
            return
        try:
            transfer = self.tier.submit_put(items)
        except UsageError:
            finish([ResultCode.FAILED] * len(items))
            raise
        self._running[transfer.id] = finish

    @staticmethod
    def _lower_key(entry: ArenaEntry) -> CopyKey:
        return entry.form.lower_template.with_hash(entry.key.hash)

    def _start_fetches(self) -> None:
        with self._lock:
            wanted = list(self._wanted)
            self._wanted.clear()
        for fetch in wanted:
            entry = fetch.entry
            key = self._lower_key(entry)

            def finish(results: Sequence[ResultCode], fetch: _Fetch = fetch) -> None:
                self._finish_fetch(fetch, results[0])

            try:
                transfer = self.tier.submit_get([GetItem(key, entry.memory[entry.form.header_bytes :])])
            except UsageError:
                finish([ResultCode.FAILED])
                raise
            self._running[transfer.id] = finish

    def _finish_fetch(self, fetch: _Fetch, result: ResultCode) -> None:
        entry, arena = fetch.entry, fetch.arena
        if result is ResultCode.OK:
            payload = entry.memory[entry.form.header_bytes :]
            spec = entry.form.spec(entry.key, payload.nbytes)
            header = build_joined_header(spec, [payload], joined_checksum([payload]))
            entry.memory[: len(header)] = np.frombuffer(header, np.uint8)
        with self._lock:
            self._fetching.pop((id(arena), entry.key), None)
            self.counts["fetched" if result is ResultCode.OK else f"fetch_{result}"] += 1
            self.counts["fetched_bytes"] += entry.size_bytes if result is ResultCode.OK else 0
            if result is ResultCode.OK and not arena.is_void(entry) and arena.twin(entry) is None:
                entry.is_offered = True
                arena.publish(entry)
            else:
                arena.abandon(entry)

    def _let_go(self, arena: ArenaIndex, entry: ArenaEntry) -> None:
        self.queued_bytes -= entry.slot_bytes
        arena.end_read(entry)
