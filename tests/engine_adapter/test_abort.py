"""Abort at any moment: blocks come back exactly once, neighbours notice nothing, nothing half done is kept."""

from __future__ import annotations

import itertools

import pytest

from engine_adapter.request import FinishReason, Request
from tests.engine_adapter.loop_kit import FAMILIES, Kit, KitMaker, prompt


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("when", range(22))
def test_abort_after_every_step(make_kit: KitMaker, family: str, when: int) -> None:
    kit = make_kit(family, blocks=30, host_blocks=40, loop={"step_tokens": 6}, prefill_tokens_per_second=1e-3)
    asked = [Request(f"r{index}", prompt(index, 11 + index), 8) for index in range(4)]
    for request in asked:
        kit.loop.submit(request)
    for _ in range(when):
        if kit.loop.busy:
            kit.step()
    gone = [name for name in ("r1", "r2") if kit.loop.abort(name)]
    kit.store.check_invariants()
    results = kit.drive()
    kit.check(results, [request for request in asked if request.request_id not in gone])
    for name in gone:
        assert results[name].finish_reason is FinishReason.ABORT
        tokens = results[name].token_ids
        assert tokens == kit.expect(next(r.token_ids for r in asked if r.request_id == name), len(tokens))
    kit.nothing_left()
    kit.run_checked(*asked)


@pytest.mark.parametrize("branch_of_self", [True, False])
def test_abort_from_a_callback(make_kit: KitMaker, branch_of_self: bool) -> None:
    kit = make_kit()
    victim = "loud" if branch_of_self else "other"

    def on_token(_request_id: str, _branch: int, _token: int) -> None:
        kit.loop.abort(victim)

    asked = [Request("loud", prompt(1, 9), 6, on_token=on_token), Request("other", prompt(2, 9), 6)]
    results = kit.drive(*asked)
    kit.check(results, [request for request in asked if request.request_id != victim])
    assert results[victim].finish_reason is FinishReason.ABORT
    kit.nothing_left()


def test_submit_from_a_callback(make_kit: KitMaker) -> None:
    kit = make_kit()
    second = Request("second", prompt(2, 9), 3)

    def on_token(_request_id: str, _branch: int, _token: int) -> None:
        if "second" not in kit.loop._live and not kit.loop._results:
            kit.loop.submit(second)

    first = Request("first", prompt(1, 9), 2, on_token=on_token)
    kit.check(kit.drive(first), [first, second])
    kit.nothing_left()


def loading_kit(make_kit: KitMaker, **settings: object) -> tuple[Kit, Request]:
    """A kit whose next submission of the returned request is going to be loaded from the host."""
    kit = make_kit(
        blocks=24, host_blocks=400, prefill_tokens_per_second=1e-3, loop={"max_batch_sequences": 2}, **settings
    )
    wanted = Request("wanted", prompt(1, 41), 3)
    kit.run_checked(Request("first", wanted.token_ids, 3))
    for index in range(4):
        kit.run_checked(Request(f"filler{index}", prompt(index + 20, 60), 3))
    hit = kit.store.lookup(wanted.token_ids)
    assert hit.tokens > hit.device_tokens, "nothing would be loaded; the test proves nothing"
    return kit, wanted


@pytest.mark.parametrize("order", list(itertools.permutations(["abort", "completion", "cleanup"])))
def test_case_051_abort_completion_and_cleanup_in_every_order(make_kit: KitMaker, order: tuple[str, ...]) -> None:
    kit, wanted = loading_kit(make_kit)
    adapter = kit.loop._adapter
    given = adapter.reserve("wanted", wanted.token_ids)
    assert given.pending_tokens > 0
    alive = True
    for action in order:
        if action == "abort" and alive:
            adapter.abort("wanted")
            alive = False
        elif action == "completion":
            kit.store.wait(0.5)
        elif action == "cleanup":
            events = adapter.load()
            assert len(events) <= int(alive)
        kit.store.check_invariants()
    assert adapter.load() == []
    if alive:
        adapter.abort("wanted")
    kit.nothing_left()
    kit.run_checked(wanted)


def test_case_039_abort_while_loading_gives_every_block_back(make_kit: KitMaker) -> None:
    kit, wanted = loading_kit(make_kit)
    kit.loop.submit(wanted)
    kit.loop._scheduler.admit()
    assert [stream.sequence_id for stream in kit.loop._scheduler.loading] == ["wanted"]
    kit.loop.abort("wanted")
    kit.store.check_invariants()
    neighbour = Request("neighbour", prompt(50, 30), 5)
    results = kit.drive(neighbour)
    kit.check(results, [neighbour])
    assert results["wanted"].finish_reason is FinishReason.ABORT
    kit.nothing_left()
    kit.run_checked(wanted)


def test_case_092_nothing_beyond_what_is_computed_is_ever_stored(make_kit: KitMaker) -> None:
    """Finish or abort with computed < allocated < hashed: what can be found ends at the computed tokens."""
    for computed, allocated in itertools.product((0, 3, 4, 9, 16), (1, 5, 12)):
        kit = make_kit("full", host_blocks=100, prefill_tokens_per_second=1e-3)
        tokens = prompt(1, 40)
        for name, end in (("a", kit.store.abort), ("f", kit.store.finish), ("p", kit.store.preempt)):
            kit.store.admit(name, tokens)
            done = kit.store.committed_tokens(name)
            if computed > done:
                kit.store.grow(name, computed - done)
                kit.store.commit(name, tokens[done:computed])
            kit.store.grow(name, allocated)
            end(name)
            kit.store.check_invariants()
            assert kit.store.lookup(tokens).tokens == computed // 4 * 4
        kit.nothing_left()
