"""What fails because of one request ends that request, with an error that names the cause, and nobody beside it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from allocator import UsageError
from engine_adapter import DecodeLoop, EmbeddedMedia, FinishReason, HFRunner, Request, SliceError, digest_of
from engine_adapter.batch import StepBatch
from engine_adapter.testing import ToyRunner, toy_generate
from kvstore import Identity, KVStore, KVStoreConfig
from kvstore.identity import Adapter
from tests.engine_adapter.loop_kit import VOCAB, Kit, KitMaker, prompt
from tests.engine_adapter.paged_kit import reference_tokens, tiny_model


def good(count: int = 3) -> list[Request]:
    return [Request(f"good {at}", prompt(at, 9 + 4 * at), 8) for at in range(count)]


def drive(kit: Kit, *requests: Request) -> tuple[dict[str, Any], list[str]]:
    """Results and what the steps said has finished, in order."""
    results = kit.drive(*requests)
    kit.nothing_left()
    return results, [name for outcome in kit.outcomes for name in outcome.finished]


# callbacks


@pytest.mark.parametrize("which", ["on_token", "keep_logits"])
@pytest.mark.parametrize("fails_at", [1, 4, 8], ids=["first", "middle", "last"])
def test_a_callback_that_raises_ends_its_own_request(make_kit: KitMaker, which: str, fails_at: int) -> None:
    calls: list[object] = []

    def callback(*given: object) -> None:
        calls.append(given)
        if len(calls) == fails_at:
            raise KeyError("the caller's own")

    kit = make_kit()
    neighbours = good()
    bad = Request("bad", prompt(7, 11), 8, **{which: callback})  # type: ignore[arg-type]
    results, finished = drive(kit, neighbours[0], bad, *neighbours[1:])
    kit.check(results, neighbours)
    assert results["bad"].finish_reason is FinishReason.ERROR
    assert results["bad"].error == "a callback of request 'bad' raised KeyError: \"the caller's own\""
    assert results["bad"].token_ids == kit.expect(bad.token_ids, fails_at)
    assert len(calls) == fails_at, "never called again"
    assert sorted(finished) == sorted(results)


def test_a_callback_that_raises_is_logged_with_its_traceback(
    make_kit: KitMaker, caplog: pytest.LogCaptureFixture
) -> None:
    def callback(*_: object) -> None:
        raise RuntimeError("deep inside")

    with caplog.at_level(logging.ERROR):
        make_kit().drive(Request("bad", prompt(7, 11), 8, on_token=callback))
    (record,) = caplog.records
    assert record.exc_info is not None
    assert "'bad'" in record.getMessage()


@pytest.mark.parametrize("branch", [0, 1, 2])
def test_a_callback_of_one_branch_ends_all_of_its_request(make_kit: KitMaker, branch: int) -> None:
    def callback(_name: str, index: int, _token: int) -> None:
        if index == branch:
            raise ValueError("enough")

    kit = make_kit()
    (neighbour,) = good(1)
    bad = Request("bad", prompt(7, 11), 8, n=3, temperature=0.7, on_token=callback)
    results, _ = drive(kit, bad, neighbour)
    kit.check(results, [neighbour])
    assert [one.finish_reason for one in results["bad"].completions] == [FinishReason.ERROR] * 3


# what the store refuses


def test_a_placeholder_that_the_model_puts_out_ends_its_own_request(make_kit: KitMaker) -> None:
    neighbours = good()
    kit = make_kit()
    asked = prompt(7, 11)
    theirs = {token for one in neighbours for token in [*one.token_ids, *kit.expect(one.token_ids, 8)]}
    mine = toy_generate(kit.model, asked, 8)
    place, token = next((at, one) for at, one in enumerate(mine[:-1]) if one not in theirs and one not in asked)
    kit.store._prompts._placeholder_ids = frozenset([token])
    results, finished = drive(kit, neighbours[0], Request("bad", asked, 8), *neighbours[1:])
    kit.check(results, neighbours)
    assert "placeholder" in results["bad"].error
    assert results["bad"].token_ids == tuple(mine[: place + 1])
    assert sorted(finished) == sorted(results)


# what the runner refuses


class Refusing(ToyRunner):
    """Refuses one sequence, or names one that is not in the step."""

    refused = "bad"

    def forward(self, batch: StepBatch) -> torch.Tensor:
        if any(part.sequence_id == self.refused or part.start > 20 for part in batch):
            raise SliceError([self.refused], "cannot compute this")
        return super().forward(batch)


def refusing(kit: Kit) -> Refusing:
    assert kit.store.slab is not None
    runner = Refusing(kit.store.geometry, kit.store.slab, vocab_size=VOCAB)
    kit.loop = DecodeLoop(runner, kit.store, max_batch_sequences=4, step_tokens=16)
    return runner


def test_a_slice_that_the_runner_refuses_ends_its_own_request(make_kit: KitMaker) -> None:
    kit = make_kit()
    refusing(kit)
    neighbours = good(2)
    results, finished = drive(kit, neighbours[0], Request("bad", prompt(7, 11), 8), neighbours[1])
    kit.check(results, neighbours)
    assert (results["bad"].finish_reason, results["bad"].error) == (FinishReason.ERROR, "cannot compute this")
    assert sorted(finished) == ["bad", "good 0", "good 1"]


def test_a_refusal_of_nobody_in_the_step_is_the_runners_own_fault(make_kit: KitMaker) -> None:
    kit = make_kit()
    refusing(kit).refused = "nobody"
    kit.loop.submit(Request("a", prompt(1, 20), 20))
    with pytest.raises(SliceError, match="cannot compute"):
        kit.drive()
    kit.store.check_invariants()


def hf_loop(runner: HFRunner, adapter: object = None) -> tuple[KVStore, DecodeLoop]:
    identity = Identity(model="tiny", weights="w", geometry=runner.geometry, adapter=adapter)
    store = KVStore(runner.geometry, identity, KVStoreConfig(device_bytes="4 MiB", codec="raw", io_threads="inline"))
    runner.attach(store.slab, store.cold_codec)  # type: ignore[arg-type]
    return store, DecodeLoop(runner, store)


def test_an_adapter_that_cannot_be_switched_to_ends_those_who_asked_for_it() -> None:
    used: list[Adapter | None] = []

    def use(adapter: Adapter | None) -> None:
        used.append(adapter)
        if adapter is not None and adapter.name == "gone":
            raise LookupError("no such adapter")

    model = tiny_model("llama")
    expected = reference_tokens(model, prompt(1, 20), 6)
    runner = HFRunner(model, use_adapter=use)
    store, loop = hf_loop(runner)
    loop.submit(Request("good", prompt(1, 20), 6))
    for name in ("bad", "worse"):
        loop.submit(Request(name, prompt(2, 20), 6, adapter="gone"))
    results = loop.run()
    assert list(results["good"].token_ids) == expected
    for name in ("bad", "worse"):
        assert results[name].finish_reason is FinishReason.ERROR
        assert "use_adapter(Adapter(name='gone'" in str(results[name].error)
        assert "LookupError: no such adapter" in str(results[name].error)
    store.check_invariants()
    store.close()
    runner.release()


def test_the_adapter_of_the_stores_identity_is_what_the_runner_is_told() -> None:
    used: list[Adapter | None] = []
    runner = HFRunner(tiny_model("llama"), use_adapter=used.append)
    store, loop = hf_loop(runner, adapter="own")
    loop.submit(Request("plain", prompt(1, 20), 2))
    loop.run()
    assert set(used) == {Adapter("own")}
    store.close()
    runner.release()


def test_media_that_do_not_fit_the_model_end_their_own_request() -> None:
    model = tiny_model("llama")
    expected = reference_tokens(model, prompt(1, 20), 6)
    runner = HFRunner(model)
    store, loop = hf_loop(runner)
    loop.submit(Request("good", prompt(1, 20), 6))
    wide = torch.ones(3, 7)
    loop.submit(Request("bad", prompt(2, 20), 6, media=[EmbeddedMedia(digest_of(wide), 2, wide)]))
    results = loop.run()
    assert list(results["good"].token_ids) == expected
    assert "media features of 7 values" in str(results["bad"].error)
    store.check_invariants()
    store.close()
    runner.release()


def test_adapters_are_refused_at_once_by_a_runner_that_cannot_switch(make_kit: KitMaker) -> None:
    kit = make_kit()
    with pytest.raises(UsageError, match=r"request 'a': got Adapter\(name='x'.* computes with None only.*use_adapter"):
        kit.loop.submit(Request("a", [1, 2], 3, adapter="x"))
    assert not kit.loop.busy
    runner = HFRunner(tiny_model("llama"))
    store, loop = hf_loop(runner, adapter=("one", 1, "d"))
    with pytest.raises(UsageError, match=r"name='two'.* computes with Adapter\(name='one'"):
        loop.submit(Request("a", [1, 2], 3, adapter="two"))
    loop.submit(Request("a", [1, 2], 3, adapter=("one", 1, "d")))  # the one that it has
    assert loop.run()["a"].error is None
    store.close()
    runner.release()


# who has finished


def test_a_step_names_whoever_ended_since_the_last_one_returned(make_kit: KitMaker) -> None:
    kit = make_kit()
    for name in ("stays", "aborted", "collected"):
        kit.loop.submit(Request(name, prompt(len(name), 9), 30))
    kit.loop.step()
    kit.loop.abort("collected")
    kit.loop.collect()
    kit.loop.abort("aborted")
    assert kit.loop.step().finished == ("aborted",)
    assert kit.loop.step().finished == ()


def test_a_step_that_raises_loses_no_name(make_kit: KitMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    kit = make_kit()
    kit.loop.submit(Request("a", prompt(1, 9), 1))
    put_out: Callable[..., int] = kit.loop._book

    def fails_after(*given: Any) -> int:
        put_out(*given)
        raise RuntimeError("behind the last token")

    monkeypatch.setattr(kit.loop, "_book", fails_after)
    with pytest.raises(RuntimeError, match="last token"):
        kit.loop.step()
    monkeypatch.undo()
    assert kit.loop.step().finished == ("a",)
