"""The reference engine: continuous batching over a paged model runner and a `KVStore`.

A step drains the store's completions, starts what has loaded, admits what fits, makes room for every slice (preempting
the newest if it must), asks for tables and places only then, runs the model once, and commits what is final: prompt
chunks, the fed token, accepted drafts. Rejected drafts are rolled back before the commit, so only committed tokens are
ever sealed. Nothing about blocks is kept between steps.

What fails because of one request (its callback, its adapter, its media, its tokens) ends that request with an error,
and nobody else's; what fails because of the runner raises out of the step, which may be repeated.

One thread: `submit`, `abort`, `step` and `run` are called from the same thread; callbacks of a request may call
`submit` and `abort`. The clock is injected and only measured, never decided upon, except that `run` gives up on a
stream after a minute without any progress.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from allocator.errors import CapacityError, ConfigError, DuplicateSequence, UnknownSequence, UsageError
from engine_adapter.adapter import StoreAdapter
from engine_adapter.batch import SequenceSlice, SliceError, StepBatch
from engine_adapter.drafter import Drafter
from engine_adapter.early_prefill import EarlyPrefill
from engine_adapter.latency import LatencyRecorder
from engine_adapter.live_request import LiveRequest, failed_branch
from engine_adapter.media import pieces_in
from engine_adapter.request import Completion, FinishReason, Request, RequestResult, check_request
from engine_adapter.runner_contract import Runner, adapter_to_use, check_attached
from engine_adapter.sampling import Choice, Sampler, first_choices
from engine_adapter.scheduler import Phase, PlannedSlice, RequestState, Scheduler, Stream
from engine_adapter.trace_hook import ended_request
from kvstore import KVStore
from kvstore.arguments import check_clock
from kvstore.trace_recorder import TraceRecorder

_STALL_SECONDS = 60.0
_WAIT_SECONDS = 0.05
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What one step did. `idle`: it computed nothing and ended nothing, so waiting for a transfer is in order.

    `finished`: every request that has ended since the last step returned, by `abort` or a step that raised too, and
    whose result was not collected meanwhile.
    """

    computed_tokens: int
    output_tokens: int
    finished: tuple[str, ...]
    idle: bool


class DecodeLoop:
    """Serves requests from one runner and one store; see the module's text.

    `max_batch_sequences` streams run at once; a step computes at most `step_tokens` tokens, which is also the longest
    prefill chunk. `drafter` proposes tokens to verify (see `engine_adapter.drafter`). `recorder` writes a trace; None:
    the one that `kvstore record` asks for in the environment, if it does. The caller closes the one that it gave.

    Over a store with `fetch_by_layer` a prompt is computed while the layers of its prefix still come, by a runner that
    calls `before_layer` (see `engine_adapter.early_prefill`).
    """

    def __init__(
        self,
        runner: Runner,
        store: KVStore | StoreAdapter,
        *,
        max_batch_sequences: int = 8,
        step_tokens: int = 256,
        drafter: Drafter | None = None,
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
        recorder: TraceRecorder | None = None,
    ) -> None:
        if not isinstance(runner, Runner):
            raise ConfigError(f"runner: got {type(runner).__name__}; expected a Runner, such as HFRunner")
        if not isinstance(store, StoreAdapter | KVStore | None):
            raise ConfigError(f"store: got {store!r}; expected a KVStore or a StoreAdapter")
        adapter = store if isinstance(store, StoreAdapter) else StoreAdapter(store)
        self._store = adapter.store
        if runner.geometry.fingerprint() != self._store.geometry.fingerprint():
            raise ConfigError(f"the runner's geometry {runner.geometry} is not the store's, {self._store.geometry}")
        check_attached(runner, self._store)
        counts = (max_batch_sequences, step_tokens)
        if any(type(count) is not int for count in counts) or not 1 <= max_batch_sequences <= step_tokens:
            raise ConfigError(
                f"expected 1 <= max_batch_sequences <= step_tokens, got {max_batch_sequences!r} and {step_tokens!r}"
            )
        check_clock(clock)
        self._runner = runner
        self._adapter = adapter
        self._clock = clock
        self._sampler = Sampler(seed)
        self._scheduler = Scheduler(
            adapter,
            max_batch_sequences=max_batch_sequences,
            step_tokens=step_tokens,
            drafter=drafter,
            on_admitted=lambda stream: self.latency.admitted(stream.request.request_id, self._clock()),
            on_failed=lambda stream, error: self._end(stream, FinishReason.ERROR, str(error)),
        )
        self._early: EarlyPrefill | None = None
        if self._store.fetch_by_layer and getattr(runner, "calls_before_layer", False):
            self._early = EarlyPrefill(adapter, self._scheduler, self._forward, self._slice, step_tokens)
        self._arrivals = 0
        self._live: dict[str, LiveRequest] = {}
        self._results: dict[str, RequestResult] = {}
        self._finished_now: list[str] = []
        self.latency = LatencyRecorder()
        names = self._store.identity
        self._recorder = recorder or TraceRecorder.from_environment(
            names.root(), runner.geometry.block_tokens, names.model if isinstance(names.model, str) else ""
        )

    @property
    def busy(self) -> bool:
        """True while any stream waits, loads or runs."""
        return self._scheduler.busy

    @property
    def least_first(self) -> bool:
        """Of the oldest that wait, admit first whoever has least to compute; nobody is overtaken more than 8 times."""
        return self._scheduler.least_first

    @least_first.setter
    def least_first(self, chosen: bool) -> None:
        self._scheduler.least_first = chosen

    def submit(self, request: Request) -> None:
        """Queue a request. Raises UsageError, DuplicateSequence or CapacityError; then nothing has changed."""
        check_request(request, self._runner.vocab_size)
        adapter_to_use(self._runner, self._store.identity, request)
        request_id = request.request_id
        if request_id in self._live or request_id in self._results:
            raise DuplicateSequence(f"request id {request_id!r} is in use: running, or its result not collected yet")
        limit = self._runner.position_limit
        if limit is not None and len(request.token_ids) + request.output_limit > limit:
            raise UsageError(
                f"request {request_id!r}: {len(request.token_ids)} prompt tokens and {request.output_limit} new ones "
                f"pass the model's {limit} positions"
            )
        # the last token is put out and never fed; an answer that may end by itself is let try
        answer_tokens = 0 if request.eos_token_ids else request.output_limit - 1
        self._store.check_fits(len(request.token_ids), answer_tokens, exact=request.exact)
        state = RequestState(request, self._arrivals)
        self._arrivals += 1
        first = Stream(state, 0, [int(token) for token in request.token_ids])
        self._live[request_id] = LiveRequest(state, {0: first})
        self.latency.submitted(request_id, self._clock())
        self._scheduler.enqueue(first)

    def abort(self, request_id: str) -> bool:
        """End a request now, in whatever phase. False if it has finished already; UnknownSequence if it never was."""
        live = self._live.get(request_id)
        if live is None:
            if request_id in self._results:
                return False
            raise UnknownSequence(f"no request {request_id!r} is waiting, running or uncollected")
        self._end_request(live, FinishReason.ABORT)
        return True

    def step(self) -> StepOutcome:
        """One bounded round: no waiting, at most one forward pass. If that raises, the step's room is given back."""
        self._store.step()
        self._scheduler.take_loads()
        output_tokens = self._take_early()
        self._scheduler.admit()
        planned = self._scheduler.plan()
        computed, put_out = self._compute(planned) if planned else (0, 0)
        output_tokens += put_out
        if self._early is not None and not self._scheduler.running:
            computed += self._early.compute()
        finished = tuple(name for name in self._finished_now if name in self._results)
        self._finished_now = []
        return StepOutcome(computed, output_tokens, finished, idle=not (computed or output_tokens or finished))

    def run(self) -> dict[str, RequestResult]:
        """Step until nothing is left, waiting for transfers where there is nothing to compute; returns `collect()`."""
        idle_since: float | None = None
        while self.busy:
            if not self.step().idle:
                idle_since = None
                continue
            now = self._clock()
            idle_since = now if idle_since is None else idle_since
            if now - idle_since > _STALL_SECONDS:
                self._give_up_oldest(now - idle_since)
                idle_since = None
            self._store.wait(_WAIT_SECONDS)
        return self.collect()

    def collect(self) -> dict[str, RequestResult]:
        """Results of the requests that have finished since the last call; their ids are free again."""
        results, self._results = self._results, {}
        return results

    def _give_up_oldest(self, seconds: float) -> None:
        scheduler = self._scheduler
        oldest = min([*scheduler.running, *scheduler.loading, *scheduler.waiting], key=lambda stream: stream.rank)
        self._end(oldest, FinishReason.ERROR, f"no progress for {seconds:.0f} s while {oldest.phase.value}")

    # One forward pass

    def _take_early(self) -> int:
        """Book the chunks that were computed while their prefix came, now that it is there; tokens put out."""
        output_tokens = 0
        for part, logits in self._early.take() if self._early is not None else ():
            output_tokens += self._absorb(part, logits, first_choices(logits))
        return output_tokens

    def _forward(self, batch: StepBatch) -> Tensor:
        check_attached(self._runner, self._store)
        return self._runner.forward(batch)

    def _compute(self, planned: Sequence[PlannedSlice]) -> tuple[int, int]:
        """Run the model over the plan and book the outcome; how many tokens were computed, and put out."""
        left = deque(planned)
        try:
            started = self._clock()
            logits = self._forward(StepBatch(tuple(self._slice(part, part.stream.computed) for part in planned)))
            argmaxes = first_choices(logits)
            self._observe_speed(planned, self._clock() - started)
            expected = sum(part.logits_count for part in planned)
            if len(argmaxes) != expected:
                raise ConfigError(f"the runner returned {len(argmaxes)} rows of logits, expected {expected}")
            row = output_tokens = 0
            while left:
                part = left.popleft()
                end = row + part.logits_count
                if part.stream.phase is Phase.RUNNING:
                    output_tokens += self._absorb(part, logits[row:end], argmaxes[row:end])
                row = end
        except SliceError as error:
            self._end_slices(planned, error)
            return 0, 0
        finally:
            for part in left:
                if part.stream.phase is Phase.RUNNING:
                    self._adapter.rollback(part.stream.sequence_id, len(part.token_ids))
        return sum(len(part.token_ids) for part in planned), output_tokens

    def _end_slices(self, planned: Sequence[PlannedSlice], error: SliceError) -> None:
        """The requests of those that the runner cannot compute; the others of the step are planned again."""
        refused = [part.stream for part in planned if part.stream.sequence_id in error.sequence_ids]
        if not refused:
            raise error
        for stream in refused:
            self._fail(stream, str(error))

    def _observe_speed(self, planned: Sequence[PlannedSlice], seconds: float) -> None:
        """Tell the store how fast prompts are computed, from steps that are mostly prompt: it weighs loading by it."""
        tokens = sum(len(part.token_ids) for part in planned)
        if 2 * sum(len(part.token_ids) for part in planned if part.stream.prefilling) > tokens:
            self._store.observe_prefill(tokens, seconds)

    def _slice(self, part: PlannedSlice, start: int) -> SequenceSlice:
        stream, count = part.stream, len(part.token_ids)
        groups = range(len(self._store.geometry.groups))
        return SequenceSlice(
            sequence_id=stream.sequence_id,
            token_ids=part.token_ids,
            start=start,
            logits_count=part.logits_count,
            tables=self._store.tables(stream.sequence_id),
            slot_mappings=tuple(self._store.slot_mapping(stream.sequence_id, group, start, count) for group in groups),
            media=pieces_in(stream.request.media, start, count),
            adapter=adapter_to_use(self._runner, self._store.identity, stream.request),
        )

    def _absorb(self, part: PlannedSlice, rows: Tensor, argmaxes: Sequence[int | None]) -> int:
        """`_book`; what the store refuses of a request, such as a placeholder that the model put out, ends it alone."""
        try:
            return self._book(part, rows, argmaxes)
        except (UsageError, CapacityError) as error:
            self._fail(part.stream, str(error))
            return 0

    def _book(self, part: PlannedSlice, rows: Tensor, argmaxes: Sequence[int | None]) -> int:
        """Choose, roll back, commit, put out, end; callbacks last, when the loop's own state is consistent."""
        stream = part.stream
        choices, sound = self._choose(stream, part, rows, argmaxes)
        if not sound:
            self._adapter.rollback(stream.sequence_id, len(part.token_ids))
            self._end(stream, FinishReason.ERROR, "the model's logits are not finite")
            return 0
        accepted = max(0, len(choices) - 1)
        void = part.draft_count - accepted
        if void:
            self._adapter.rollback(stream.sequence_id, void)
        final = part.token_ids[: len(part.token_ids) - void]
        self._adapter.commit(stream.sequence_id, final)
        self._count(part, len(final), accepted)
        if not choices:
            return 0
        if stream.prefilling:
            stream.prefilling = False
            self._store.prefill_done(stream.sequence_id)
        position = stream.output_count
        born = self._fork(stream, rows[0], choices[0].argmax_token_id) if position == 0 else []
        self._put_out(stream, choices)
        for child, choice in born:
            self._put_out(child, [choice])
        self._call_back(stream, position, choices, rows)
        for child, choice in born:
            self._call_back(child, 0, [choice], rows)
        return len(choices) + len(born)

    def _choose(
        self, stream: Stream, part: PlannedSlice, rows: Tensor, argmaxes: Sequence[int | None]
    ) -> tuple[list[Choice], bool]:
        """Tokens to put out: one per row while the drafts keep agreeing. False if a needed row is not finite."""
        request, position = stream.request, stream.output_count
        drafts = part.token_ids[len(part.token_ids) - part.draft_count :]
        choices: list[Choice] = []
        for place, argmax in enumerate(argmaxes):
            if argmax is None:
                return choices, False
            choice = self._sampler.choose(rows[place], argmax, request, stream.index, position + place)
            choices.append(choice)
            ended = choice.token_id in request.eos_token_ids or position + place + 1 >= request.output_limit
            if ended or place >= len(drafts) or drafts[place] != choice.token_id:
                break
        return choices, True

    def _count(self, part: PlannedSlice, final_count: int, accepted: int) -> None:
        state, stream = part.stream.state, part.stream
        state.drafted_tokens += part.draft_count
        state.accepted_tokens += accepted
        end = stream.computed + final_count
        if stream.prefilling:
            state.computed_prefill_tokens += final_count
            state.recomputed_tokens += max(0, min(stream.once_computed, end) - stream.computed)
        stream.computed = end
        stream.once_computed = max(stream.once_computed, end)

    def _fork(self, root: Stream, row: Tensor, argmax: int) -> list[tuple[Stream, Choice]]:
        """The other branches of a request, born when its prompt is computed; those that run now share its blocks."""
        request, live = root.request, self._live[root.request.request_id]
        if root.index or root.state.forked:
            return []
        root.state.forked = True
        born = []
        for index in range(1, request.n):
            child = Stream(root.state, index, list(root.tokens), once_computed=root.computed)
            choice = self._sampler.choose(row, argmax, request, index, 0)
            live.streams[index] = child
            if self._scheduler.free_places > 0 and not self._is_last(choice.token_id, 1, request):
                self._store.fork(root.sequence_id, child.sequence_id)
                self._scheduler.start(child, root.computed, prefilling=False)
            else:
                self._scheduler.enqueue(child)
            born.append((child, choice))
        return born

    def _put_out(self, stream: Stream, choices: Sequence[Choice]) -> None:
        request = stream.request
        stream.tokens += [choice.token_id for choice in choices]
        stream.argmax_token_ids += [choice.argmax_token_id for choice in choices]
        self.latency.tokens(request.request_id, stream.index, len(choices), self._clock())
        last = choices[-1].token_id
        if last in request.eos_token_ids:
            self._end(stream, FinishReason.STOP)
        elif self._is_last(last, stream.output_count, request):
            self._end(stream, FinishReason.LENGTH)

    @staticmethod
    def _is_last(token_id: int, output_count: int, request: Request) -> bool:
        return token_id in request.eos_token_ids or output_count >= request.output_limit

    def _call_back(self, stream: Stream, position: int, choices: Sequence[Choice], rows: Tensor) -> None:
        request = stream.request
        for place, choice in enumerate(choices):
            try:
                if request.keep_logits is not None:
                    request.keep_logits(stream.index, position + place, rows[place])
                if request.on_token is not None:
                    request.on_token(request.request_id, stream.index, choice.token_id)
            except Exception as error:  # the caller's own function: its request ends, nobody else's
                _log.exception("a callback of request %r has failed", request.request_id)
                said = f"{type(error).__name__}: {error}"
                self._fail(stream, f"a callback of request {request.request_id!r} raised {said}")
                return

    # Ends

    def _fail(self, stream: Stream, error: str) -> None:
        """End a stream's request with an error, or mark its result where it had ended with this very token."""
        name = stream.request.request_id
        if (live := self._live.get(name)) is not None and live.state is stream.state:
            self._end_request(live, FinishReason.ERROR, error)
        elif (result := self._results.get(name)) is not None:
            self._results[name] = failed_branch(result, stream.index, error)

    def _end_request(self, live: LiveRequest, reason: FinishReason, error: str | None = None) -> None:
        for stream in live.unfinished():
            if stream.index not in live.completions:  # an error of the first ends those that are not born yet
                self._end(stream, reason, error)

    def _end(self, stream: Stream, reason: FinishReason, error: str | None = None) -> None:
        """Take a stream out, give its memory back, and close its request with the last one."""
        phase = self._scheduler.remove(stream)
        if phase in (Phase.RUNNING, Phase.LOADING):
            if reason in (FinishReason.STOP, FinishReason.LENGTH):
                self._adapter.finish(stream.sequence_id)
            else:
                self._adapter.abort(stream.sequence_id)
        request = stream.request
        live = self._live[request.request_id]
        live.completions[stream.index] = Completion(
            stream.index, stream.output_token_ids, tuple(stream.argmax_token_ids), reason, error
        )
        if not live.state.forked and reason is FinishReason.ERROR:
            for index in range(1, request.n):
                live.completions[index] = Completion(index, (), (), reason, error)
        if len(live.completions) == request.n:
            self._close(request.request_id)

    def _close(self, request_id: str) -> None:
        live = self._live.pop(request_id)
        state = live.state
        latency = self.latency.finished(request_id)
        self._finished_now.append(request_id)
        if self._recorder is not None:
            self._recorder.record(ended_request(state, live.completions.values(), latency, self._clock()))
        self._results[request_id] = live.result(latency)
