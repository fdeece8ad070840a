"""The loop's outputs equal the oracle's for every chunking, batch and attention family."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from allocator import CapacityError, ConfigError, DuplicateSequence, UnknownSequence, UsageError
from engine_adapter.batch import StepBatch
from engine_adapter.decode_loop import DecodeLoop
from engine_adapter.request import FinishReason, Request
from engine_adapter.sampling import uniform_at
from engine_adapter.testing import ToyRunner, toy_generate
from tests.engine_adapter.loop_kit import FAMILIES, VOCAB, KitMaker, prompt

from engine_adapter.sampling import draw  # isort: skip

LENGTHS = (1, 3, 4, 5, 8, 40)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("step_tokens", [1, 2, 3, 4, 5, 8, 64])
def test_every_chunk_size_and_length_alone(make_kit: KitMaker, family: str, step_tokens: int) -> None:
    kit = make_kit(family, loop={"step_tokens": step_tokens, "max_batch_sequences": 1})
    kit.run_checked(*(Request(f"r{length}", prompt(length, length), 7) for length in LENGTHS))
    assert max(outcome.computed_tokens for outcome in kit.outcomes) <= step_tokens


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch", [2, 3, 6])
@pytest.mark.parametrize("block_tokens", [1, 4, 16])
def test_batches_mix_prefill_and_decode(make_kit: KitMaker, family: str, batch: int, block_tokens: int) -> None:
    kit = make_kit(family, block_tokens, blocks=400, loop={"step_tokens": 11, "max_batch_sequences": batch})
    requests = [Request(f"r{length}", prompt(length, length), 3 + length % 9) for length in (17, 1, 40, 8, 23, 5, 64)]
    kit.run_checked(*requests)
    assert all(outcome.computed_tokens <= 11 for outcome in kit.outcomes)


def test_decode_goes_on_while_a_long_prompt_is_computed(make_kit: KitMaker) -> None:
    kit = make_kit(loop={"step_tokens": 8, "max_batch_sequences": 2})
    told: list[str] = []
    short = Request("short", prompt(1, 2), 12, on_token=lambda request_id, _branch, _token: told.append(request_id))
    kit.loop.submit(short)
    kit.step()
    kit.drive(Request("long", prompt(2, 80), 2, on_token=lambda request_id, _b, _t: told.append(request_id)))
    assert told.index("long") == 12  # the short one was never held up: a token in each of the 11 chunks' steps


def test_stop_token_ends_and_is_put_out(make_kit: KitMaker) -> None:
    kit = make_kit()
    tokens = prompt(5, 9)
    free = kit.expect(tokens, 12)
    stop = free[4]
    results = kit.drive(Request("a", tokens, 12, eos_token_ids=frozenset({stop})))
    assert results["a"].token_ids == free[: free.index(stop) + 1]
    assert results["a"].finish_reason is FinishReason.STOP
    kit.nothing_left()


def test_forced_tokens_are_fed_and_the_models_choice_is_kept(make_kit: KitMaker) -> None:
    kit = make_kit()
    tokens, forced = prompt(5, 9), prompt(6, 10)
    rows: list[torch.Tensor] = []
    request = Request(
        "a", tokens, 99, forced_token_ids=forced, keep_logits=lambda branch, place, row: rows.append(row.clone())
    )
    result = kit.drive(request)["a"]
    assert result.token_ids == tuple(forced)
    expected = [kit.expect([*tokens, *forced[:place]], 1)[0] for place in range(len(forced))]
    assert list(result.argmax_token_ids) == expected
    assert [int(row.argmax()) for row in rows] == expected


@pytest.mark.parametrize("step_tokens", [3, 16])
def test_sampled_output_depends_on_seed_and_place_only(make_kit: KitMaker, step_tokens: int) -> None:
    kit = make_kit(loop={"step_tokens": step_tokens, "max_batch_sequences": 3, "seed": 11})
    requests = [
        Request(f"r{index}", prompt(index, 6 + index), 9, temperature=1.3, top_p=0.95, top_k=20, seed=index)
        for index in range(4)
    ]
    results = kit.drive(*requests)
    for request in requests:
        expected = toy_generate(
            kit.model,
            request.token_ids,
            9,
            lambda row, place, request=request: draw(row, request, uniform_at(11, request.seed, 0, place)),  # type: ignore[misc]
        )
        assert results[request.request_id].token_ids == tuple(expected)
    assert any(results[r.request_id].token_ids != results[r.request_id].argmax_token_ids for r in requests)


def test_latency_uses_the_injected_clock(make_kit: KitMaker) -> None:
    ticks = iter(range(10_000))
    kit = make_kit(loop={"clock": lambda: float(next(ticks)), "max_batch_sequences": 1})
    results = kit.run_checked(Request("a", prompt(1, 5), 4), Request("b", prompt(2, 5), 4))
    assert len(results["a"].itl_seconds) == 3
    assert results["b"].queue_seconds is not None
    assert results["a"].ttft_seconds is not None
    assert results["b"].queue_seconds > results["a"].ttft_seconds
    assert kit.loop.latency.snapshot()["itl_seconds"]["count"] == 6


# Bad input


@pytest.mark.parametrize(
    "changes",
    [{"token_ids": []}, {"token_ids": [VOCAB]}, {"token_ids": [-1]}, {"max_new_tokens": 0}, {"request_id": ""}],
)
def test_bad_requests_are_refused_and_others_go_on(make_kit: KitMaker, changes: dict[str, object]) -> None:
    kit = make_kit()
    good = Request("good", prompt(1, 9), 5)
    kit.loop.submit(good)
    kit.step()
    with pytest.raises(UsageError):
        kit.loop.submit(dataclasses.replace(Request("bad", [1], 1), **changes))  # type: ignore[arg-type]
    kit.store.check_invariants()
    kit.check(kit.drive(), [good])
    kit.nothing_left()


def test_ids_in_use_unknown_and_free_again(make_kit: KitMaker) -> None:
    kit = make_kit()
    request = Request("a", prompt(1, 9), 3)
    kit.loop.submit(request)
    with pytest.raises(DuplicateSequence, match="'a' is in use"):
        kit.loop.submit(request)
    with pytest.raises(UnknownSequence, match="'b'"):
        kit.loop.abort("b")
    while kit.loop.busy:
        kit.step()
    with pytest.raises(DuplicateSequence, match="not collected"):
        kit.loop.submit(request)
    assert kit.loop.abort("a") is False
    kit.check(kit.loop.collect(), [request])
    kit.run_checked(request)
    with pytest.raises(UnknownSequence):
        kit.loop.abort("a")


def test_more_tokens_than_the_model_has_positions_are_refused(make_kit: KitMaker) -> None:
    kit = make_kit()
    kit.runner.position_limit = 20
    kit.run_checked(Request("fits", prompt(1, 15), 5))
    with pytest.raises(UsageError, match="15 prompt tokens and 6 new ones pass the model's 20 positions"):
        kit.loop.submit(Request("long", prompt(1, 15), 6))


@pytest.mark.parametrize("family", ["full", "hybrid", "latent"])
def test_a_prompt_longer_than_the_pool_is_refused_at_once(make_kit: KitMaker, family: str) -> None:
    kit = make_kit(family, blocks=8)
    good = Request("good", prompt(1, 9), 5)
    kit.loop.submit(good)
    with pytest.raises(CapacityError, match="ever hold") as caught:
        kit.loop.submit(Request("long", prompt(2, 500), 1))
    assert caught.value.permanent
    kit.check(kit.drive(), [good])
    kit.nothing_left()


@pytest.mark.parametrize("family", FAMILIES)
def test_an_output_that_the_pool_can_never_hold_is_refused_and_hurts_nobody(make_kit: KitMaker, family: str) -> None:
    kit = make_kit(family, blocks=10, loop={"max_batch_sequences": 3})
    small = [Request(f"s{index}", prompt(index, 6), 5) for index in range(3)]
    big = Request("big", prompt(9, 12), 150)
    if family == "sliding":  # what it holds does not grow with the answer
        results = kit.drive(big, *small)
        assert results["big"].finish_reason is FinishReason.LENGTH
        assert results["big"].token_ids == kit.expect(prompt(9, 12), 150)
    else:
        with pytest.raises(CapacityError, match="12 prompt tokens and 149 new ones"):
            kit.loop.submit(big)
        results = kit.drive(*small)
    kit.check(results, small)
    kit.nothing_left()


def test_settings_that_cannot_work_are_refused(make_kit: KitMaker) -> None:
    kit = make_kit()
    with pytest.raises(ConfigError, match="max_batch_sequences"):
        DecodeLoop(kit.runner, kit.store, max_batch_sequences=9, step_tokens=8)
    with pytest.raises(ConfigError, match="step_tokens, got '8' and 256"):
        DecodeLoop(kit.runner, kit.store, max_batch_sequences="8")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="store: got 5; expected a KVStore"):
        DecodeLoop(kit.runner, 5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="runner: got NoneType; expected a Runner"):
        DecodeLoop(None, kit.store)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"clock: got 5 \(int\); expected a function that returns seconds"):
        DecodeLoop(kit.runner, kit.store, clock=5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="clock: returned None"):
        DecodeLoop(kit.runner, kit.store, clock=lambda: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(ConfigError, match="geometry"):
        DecodeLoop(make_kit("latent").runner, kit.store)


# Failing models


class FailingRunner(ToyRunner):
    """Raises, or puts NaN into the logits of one sequence, at a chosen forward pass."""

    fail_at = -1
    nan_for: str | None = None

    def forward(self, batch: StepBatch) -> torch.Tensor:
        logits = super().forward(batch)
        if self.forward_count == self.fail_at:
            raise RuntimeError("the accelerator fell off")
        row = 0
        for part in batch:
            if part.sequence_id == self.nan_for and part.logits_count:
                logits[row] = torch.nan
            row += part.logits_count
        return logits


@pytest.mark.parametrize("fail_at", range(1, 14))
def test_a_failed_forward_pass_gives_its_room_back_and_can_be_repeated(make_kit: KitMaker, fail_at: int) -> None:
    kit = make_kit("hybrid", blocks=40)
    slab = kit.store.slab
    assert slab is not None
    runner = FailingRunner(kit.store.geometry, slab, vocab_size=VOCAB)
    runner.fail_at = fail_at
    kit.loop = DecodeLoop(runner, kit.store, max_batch_sequences=3, step_tokens=7)
    requests = [Request(f"r{index}", prompt(index, 5 + 6 * index), 6) for index in range(4)]
    for request in requests:
        kit.loop.submit(request)
    failures = 0
    while kit.loop.busy:
        try:
            kit.step()
        except RuntimeError:
            failures += 1
            kit.store.check_invariants()
    assert failures == 1
    kit.check(kit.loop.collect(), requests)
    kit.nothing_left()


def test_logits_that_are_not_finite_fail_their_request_only_and_its_kv_is_not_kept(make_kit: KitMaker) -> None:
    kit = make_kit()
    slab = kit.store.slab
    assert slab is not None
    runner = FailingRunner(kit.store.geometry, slab, vocab_size=VOCAB)
    runner.nan_for = "sick"
    kit.loop = DecodeLoop(runner, kit.store, max_batch_sequences=3, step_tokens=32)
    well = Request("well", prompt(1, 9), 6)
    results = kit.drive(well, Request("sick", prompt(2, 9), 6))
    kit.check(results, [well])
    assert results["sick"].finish_reason is FinishReason.ERROR
    assert results["sick"].error == "the model's logits are not finite"
    assert kit.store.lookup(prompt(2, 9)).tokens == 0
    kit.nothing_left()


def test_run_returns_what_step_by_step_does(make_kit: KitMaker) -> None:
    kit = make_kit(blocks=12)
    requests = [Request(f"r{index}", prompt(index, 9 + index), 6) for index in range(5)]
    for request in requests:
        kit.loop.submit(request)
    kit.check(kit.loop.run(), requests)
    kit.nothing_left()


def test_the_store_learns_how_fast_prompts_are_computed(make_kit: KitMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    kit = make_kit(loop={"clock": lambda: now[0], "step_tokens": 128})
    forward = ToyRunner.forward

    def slow(self: ToyRunner, batch: StepBatch) -> torch.Tensor:
        now[0] += 0.5
        return forward(self, batch)

    monkeypatch.setattr(ToyRunner, "forward", slow)
    kit.run_checked(Request("r", prompt(1, 80), 5))
    assert kit.store._parts.costs.prefill_tokens_per_second == 160.0, "80 tokens in the one step that was prompt"
