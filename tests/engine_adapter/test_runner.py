"""The runner itself: who owns a model, bad input, several runners in one process, NaN in recycled memory."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch

from allocator import ConfigError, IntegrityError, UsageError
from engine_adapter.attention import backend_names, get_backend, register_backend
from engine_adapter.attention.torch_paged import TorchPagedAttention
from engine_adapter.batch import SequenceSlice, StepBatch
from engine_adapter.runner import HFRunner
from quant import native
from tests.engine_adapter.paged_kit import Paged, reference_logits, reference_tokens, tiny_model

PROMPT = [7 * at % 89 + 1 for at in range(70)]


def test_importing_the_package_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, engine_adapter, engine_adapter.batch, engine_adapter.attention;"
        "engine_adapter.StepBatch;"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_rows_come_back_in_batch_order_and_only_those_asked_for() -> None:
    model = tiny_model("llama")
    expected = reference_logits(model, PROMPT)
    paged = Paged(model)
    parts = [paged.slice("a", PROMPT[:30], 0), paged.slice("b", PROMPT[:20], 2), paged.slice("c", PROMPT, 3)]
    found = paged.step(*parts)
    torch.testing.assert_close(found, torch.cat((expected[18:20], expected[67:70])), rtol=0, atol=1e-4)
    assert paged.step(paged.slice("a", PROMPT[30:40], 0)).shape == (0, 97)


def test_two_runners_in_two_threads_do_not_see_each_other() -> None:
    models = [tiny_model("llama", seed=1), tiny_model("gemma3", seed=2)]
    expected = [reference_tokens(model, PROMPT, 16) for model in models]
    engines = [Paged(model) for model in models]
    found: dict[int, list[list[int]]] = {0: [], 1: []}

    def work(at: int) -> None:
        for turn in range(4):
            found[at].append(engines[at].generate(f"turn {turn}", PROMPT, 16, 13))

    threads = [threading.Thread(target=work, args=(at,)) for at in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {at: [expected[at]] * 4 for at in (0, 1)}


def test_two_runners_on_one_model_and_its_release() -> None:
    model = tiny_model("mistral")
    expected = reference_tokens(model, PROMPT, 8)
    original = model.config._attn_implementation
    first, second = Paged(model, seed=1), Paged(model, seed=2)
    assert first.generate("x", PROMPT, 8) == second.generate("x", PROMPT, 8) == expected
    with pytest.raises(UsageError, match=r"runner\.release\(\)"):
        model.generate(torch.tensor([PROMPT]), max_new_tokens=1)
    first.runner.release()
    first.runner.release()
    assert second.generate("y", PROMPT, 8) == expected
    with pytest.raises(UsageError, match="release"):
        first.prefill("y", PROMPT)
    second.runner.release()
    assert model.config._attn_implementation == original
    assert reference_tokens(model, PROMPT, 8) == expected


def test_a_runner_without_a_slab_says_so() -> None:
    runner = HFRunner(tiny_model("llama"))
    paged = Paged(tiny_model("llama"))
    with pytest.raises(UsageError, match="attach"):
        runner.forward(StepBatch((paged.slice("a", PROMPT),)))


@pytest.mark.parametrize("bad", [[-1], [3, 97], [2**32]])
def test_token_ids_out_of_range_are_refused_before_anything_is_written(bad: list[int]) -> None:
    paged = Paged(tiny_model("llama"))
    before = paged.slab.bytes.clone()
    with pytest.raises(UsageError, match=r"vocabulary is 0\.\.96"):
        paged.step(paged.slice("good", PROMPT[:20]), paged.slice("bad", bad))
    assert torch.equal(paged.slab.bytes, before)


def test_missing_tables_are_refused() -> None:
    paged = Paged(tiny_model("gemma3"))
    part = paged.slice("one", PROMPT[:20])
    with pytest.raises(UsageError, match="1 tables; the model has 2 cache groups"):
        paged.step(replace(part, tables=part.tables[:1], slot_mappings=part.slot_mappings[:1]))


def test_a_layer_that_bypasses_paged_attention_is_noticed() -> None:
    model = tiny_model("llama")
    paged = Paged(model)
    paged.prefill("one", PROMPT)
    attention = model.model.layers[2].self_attn
    attention.forward = lambda hidden_states, **kwargs: (torch.zeros_like(hidden_states), None)
    with pytest.raises(IntegrityError, match=r"layers \[2\]"):
        paged.prefill("two", PROMPT)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 45])
def test_case_067_decode_in_memory_full_of_nan_equals_a_clean_run(family: str, length: int) -> None:
    """The slab is NaN wherever nobody wrote, when a sequence starts and again before each later step."""
    model = tiny_model(family)
    expected = reference_tokens(model, PROMPT[:length], 20)
    paged = Paged(model)
    found = [int(paged.prefill("one", PROMPT[:length]).argmax())]
    while len(found) < 20:
        for group, tables in enumerate(paged.tables["one"]):
            paged.slab.poison(2 * group, paged.free[2 * group][:8])
            assert tables
        logits = paged.step(paged.slice("one", found[-1:]))
        assert logits.isfinite().all()
        found.append(int(logits[-1].argmax()))
    assert found == expected


def test_one_sequence_that_overflows_does_not_touch_its_neighbours() -> None:
    """NaN in one sequence's own KV stays there, in any bucket and padding."""
    model = tiny_model("llama")
    expected = reference_logits(model, [*PROMPT[:40], 5])[-1]
    paged = Paged(model)
    paged.step(paged.slice("good", PROMPT[:40], 0), paged.slice("bad", PROMPT[:60], 0), paged.slice("short", [1], 0))
    for entry in paged.tables["bad"][0]:
        paged.slab.poison(0, [entry >> 1])
    found = paged.step(paged.slice("bad", [5]), paged.slice("good", [5]), paged.slice("short", [5]))
    assert not found[0].isfinite().all()
    assert found[2].isfinite().all()
    torch.testing.assert_close(found[1], expected, rtol=0, atol=1e-4)


def test_backends_are_chosen_in_one_place() -> None:
    assert get_backend().name == ("torch" if native.kernels is None else "native")
    assert isinstance(get_backend("torch"), TorchPagedAttention)
    assert get_backend("torch") is not get_backend("torch")
    with pytest.raises(ConfigError, match=r"unknown attention backend 'abacus'; known:.*torch"):
        get_backend("abacus")
    with pytest.raises(ConfigError, match="registered already"):
        register_backend("torch", TorchPagedAttention)
    register_backend("small buckets", lambda: TorchPagedAttention(1))
    assert "small buckets" in backend_names()
    model = tiny_model("gemma2")
    expected = reference_tokens(model, PROMPT, 8)
    paged = Paged(model, backend=get_backend("small buckets"))
    assert paged.generate("one", PROMPT, 8, 9) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": ()}, "no tokens"),
        ({"start": -1}, "starts at -1"),
        ({"logits_count": 3}, "expected 0..2"),
        ({"tables": ()}, "0 tables and 1 slot mappings"),
        ({"token_ids": (1, 2, 3)}, "one place per token"),
    ],
)
def test_slices_that_contradict_themselves_are_refused(changes: dict[str, object], message: str) -> None:
    part = Paged(tiny_model("llama")).slice("one", [1, 2])
    with pytest.raises(ValueError, match=message):
        replace(part, **changes)  # type: ignore[arg-type]


def test_a_batch_holds_a_sequence_once() -> None:
    part: SequenceSlice = Paged(tiny_model("llama")).slice("one", [1, 2])
    with pytest.raises(ValueError, match="found twice: \\['one'\\]"):
        StepBatch((part, part))
    with pytest.raises(ValueError, match="at least one slice"):
        StepBatch(())
