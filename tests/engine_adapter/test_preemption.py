"""Too little memory changes when tokens come, never which."""

from __future__ import annotations

import pytest

from engine_adapter.request import Request
from engine_adapter.scheduler import Phase
from kvstore.testing import SteppedExecutor
from tests.engine_adapter.loop_kit import FAMILIES, Kit, KitMaker, prompt


def requests(count: int, prompt_tokens: int, new_tokens: int) -> list[Request]:
    return [Request(f"r{index}", prompt(index, prompt_tokens + index % 3), new_tokens) for index in range(count)]


@pytest.mark.parametrize("family", ["full", "hybrid", "latent"])
@pytest.mark.parametrize("host_blocks", [0, 6, 400])
@pytest.mark.parametrize("step_tokens", [5, 32])
def test_tight_memory_preempts_and_stays_exact(
    make_kit: KitMaker, family: str, host_blocks: int, step_tokens: int
) -> None:
    kit = make_kit(family, blocks=26, host_blocks=host_blocks, loop={"step_tokens": step_tokens})
    asked = requests(6, 14, 30)
    results = kit.run_checked(*asked)
    assert sum(result.preemptions for result in results.values()) > 0
    for result in results.values():
        assert result.recomputed_tokens <= result.computed_prefill_tokens
        if result.preemptions == 0:
            assert result.recomputed_tokens == 0
            assert sum(result.resumed_tokens.values()) == 0


def test_the_oldest_is_never_preempted_for_a_younger_one(make_kit: KitMaker) -> None:
    kit = make_kit(blocks=20)
    results = kit.run_checked(*requests(5, 14, 40))
    assert results["r0"].preemptions == 0
    assert sum(result.preemptions for result in results.values()) > 0
    finished = [name for outcome in kit.outcomes for name in outcome.finished]
    assert finished[0] == "r0"


def test_preemption_spills_and_comes_back_from_the_host(make_kit: KitMaker) -> None:
    kit = make_kit(blocks=26, host_blocks=400, prefill_tokens_per_second=1e-3)
    results = kit.run_checked(*requests(6, 14, 30))
    assert sum(result.preemptions for result in results.values()) > 0
    resumed: dict[str, int] = {}
    for result in results.values():
        for tier, count in result.resumed_tokens.items():
            resumed[tier] = resumed.get(tier, 0) + count
    assert resumed.get("host", 0) > 0
    without = make_kit(blocks=26)
    plain = without.run_checked(*requests(6, 14, 30))
    recomputed = sum(result.recomputed_tokens for result in results.values())
    assert recomputed < sum(result.recomputed_tokens for result in plain.values())


def test_case_137_a_resumed_request_asks_anew_and_never_for_less_than_nothing(make_kit: KitMaker) -> None:
    kit = make_kit(blocks=60, host_blocks=400, prefill_tokens_per_second=1e-3)
    asked = requests(3, 14, 20)
    for request in asked:
        kit.loop.submit(request)
    scheduler = kit.loop._scheduler
    for turn in range(400):
        if not kit.loop.busy:
            break
        kit.step()
        if turn % 5 == 2 and scheduler.running:
            victim = scheduler.running[-1]
            scheduler.preempt(victim)
            kit.store.check_invariants()
            hit = kit.store.lookup(victim.tokens)
            assert hit.device_tokens <= hit.tokens < len(victim.tokens)
            assert hit.tokens % 4 == 0
            assert sum(hit.by_tier.values()) == hit.tokens
    kit.check(kit.loop.collect(), asked)
    kit.nothing_left()


@pytest.mark.parametrize("family", FAMILIES)
def test_preempted_at_every_step_in_turn(make_kit: KitMaker, family: str) -> None:
    """Case 9: whatever is in flight when a stream is preempted, its key is absent or has its own bytes."""
    for when in range(1, 24):
        kit = make_kit(family, blocks=30, host_blocks=100, loop={"step_tokens": 6}, prefill_tokens_per_second=1e-3)
        asked = requests(3, 9, 9)
        for request in asked:
            kit.loop.submit(request)
        for turn in range(600):
            if not kit.loop.busy:
                break
            kit.step()
            if turn == when:
                preempt_all(kit)
        kit.check(kit.loop.collect(), asked)
        kit.nothing_left()


def preempt_all(kit: Kit) -> None:
    scheduler = kit.loop._scheduler
    for stream in [*scheduler.running, *scheduler.loading]:
        scheduler.preempt(stream)
        assert stream.phase is Phase.WAITING
        kit.store.check_invariants()


def test_threads_move_blocks_while_the_loop_runs(make_kit: KitMaker) -> None:
    kit = make_kit("hybrid", blocks=26, host_blocks=100, io_threads="thread", prefill_tokens_per_second=1e-3)
    kit.run_checked(*requests(8, 14, 25))


def test_int4_cooling_accounts_for_every_block(make_kit: KitMaker) -> None:
    """The toy is not exact over INT4 blocks, so this checks the books: all ends, nothing leaks, blocks do cool."""
    kit = make_kit("full", 16, blocks=40, host_blocks=40, codec="int4", residual_tokens=32, loop={"step_tokens": 64})
    asked = requests(8, 100, 60)
    results = kit.drive(*asked)
    assert all(len(results[request.request_id].token_ids) == 60 for request in asked)
    metrics = kit.store.metrics
    assert metrics.get("cooled_blocks", cause="age") + metrics.get("cooled_blocks", cause="pressure") > 20
    kit.nothing_left()


def test_a_prompt_waits_for_memory_that_cooling_holds(make_kit: KitMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks in flight cannot be evicted, so an admission with nothing else running must wait for them, not fail."""
    executors: list[SteppedExecutor] = []

    def make_executor(_kind: str, **_settings: object) -> SteppedExecutor:
        executors.append(SteppedExecutor())
        return executors[-1]

    monkeypatch.setattr("kvstore.assembly.make_executor", make_executor)
    kit = make_kit("full", 16, blocks=40, codec="int4", residual_tokens=16, loop={"step_tokens": 64})
    kit.drive(Request("first", prompt(1, 400), 24))
    assert sum(executor.waiting_count for executor in executors) > 0, "nothing is in flight; the test proves nothing"
    kit.loop.submit(Request("second", prompt(2, 560), 2))
    for _ in range(5):
        assert kit.step().idle
    for _ in range(200):
        for executor in executors:
            executor.run_all()
        if not kit.loop.busy:
            break
        kit.step()
    assert kit.loop.collect()["second"].error is None
