"""Commands of docs/how-to/capacity.md, run as they stand over a small trace."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from kvstore.cli import main
from kvstore.simulation import generate

PAGE = Path(__file__).resolve().parents[3] / "docs/how-to/capacity.md"
COMMANDS = [
    command
    for block in re.findall(r"```\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    for command in block.replace("\\\n", " ").splitlines()
]


def test_the_page_shows_all_three_commands() -> None:
    assert {command.split()[1] for command in COMMANDS} == {"plan", "record", "simulate"}


@pytest.mark.parametrize("command", [one for one in COMMANDS if one.split()[1] != "record"])
def test_a_command_of_the_page_does_what_it_says(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = generate("mixture", 300, block_tokens=512)
    lines = [
        {"timestamp": number, "input_length": 512 * (end - start), "output_length": 1, "hash_ids": keys}
        for number, (start, end) in enumerate(zip(trace.starts[:-1].tolist(), trace.starts[1:].tolist(), strict=True))
        if (keys := trace.keys[start:end].tolist())
    ]
    (tmp_path / "requests.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out
    for written in re.findall(r"--(?:html|json) (\S+)", command):
        assert (tmp_path / written).stat().st_size > 1000
