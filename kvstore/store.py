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
from typing import TYPE_CHECKING

from allocator import DuplicateSequence, KVGeometry
from kvstore.arguments import check_hashes, check_spare_blocks, check_store_arguments, duration, moment, text_id, whole
from kvstore.assembly import assemble
from kvstore.closing import DRAIN_SECONDS, close_parts
from kvstore.config import KVStoreConfig
from kvstore.epochs import Epochs
from kvstore.layer_progress import wait_all
from kvstore.live_sequences import LiveSequences
from kvstore.prompts import Prompts
from kvstore.questions import Questions
from kvstore.quotas import tenant_of
from kvstore.relocation import Relocation
from kvstore.retention import Retention, check_retention
from kvstore.sequence import Admission, FetchState, Hit, Lease, Sequence, SequenceState
from kvstore.store_views import StoreViews
from kvstore.upkeep import StepReport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from collections.abc import Sequence as Items

    import numpy as np
    import numpy.typing as npt

    from allocator import EvictionPolicy
    from kvstore.identity import HashChain, Identity, Media
    from kvstore.tier import Tier


class KVStore(StoreViews):
    """Decides where every token's KV lives. See the module docstring for the order of calls.

    geometry, identity: must agree on what a block is; `identity.root()` names everything stored here.
    device: a torch device string, or "absent" for accounting without bytes.
    tiers: fast to slow; None means a host tier of `config.host_bytes` when that is not zero.
    clock: monotonic seconds.
    placeholder_ids: token ids that stand for media; a prompt that has one without its media is refused.
    fetch_by_layer: an engine that computes while it loads sets it. Then disk and remote bring first layers first.
    Raises ConfigError when a group's shape does not fit the codec or the slab cannot hold one block per group.
    """

    _eviction: Callable[[int], EvictionPolicy] | None = None  # instead of the settings' one: the simulator compares

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
        self.config = config = KVStoreConfig() if config is None else config
        check_store_arguments(geometry, self.config, device, tiers, clock)
        self.geometry = geometry
        self._device = device
        reachable = bool(tiers or config.disk_path or config.redis_url or config.daemon_socket)
        self._prompts = Prompts(
            geometry, identity, placeholder_ids=placeholder_ids, share=config.share, reachable=reachable
        )
        self._clock = clock
        self._lock = threading.RLock()
        self._arrived = threading.Event()
        self._sequences = sequences = LiveSequences()
        parts = assemble(geometry, config, device, tiers, sequences, identity.epoch, self._arrived.set, self._eviction)
        self.pool = parts.pool
        self.metrics = parts.metrics
        self.cold_codec = parts.cold_codec
        self._parts = parts
        self._admitter, self._growth, self._upkeep = parts.admitter, parts.growth, parts.upkeep
        self._relocation = Relocation(parts, self._sequences, self._release)
        self.events = parts.announcer.events
        self.fetch_by_layer = False
        self._questions = Questions(parts.admitter, self.config.fetch_deadline_seconds)
        self._epochs = Epochs(parts, self._prompts, self._sequences, self._lock)
        self.metrics.before_reading = self._state_gauges

    # -- lookup and pin -----------------------------------------------------------------------------------------

    def prepare(
        self, token_ids: Items[int], *, media: Items[Media] = (), identity: Identity | None = None
    ) -> HashChain:
        """The block hashes of a prompt, to be passed as `token_ids` to lookup, pin and admit: hashed only once."""
        return self._prompts.chain(token_ids, media, identity)

    def lookup(
        self,
        token_ids: Items[int] | HashChain,
        *,
        exact: bool = False,
        media: Items[Media] = (),
        identity: Identity | None = None,
    ) -> Hit:
        """The longest reusable prefix of `token_ids`, by tier. Changes nothing: repeat it as often as you like.

        Never waits: a hit is `pending` while a slow tier is still looking, and may be larger after the next step.
        exact: only raw copies of exactly computed blocks count. identity: another adapter, tenant or salt than
        the store's own. Raises UsageError on token ids outside 0..2**32-1 and on an empty prompt.
        """
        self._epochs.keep_up()
        chain = self._prompts.chain(token_ids, media, identity)
        return self.lookup_hashes(chain.root, chain.hashes, chain.token_count, exact=exact)

    def lookup_hashes(self, root: bytes, hashes: Items[bytes], token_count: int, *, exact: bool = False) -> Hit:
        """`lookup` for a caller that has the block hashes already (hash of each full block, in order)."""
        check_hashes(hashes, token_count, self.geometry.block_tokens)
        is_fresh = self._epochs.keep_up()
        with self._lock:
            self._sequences.check_open()
            usable = self._admitter.usable_hashes(hashes, token_count, None)
            return self._questions.hit(root, usable, exact, is_fresh, self._clock())

    def pin(
        self,
        token_ids: Items[int] | HashChain,
        ttl_seconds: float | None = None,
        *,
        exact: bool = False,
        media: Items[Media] = (),
        identity: Identity | None = None,
    ) -> Lease:
        """Hold the device-resident part of a prefix for `ttl_seconds`, whatever happens around it.

        Admit with `lease=` to use it. An ended lease is no error there: it is a miss, or less of a hit. None: for
        `config.lease_seconds`, the longest there is. CapacityError when pins would hold over half of the device.
        """
        seconds = self._parts.leases.checked_seconds(ttl_seconds)
        chain = self._prompts.chain(token_ids, media, identity)
        with self._lock:
            self._sequences.check_open()
            blocks, tokens = self._admitter.on_device(chain, exact)
            return self._parts.leases.grant(blocks, tokens, self._clock() + seconds)

    def unpin(self, lease: Lease) -> None:
        """Give a lease back. Raises LeaseError when it is not this store's or was given back before."""
        with self._lock:
            self._parts.leases.end(lease)

    def retain(self, sequence_id: str, retention: Items[Retention]) -> None:
        """What of a live sequence is to be evicted later, or earlier, than the rest once it has ended."""
        wishes = check_retention(retention)
        with self._lock:
            self._sequences.live(sequence_id).retention = wishes

    def retain_prefix(
        self, token_ids: Items[int] | HashChain, retention: Items[Retention], *, identity: Identity | None = None
    ) -> int:
        """`retain` for what of a prefix is here, as if a sequence had ended now; how many tokens the device has."""
        wishes = check_retention(retention)
        chain = self._prompts.chain(token_ids, (), identity)
        with self._lock:
            self._sequences.check_open()
            blocks, tokens = self._admitter.on_device(chain, False)
            self._parts.retainer.keep_blocks(blocks, wishes, tokens)
            self._parts.retainer.keep_copies(chain, wishes)
            return tokens

    def promote(self, token_ids: Items[int] | HashChain, *, exact: bool = False) -> int:
        """Read a prefix's next blocks up from lower tiers and keep them as hits; tokens on their way (see `step`)."""
        chain = self._prompts.chain(token_ids, (), None)
        with self._lock:
            self._sequences.check_open()
            return self._relocation.promote(chain, exact, self._clock())

    def demote(self, token_ids: Items[int] | HashChain) -> int:
        """Copy a prefix's idle blocks down and drop them here once the copy is made; how many blocks."""
        chain = self._prompts.chain(token_ids, (), None)
        with self._lock:
            self._sequences.check_open()
            return self._relocation.demote(chain)

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
        spare_blocks: Items[int] = (),
    ) -> Admission:
        """Begin a sequence: share what is there, start fetching what lies lower. `ask_again`: not yet, see Admission.

        exact: only what reads as full precision is shared, and none of the sequence's blocks ever cools.
        lease: given back once the sequence has references of its own; one that has ended is a miss, not an error.
        prompt_tokens: how many of `token_ids` are the prompt (the rest was generated before a preemption).
        private_from: blocks from that token position on are neither shared nor named.
        spare_blocks: blocks by cache group that must be left for others once the whole prompt has its own.
        Raises, with nothing changed, CapacityError (`permanent` when the prompt can never fit, for its tenant's quota
        too), DuplicateSequence,
        LeaseError for another store's lease, UsageError for bad token ids and counts.
        """
        text_id("sequence_id", sequence_id)
        is_fresh = self._epochs.keep_up()
        chain = self._prompts.chain(token_ids, media, identity)
        token_count = chain.token_count
        prompt_tokens = token_count if prompt_tokens is None else whole("prompt_tokens", prompt_tokens, 0, token_count)
        private_from = None if private_from is None else whole("private_from", private_from, 0)
        check_spare_blocks(spare_blocks, len(self.geometry.groups))
        with self._lock:
            self._sequences.check_open()
            if not self._prompts.is_current(chain):  # reset since the line above
                chain = self._prompts.chain(token_ids, media, identity)
            if sequence_id in self._sequences:
                raise DuplicateSequence(f"sequence {sequence_id!r} is live already; finish or abort it first")
            self._parts.leases.check(lease)
            self.check_fits(token_count)
            sequence = self._admitter.new_sequence(
                sequence_id, chain, exact=exact, prompt_tokens=prompt_tokens, private_from=private_from
            )
            sequence.tenant = tenant_of(identity or self.identity)
            hashes = self._admitter.usable_hashes(chain.hashes, token_count, private_from)
            plan = self._admitter.find(chain.root, hashes, exact)
            if self._questions.is_open(plan, hashes, exact, is_fresh, self._clock()):
                return Admission(sequence_id, 0, 0, ask_again=True)
            self._admitter.build_tables(sequence, plan, token_count, spare_blocks)
            self._sequences[sequence_id] = sequence
            self._admitter.note_choice(sequence, plan, len(hashes))
            self._parts.leases.take_over(lease)
            if sequence.pending:
                on_done, by_layer = self._parts.arrivals.fetched, self.fetch_by_layer
                self._admitter.start_fetch(sequence, plan, on_done, self._clock(), by_layer=by_layer)
            else:
                self._parts.arrivals.ready(sequence, plan.blocks, {})
            return self._admitter.admission(sequence, plan)

    def fetch(self, sequence_id: str) -> FetchState:
        """Whether the copies that `admit` asked for have arrived. Never waits: call `step` between two calls."""
        with self._lock:
            sequence, fetcher = self._sequences.live(sequence_id), self._upkeep.mover.fetcher
            if sequence.state is SequenceState.RUNNING:
                return FetchState(True, sequence.committed, fetcher.layer_end, sequence.committed)
            ready = fetcher.layers_ready(sequence) if sequence.by_layer else 0
            return FetchState(False, 0, ready, sequence.loading_tokens)

    def wait_layer(self, sequence_id: str, layer: int, timeout_seconds: float) -> bool:
        """Block until the KV of a model's layer is there for all that the sequence loads; on any thread, lock not held.

        For attention of a sequence that still loads. False: not in this time, or never; what was computed from earlier
        layers is void then. True is not the last word: commit only once `fetch` is done and all that it expected ready.
        """
        seconds = duration("timeout_seconds", timeout_seconds)
        group, place = self.geometry.group_of_layer(whole("layer", layer, 0))
        with self._lock:
            sequence = self._sequences.live(sequence_id)
            waits = self._upkeep.mover.fetcher.progress(sequence, group)
        return waits is not None and wait_all(waits, group, place + 1, seconds)

    def check_fits(self, token_count: int, answer_tokens: int = 0, *, exact: bool = False) -> None:
        """CapacityError (permanent) when a prompt of `token_count` tokens, which must fit in full precision, or it and
        its answer with every block cooled that may cool, can never be on the device at once.
        """
        answer = whole("answer_tokens", answer_tokens, 0)
        self._admitter.check_fits(whole("token_count", token_count, 0), answer, exact=exact)

    # -- grow, commit, rollback ---------------------------------------------------------------------------------

    def grow(self, sequence_id: str, token_count: int) -> None:
        """Make room for `token_count` more written tokens in all groups, or change nothing and raise CapacityError.

        A partly filled block that others hold too is copied first. `error.transient` says that transfers in flight
        will free memory, so trying again after `step` may succeed without preempting anybody.
        """
        if type(token_count) is not int or token_count <= 0:
            token_count = whole(f"token_count of grow for sequence {sequence_id!r}", token_count)
        with self._lock:
            self._growth.grow(self._sequences.computing(sequence_id), token_count)

    def commit(self, sequence_id: str, token_ids: Items[int], media: Items[Media] = ()) -> None:
        """The next written tokens are final: their KV was computed from `token_ids`. Seals full blocks.

        media: those that start among them, unless `admit` was told. UsageError for more than `grow` has written.
        """
        with self._lock:
            self._growth.commit(self._sequences.running(sequence_id), token_ids, media)

    def commit_prompt(self, sequence_id: str, token_count: int) -> None:
        """`commit` of the next `token_count` tokens that the sequence was admitted with: nothing is hashed again."""
        with self._lock:
            self._growth.commit_prompt(self._sequences.running(sequence_id), whole("token_count", token_count))

    def rollback(self, sequence_id: str, token_count: int) -> None:
        """Drop the last `token_count` written tokens, uncommitted ones first.

        A block cut in the middle is copied when it is written to again, so shared ones stay whole. CannotRollback, with
        nothing changed, when a sliding group lacks the shorter sequence's blocks, or the cut falls into an INT4 block.
        """
        with self._lock:
            self._growth.rollback(self._sequences.computing(sequence_id), whole("token_count", token_count))

    def prefill_done(self, sequence_id: str) -> None:
        """The prompt is computed: its blocks may cool from now on, save the first and the newest ones."""
        with self._lock:
            sequence = self._sequences.running(sequence_id)
            sequence.prefill_done = True
            self._upkeep.prefill_done(sequence)

    # -- what the forward pass reads ----------------------------------------------------------------------------

    def tables(self, sequence_id: str) -> tuple[npt.NDArray[np.int64], ...]:
        """Per group, int64 [blocks]: slot << 1 | form, -1 where a block has left the window. Valid until `step`."""
        with self._lock:
            return tuple(table.entries() for table in self._sequences.computing(sequence_id).tables)

    def slot_mapping(self, sequence_id: str, group: int, start: int, count: int) -> npt.NDArray[np.int64]:
        """Where to write tokens start..start+count-1: int64 [count], slot * block_tokens + offset.

        Only tokens that are written and not committed have such a place: UsageError for others, whose blocks may be
        shared.
        """
        with self._lock:
            return self._growth.slot_mapping(self._sequences.computing(sequence_id), group, start, count)

    # -- fork, preempt, finish, abort ---------------------------------------------------------------------------

    def fork(self, sequence_id: str, child_id: str) -> None:
        """A second sequence with the same past; blocks are shared and copied only when written to."""
        with self._lock:
            parent = self._sequences.running(sequence_id)
            text_id("child_id", child_id)
            if child_id in self._sequences:
                raise DuplicateSequence(f"sequence {child_id!r} is live already; fork needs a new id")
            self._sequences[child_id] = self._growth.fork(parent, child_id)

    def preempt(self, sequence_id: str) -> None:
        """Take a sequence off the device. Its sealed blocks are copied down and stay hits; the tail is recomputed."""
        with self._lock:
            sequence = self._sequences.live(sequence_id)
            self._upkeep.spill_sequence(sequence)
            self._release(sequence)
            self.metrics.preempted()

    def finish(self, sequence_id: str) -> None:
        """End a sequence; what it sealed stays as hits until evicted."""
        with self._lock:
            self._upkeep.offer_sequence(self._sequences.live(sequence_id))
            self._release(self._sequences.live(sequence_id))
            self.metrics.forget_request(sequence_id)

    def abort(self, sequence_id: str) -> None:
        """End a sequence at any moment, loading included. Blocks in flight are freed when their transfer ends."""
        with self._lock:
            self._release(self._sequences.live(sequence_id))
            self.metrics.forget_request(sequence_id)
            self.metrics.aborted()

    def _release(self, sequence: Sequence) -> None:
        del self._sequences[sequence.sequence_id]
        if sequence.pending:
            self._upkeep.mover.fetcher.leave(sequence)
        self._growth.release(sequence)

    def step(self, now: float | None = None) -> StepReport:
        """Bring back finished transfers, then start a bounded amount of cooling and spilling. Never waits."""
        self._epochs.keep_up()
        with self._lock:
            self._sequences.check_open()
            now = self._clock() if now is None else moment("now", now)
            self._arrived.clear()
            self._parts.leases.expire(now)
            self._parts.quotas.trim()
            self.pool.expire(now)
            self.metrics.computed(self._growth.computed_tokens)
            self._growth.computed_tokens = 0
            return self._upkeep.step(now)

    def wait(self, timeout_seconds: float) -> bool:
        """Block until a transfer or a lookup has ended or the time is up; for idle loops. Then call `step`."""
        seconds = duration("timeout_seconds", timeout_seconds)
        with self._lock:
            waits = self._upkeep.mover.is_moving or self._questions.any_open(self._clock())
            if self._sequences.closed or not waits:
                return False
        return self._arrived.wait(seconds)

    def reset(self) -> None:
        """The weights changed in place: nothing stored before is ever served again, here or by others on our tiers.

        Waits for the tiers, and for other processes that share one to notice. Live sequences go on, and name nothing.
        Raises TierError when a tier cannot be reached; the epoch is raised all the same, so that even its copies miss.
        """
        self._sequences.check_open()
        self._epochs.reset()

    def close(self, drain_seconds: float = DRAIN_SECONDS) -> None:
        """Write what is named and worth it to disk and remote, for `drain_seconds` at most, then close the tiers.

        What was left is counted (`dropped_blocks`, cause close). Closing twice is harmless.
        """
        seconds = duration("drain_seconds", drain_seconds)
        with self._lock:
            if self._sequences.closed:
                return
            self._sequences.closed = True
        close_parts(
            self._parts, self._lock, self._arrived, seconds, self._clock(), lambda: self._sequences.end(self._release)
        )

    def __enter__(self) -> KVStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
