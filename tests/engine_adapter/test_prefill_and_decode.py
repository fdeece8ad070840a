"""The example of prefill here, decode there: two real processes, blocks handed over while the prompt is computed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine_adapter.paged_kit import reference_tokens, tiny_model
from tests.servers import shared_server

ROOT = Path(__file__).resolve().parents[2]
PROMPT = [(7 * at * at + at) % 96 + 1 for at in range(150)]

# The prefilling process stops half way until the other says that the first half is there: without a hand-over by blocks
# both would wait for each other.
_PROGRAM = """
import json, sys, time
from pathlib import Path
from types import SimpleNamespace
import examples.prefill_here_decode_there as example
from examples.prefill_here_decode_there import decode, open_loop, prefill, take_over
from tests.engine_adapter.paged_kit import tiny_model
from tests.engine_adapter.test_prefill_and_decode import PROMPT

role, family, tier, mark, seed = sys.argv[1:]
loaded = SimpleNamespace(model=tiny_model(family, seed=int(seed)), name="tiny", weights=seed * 64)
loop, store = open_loop(loaded, tier, step_tokens=16)
example.PATIENCE_SECONDS = 150.0
mark, steps, seen = Path(mark), [], []
if role == "prefill":
    def after_step():
        steps.append(1)
        end = time.monotonic() + 150
        while len(steps) == 6 and not mark.exists():
            assert time.monotonic() < end, "the other process never saw the first half"
            store.step()
            time.sleep(0.01)
    print(json.dumps([prefill(loop, PROMPT, after_step), len(steps)]))
else:
    def on_tokens(tokens):
        seen.append(tokens)
        if tokens >= 48:
            mark.touch()
    take_over(store, PROMPT, on_tokens)
    found = decode(loop, PROMPT, 8)
    print(json.dumps([list(found.token_ids), found.computed_prefill_tokens, seen]))
store.close()
"""


def start(role: str, family: str, tier: str, mark: Path, seed: int = 0) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, role, family, tier, str(mark), str(seed)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def result(process: subprocess.Popen[str]) -> list[object]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    found: list[object] = json.loads(out)
    return found


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_blocks_are_handed_over_while_the_prompt_is_computed(family: str, tmp_path: Path) -> None:
    tier = f"{shared_server().unix_url}?namespace=hand-over-{family}"
    processes = [start(role, family, tier, tmp_path / "mark") for role in ("prefill", "decode")]
    (computed, steps), (tokens, left, seen) = [result(process) for process in processes]
    assert (computed, steps) == (150, 10)
    assert tokens == reference_tokens(tiny_model(family), PROMPT, 8)
    assert isinstance(seen, list)
    assert seen[0] < 144, "some came before the rest was computed"
    assert seen[-1] == 144
    assert left == 6
