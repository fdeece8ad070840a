"""Cooling in a bounded queue, and the outcomes of all movement: `WriteBehind` writes down, `Fetcher` reads up.

Decisions are made by `KVStore` under its lock; this file turns them into fenced transfers and brings the outcomes
back. Nothing here waits and nothing here takes a lock: `start_*` enqueue, the executor copies or encodes without
any lock, and `drain` (called by `KVStore.step`, under the store's lock) applies what has finished.

Invariant: a block whose bytes a transfer reads or writes is in flight in the pool from before the transfer is
submitted until `drain` has seen its completion. The pool hands out and evicts no block in flight.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from allocator import FULL, IntegrityError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from allocator import BlockPool
    from kvstore.device import BlockBytes
    from kvstore.executor import Executor
    from kvstore.fetching import Fetcher
    from kvstore.metrics import StoreMetrics
    from kvstore.tier import Completion, Tier
    from kvstore.write_behind import WriteBehind


_LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class _CoolJob:
    group: int
    block_ids: list[int]
    target_ids: list[int]
    cause: str
    accepted: list[bool] | None = None
    failure: BaseException | None = None


@dataclass(slots=True)
class Drained:
    """What one `drain` brought back, in blocks."""

    cooled: int = 0
    spilled: int = 0
    fetched: int = 0
    failed: int = 0


class Mover:
    def __init__(
        self,
        pool: BlockPool,
        device: BlockBytes,
        executor: Executor,
        metrics: StoreMetrics,
        fetcher: Fetcher,
        *,
        writes: WriteBehind,
        cool_queue_limit: int,
        waker: Callable[[], None],
    ) -> None:
        self._pool = pool
        self._device = device
        self._executor = executor
        self._metrics = metrics
        self.fetcher = fetcher
        self._writes = writes
        self._waker = waker
        self.on_cooled: Callable[[list[int]], None] | None = None  # told of blocks that were encoded or stay raw
        self._cooled: SimpleQueue[_CoolJob] = SimpleQueue()
        self._cooling = 0
        self.cool_generation = 0  # grows whenever blocks have cooled, so that sequences look at their own again
        self._refused: dict[int, bytes] = {}  # id -> hash of blocks that the codec refused: they stay raw for good
        self._cool_queue: deque[tuple[int, bytes, str]] = deque(maxlen=cool_queue_limit)

    @property
    def in_flight_blocks(self) -> int:
        """Blocks whose transfer has not been drained; memory may come free once it is."""
        return self._cooling + self._writes.fenced_blocks + self.fetcher.block_count

    @property
    def is_moving(self) -> bool:
        """Whether anything is under way that a `drain` will bring back, copies that fence no block included."""
        return self.in_flight_blocks > 0 or self._writes.under_way_blocks > 0

    def queued_bytes(self, tier: str) -> int:
        """What is under way to and from a tier."""
        return self._writes.under_way_bytes(tier) + self.fetcher.queued_bytes(tier)

    def depths(self) -> dict[str, int]:
        """Blocks that wait or are under way, by queue."""
        return {
            "cool": len(self._cool_queue),
            "cooling": self._cooling,
            "fetching": self.fetcher.block_count,
        }

    # -- cool ---------------------------------------------------------------------------------------------------

    def enqueue_cool(self, blocks: Sequence[tuple[int, bytes]], cause: str = "age") -> None:
        """Remember blocks (id, hash) that may cool. When the queue is full the oldest is forgotten and stays raw."""
        queue = self._cool_queue
        overflow = len(queue) + len(blocks) - (queue.maxlen or 0)
        if overflow > 0:
            self._metrics.kept_raw("queue_full", overflow)
        queue.extend((block_id, block_hash, cause) for block_id, block_hash in blocks)

    def start_cool(self, limit: int) -> int:
        """Begin encoding at most `limit` queued blocks. Entries that no longer hold their block are skipped."""
        pool = self._pool
        begun: dict[str, list[tuple[int, int]]] = {}
        count = 0
        held: list[tuple[int, bytes, str]] = []  # being copied down: their turn comes again
        while self._cool_queue and count < limit:
            block_id, block_hash, cause = self._cool_queue.popleft()
            if pool.hash_of(block_id) != block_hash or pool.form_of(block_id) != FULL or self.was_refused(block_id):
                continue
            target = pool.begin_cool(block_id)
            if target is not None:
                begun.setdefault(cause, []).append((block_id, target))
                count += 1
            elif pool.in_flight(block_id) and not pool.is_changing(block_id):
                held.append((block_id, block_hash, cause))
            elif not (pool.in_flight(block_id) or pool.is_pinned(block_id) or pool.exact_holders[block_id]):
                self._cool_queue.appendleft((block_id, block_hash, cause))  # no INT4 slot to be had yet: a later step
                break
        self._cool_queue.extend(held)
        for cause, blocks in begun.items():
            self._submit_cool(blocks, cause)
        return count

    def was_refused(self, block_id: int) -> bool:
        """Whether the codec refused this block before; trying again would give the same answer."""
        block_hash = self._refused.get(block_id)
        return block_hash is not None and block_hash == self._pool.hash_of(block_id)

    def forget(self, block_ids: Iterable[int]) -> None:
        """These blocks were evicted."""
        if self._refused:
            for block_id in block_ids:
                self._refused.pop(block_id, None)

    def start_cool_idle(self, block_ids: Sequence[int]) -> int:
        """Begin encoding idle blocks ahead of their time because memory is short. Counted apart."""
        begun = [(one, target) for one in block_ids if (target := self._pool.begin_cool(one)) is not None]
        self._submit_cool(begun, "pressure")
        return len(begun)

    def _submit_cool(self, begun: list[tuple[int, int]], cause: str) -> None:
        by_group: dict[int, _CoolJob] = {}
        for block_id, target in begun:
            group = self._pool.group_of(block_id)
            job = by_group.setdefault(group, _CoolJob(group, [], [], cause))
            job.block_ids.append(block_id)
            job.target_ids.append(target)
        for job in by_group.values():
            self._encode(job)

    def _encode(self, job: _CoolJob) -> None:
        full_slots = [self._pool.slot_of(block_id) for block_id in job.block_ids]
        cold_slots = [self._pool.slot_of(block_id) for block_id in job.target_ids]
        self._cooling += len(job.block_ids)

        def encode() -> None:
            try:
                accepted = self._device.encode(job.group, full_slots, cold_slots)
                if len(accepted) != len(full_slots):
                    raise IntegrityError(f"encode answered for {len(accepted)} of {len(full_slots)} blocks")
                job.accepted = accepted
            except BaseException as error:  # carried to `drain`, which unfences the blocks
                job.failure = error
            self._cooled.put(job)
            self._waker()

        try:
            self._executor.submit(encode)
        except Exception as error:  # counted by `_finish_cool`: the blocks stay raw
            job.failure = error
            self._cooled.put(job)

    def _finish_cool(self, job: _CoolJob) -> int:
        self._cooling -= len(job.block_ids)
        accepted = job.accepted if job.accepted is not None else [False] * len(job.block_ids)
        cooled = 0
        for block_id, target, good in zip(job.block_ids, job.target_ids, accepted, strict=True):
            if good:
                cooled += self._pool.finish_cool(block_id, target)
            else:
                self._pool.cancel_cool(block_id, target)
                block_hash = self._pool.hash_of(block_id)
                if job.failure is None and block_hash is not None:
                    self._refused[block_id] = block_hash
                self._metrics.kept_raw("error_bound" if job.failure is None else "encode_failed")
        self._metrics.cooled(cooled, cause=job.cause)
        if cooled:
            self.cool_generation += 1
        if self.on_cooled is not None:
            self.on_cooled(job.block_ids)
        if isinstance(job.failure, Exception):  # counted above: a block that was not encoded is still right
            _LOG.error("kvstore: encoding %d blocks failed", len(job.block_ids), exc_info=job.failure)
        elif job.failure is not None:
            raise job.failure
        return cooled

    # -- outcomes -----------------------------------------------------------------------------------------------

    def drain(self, tiers: Sequence[Tier], now: float) -> Drained:
        """Apply everything that has finished. An unknown completion (cancelled, late) changes nothing."""
        drained = Drained()
        failure: BaseException | None = None
        self._writes.take_staged()
        for tier in tiers:
            for completion in tier.poll():
                try:
                    self._finish(completion, drained, now)
                except BaseException as error:  # raised below, once the other outcomes have been applied
                    failure = error
        try:
            self.fetcher.settle(now)
        except BaseException as error:
            failure = error
        while True:
            try:
                job = self._cooled.get_nowait()
            except Empty:
                break
            try:
                drained.cooled += self._finish_cool(job)
            except BaseException as error:
                failure = error
        if failure is not None:
            raise failure
        return drained

    def _finish(self, completion: Completion, drained: Drained, now: float) -> None:
        stored = self._writes.finish(completion)
        if stored is not None:
            drained.spilled += stored
            return
        drained.fetched += self.fetcher.finish(completion, now)
