"""A state machine over the loop: hypothesis chooses what to submit, abort, preempt and step, and shrinks failures."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine_adapter.decode_loop import DecodeLoop
from engine_adapter.drafter import PromptLookupDrafter
from engine_adapter.request import FinishReason, Request, RequestResult
from engine_adapter.testing import toy_generate
from tests.engine_adapter.loop_kit import FAMILIES, Kit, geometry, make_store, prompt

ROOTS = [prompt(seed, 24) for seed in range(2)]


class LoopMachine(RuleBasedStateMachine):
    """A small vocabulary, so that prompt lookup guesses right at times; prompts that share prefixes; little memory."""

    def __init__(self) -> None:
        super().__init__()
        self.kit: Kit | None = None
        self.asked: dict[str, Request] = {}
        self.results: dict[str, RequestResult] = {}

    @initialize(
        family=st.sampled_from(FAMILIES),
        block_tokens=st.sampled_from([1, 4]),
        tight=st.booleans(),
        host_blocks=st.sampled_from([0, 10, 100]),
        batch=st.integers(1, 4),
        more_tokens=st.integers(0, 12),
        drafts=st.integers(0, 3),
    )
    def start(
        self, family: str, block_tokens: int, tight: bool, host_blocks: int, batch: int, more_tokens: int, drafts: int
    ) -> None:
        blocks = (36 if tight else 90) // block_tokens + 12
        store = make_store(
            geometry(family, block_tokens), blocks=blocks, host_blocks=host_blocks, prefill_tokens_per_second=1e-3
        )
        self.kit = Kit(store)
        drafter = PromptLookupDrafter(draft_tokens=drafts) if drafts else None
        self.kit.loop = DecodeLoop(
            self.kit.runner, store, max_batch_sequences=batch, step_tokens=batch + more_tokens, drafter=drafter
        )

    @rule(
        root=st.sampled_from(ROOTS),
        shared=st.integers(0, 24),
        own=st.integers(0, 3),
        new=st.integers(1, 8),
        n=st.integers(1, 2),
    )
    def submit(self, root: list[int], shared: int, own: int, new: int, n: int) -> None:
        assert self.kit is not None
        name = f"r{len(self.asked)}"
        tokens = [*root[:shared], *prompt(len(self.asked), own)] or [1]
        self.asked[name] = Request(name, tokens, new, n=n)
        self.kit.loop.submit(self.asked[name])

    @precondition(lambda self: self.kit is not None and self.kit.loop.busy)
    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        assert self.kit is not None
        for _ in range(count):
            self.kit.step()
        self.collect()

    @precondition(lambda self: self.kit is not None and self.kit.loop.busy)
    @rule(choice=st.randoms(use_true_random=False))
    def abort(self, choice: Any) -> None:
        assert self.kit is not None
        self.kit.loop.abort(choice.choice(sorted(self.kit.loop._live)))
        self.collect()

    @precondition(lambda self: self.kit is not None and self.kit.loop._scheduler.running)
    @rule(choice=st.randoms(use_true_random=False))
    def preempt(self, choice: Any) -> None:
        assert self.kit is not None
        scheduler = self.kit.loop._scheduler
        scheduler.preempt(choice.choice(scheduler.running))

    def collect(self) -> None:
        assert self.kit is not None
        for name, result in self.kit.loop.collect().items():
            self.results[name] = result
            request = self.asked[name]
            truth = tuple(toy_generate(self.kit.model, request.token_ids, request.max_new_tokens))
            for completion in result.completions:
                assert completion.error is None
                if completion.finish_reason is FinishReason.ABORT:
                    assert completion.token_ids == truth[: len(completion.token_ids)]
                else:
                    assert completion.token_ids == truth

    @invariant()
    def books_are_right(self) -> None:
        if self.kit is not None:
            self.kit.store.check_invariants()

    def teardown(self) -> None:
        if self.kit is None:
            return
        for _ in range(2000):
            if not self.kit.loop.busy:
                break
            self.kit.step()
        self.collect()
        assert set(self.results) == set(self.asked)
        self.kit.nothing_left()
        self.kit.store.close()


TestLoopMachine = LoopMachine.TestCase
TestLoopMachine.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
