"""Several continuations of one prompt share its blocks and nothing else."""

from __future__ import annotations

import random

import pytest

from allocator import CapacityError
from engine_adapter.batch import SequenceSlice, StepBatch
from engine_adapter.request import FinishReason, Request, RequestResult
from engine_adapter.sampling import draw, uniform_at
from engine_adapter.testing import ToyModel, toy_generate
from tests.engine_adapter.loop_kit import FAMILIES, KitMaker, prompt


def check_branches(model: ToyModel, request: Request, result: RequestResult) -> None:
    assert len(result.completions) == request.n
    for completion in result.completions:
        expected = toy_generate(
            model,
            request.token_ids,
            request.max_new_tokens,
            lambda row, place, index=completion.index: draw(row, request, uniform_at(0, request.seed, index, place)),  # type: ignore[misc]
        )
        assert completion.token_ids == tuple(expected), completion.index


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [3, 4, 5, 16, 21])
def test_branches_draw_as_if_alone(make_kit: KitMaker, family: str, length: int) -> None:
    kit = make_kit(family)
    request = Request("a", prompt(length, length), 10, temperature=2.0, n=4)
    result = kit.drive(request)["a"]
    check_branches(kit.model, request, result)
    assert len({completion.token_ids for completion in result.completions}) > 1
    assert result.computed_prefill_tokens == length
    kit.nothing_left()


def test_greedy_branches_are_equal(make_kit: KitMaker) -> None:
    kit = make_kit()
    result = kit.drive(Request("a", prompt(1, 9), 6, n=3))["a"]
    assert {completion.token_ids for completion in result.completions} == {kit.expect(prompt(1, 9), 6)}
    kit.nothing_left()


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_more_branches_than_places_run_one_after_the_other(make_kit: KitMaker, batch: int) -> None:
    kit = make_kit(loop={"max_batch_sequences": batch})
    request = Request("a", prompt(1, 18), 7, temperature=2.0, n=5)
    result = kit.drive(request)["a"]
    check_branches(kit.model, request, result)
    assert result.computed_prefill_tokens < 18 + 5 * 4
    kit.nothing_left()


@pytest.mark.parametrize("family", ["full", "hybrid"])
def test_branches_under_pressure(make_kit: KitMaker, family: str) -> None:
    kit = make_kit(family, blocks=24, host_blocks=20)
    asked = [Request(f"r{i}", prompt(i, 9 + i), 25, temperature=2.0, n=3, seed=i) for i in range(3)]
    results = kit.drive(*asked)
    for request in asked:
        check_branches(kit.model, request, results[request.request_id])
    assert sum(result.preemptions for result in results.values()) > 0
    kit.nothing_left()


def test_single_token_outputs_and_stops_at_the_first_token(make_kit: KitMaker) -> None:
    kit = make_kit()
    tokens = prompt(1, 9)
    result = kit.drive(Request("a", tokens, 1, n=3))["a"]
    assert [completion.token_ids for completion in result.completions] == [kit.expect(tokens, 1)] * 3
    stop = frozenset(kit.expect(tokens, 1))
    result = kit.drive(Request("b", tokens, 9, n=3, eos_token_ids=stop))["b"]
    assert [completion.finish_reason for completion in result.completions] == [FinishReason.STOP] * 3
    kit.nothing_left()


@pytest.mark.parametrize("when", range(8))
def test_abort_ends_all_branches(make_kit: KitMaker, when: int) -> None:
    kit = make_kit(loop={"max_batch_sequences": 2, "step_tokens": 8})
    kit.loop.submit(Request("a", prompt(1, 18), 7, temperature=2.0, n=4))
    other = Request("b", prompt(2, 9), 5)
    kit.loop.submit(other)
    for _ in range(when):
        kit.step()
    assert kit.loop.abort("a")
    kit.store.check_invariants()
    results = kit.drive()
    kit.check(results, [other])
    assert len(results["a"].completions) == 4
    assert results["a"].completions[-1].finish_reason is FinishReason.ABORT
    kit.nothing_left()


@pytest.mark.parametrize("seed", range(4))
def test_case_120_beams_prune_and_fork_at_random(make_kit: KitMaker, seed: int) -> None:
    """Four beams over the store itself: 200 random prunes and forks, an abort in the middle; all blocks return."""
    rng = random.Random(seed)
    kit = make_kit("hybrid", blocks=90)
    store, names = kit.store, iter(range(10_000))
    beams: dict[str, list[int]] = {}
    tokens = prompt(seed, 13)
    root = f"beam{next(names)}"
    store.admit(root, tokens)
    beams[root] = []

    def feed(name: str, new: list[int]) -> int:
        start = store.committed_tokens(name)
        store.grow(name, len(new))
        groups = range(len(store.geometry.groups))
        mapping = tuple(store.slot_mapping(name, group, start, len(new)) for group in groups)
        row = kit.runner.forward(StepBatch((SequenceSlice(name, new, start, 1, store.tables(name), mapping),)))[0]
        store.commit(name, new)
        beams[name] += new
        assert int(row.argmax()) == toy_generate(kit.model, beams[name], 1)[0]
        return int(row.argmax())

    feed(root, tokens)
    for turn in range(200):
        store.step()
        name = rng.choice(sorted(beams))
        action = rng.random()
        if action < 0.3 and len(beams) < 4:
            child = f"beam{next(names)}"
            store.fork(name, child)
            beams[child] = list(beams[name])
        elif action < 0.45 and len(beams) > 1:
            del beams[name]
            (store.abort if turn % 3 == 0 else store.finish)(name)
        else:
            try:
                feed(name, [rng.randrange(97) for _ in range(rng.randint(1, 3))])
            except CapacityError:
                if len(beams) > 1:
                    del beams[name]
                    store.abort(name)
                else:
                    break
        store.check_invariants()
    for name in beams:
        store.finish(name)
    kit.nothing_left()
