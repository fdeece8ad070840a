"""One tier below the arena: what the policy admits is spilled to it, what is asked for and only there is fetched.

A thread a tier drives it: it verifies a copy while it takes it out of shared memory (a client could still write there),
hands it down, and brings fetched ones up as sealed frames. Spills wait in a queue of bounded bytes; past it the coldest
is dropped and counted. What the tier has is not written again; what it did not take, for whatever reason, is offered
to it again when it is next used, and while it is down nothing is. Nothing here makes a client wait.

The daemon's lock guards queue and index and is never held while bytes move or a tier is called.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from allocator.errors import TierError
from kvstore.copy_key import CopyKey
from kvstore.daemon.arena import ArenaIndex
from kvstore.daemon.forms import Form
from kvstore.daemon.holder import Holder
from kvstore.daemon.protocol import Place
from kvstore.daemon.slots import ArenaEntry
from kvstore.daemon.troubles import DamageLog
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
    is_void: bool = False  # deleted meanwhile


class LowerTier:
    """See the module. `tier` is driven by this object's thread alone, but for contains, delete, clear.

    lock: the daemon's. queue_bytes: most that waits to be spilled, all of it fenced in the arena. checks: whether
    copies of a trust domain carry a checksum. mark: its bit in ArenaEntry.offered.
    """

    def __init__(
        self,
        tier: Tier,
        lock: threading.Lock,
        queue_bytes: int,
        checks: Callable[[str], bool] = lambda domain: True,
        mark: int = 1,
    ) -> None:
        self.tier = tier
        self.mark = mark
        self._checks = checks
        self.counts: Counter[str] = Counter()
        self._damage = DamageLog(tier)
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
        return self._presence(form.lower_template.with_hashes(hashes))

    def _presence(self, keys: Sequence[CopyKey]) -> list[int]:
        found = [int(one) for one in self.tier.contains(keys)]
        if not all(found) and self.tier.pending_count(keys):
            found = [one or 2 * bool(self.tier.pending_count([key])) for one, key in zip(found, keys, strict=True)]
        return found

    @property
    def takes_spills(self) -> bool:
        """Not while it is down: its own thread sees when it is back."""
        return not (self.is_dropped or self._stop or self.tier.is_down)

    def offer(self, arena: ArenaIndex, entry: ArenaEntry) -> None:
        """Spill this published copy some time, while it `takes_spills`. Under the lock."""
        while self._queue and self.queued_bytes + entry.slot_bytes > self._queue_limit_bytes:
            self._turn_away(*self._queue.popleft())
            self.counts["spills_dropped"] += 1
        if not entry.offered:  # else what one tier refuses again and again would keep the others believed in
            entry.offered_seconds = time.monotonic()
        entry.offered |= self.mark
        entry.reader_count += 1
        self._queue.append((arena, entry))
        self.queued_bytes += entry.slot_bytes
        self._wake.set()

    def fetch(self, holder: Holder, form: Form, hash: bytes, payload_bytes: int) -> Place:
        """Bring a copy up that `presence` has found. Under the lock."""
        arena, key = holder.arena, form.key(hash)
        if (id(arena), key) in self._fetching:
            return Place.PENDING
        is_deleted = self._spilling.get(form.lower_template.with_hash(hash), False)  # it has just landed
        if payload_bytes == 0 or self._stop or is_deleted:
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

    def forget_fetch(self, arena: ArenaIndex, key: CopyKey) -> None:
        """What is on its way up comes too late. Under the lock."""
        fetch = self._fetching.get((id(arena), key))
        if fetch is not None:
            fetch.is_void = True

    def delete(self, form: Form, hashes: Sequence[bytes]) -> int:
        """Of a dropped tier too, see clear. Copies that are on their way down go when they have arrived."""
        keys = form.lower_template.with_hashes(hashes)
        with self._lock:
            self._purge()
            for key in keys:
                if key in self._spilling:
                    self._spilling[key] = True
        return self.tier.delete(keys)

    def clear(self, roots: set[bytes], *, all_allowed: bool) -> None:
        """Drop every copy of these (lower) roots, of a dropped tier too: a restart would bring them back. TierError
        where that takes clearing all and that is not allowed."""
        delete_root = getattr(self.tier, "delete_root", None)
        self._settle(roots if delete_root is not None or not all_allowed else None)
        if delete_root is not None:
            for root in roots:
                delete_root(root)
        elif all_allowed:
            self.tier.clear()
        else:
            raise TierError(f"tier {self.tier.name}: others share it; only the daemon's own user may clear it")

    def clear_all(self) -> None:
        """Drop every copy of every domain, of a dropped tier too. TierError."""
        self._settle(None)
        self.tier.clear()

    def _settle(self, roots: set[bytes] | None) -> None:
        """Let go of what waits and was dropped above, and wait a while for what is under way, of these (lower) roots;
        None: of all."""
        with self._lock:
            self._purge()
            for key in self._spilling:
                self._spilling[key] |= roots is None or key.root in roots
        until = time.monotonic() + _SETTLE_SECONDS
        while self._is_settling(roots) and time.monotonic() < until and self._thread.is_alive():
            time.sleep(0.0005)

    def _is_settling(self, roots: set[bytes] | None) -> bool:
        with self._lock:
            coming = [self._lower_key(one.entry).root for one in self._fetching.values()]
            return any(self._spilling.values()) or any(roots is None or root in roots for root in coming)

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
        with self._lock:  # copies go from one to the other and back
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
        """Use this tier no more, until the daemon restarts; what it holds stays where it is, unless it is cleared."""
        self.is_dropped = True
        with self._lock:
            self._turn_all_away()

    def close(self) -> None:
        self._stop = True
        self._wake.set()
        self._thread.join()
        self.tier.close()
        for done in self.tier.poll():
            self._finish(done)
        with self._lock:
            self.counts["spills_dropped"] += len(self._queue)
            self._turn_all_away()

    # the thread ------------------------------------------------------------------------------------------------------

    def _drive(self) -> None:
        while not self._stop:
            self._wake.wait(0.5)
            self._wake.clear()
            try:
                self.tier.seen_epoch()  # a sign of life: without it a tier that nobody uses could be gone unseen
                for done in self.tier.poll():
                    self._finish(done)
                self._damage.tick()
                self._start_fetches()
                if not self._spilling:
                    self._start_spills()
            except Exception as error:  # counted by cause: the daemon lives on without this tier's next batch
                self._note(error)

    def _note(self, error: Exception) -> None:
        self.counts[f"failed_{type(error).__name__}"] += 1
        _LOG.error("kvstore: lower tier %s failed", self.tier.name, exc_info=error)

    def _finish(self, done: Completion) -> None:
        finish = self._running.pop(done.transfer.id, None)
        if finish is not None:
            finish(done.results)
            self._wake.set()

    def _start_spills(self) -> None:
        batch = self._next_batch()
        taken: list[ArenaEntry] = []
        items: list[PutItem] = []
        try:
            is_looking = self._leave_known(batch)
            self._take_out(batch, taken, items)
            if items:
                transfer = self.tier.submit_put(items)
                self._running[transfer.id] = partial(self._finish_spills, taken, items)
        except BaseException:
            with self._lock:
                for pair in batch:
                    self._turn_away(*pair)
            self._finish_spills(taken, items, [ResultCode.FAILED] * len(items))
            raise
        if not items:
            self._finish_spills([], [], [])
            if self._queue and not is_looking:  # else the tier says when it has looked
                self._wake.set()

    def _next_batch(self) -> deque[tuple[ArenaIndex, ArenaEntry]]:
        """What is written next; it is fenced still. Empty while the tier takes nothing: what waits stays no longer."""
        batch: deque[tuple[ArenaIndex, ArenaEntry]] = deque()
        takes_spills, total = self.takes_spills, 0
        with self._lock:
            if not takes_spills:
                self.counts["spills_down"] += len(self._queue)
                self._turn_all_away()
            while self._queue and len(batch) < _BATCH_COPIES and (not batch or total < _BATCH_BYTES):
                batch.append(self._queue.popleft())
                total += batch[-1][1].size_bytes
            self._spilling = {self._lower_key(entry): False for _, entry in batch}
        return batch

    def _leave_known(self, batch: deque[tuple[ArenaIndex, ArenaEntry]]) -> bool:
        """Let go of what the tier has; what it is still looking up is first in line again. Whether there is such."""
        keys = [self._lower_key(entry) for _, entry in batch]
        found = self._presence(keys) if keys else []
        self.tier.touch([key for key, flag in zip(keys, found, strict=True) if flag == 1])
        pairs = list(batch)
        with self._lock:
            batch.clear()
            for (arena, entry), key, flag in reversed(list(zip(pairs, keys, found, strict=True))):
                if flag == 1:
                    self.counts["spills_there"] += 1
                    self._let_go(arena, entry)
                elif flag == 2:
                    self._queue.appendleft((arena, entry))
                    self._spilling.pop(key, None)
                else:
                    batch.appendleft((arena, entry))
            self._purge()  # of what was dropped meanwhile and is in line again
        return 2 in found

    def _take_out(
        self, batch: deque[tuple[ArenaIndex, ArenaEntry]], taken: list[ArenaEntry], items: list[PutItem]
    ) -> None:
        """Copy payloads, and let go of each when that is done."""
        total, at = sum(entry.size_bytes for _, entry in batch), 0
        if self._scratch.nbytes < total:
            self._scratch = np.empty(total, np.uint8)
        while batch:
            arena, entry = batch[0]
            payload = taken_out(entry, self._scratch[at:], checks=self._checks(entry.form.domain))
            at += entry.size_bytes
            if not isinstance(payload, FrameFault):
                items.append(PutItem(self._lower_key(entry), [payload], entry.parent))
                taken.append(entry)
            with self._lock:
                if isinstance(payload, FrameFault):
                    self.counts[f"corrupt_{payload}"] += 1
                    if entry.is_linked:
                        arena.unlink(entry)
                self._let_go(*batch.popleft())

    def _finish_spills(
        self, entries: Sequence[ArenaEntry], items: Sequence[PutItem], results: Sequence[ResultCode]
    ) -> None:
        for item, code in zip(items, results, strict=True):
            self.counts["spilled" if code is ResultCode.OK else "spills_failed"] += 1
            self.counts["spilled_bytes"] += item.pieces[0].nbytes if code is ResultCode.OK else 0
        with self._lock:
            dropped = [key for key, is_dropped in self._spilling.items() if is_dropped]
            self._spilling = {}
            for entry, item, code in zip(entries, items, results, strict=True):
                if code not in (ResultCode.OK, ResultCode.TOO_LARGE) or item.key in dropped:
                    entry.offered &= ~self.mark
        if dropped:
            self.tier.delete(dropped)

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
            except Exception as error:  # counted by cause: who waits for this one is told, and the others go on
                self._note(error)
                finish([ResultCode.FAILED])
            else:
                self._running[transfer.id] = finish

    def _finish_fetch(self, fetch: _Fetch, result: ResultCode) -> None:
        entry, arena = fetch.entry, fetch.arena
        if result is ResultCode.CORRUPT:
            self._damage.note()
        if result is ResultCode.OK:
            payload = entry.memory[entry.form.header_bytes :]
            spec = entry.form.spec(entry.key, payload.nbytes)
            header = build_joined_header(spec, [payload], joined_checksum([payload]))
            entry.memory[: len(header)] = np.frombuffer(header, np.uint8)
        with self._lock:
            self._fetching.pop((id(arena), entry.key), None)
            self.counts["fetched" if result is ResultCode.OK else f"fetch_{result}"] += 1
            self.counts["fetched_bytes"] += entry.size_bytes if result is ResultCode.OK else 0
            is_void = fetch.is_void or arena.is_void(entry)
            if result is ResultCode.OK and not is_void and arena.twin(entry) is None:
                entry.offered, entry.offered_seconds = self.mark, time.monotonic()  # others may be nearer
                arena.publish(entry)
            else:
                arena.abandon(entry)

    def _turn_all_away(self) -> None:
        while self._queue:
            self._turn_away(*self._queue.popleft())

    def _turn_away(self, arena: ArenaIndex, entry: ArenaEntry) -> None:
        """Its next use offers it again."""
        entry.offered &= ~self.mark
        self._let_go(arena, entry)

    def _let_go(self, arena: ArenaIndex, entry: ArenaEntry) -> None:
        self.queued_bytes -= entry.slot_bytes
        arena.end_read(entry)
