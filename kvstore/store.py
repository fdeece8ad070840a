"""`KVStore`: the facade. One owner of the truth about blocks, one lock, batch calls.

Every public method takes the store's lock for bookkeeping only; bytes are copied and encoded by the executor.
`step` drives all movement: call it between forward passes, never while one is reading or writing the slab.

Life of a sequence: admit -> (fetch until done) -> { grow -> forward -> commit } ... -> finish | abort | preempt.
`written` tokens have room in the tables, `committed` tokens have final KV. Only full blocks of committed tokens are
sealed, cooled or copied, so drafts can be rolled back.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from allocator import (
    FULL,
    BlockTable,
    CapacityError,
    DuplicateSequence,
    GroupKind,
    IntegrityError,
    KVGeometry,
    TierError,
    UnknownSequence,
    UsageError,
)
from kvstore.assembly import assemble
from kvstore.config import KVStoreConfig
from kvstore.identity import HashChain, Identity
from kvstore.sequence import Admission, FetchState, Hit, Lease, Sequence, SequenceState
from kvstore.upkeep import StepReport, StoreUsage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from collections.abc import Sequence as Items

    import numpy as np
    import numpy.typing as npt

    from allocator import Slab
    from kvstore.identity import Media
    from kvstore.tier import Tier


class KVStore:
    """Decides where every token's KV lives. See the module docstring for the order of calls.

    geometry, identity: must agree on what a block is; `identity.root()` names everything stored here.
    device: a torch device string, or "absent" for accounting without bytes.
    tiers: fast to slow; None means a host tier of `config.host_bytes` when that is not zero.
    clock: monotonic seconds.
    placeholder_ids: token ids that stand for media; a prompt that has one without its media is refused.

    Raises ConfigError when a group's shape does not fit the codec or the slab cannot hold one block per group.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        identity: Identity,
        config: KVStoreConfig | None = None,
        *,
        device: str = "cpu",
        tiers: Items[Tier] | None = None,
        clock: Callable[[], float] = time.monotonic,
        placeholder_ids: Iterable[int] = (),
    ) -> None:
        self._placeholder_ids = frozenset(placeholder_ids)
        self.config = config or KVStoreConfig()
        self.geometry = geometry
        self._identity = identity
        self._root = identity.root()
        self._clock = clock
        self._lock = threading.RLock()
        self._arrived = threading.Event()
        self._sequences: dict[str, Sequence] = {}
        self._closed = False
        parts = assemble(geometry, self.config, device, tiers, self._sequences, self._arrived.set)
        self.pool = parts.pool
        self.metrics = parts.metrics
        self.cold_codec = parts.cold_codec
        self._parts = parts
        self._admitter, self._growth, self._upkeep = parts.admitter, parts.growth, parts.upkeep

    # -- what others may look at --------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def slab(self) -> Slab | None:
        return self._parts.device.slab

    @property
    def tiers(self) -> tuple[Tier, ...]:
        return self._parts.tiers

    @property
    def identity(self) -> Identity:
        return self._identity

    def sequence_ids(self) -> list[str]:
        with self._lock:
            return list(self._sequences)

    def committed_tokens(self, sequence_id: str) -> int:
        with self._lock:
            return self._sequence(sequence_id).committed

    def written_tokens(self, sequence_id: str) -> int:
        with self._lock:
            return self._sequence(sequence_id).written

    def is_exact(self, sequence_id: str) -> bool:
        """True while everything committed was computed from full precision only."""
        with self._lock:
            sequence = self._sequence(sequence_id)
            return sequence.is_exact_up_to(sequence.committed)

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Tell the store how fast the engine computes prompts, so that it can choose between loading and computing."""
        with self._lock:
            self._parts.costs.observe_prefill(tokens, seconds)

    # -- lookup and pin -----------------------------------------------------------------------------------------

    def prepare(
        self, token_ids: Items[int], *, media: Items[Media] = (), identity: Identity | None = None
    ) -> HashChain:
        """The block hashes of a prompt, to be passed as `token_ids` to lookup, pin and admit: hashed only once."""
        return self._chain(token_ids, media, identity)

    def lookup(
        self,
        token_ids: Items[int] | HashChain,
        *,
        exact: bool = False,
        media: Items[Media] = (),
        identity: Identity | None = None,
    ) -> Hit:
        """The longest reusable prefix of `token_ids`, by tier. Changes nothing: repeat it as often as you like.

        exact: only raw copies of exactly computed blocks count. identity: another adapter, tenant or salt than
        the store's own. Raises UsageError on token ids outside 0..2**32-1 and on an empty prompt.
        """
        chain = self._chain(token_ids, media, identity)
        return self.lookup_hashes(chain.root, chain.hashes, chain.token_count, exact=exact)

    def lookup_hashes(self, root: bytes, hashes: Items[bytes], token_count: int, *, exact: bool = False) -> Hit:
        """`lookup` for a caller that has the block hashes already (hash of each full block, in order)."""
        with self._lock:
            usable = self._admitter.usable_hashes(hashes, token_count, None)
            return self._admitter.hit(self._admitter.find(root, usable, exact))

    def pin(
        self,
        token_ids: Items[int] | HashChain,
        ttl_seconds: float,
        *,
        exact: bool = False,
        media: Items[Media] = (),
        identity: Identity | None = None,
    ) -> Lease:
        """Hold the device-resident part of a prefix for `ttl_seconds`, whatever happens around it.

        Admit with `lease=` to use it. An ended lease is no error there: it is a miss, or less of a hit.
        """
        if not ttl_seconds > 0:
            raise UsageError(f"pin needs a positive ttl_seconds, got {ttl_seconds}")
        chain = self._chain(token_ids, media, identity)
        with self._lock:
            self._check_open()
            usable = self._admitter.usable_hashes(chain.hashes, chain.token_count, None)
            plan = self._parts.residency.plan(chain.root, usable, exact)
            plan = self._parts.residency.on_device(plan, chain.root, usable, exact)
            blocks = tuple(tuple(block for block in group.ids if block >= 0) for group in plan.groups)
            tokens = plan.blocks * self.geometry.block_tokens
            return self._parts.leases.grant(blocks, tokens, self._clock() + ttl_seconds)

    def unpin(self, lease: Lease) -> None:
        """Give a lease back. Raises LeaseError when it is not this store's or was given back before."""
        with self._lock:
            self._parts.leases.end(lease)

    # -- admit --------------------------------------------------------------------------------------------------

    def admit(
        self,
        sequence_id: str,
        token_ids: Items[int] | HashChain,
        *,
        exact: bool = False,
        lease: Lease | None = None,
        media: Items[Media] = (),
        identity: Identity | None = None,
        prompt_tokens: int | None = None,
        private_from: int | None = None,
    ) -> Admission:
        """Begin a sequence: share what is there, start fetching what lies lower.

        prompt_tokens: how many of `token_ids` are the prompt (the rest was generated before a preemption).
        private_from: blocks from that token position on are neither shared nor named.
        Raises CapacityError with nothing changed: `permanent` when the prompt can never fit, else when it does not
        fit now; DuplicateSequence; UsageError for an empty prompt or token ids out of range.
        """
        chain = self._chain(token_ids, media, identity)
        with self._lock:
            self._check_open()
            if sequence_id in self._sequences:
                raise DuplicateSequence(f"sequence {sequence_id!r} is live already; finish or abort it first")
            token_count = chain.token_count
            self.check_fits(token_count)
            tables = [
                BlockTable(self.pool, index, self.geometry.block_tokens, group.window_tokens)
                for index, group in enumerate(self.geometry.groups)
            ]
            sequence = Sequence(
                sequence_id=sequence_id,
                chain=chain,
                root=chain.root,
                tables=tables,
                exact=exact,
                prompt_tokens=token_count if prompt_tokens is None else prompt_tokens,
                private_from=private_from,
            )
            hashes = self._admitter.usable_hashes(chain.hashes, token_count, private_from)
            plan = self._admitter.find(chain.root, hashes, exact)
            block_tokens = self.geometry.block_tokens
            self._admitter.build_tables(sequence, plan, token_count - plan.blocks * block_tokens)
            sequence.written = plan.blocks * block_tokens
            if plan.lossy_at is not None:
                sequence.lossy_from = plan.lossy_at * block_tokens
            self._sequences[sequence_id] = sequence
            self._admitter.start_fetch(sequence, plan, self._fetch_done, self._clock())
            if sequence.state is SequenceState.RUNNING:
                self._take_ready(sequence, plan.blocks, {})
            reused = plan.device_blocks * block_tokens
            by_tier = self._admitter.hit(plan).by_tier
            return Admission(sequence_id, reused, plan.blocks * block_tokens - reused, by_tier)

    def fetch(self, sequence_id: str) -> FetchState:
        """Whether the copies that `admit` asked for have arrived. Never waits: call `step` between two calls."""
        with self._lock:
            sequence = self._sequence(sequence_id)
            done = sequence.state is SequenceState.RUNNING
            return FetchState(done, sequence.committed if done else 0)

    def _fetch_done(self, sequence: Sequence) -> None:
        """All copies of a sequence have an outcome. Runs inside `step`, under the lock."""
        if self._sequences.get(sequence.sequence_id) is not sequence:
            return  # aborted meanwhile: its blocks were released and leave when their transfers ended
        planned = sequence.written // self.geometry.block_tokens
        pending = sequence.pending
        blocks = self._admitter.settle(sequence)
        self._upkeep.remember_fetched(sequence, [copy for copy in pending if copy.outcome and copy.position < blocks])
        if blocks < planned:
            self._growth.truncate(sequence, blocks * self.geometry.block_tokens)
            if all(self.pool.reads_exact(one) for table in sequence.tables for one in table.ids().tolist() if one >= 0):
                sequence.lossy_from = None
            elif sequence.lossy_from is not None:
                sequence.lossy_from = min(sequence.lossy_from, blocks * self.geometry.block_tokens)
        self._take_ready(sequence, blocks, {copy.position: copy.tier for copy in pending})

    def _take_ready(self, sequence: Sequence, blocks: int, fetched: dict[int, str]) -> None:
        """`blocks` leading blocks are there, those in `fetched` (position -> tier) from below: computing can start."""
        block_tokens = self.geometry.block_tokens
        sequence.written = sequence.committed = sequence.reused_tokens = blocks * block_tokens
        sequence.sealed_blocks = blocks
        by_tier = Counter(fetched.get(position, "device") for position in range(blocks))
        hits = {name: count * block_tokens for name, count in by_tier.items()}
        self.metrics.count_request(sequence.sequence_id, sequence.chain.token_count, hits)
        self.metrics.reused(sequence.reused_tokens, hits)
        self._upkeep.touch_below(sequence, blocks)

    def check_fits(self, token_count: int) -> None:
        """CapacityError (permanent) when a sequence of `token_count` tokens can never be on the device at once."""
        block_tokens, layout = self.geometry.block_tokens, self.pool.layout
        for index, group in enumerate(self.geometry.groups):
            held = token_count
            if group.kind is GroupKind.SLIDING and group.window_tokens is not None:
                held = min(token_count, group.window_tokens + 2 * block_tokens)
            needed = -(-held // block_tokens)
            ever = (layout.extent_count - layout.spare_count) * layout.per_extent[2 * index + FULL]
            if needed > ever:
                raise CapacityError(
                    needed,
                    ever,
                    f"blocks of group {group.name!r} for a sequence of {token_count} tokens, more than the slab can "
                    "ever hold: raise device_bytes or shorten the prompt",
                    permanent=True,
                )

    # -- grow, commit, rollback ---------------------------------------------------------------------------------

    def grow(self, sequence_id: str, token_count: int) -> None:
        """Make room for `token_count` more written tokens in all groups, or change nothing and raise CapacityError.

        A partly filled block that others hold too is copied first. `error.transient` says that transfers in flight
        will free memory, so trying again after `step` may succeed without preempting anybody.
        """
        if token_count <= 0:
            raise UsageError(f"grow needs a positive token_count, got {token_count} for sequence {sequence_id!r}")
        with self._lock:
            self._growth.grow(self._running(sequence_id), token_count)

    def commit(self, sequence_id: str, token_ids: Items[int]) -> None:
        """The next written tokens are final: their KV was computed from `token_ids`. Seals full blocks.

        Raises UsageError when more is committed than was written by `grow`.
        """
        with self._lock:
            self._growth.commit(self._running(sequence_id), token_ids)

    def commit_prompt(self, sequence_id: str, token_count: int) -> None:
        """`commit` of the next `token_count` tokens that the sequence was admitted with: nothing is hashed again."""
        with self._lock:
            self._growth.commit_prompt(self._running(sequence_id), token_count)

    def rollback(self, sequence_id: str, token_count: int) -> None:
        """Drop the last `token_count` written tokens, uncommitted ones first.

        Shared blocks stay whole: a block cut in the middle is copied when it is written to again. Raises
        CannotRollback, with nothing changed, when a sliding group no longer has the blocks that the shorter
        sequence would need, or when the cut falls into an INT4 block.
        """
        with self._lock:
            self._growth.rollback(self._running(sequence_id), token_count)

    def prefill_done(self, sequence_id: str) -> None:
        """The prompt is computed: its blocks may cool from now on, save the first and the newest ones."""
        with self._lock:
            sequence = self._running(sequence_id)
            sequence.prefill_done = True
            self._upkeep.enqueue_cool(sequence)

    # -- what the forward pass reads ----------------------------------------------------------------------------

    def tables(self, sequence_id: str) -> tuple[npt.NDArray[np.int64], ...]:
        """Per group, int64 [blocks]: slot << 1 | form, -1 where a block has left the window. Valid until `step`."""
        with self._lock:
            return tuple(table.entries() for table in self._running(sequence_id).tables)

    def slot_mapping(self, sequence_id: str, group: int, start: int, count: int) -> npt.NDArray[np.int64]:
        """Where to write tokens start..start+count-1: int64 [count], slot * block_tokens + offset."""
        with self._lock:
            return self._running(sequence_id).tables[group].slot_mapping(start, count)

    # -- fork, preempt, finish, abort ---------------------------------------------------------------------------

    def fork(self, sequence_id: str, child_id: str) -> None:
        """A second sequence with the same past; blocks are shared and copied only when written to."""
        with self._lock:
            parent = self._running(sequence_id)
            if child_id in self._sequences:
                raise DuplicateSequence(f"sequence {child_id!r} is live already; fork needs a new id")
            if parent.written != parent.committed:
                raise UsageError(
                    f"fork of {sequence_id!r}: {parent.written - parent.committed} written tokens are not committed; "
                    "commit or roll them back first"
                )
            tables = [table.fork() for table in parent.tables]
            self._sequences[child_id] = Sequence(
                sequence_id=child_id,
                chain=parent.chain.fork(),
                root=parent.root,
                tables=tables,
                exact=parent.exact,
                prompt_tokens=parent.prompt_tokens,
                written=parent.written,
                committed=parent.committed,
                sealed_blocks=parent.sealed_blocks,
                lossy_from=parent.lossy_from,
                cold_generation=parent.cold_generation,
                prefill_done=parent.prefill_done,
                shared=parent.shared,
                reused_tokens=parent.reused_tokens,
                private_from=parent.private_from,
            )
            if parent.exact:
                for table in tables:
                    self.pool.hold_exact(table.ids())
            self._growth.hold_tails(self._sequences[child_id])

    def preempt(self, sequence_id: str) -> None:
        """Take a sequence off the device. Its sealed blocks are copied down and stay hits; the tail is recomputed."""
        with self._lock:
            sequence = self._sequence(sequence_id)
            self._upkeep.spill_sequence(sequence)
            self._release(sequence)
            self.metrics.preempted()

    def finish(self, sequence_id: str) -> None:
        """End a sequence; what it sealed stays as hits until evicted."""
        with self._lock:
            self._release(self._sequence(sequence_id))
            self.metrics.forget_request(sequence_id)

    def abort(self, sequence_id: str) -> None:
        """End a sequence at any moment, loading included. Blocks in flight are freed when their transfer ends."""
        with self._lock:
            self._release(self._sequence(sequence_id))
            self.metrics.forget_request(sequence_id)
            self.metrics.aborted()

    def _release(self, sequence: Sequence) -> None:
        del self._sequences[sequence.sequence_id]
        self._growth.drop_tails(sequence)
        for table in sequence.tables:
            if sequence.exact:
                self.pool.drop_exact(table.ids())
            table.release()

    # -- upkeep -------------------------------------------------------------------------------------------------

    def step(self, now: float | None = None) -> StepReport:
        """Bring back finished transfers, then start a bounded amount of cooling and spilling. Never waits."""
        with self._lock:
            self._check_open()
            now = self._clock() if now is None else now
            self._arrived.clear()
            self._parts.leases.expire(now)
            self.metrics.computed(self._growth.computed_tokens)
            self._growth.computed_tokens = 0
            return self._upkeep.step(now)

    def wait(self, timeout_seconds: float) -> bool:
        """Block until a transfer has ended or the time is up; for loops with nothing else to do. Then call `step`."""
        with self._lock:
            if not self._upkeep.mover.in_flight_blocks:
                return False
        return self._arrived.wait(timeout_seconds)

    def usage(self) -> StoreUsage:
        with self._lock:
            return self._upkeep.usage()

    def reset(self) -> None:
        """The weights changed in place: nothing stored before is ever served again.

        Raises the epoch, drops idle blocks and empties every tier. Live sequences go on, but name nothing any more.
        Raises TierError when a tier cannot be reached; the epoch is raised all the same, so that even its copies miss.
        """
        with self._lock:
            self._check_open()
            self._identity = replace(self._identity, epoch=self._identity.epoch + 1)
            self._root = self._identity.root()
            for sequence in self._sequences.values():
                sequence.shared = False
            self.pool.drop_all_idle()
            failures = []
            for tier in self._parts.tiers:
                try:
                    tier.clear()
                except TierError as error:
                    failures.append(f"{tier.name}: {error}")
            if failures:
                raise TierError("reset did not reach every tier: " + "; ".join(failures))

    def check_invariants(self) -> None:
        """Raise IntegrityError naming the first invariant that does not hold."""
        with self._lock:
            tables = [table for sequence in self._sequences.values() for table in sequence.tables]
            self.pool.check_invariants(tables)
            for sequence in self._sequences.values():
                self._check_sequence(sequence)

    def _check_sequence(self, sequence: Sequence) -> None:
        name = sequence.sequence_id
        if not 0 <= sequence.committed <= sequence.written and sequence.state is SequenceState.RUNNING:
            raise IntegrityError(f"{name!r}: committed {sequence.committed} > written {sequence.written}")
        if sequence.chain.token_count < sequence.committed:
            raise IntegrityError(f"{name!r}: chain of {sequence.chain.token_count} < committed {sequence.committed}")
        for table in sequence.tables:
            if table.token_count != sequence.written:
                raise IntegrityError(f"{name!r}: table has {table.token_count} tokens, written {sequence.written}")

    def close(self) -> None:
        """Stop movement, close the tiers that this store made or was given. Closing twice is harmless."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._sequences.clear()
        self._parts.executor.close()
        for tier in self._parts.tiers:
            tier.close()

    def __enter__(self) -> KVStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside -------------------------------------------------------------------------------------------------

    def _chain(self, token_ids: Items[int] | HashChain, media: Items[Media], identity: Identity | None) -> HashChain:
        if isinstance(token_ids, HashChain):
            if token_ids.block_tokens != self.geometry.block_tokens:
                raise UsageError(
                    f"the prompt was hashed in blocks of {token_ids.block_tokens}, this store's are "
                    f"{self.geometry.block_tokens}"
                )
            return token_ids.fork()
        if not len(token_ids):
            raise UsageError("an empty prompt has nothing to compute: give at least one token id")
        chain = HashChain(
            self._root if identity is None else identity.root(),
            self.geometry.block_tokens,
            placeholder_ids=self._placeholder_ids,
        )
        chain.extend(token_ids, media)
        return chain

    def _sequence(self, sequence_id: str) -> Sequence:
        self._check_open()
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            raise UnknownSequence(f"no live sequence {sequence_id!r}: never admitted, or finished, aborted, preempted")
        return sequence

    def _running(self, sequence_id: str) -> Sequence:
        sequence = self._sequences.get(sequence_id)
        if sequence is not None and sequence.state is SequenceState.RUNNING:
            return sequence
        sequence = self._sequence(sequence_id)
        if sequence.state is SequenceState.LOADING:
            raise UsageError(f"sequence {sequence_id!r} is still loading: call step until fetch says done")
        return sequence

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this store is closed")
