"""The example of prefill here, decode there: two real processes, blocks handed over while the prompt is computed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import examples.prefill_here_decode_there as example
from examples.prefill_here_decode_there import open_loop, prefill  # noqa: F401 - the other process too
from tests.engine_adapter.paged_kit import reference_tokens, tiny_model
from tests.servers import shared_server

ROOT = Path(__file__).resolve().parents[2]
PROMPT = [(7 * at * at + at) % 96 + 1 for at in range(150)]

# The prefilling process stops half way until the other says that the first half is there: without a hand-over by blocks
# both would wait for each other.
_PREFILL = """
import sys, time
from pathlib import Path
from tests.engine_adapter.test_prefill_and_decode import PROMPT, loaded, open_loop, prefill

tier, mark = sys.argv[1:]
loop, store = open_loop(loaded(), tier, step_tokens=16)

def after_step():
    end = time.monotonic() + 150
    while store.sequence_ids() and 80 <= store.committed_tokens("prefill") < 150 and not Path(mark).exists():
        assert time.monotonic() < end, "the other process never saw the first half"
        store.step()
        time.sleep(0.01)

print(prefill(loop, PROMPT, after_step))
store.close()
"""


def loaded() -> SimpleNamespace:
    return SimpleNamespace(model=tiny_model("gemma3"), name="tiny", weights="0" * 64)


def test_blocks_are_handed_over_while_the_prompt_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, "PATIENCE_SECONDS", 150.0)
    mark, seen = tmp_path / "mark", []
    tier = f"{shared_server().unix_url}?namespace=hand-over"
    process = subprocess.Popen(
        [sys.executable, "-c", _PREFILL, tier, str(mark)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    loop, store = open_loop(loaded(), tier)

    def on_tokens(tokens: int) -> None:
        seen.append(tokens)
        if tokens >= 48:
            mark.touch()

    with store:
        example.take_over(store, PROMPT, on_tokens)
        answer = example.decode(loop, PROMPT, 8)
    computed, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert int(computed) == 150
    assert list(answer.token_ids) == reference_tokens(tiny_model("gemma3"), PROMPT, 8)
    assert seen[0] < 144, "some came before the rest was computed"
    assert seen[-1] == 144
    assert answer.computed_prefill_tokens == 6


def test_what_nobody_sends_is_computed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, "PATIENCE_SECONDS", 0.1)
    loop, store = open_loop(loaded(), f"{shared_server().unix_url}?namespace=nobody")
    with store:
        assert example.take_over(store, PROMPT) == 0
        answer = example.decode(loop, PROMPT, 8)
    assert answer.computed_prefill_tokens == 150
    assert list(answer.token_ids) == reference_tokens(tiny_model("gemma3"), PROMPT, 8)
