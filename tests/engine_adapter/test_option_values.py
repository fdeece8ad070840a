"""Every numeric option of the programs above the store, with values that make no sense: exit code 2, and which."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine_adapter.demo import __main__ as demo
from engine_adapter.demo import daemon, vllm
from engine_adapter.server import __main__ as server

PARSERS = {"demo": demo.parse, "demo.daemon": daemon.parse, "demo.vllm": vllm.parse, "server": server.parse}
VALUES = ("nan", "inf", "-inf", "-1", "1e308", "9" * 30, "9" * 5000, "1e", "x", "")
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("name", "parse"), PARSERS.items())
def test_a_number_that_makes_no_sense(
    name: str, parse: Callable[[Any], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    seen: list[argparse.ArgumentParser] = []
    really = argparse.ArgumentParser.parse_args

    def parse_args(self: argparse.ArgumentParser, *words: Any) -> Any:
        seen.append(self)
        return really(self, *words)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    parse([])
    numeric = [action.option_strings[0] for action in seen[0]._actions if action.type in (int, float)]
    assert numeric, name
    for option in numeric:
        for value in VALUES:
            with pytest.raises(SystemExit) as ended:
                parse([f"{option}={value}"])
            assert ended.value.code == 2, (option, value)
            said = capsys.readouterr().err
            assert option in said, (option, value)
            assert len(value) > 6 or not value or value in said or "1e+308" in said, said


def test_messages_name_no_package_that_is_on_no_index() -> None:
    said = re.compile(r"pip install [^\n]*kvstore-llm")
    wrong = [str(path) for folder in ("kvstore", "engine_adapter", "quant", "allocator")
             for path in (ROOT / folder).rglob("*.py") if said.search(path.read_text(encoding="utf-8"))]  # fmt: skip
    assert not wrong
