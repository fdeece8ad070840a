"""Serves a workload with a decode loop: users who wait for an answer before they send what comes next.

Runs in the thread that owns the loop. After each step a `Sample` says what lies where.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine_adapter.request import FinishReason, Request

if TYPE_CHECKING:
    from torch import Tensor

    from engine_adapter.decode_loop import DecodeLoop
    from engine_adapter.demo.workload import Session, Workload
    from engine_adapter.request import RequestResult
    from kvstore import KVStore

LogitsKeeper = Callable[[str, int, "Tensor"], None]
"""Called as (request id, output position, logits Tensor[vocab])."""

_STALL_SECONDS = 60.0
_WAIT_SECONDS = 0.02


class ServeError(RuntimeError):
    """A request failed, or nothing moved for a minute."""


@dataclass(frozen=True, slots=True)
class Sample:
    """State after one step. `bytes_by_form` counts live and idle blocks on the device, "full" and "int4"."""

    seconds: float
    resident_tokens: int
    bytes_by_form: Mapping[str, int]
    host_bytes: int
    extent_bytes: int
    waste_bytes: int
    running: int
    preemptions: int

    @property
    def device_bytes(self) -> int:
        return sum(self.bytes_by_form.values())


@dataclass(frozen=True, slots=True)
class Progress:
    """What a progress display may want to show."""

    finished: int
    sample: Sample


@dataclass(slots=True)
class Served:
    """Outcome of a workload."""

    results: dict[str, RequestResult] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0

    @property
    def outputs(self) -> dict[str, tuple[int, ...]]:
        return {name: result.token_ids for name, result in self.results.items()}


@dataclass(slots=True)
class _Conversation:
    session: Session
    prompt: list[int]
    turn: int = 0


class Server:
    """One pass of a workload over one loop.

    forced: output tokens by request id; when given, they are fed instead of the loop's choices.
    keep_logits: sees the logits of every output token. on_step: sees progress after each step.
    """

    def __init__(
        self,
        loop: DecodeLoop,
        store: KVStore,
        *,
        forced: Mapping[str, Sequence[int]] | None = None,
        keep_logits: LogitsKeeper | None = None,
        on_step: Callable[[Progress], None] | None = None,
        exact: bool = False,
    ) -> None:
        self._loop = loop
        self._store = store
        self._forced = forced
        self._keep_logits = keep_logits
        self._on_step = on_step
        self._exact = exact
        self._open: dict[str, _Conversation] = {}

    def run(self, workload: Workload) -> Served:
        """Serve all sessions. Raises ServeError naming the request that failed."""
        served = Served()
        started, cpu_started = time.perf_counter(), time.process_time()
        waiting = list(workload.sessions)
        moved_at = started
        while waiting or self._open:
            while waiting and len(self._open) < workload.users:
                session = waiting.pop(0)
                self._submit(_Conversation(session, list(session.first_prompt)), workload)
            outcome = self._loop.step()
            now = time.perf_counter()
            for result in self._loop.collect().values():
                served.results[result.request_id] = result
                self._answer(result, workload)
            served.samples.append(self._sample(now - started))
            if self._on_step is not None:
                self._on_step(Progress(len(served.results), served.samples[-1]))
            if not outcome.idle:
                moved_at = now
            elif now - moved_at > _STALL_SECONDS:
                raise ServeError(f"nothing has moved for {_STALL_SECONDS:.0f} s; open: {sorted(self._open)}")
            else:
                self._store.wait(_WAIT_SECONDS)
        served.wall_seconds = time.perf_counter() - started
        served.cpu_seconds = time.process_time() - cpu_started
        return served

    def _submit(self, conversation: _Conversation, workload: Workload) -> None:
        request_id = conversation.session.request_id(conversation.turn)
        keep = self._keep_logits

        def keep_logits(_branch: int, position: int, logits: Tensor) -> None:
            if keep is not None:
                keep(request_id, position, logits)

        self._open[request_id] = conversation
        self._loop.submit(
            Request(
                request_id,
                conversation.prompt,
                workload.max_new_tokens,
                eos_token_ids=workload.eos_token_ids,
                exact=self._exact,
                forced_token_ids=None if self._forced is None else self._forced[request_id],
                keep_logits=None if keep is None else keep_logits,
            )
        )

    def _answer(self, result: RequestResult, workload: Workload) -> None:
        """A request ended: its session goes on with the next turn, or is over."""
        conversation = self._open.pop(result.request_id)
        if result.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            raise ServeError(f"request {result.request_id!r} ended with {result.finish_reason.value}: {result.error}")
        turn = conversation.turn + 1
        if turn < conversation.session.turn_count:
            prompt = conversation.session.next_prompt(turn, conversation.prompt, result.token_ids)
            self._submit(_Conversation(conversation.session, prompt, turn), workload)

    def _sample(self, seconds: float) -> Sample:
        usage = self._store.usage()
        by_form = {"full": 0, "int4": 0}
        for name, count in usage.bytes_by_class.items():
            by_form[name.rpartition(":")[2]] += count
        return Sample(
            seconds=seconds,
            resident_tokens=usage.resident_tokens,
            bytes_by_form=by_form,
            host_bytes=sum(tier.used_bytes for tier in self._store.tiers if tier.name == "host"),
            extent_bytes=usage.extent_bytes,
            waste_bytes=usage.waste_bytes,
            running=usage.live_sequences,
            preemptions=int(self._store.metrics.get("preempted_sequences")),
        )
