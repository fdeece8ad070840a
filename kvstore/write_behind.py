"""Writing copies down: a bounded queue a tier, in batches, from where their bytes can be had without waiting.

`offer` only remembers names; `pump` (called by `KVStore.step`) starts what a tier has room for; `finish` and
`take_staged` bring outcomes back. Everything runs under the store's lock except copying: no step waits for a tier.

Where the bytes come from, in this order:
- a copy in the store's own memory (the host tier): lent, so it is neither evicted nor overwritten while it is read;
- the device block. For the store's own memory it is read in place, fenced for the length of a memcpy. For any other
  tier an executor first copies it into a staging buffer, and the fence ends there: a server that hangs holds buffers,
  of which each tier has `_STAGED_BYTES`, and no device memory. (Sending everything through the host tier instead would
  let what is young push out what is old there, and many stores have none.)

A queued copy holds nothing: a block that was evicted before its turn, cooled or taken by others is passed by, counted.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from allocator import COLD, IntegrityError
from allocator.block_marks import PLAIN
from kvstore.spill_queue import NO_BLOCK, QueueLimits, SpillQueue, Waiting
from kvstore.staging import Staging
from kvstore.tier import PutItem, ResultCode, as_byte_row
from kvstore.tier_admission import Candidate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from allocator import BlockPool
    from kvstore.device import BlockBytes
    from kvstore.executor import Executor
    from kvstore.metrics import StoreMetrics
    from kvstore.tier import ByteRow, Completion, Loan, Tier, Transfer
    from kvstore.tier_admission import TierAdmission

_LOG = logging.getLogger(__name__)
_QUEUED_BYTES = 4 << 30  # most that may wait for a tier, in bytes it would have to take
_STAGED_BYTES = 64 << 20
_BLOCKS_UNDER_WAY = {True: 256, False: 64}  # own memory: fenced for a memcpy each; others: staged or lent
_BLOCKS_A_PUMP = 64  # started by one step for a tier, since each costs the step some microseconds


@dataclass(slots=True)
class _Put:
    """A batch under way to one tier. `fenced`: blocks that are held for it, until it has ended or has been staged."""

    queue: SpillQueue
    copies: list[Waiting]
    fenced: list[int] = field(default_factory=list)
    buffers: list[ByteRow] = field(default_factory=list)
    loans: list[Loan] = field(default_factory=list)
    drop: bool = False
    void: bool = False  # a reset or the end of the store came between
    failure: BaseException | None = None


class WriteBehind:
    """admission is asked about every tier that is not the store's own memory. queued_blocks: limit of each queue."""

    def __init__(
        self,
        pool: BlockPool,
        device: BlockBytes,
        executor: Executor,
        metrics: StoreMetrics,
        tiers: Sequence[Tier],
        admission: TierAdmission,
        *,
        queued_blocks: int,
        waker: Callable[[], None],
    ) -> None:
        self.admission = admission
        self._pool = pool
        self._device = device
        self._executor = executor
        self._metrics = metrics
        self._waker = waker
        self._queues = [SpillQueue(tier, QueueLimits(queued_blocks, _QUEUED_BYTES)) for tier in tiers]
        self._own_memory = [tier for tier in tiers if tier.private_memory]
        self._staging = {tier.name: Staging(_STAGED_BYTES) for tier in tiers}
        self._puts: dict[Transfer, _Put] = {}
        self._staging_puts: list[_Put] = []
        self._staged: SimpleQueue[_Put] = SimpleQueue()
        self.fenced_blocks = 0

    # -- what is under way --------------------------------------------------------------------------------------

    @property
    def under_way_blocks(self) -> int:
        return sum(queue.under_way_blocks for queue in self._queues)

    def under_way_bytes(self, tier: str) -> int:
        return sum(copy.size_bytes for put in self._puts.values() if put.queue.tier.name == tier for copy in put.copies)

    @property
    def waiting_blocks(self) -> int:
        return sum(queue.waiting_blocks for queue in self._queues)

    @property
    def staged_bytes(self) -> int:
        return sum(staging.used_bytes for staging in self._staging.values())

    @property
    def is_busy(self) -> bool:
        return any(queue.waiting_blocks or queue.under_way_blocks for queue in self._queues)

    def room_blocks(self, tier: Tier) -> int:
        """Blocks that its queue has room for."""
        return self._queue(tier).room_blocks

    def depths(self) -> dict[str, int]:
        """Blocks under way, and those that wait, by tier."""
        waiting = {f"spill_{queue.tier.name}": queue.waiting_blocks for queue in self._queues}
        return {"spilling": self.under_way_blocks, **waiting}

    # -- offer --------------------------------------------------------------------------------------------------

    def offer(
        self, tier: Tier, copies: Sequence[Waiting], candidates: Sequence[Candidate], *, urgent: bool = False
    ) -> Sequence[Waiting]:
        """Queue what is worth writing and neither stored nor queued, front of a prefix first; what had no room.

        candidates: what the policy is told of each copy. urgent: about to be lost, so begin now, before all others.
        """
        queue = self._queue(tier)
        if not tier.private_memory:
            worth = self.admission.admits(tier.name, candidates)
            admitted = [copy for copy, good in zip(copies, worth, strict=True) if good]
            self._metrics.offered("refused", len(copies) - len(admitted), tier=tier.name)
            copies = admitted
        fresh = self._not_there(queue, list({copy.key: copy for copy in copies if copy.key not in queue}.values()))
        self._metrics.offered("coalesced", len(copies) - len(fresh), tier=tier.name)
        if urgent:
            queue.hasten(copy.key for copy in copies)
        taken, dropped = queue.add(fresh, urgent=urgent)
        self._metrics.offered("admitted", taken, tier=tier.name)
        self._metrics.dropped("queue_full", dropped, tier=tier.name)
        if urgent:
            self._pump(queue, _BLOCKS_UNDER_WAY[tier.private_memory])
        return fresh[taken:]

    def _not_there(self, queue: SpillQueue, copies: list[Waiting]) -> list[Waiting]:
        present = queue.tier.contains([copy.key for copy in copies]) if copies else []
        return [copy for copy, there in zip(copies, present, strict=True) if not there]

    def demote(self, tier: Tier, copies: Sequence[Waiting]) -> int:
        """Copy device blocks down now and evict each once its copy is there; how many began. What is queued waits."""
        queue = self._queue(tier)
        fresh = [copy for copy in copies if copy.key not in queue]
        begun = queue.begin(fresh)
        self._metrics.dropped("queue_full", len(fresh) - len(begun), tier=tier.name)
        return self._start(queue, begun, drop=True)

    def _queue(self, tier: Tier) -> SpillQueue:
        return next(queue for queue in self._queues if queue.tier is tier)

    # -- start --------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Start what every tier has room for, a bounded number."""
        for queue in self._queues:
            if queue.waiting_blocks:
                self._pump(queue, _BLOCKS_A_PUMP)

    def _pump(self, queue: SpillQueue, limit: int) -> None:
        tier = queue.tier
        room = min(limit, _BLOCKS_UNDER_WAY[tier.private_memory] - queue.under_way_blocks)
        urgent = queue.take_urgent(max(0, room))
        if urgent:
            self._start(queue, urgent)
        room -= len(urgent)
        if room > 0 and (not queue.under_way_blocks or queue.waiting_blocks >= tier.put_batch_copies):
            copies = queue.take(room)
            if tier.pending_count([copy.key for copy in copies]):
                looked_up = [copy for copy in copies if not tier.pending_count([copy.key])]
                known = {copy.key for copy in looked_up}
                queue.put_back([copy for copy in copies if copy.key not in known])
                copies = looked_up
            self._start(queue, copies)

    def _start(self, queue: SpillQueue, copies: list[Waiting], *, drop: bool = False) -> int:
        """Begin writing copies that were taken from the queue; how many began."""
        missing = self._not_there(queue, copies)
        self._pass_by(queue, _without(copies, missing), None)
        begun = len(missing)
        if not queue.tier.private_memory:
            missing = self._lend(queue, missing, drop)
        here = [copy for copy in missing if self._is_on_device(copy)]
        self._pass_by(queue, _without(missing, here), "gone")
        begun -= len(missing)
        if not here:
            return begun
        put = _Put(queue, here, drop=drop)
        return begun + (self._read_in_place(put) if queue.tier.private_memory else self._stage(put))

    def _pass_by(self, queue: SpillQueue, copies: list[Waiting], cause: str | None) -> None:
        """These are not written after all."""
        if copies:
            queue.finish(copies)
            if cause is None:
                self._metrics.offered("coalesced", len(copies), tier=queue.tier.name)
            else:
                self._metrics.dropped(cause, len(copies), tier=queue.tier.name)

    def _is_on_device(self, copy: Waiting) -> bool:
        """Whether the block still holds what was offered, and not another one's tokens, group, class or form."""
        pool, block_id, key = self._pool, copy.block_id, copy.key
        return (
            block_id != NO_BLOCK
            and pool.hash_of(block_id) == key.hash
            and pool.group_of(block_id) == key.group
            and pool.computed_exact(block_id) == key.exact
            and (pool.form_of(block_id) == COLD) == (key.codec != "raw")
            and not pool.is_changing(block_id)
        )

    def _lend(self, queue: SpillQueue, copies: list[Waiting], drop: bool) -> list[Waiting]:
        """Write those that own memory has from there. Returns the others."""
        for tier in self._own_memory:
            if not copies:
                break
            loans = tier.lend([copy.key for copy in copies])
            lent = [(copy, loan) for copy, loan in zip(copies, loans, strict=True) if loan is not None]
            if lent:
                put = _Put(queue, [copy for copy, _ in lent], loans=[loan for _, loan in lent], drop=drop)
                self._submit(put, [loan.row for loan in put.loans])
                copies = [copy for copy, loan in zip(copies, loans, strict=True) if loan is None]
        return copies

    def _read_in_place(self, put: _Put) -> int:
        self._fence(put)
        try:
            rows = [self._device_row(copy) for copy in put.copies]
        except Exception:  # counted: a copy that is not made is a later miss, no reason to stop
            self._not_submitted(put)
            return 0
        return self._submit(put, rows)

    def _device_row(self, copy: Waiting) -> ByteRow:
        pool, block_id = self._pool, copy.block_id
        group, form = pool.group_of(block_id), pool.form_of(block_id)
        return as_byte_row(self._device.read_buffer(group, form, pool.slot_of(block_id)))

    def _stage(self, put: _Put) -> int:
        """Copy blocks into buffers on the executor; what there is no buffer for goes back in line."""
        for copy in put.copies:
            row = self._staging[put.queue.tier.name].take(copy.size_bytes)
            if row is None:
                break
            put.buffers.append(row)
        begun = len(put.buffers)
        put.queue.put_back(put.copies[begun:])
        del put.copies[begun:]
        if not begun:
            return 0
        self._fence(put)
        pool = self._pool
        places = [
            (pool.group_of(one), pool.form_of(one), pool.slot_of(one)) for one in [copy.block_id for copy in put.copies]
        ]

        def stage() -> None:
            try:
                for place, buffer in zip(places, put.buffers, strict=True):
                    self._device.copy_out(*place, buffer)
            except BaseException as error:  # carried to `take_staged`, which unfences the blocks
                put.failure = error
            self._staged.put(put)
            self._waker()

        self._staging_puts.append(put)
        try:
            self._executor.submit(stage)
        except Exception as error:  # counted by `take_staged`
            put.failure = error
            self._staged.put(put)
        self.take_staged()  # an inline executor has done it already
        return begun

    def take_staged(self) -> None:
        """Submit what lies in buffers now; its device blocks are free to go."""
        while True:
            try:
                put = self._staged.get_nowait()
            except Empty:
                return
            self._staging_puts.remove(put)
            self._unfence(put)
            if put.void:
                self._end(put)
            elif put.failure is not None:
                self._not_submitted(put)
                if not isinstance(put.failure, Exception):
                    raise put.failure
            else:
                self._submit(put, put.buffers)

    def _submit(self, put: _Put, rows: Sequence[ByteRow]) -> int:
        tier = put.queue.tier
        items = [
            PutItem(copy.key, [row], copy.parent, copy.steps if tier.private_memory else PLAIN)
            for copy, row in zip(put.copies, rows, strict=True)
        ]
        try:
            transfer = tier.submit_put(items)
        except Exception:  # counted: a copy that is not made is a later miss, no reason to stop
            self._not_submitted(put)
            return 0
        self._puts[transfer] = put
        return len(items)

    def _not_submitted(self, put: _Put) -> None:
        name = put.queue.tier.name
        self._metrics.dropped("not_submitted", len(put.copies), tier=name)
        _LOG.error("kvstore: %d copies to tier %s could not start", len(put.copies), name, exc_info=put.failure or True)
        self._end(put)

    # -- outcomes -----------------------------------------------------------------------------------------------

    def finish(self, completion: Completion) -> int | None:
        """Apply a put's outcome: how many copies were stored. None: not one of ours, or seen before."""
        put = self._puts.pop(completion.transfer, None)
        if put is None:
            return None
        name, results = put.queue.tier.name, completion.results
        self._metrics.transferred(name, "put", results, sum(copy.size_bytes for copy in put.copies))
        stored = 0
        for result in results:
            if result is ResultCode.OK:
                stored += 1
            else:
                self._metrics.dropped(result.value, tier=name)
        self._metrics.spilled(name, stored)
        self._end(put)
        if put.drop:
            self._drop_above(put, results)
        return stored

    def _end(self, put: _Put) -> None:
        """Everything a put held is given back."""
        self._unfence(put)
        for loan in put.loans:
            loan.end()
        for buffer in put.buffers:
            self._staging[put.queue.tier.name].give_back(buffer)
        put.queue.finish(put.copies)

    def _fence(self, put: _Put) -> None:
        put.fenced = [copy.block_id for copy in put.copies]
        self._pool.begin_transfer(put.fenced)
        self.fenced_blocks += len(put.fenced)

    def _unfence(self, put: _Put) -> None:
        self._pool.end_transfer(put.fenced)
        self.fenced_blocks -= len(put.fenced)
        put.fenced = []

    def _drop_above(self, put: _Put, results: Sequence[ResultCode]) -> None:
        """The second half of a demotion, for blocks that nobody has taken up since."""
        pool = self._pool
        gone = [
            copy.block_id
            for copy, result in zip(put.copies, results, strict=False)
            if result is ResultCode.OK and self._is_on_device(copy) and pool.is_idle(copy.block_id)
            if not (pool.in_flight(copy.block_id) or pool.is_pinned(copy.block_id))
        ]
        pool.evict(gone)
        self._metrics.demoted(put.queue.tier.name, len(gone))

    # -- reset, close, checks -----------------------------------------------------------------------------------

    def clear(self, cause: str) -> None:
        """Nothing that waits or is being staged is written any more; what is under way ends as its tier says."""
        for queue in self._queues:
            self._metrics.dropped(cause, queue.clear(), tier=queue.tier.name)
        for put in self._staging_puts:
            if not put.void:
                put.void = True
                self._metrics.dropped(cause, len(put.copies), tier=put.queue.tier.name)

    def count_left(self, tier: Tier, offers: Sequence[tuple[Waiting, Candidate]]) -> None:
        """The time was up before these were even offered to the tier: count those that it would have got."""
        queue = self._queue(tier)
        worth = self.admission.admits(tier.name, [candidate for _, candidate in offers])
        wanted = [copy for (copy, _), good in zip(offers, worth, strict=True) if good and copy.key not in queue]
        self._metrics.dropped("close", len(self._not_there(queue, wanted)), tier=tier.name)

    def check(self) -> None:
        """IntegrityError when queues, transfers and buffers do not add up."""
        puts = [*self._puts.values(), *self._staging_puts]
        for queue in self._queues:
            queue.check(copy.key for put in puts if put.queue is queue for copy in put.copies)
        held = sum(buffer.nbytes for put in puts for buffer in put.buffers)
        fenced = sum(len(put.fenced) for put in puts)
        if held != self.staged_bytes or fenced != self.fenced_blocks:
            raise IntegrityError(
                f"write-behind: {self.staged_bytes} bytes staged and {self.fenced_blocks} blocks fenced, "
                f"{held} and {fenced} in transfers"
            )


def _without(copies: Sequence[Waiting], others: Sequence[Waiting]) -> list[Waiting]:
    keys = {copy.key for copy in others}
    return [copy for copy in copies if copy.key not in keys]
