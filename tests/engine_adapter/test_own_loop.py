"""The example of one's own decode loop: every line of it runs here, and its tokens are those of the plain loop."""

from __future__ import annotations

import ast
import random
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

import engine_adapter
from kvstore import KVStoreConfig
from tests.engine_adapter.paged_kit import tiny_model
from tests.servers import shared_server

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own_loop.py"


def stand_in(*_: Any) -> SimpleNamespace:
    """What load_model gives, of a tiny model; a tokenizer of characters."""
    return SimpleNamespace(
        name="tiny",
        weights="0" * 64,
        model=tiny_model("llama"),
        tokenizer=lambda text: SimpleNamespace(input_ids=[ord(letter) % 97 for letter in text[:300]]),
    )


def lines_to_run() -> set[int]:
    return {
        node.lineno
        for node in ast.walk(ast.parse(EXAMPLE.read_text()))
        if isinstance(node, ast.stmt) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    }


@pytest.fixture
def traced() -> Any:
    """Lines of the example that ran."""
    ran: set[int] = set()

    def trace(frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        if frame.f_code.co_filename != str(EXAMPLE):
            return None
        ran.add(frame.f_lineno)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    yield ran
    sys.settrace(before)


def test_every_line_runs_and_answers_are_those_of_the_plain_loop(
    traced: set[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine_adapter, "load_model", stand_in)
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE)])
    loop_of = runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("question 0: 0 of ")
    assert printed[1].startswith("question 1: 288 of ")
    assert all(line.endswith("as without a store: True") for line in printed)

    # the rest: a second loop finds the prompts of the first on a server
    model = tiny_model("llama")
    draw = random.Random(3)
    prompt = [draw.randrange(1, 97) for _ in range(100)]
    url = shared_server().unix_url + "?namespace=own-loop"
    config = KVStoreConfig(
        redis_url=url, share=True, spill_policy="everything", codec="raw", load_always=True, fetch_deadline_seconds=30
    )
    reused = []
    for _ in range(2):
        loop = loop_of["Loop"]("tiny", model, "0" * 64, config)
        answer, ready = loop.generate("one", prompt, 6)
        loop.runner.release()
        assert answer == loop_of["plain"](model, prompt, 6)
        reused.append(ready)
        loop.store.close()
    assert reused == [0, 96]
    assert sorted(lines_to_run() - traced) == []
