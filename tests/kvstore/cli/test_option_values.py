"""Every numeric option of every command, with values that make no sense: said in one line, never a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args, get_type_hints

import pytest

from kvstore.cli import main, own_commands

NOBODY = "http://127.0.0.1:1"
BASE = {
    "doctor": ("--url", NOBODY),
    "plan": ("--model", "llama-3.1-8b"),
    "simulate": ("--workload", "rag", "--requests", "20", "--capacity-blocks", "50", "--policy", "lru", "--jobs", "1"),
    "top": ("--url", NOBODY, "--once"),
}
NUMBERS_IN_TEXT = {  # options that read numbers out of words, and how a word looks
    "doctor": {"--prompt-tokens": "{}", "--concurrency": "4,{}"},
    "plan": {"--gpu-memory": "{} GiB", "--gpu-bandwidth": "{}", "--weights-bytes": "{}", "--tier": "host={}@{}"},
    "serve": {"--host-bytes": "{} GiB", "--disk-bytes": "{}", "--http": "{}", "--allowed-uids": "{}"},
    "simulate": {
        "--capacity-percent": "{}",
        "--capacity-blocks": "{}",
        "--hosts": "{}",
        "--tiers": "host={}@{}",
        "--tier-dollars": "host={}",
    },
}
BASE["serve"] = ("--check",)
VALUES = ("nan", "inf", "-inf", "-1", "0", "-0.0", "1e308", "1e-320", "1000000000", "9" * 30, "9" * 5000, "1e", "x", "")


def options() -> Iterator[tuple[str, str, str]]:
    """(command, option, how its value is written)."""
    for name, function in own_commands().items():
        for argument, kind in get_type_hints(function).items():
            if {int, float} & {kind, *get_args(kind)}:
                yield name, f"--{argument.replace('_', '-')}", "{}"
        for option, form in NUMBERS_IN_TEXT.get(name, {}).items():
            yield name, option, form


def test_the_numeric_options_are_found() -> None:
    found = {(command, option) for command, option, _ in options()}
    assert len(found) > 25
    assert {command for command, _ in found} == set(BASE)


@pytest.mark.parametrize(("command", "option", "form"), list(options()))
def test_a_number_that_makes_no_sense(
    command: str, option: str, form: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in VALUES:
        words = list(BASE[command])
        if option in words:
            at = words.index(option)
            del words[at : at + 2]
        elif option == "--capacity-percent":
            at = words.index("--capacity-blocks")
            del words[at : at + 2]
        code = main([command, *words, f"{option}={form.format(value, value)}"])
        said = capsys.readouterr()
        assert code in (0, 1, 2), (option, value)
        assert code != 2 or said.err.strip(), (option, value)
        assert "Traceback" not in said.err
        if value in ("nan", "x", "1e"):
            assert code == 2, (option, value, said.out)
            assert value in said.err, (option, value, said.err)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("simulate", "--workload", "rag", "--jobs", "-3"), "jobs: got -3"),
        (("simulate", "--workload", "rag", "--format", "nonsense"), "format: got 'nonsense'"),
        (("simulate", "--workload", "rag", "--policy", ""), "--policy: got ''"),
        (("simulate", "--workload", "rag", "--codec", ","), "--codec: got ','"),
        (("simulate", "--workload", "rag", "--hosts", "3", "--routing", ""), "--routing: got ''"),
        (("simulate", "--workload", "rag", "--seed", "-1"), "seed: got -1"),
        (("simulate", "--workload", "rag", "--seed", "x"), "got 'x'"),
        (("plan", "--model", "llama-3.1-8b", "--context", "abc"), "got 'abc'"),
        (("plan", "--model", "llama-3.1-8b", "--gpu-flops", "-1"), "gpu-flops: got -1.0"),
        (("plan", "--model", "llama-3.1-8b", "--gpu-memory", "0"), "gpu-memory: got '0'"),
        (("doctor", "--url", NOBODY, "--rounds", "0"), "rounds: got 0"),
        (("doctor", "--url", NOBODY, "--seconds", "nan"), "seconds: got nan"),
        (("doctor", "--loop", "--seconds", "nan"), "seconds: got nan"),
        (("doctor", "--config", "store.toml"), "--tiers"),
        (("inspect", ".", "--codec", "foo"), "codec: got 'foo'"),
        (("inspect", ".", "--root", "zzz"), "root: got 'zzz'"),
    ],
)
def test_what_makes_no_sense_is_said(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert "Probes(" not in shown
    assert "Card(" not in shown


def test_a_wrong_variable_is_called_by_its_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTORE_HOST_BYTES", "lots")
    assert main(("doctor", "--tiers")) == 2
    shown = capsys.readouterr().err
    assert "KVSTORE_HOST_BYTES: got 'lots'" in shown
    assert "--config" not in shown


def test_a_server_that_is_down_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_REDIS_URL", "redis://someone:secret-word@127.0.0.1:1/0")
    assert main(("doctor", "--tiers")) == 1
    shown = capsys.readouterr().out
    assert "127.0.0.1:1" in shown
    assert "secret-word" not in shown
