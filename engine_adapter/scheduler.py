"""Which streams run, wait or load, and what each computes in the next step: queues, budgets, preemption.

The rules, in the order in which they bind:

- **Rank.** Every stream has one (arrival of its request, branch); lists are kept in rank order.
- **First come, first served**, unless `least_first`: then whoever has least to compute is admitted first, of the oldest
  few that wait, since a prefix that lies in the cache now may be gone when its turn comes. Nobody is overtaken more
  than a few times.
- **Decode before prefill.** Every running stream with one token to feed gets it; then drafts; then prefill chunks,
  oldest first, fill the step's token budget.
- **Room is made from the newest.** When a stream cannot grow, the newest running or loading stream is preempted; the
  newest itself just waits. So the oldest always moves on, or, alone, fails with an error of its own: no livelock.
- **Nobody waits for a lookup but its own stream.** A stream whose prefix a slow tier is still looking up stays where it
  is, and later ones may go first; the store says for how long.
- **Admit what will fit.** A stream is admitted beside others only while the pool has room for all prompts begun, and
  not while another one is computing a longer prefix of it than the cache has (it would compute the same blocks twice).

Called by the decode loop's thread only. Touches the store through the adapter; knows nothing of logits.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from allocator.errors import CapacityError, IntegrityError, KVError
from engine_adapter.adapter import LoadOutcome, StoreAdapter
from engine_adapter.drafter import Drafter
from engine_adapter.media import same_tokens
from engine_adapter.request import Request
from kvstore.fitting import outgrown

if TYPE_CHECKING:
    from allocator import KVGeometry
    from kvstore import HashChain
    from kvstore.identity import Media

_FAILED_LOADS_LIMIT = 3
_CHOICE_STREAMS = 16  # of so many that wait the next one is chosen
_OVERTAKEN_LIMIT = 8
_PATIENT_STEPS = 4  # how long a stream waits for transfers to free memory before the newest is preempted for it


class Phase(StrEnum):
    """Where a stream is."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True)
class RequestState:
    """Counters shared by the streams of one request."""

    request: Request
    arrival: int
    forked: bool = False
    reused_tokens: dict[str, int] | None = None
    resumed_tokens: dict[str, int] = field(default_factory=dict)
    computed_prefill_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(slots=True, eq=False)
class Stream:
    """One output stream: a branch of a request, with its tokens and how many of them have committed KV.

    `prefilling` from each admission until the model has been asked for the next token.
    """

    state: RequestState
    index: int
    tokens: list[int]
    phase: Phase = Phase.WAITING
    prefilling: bool = True
    computed: int = 0
    once_computed: int = 0
    failed_loads: int = 0
    stalled_steps: int = 0
    overtaken: int = 0
    chain: HashChain | None = None  # while it waits
    expected_tiers: dict[str, int] = field(default_factory=dict)
    argmax_token_ids: list[int] = field(default_factory=list)

    @property
    def request(self) -> Request:
        return self.state.request

    @property
    def sequence_id(self) -> str:
        request_id = self.state.request.request_id
        return request_id if self.index == 0 else f"{request_id}#{self.index}"

    @property
    def media_names(self) -> list[Media]:
        return [one.name() for one in self.request.media]

    @property
    def rank(self) -> tuple[int, int]:
        return (self.state.arrival, self.index)

    @property
    def output_count(self) -> int:
        return len(self.tokens) - len(self.request.token_ids)

    @property
    def output_token_ids(self) -> tuple[int, ...]:
        return tuple(self.tokens[len(self.request.token_ids) :])

    @property
    def pending_count(self) -> int:
        """Tokens without committed KV; 1 in steady decoding."""
        return len(self.tokens) - self.computed


@dataclass(frozen=True, slots=True)
class PlannedSlice:
    """What one stream feeds in the step; room for it has been made. The last `draft_count` tokens are guesses."""

    stream: Stream
    token_ids: list[int]
    draft_count: int
    logits_count: int


def _rank(stream: Stream) -> tuple[int, int]:
    return stream.rank


class Scheduler:
    """Queues and planning; see the module's text for the rules."""

    def __init__(
        self,
        adapter: StoreAdapter,
        *,
        max_batch_sequences: int,
        step_tokens: int,
        drafter: Drafter | None,
        on_admitted: Callable[[Stream], None],
        on_failed: Callable[[Stream, KVError], None],
    ) -> None:
        self._adapter = adapter
        self._store = adapter.store
        self._max_batch_sequences = max_batch_sequences
        self._step_tokens = step_tokens
        self._drafter = drafter
        self._on_admitted = on_admitted
        self._on_failed = on_failed
        self._held_back: tuple[Stream, tuple[int, ...]] | None = None
        self.least_first = False
        self.waiting: list[Stream] = []
        self.loading: list[Stream] = []
        self.running: list[Stream] = []

    @property
    def geometry(self) -> KVGeometry:
        return self._store.geometry

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.loading or self.running)

    @property
    def free_places(self) -> int:
        return self._max_batch_sequences - len(self.running) - len(self.loading)

    # Queues

    def enqueue(self, stream: Stream) -> None:
        stream.phase, stream.computed, stream.chain = Phase.WAITING, 0, None
        insort(self.waiting, stream, key=_rank)

    def start(self, stream: Stream, computed: int, *, prefilling: bool = True) -> None:
        """The stream holds `computed` tokens of KV, not all of them, and runs from now on."""
        if not 0 <= computed < len(stream.tokens) + (not prefilling):
            raise IntegrityError(
                f"sequence {stream.sequence_id!r} starts with {computed} of {len(stream.tokens)} tokens computed; "
                "at least one must be left"
            )
        if stream.request.retention:
            self._store.retain(stream.sequence_id, stream.request.retention)
        stream.phase, stream.computed, stream.prefilling = Phase.RUNNING, computed, prefilling
        stream.once_computed = max(stream.once_computed, computed)
        insort(self.running, stream, key=_rank)

    def remove(self, stream: Stream) -> Phase:
        """Take the stream out of its list for good; returns where it was."""
        phase = stream.phase
        if phase is not Phase.ENDED:
            queues = {Phase.WAITING: self.waiting, Phase.LOADING: self.loading, Phase.RUNNING: self.running}
            queues[phase].remove(stream)
            stream.phase = Phase.ENDED
        return phase

    def preempt(self, stream: Stream) -> None:
        """Give up the stream's memory and queue it again; what it committed stays findable."""
        if self.remove(stream) is Phase.RUNNING:
            self._adapter.preempt(stream.sequence_id)
        else:
            self._adapter.abort(stream.sequence_id)
        stream.state.preemptions += 1
        self.enqueue(stream)

    # Admission

    def take_loads(self) -> None:
        """Start the streams whose loads have ended."""
        loading = {stream.sequence_id: stream for stream in self.loading}
        for event in self._adapter.load():
            stream = loading[event.sequence_id]
            self.remove(stream)
            if event.outcome is LoadOutcome.DONE:
                self._count_reuse(stream, event.ready_tokens)
                self.start(stream, event.ready_tokens)
                continue
            stream.failed_loads += 1
            if stream.failed_loads < _FAILED_LOADS_LIMIT:
                self.enqueue(stream)
            else:
                error = KVError(f"sequence {event.sequence_id!r}: {stream.failed_loads} loads missed their deadline")
                self._on_failed(stream, error)

    def admit(self) -> None:
        """Move waiting streams to running or loading while there are places and room."""
        for stream in self._in_turn():
            if self.free_places < 1 or self._is_held_back(stream):
                return
            if self._prefix_is_being_computed(stream):
                continue
            if not self._admit_one(stream):
                return

    def _in_turn(self) -> list[Stream]:
        """The waiting streams, those first that are tried first."""
        choice = self.waiting[:_CHOICE_STREAMS]
        if not self.least_first or len(choice) < 2 or self.free_places < 1:
            return list(self.waiting)
        left = {stream: len(stream.tokens) - self._hit_tokens(stream) for stream in choice}
        choice.sort(key=lambda one: left[one] if one.overtaken < _OVERTAKEN_LIMIT else 0)  # stable: then by rank
        return choice + self.waiting[_CHOICE_STREAMS:]

    def _hit_tokens(self, stream: Stream) -> int:
        """What the cache has of a waiting stream's tokens now. They are hashed once; after a reset that is a miss."""
        chain, request = stream.chain, stream.request
        if chain is None:
            identity = request.identity(self._store.identity)
            try:
                chain = self._store.prepare(stream.tokens, media=stream.media_names, identity=identity)
            except KVError:  # admitting it says why
                return 0
            stream.chain = chain
        exact = request.exact
        return self._store.lookup_hashes(chain.root, chain.hashes, chain.token_count, exact=exact).tokens

    def _is_held_back(self, stream: Stream) -> bool:
        """True for the stream that did not fit last time, until there is more room or nothing else that runs."""
        if self._held_back is None or self._held_back[0] is not stream:
            return False
        grew = any(now > then for now, then in zip(self._available(), self._held_back[1], strict=True))
        return not grew and bool(self.running or self.loading)

    def _admit_one(self, stream: Stream) -> bool:
        """True when later streams may be tried too."""
        alone = not self.running and not self.loading
        try:
            given = self._adapter.reserve(
                stream.sequence_id,
                stream.tokens,
                exact=stream.request.exact,
                prompt_tokens=len(stream.request.token_ids),
                spare_blocks=() if alone else self._spare_blocks(),
                media=stream.media_names,
                identity=stream.request.identity(self._store.identity),
            )
        except CapacityError as error:
            if error.permanent or (alone and not error.transient):
                self.remove(stream)
                self._on_failed(stream, error)
                return True
            self._held_back = (stream, self._available())
            return False
        except KVError as error:
            self.remove(stream)
            self._on_failed(stream, error)
            return True
        if given.ask_again:
            return True
        self.remove(stream)
        stream.overtaken, stream.chain = 0, None
        for older in self.waiting:
            if older.rank > stream.rank:
                break
            older.overtaken += 1
        stream.expected_tiers = dict(given.by_tier)
        self._on_admitted(stream)
        if given.pending_tokens > 0:
            stream.phase = Phase.LOADING
            insort(self.loading, stream, key=_rank)
        else:
            self._count_reuse(stream, given.ready_tokens)
            self.start(stream, given.ready_tokens)
        return True

    def _count_reuse(self, stream: Stream, ready_tokens: int) -> None:
        """Book `ready_tokens` by tier: the device first, then what each tier was expected to bring."""
        left = ready_tokens
        got: dict[str, int] = {}
        for tier, expected in stream.expected_tiers.items():
            got[tier] = min(left, expected)
            left -= got[tier]
        state = stream.state
        if state.reused_tokens is None:
            state.reused_tokens = got
        else:
            for tier, count in got.items():
                state.resumed_tokens[tier] = state.resumed_tokens.get(tier, 0) + count

    def _available(self) -> tuple[int, ...]:
        return tuple(self._store.pool.available(group) for group in range(len(self.geometry.groups)))

    def _spare_blocks(self) -> list[int]:
        """Blocks by group that a newcomer must leave over: all begun prompts, and one block to decode into for each."""
        return [
            1
            + sum(self._blocks_to_come(other, other.computed, group) for other in self.running)
            + sum(self._blocks_to_come(other, sum(other.expected_tiers.values()), group) for other in self.loading)
            for group in range(len(self.geometry.groups))
        ]

    def _blocks_to_come(self, stream: Stream, held_tokens: int, group_index: int) -> int:
        block_tokens = self.geometry.block_tokens
        missing = len(stream.tokens) // block_tokens + 1 - -(-held_tokens // block_tokens)
        window = self.geometry.groups[group_index].window_tokens
        if window is not None:
            missing = min(missing, (window + self._step_tokens) // block_tokens + 2)
        return max(missing, 1)

    def _prefix_is_being_computed(self, stream: Stream) -> bool:
        """True when a running prefill will soon have whole blocks that this stream could take instead of computing."""
        block_tokens = self.geometry.block_tokens
        best = 0
        identity = stream.request.identity(self._store.identity)
        for other in self.running:
            if not other.prefilling or other.request.exact < stream.request.exact:
                continue
            if other.request.identity(self._store.identity) == identity:
                same = same_tokens(other.request.media, stream.request.media)
                common = _common_prefix(other.tokens[:same], stream.tokens[:-1])
                best = max(best, common // block_tokens * block_tokens)
        return best > 0 and best > self._hit_tokens(stream)

    # Planning

    def plan(self) -> list[PlannedSlice]:
        """The slices of the next step, with room made for each."""
        planned: dict[Stream, PlannedSlice] = {}
        decoding = [stream for stream in self.running if stream.pending_count == 1]
        prefilling = [stream for stream in self.running if stream.pending_count > 1]
        spare = self._step_tokens - len(decoding)
        draft_tokens = spare // 2 if prefilling else spare
        for stream in decoding:
            if stream.phase is not Phase.RUNNING:
                continue
            drafts = self._grow_with_drafts(stream, self._draft(stream, draft_tokens), planned)
            if drafts is not None:
                draft_tokens -= len(drafts)
                spare -= len(drafts)
                planned[stream] = PlannedSlice(stream, [stream.tokens[-1], *drafts], len(drafts), 1 + len(drafts))
        for stream in prefilling:
            if spare < 1:
                break
            if stream.phase is not Phase.RUNNING:
                continue
            count = self._grow(stream, min(spare, stream.pending_count), planned)
            if count:
                spare -= count
                chunk = stream.tokens[stream.computed : stream.computed + count]
                planned[stream] = PlannedSlice(stream, chunk, 0, int(count == stream.pending_count))
        return list(planned.values())

    def _draft(self, stream: Stream, budget: int) -> list[int]:
        if self._drafter is None or stream.output_count == 0 or stream.request.forced_token_ids is not None:
            return []
        wanted = min(budget, stream.request.output_limit - stream.output_count - 1)
        return self._drafter.propose(stream.tokens, wanted)[:wanted] if wanted > 0 else []

    def _grow_with_drafts(
        self, stream: Stream, drafts: list[int], planned: dict[Stream, PlannedSlice]
    ) -> list[int] | None:
        """The drafts that there is room for, none rather than preempting for a guess; None when nothing fits."""
        if drafts:
            try:
                self._adapter.allocate(stream.sequence_id, 1 + len(drafts))
            except CapacityError:
                drafts = []
            else:
                return drafts
        return [] if self._grow(stream, 1, planned) else None

    def _grow(self, stream: Stream, count: int, planned: dict[Stream, PlannedSlice]) -> int:
        """Tokens that room was made for: `count`, fewer when the stream is alone and short of room, or 0."""
        while True:
            try:
                self._adapter.allocate(stream.sequence_id, count)
            except CapacityError as error:
                alone = len(self.running) + len(self.loading) == 1
                newest = max([*self.running, *self.loading], key=_rank)
                if error.transient and (stream.stalled_steps < _PATIENT_STEPS or (alone and count == 1)):
                    stream.stalled_steps += 1
                    return 0
                if newest is not stream:
                    planned.pop(newest, None)
                    self.preempt(newest)
                elif not alone:
                    return 0
                elif count > 1:
                    count = count // 2
                else:
                    sizes = (len(stream.request.token_ids), stream.request.output_limit, stream.computed)
                    self._on_failed(stream, outgrown(self.geometry, self._store.pool.layout, sizes, error))
                    return 0
            else:
                stream.stalled_steps = 0
                return count


def _common_prefix(left: list[int], right: list[int]) -> int:
    """Length of the longest common prefix, by bisection on slices."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
