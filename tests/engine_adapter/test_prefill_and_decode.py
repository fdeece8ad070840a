"""The examples of reuse between processes: prefill here, decode there, block by block; and `generate` over a disk."""

from __future__ import annotations

import runpy
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import examples.prefill_here_decode_there as example
from engine_adapter import load_model
from examples.prefill_here_decode_there import open_loop, prefill  # noqa: F401 - the other process too
from tests.engine_adapter.demo_kit import save_tiny_model
from tests.engine_adapter.paged_kit import reference_tokens, tiny_model
from tests.kvstore.daemon.kit import ServeProcess
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


@pytest.fixture(params=["redis", "daemon"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """What both processes reach."""
    if request.param == "redis":
        yield f"{shared_server().unix_url}?namespace=hand-over"
        return
    daemon = ServeProcess(tmp_path / "socket", "--host-bytes", "64MiB")
    yield str(tmp_path / "socket")
    daemon.stop()


def test_blocks_are_handed_over_while_the_prompt_is_computed(
    tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(example, "PATIENCE_SECONDS", 150.0)
    mark, seen = tmp_path / "mark", []
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


def run(name: str, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """An example as a user starts it; its exit code."""
    path = str(ROOT / "examples" / name)
    monkeypatch.setattr(sys, "argv", [path, *arguments])
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_the_example_in_its_two_roles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_tiny_model(tmp_path / "model")
    daemon = ServeProcess(tmp_path / "socket", "--host-bytes", "64MiB")
    words = (str(tmp_path / "socket"), "--model", str(folder), "--role")
    for role in ("prefill", "decode"):
        assert run("prefill_here_decode_there.py", *words, role, monkeypatch=monkeypatch) == 0
    daemon.stop()
    known = load_model(folder, "float32")
    ids = known.tokenizer("The ferry left at six because the tide would not wait. " * 60 + "It left at").input_ids
    first, *steps, last = capsys.readouterr().out.splitlines()
    assert first == f"prefill: {len(ids)} tokens computed"
    assert steps[-1] == f"decode: {(len(ids) - 1) // 16 * 16} of {len(ids)} tokens are here"
    answer = known.tokenizer.decode(reference_tokens(known.model, ids, 8))
    assert last == f"decode: {(len(ids) - 1) % 16 + 1} computed, {answer!r}"


@pytest.mark.parametrize(
    ("kind", "role"),
    [("no socket", ()), ("no socket", ("--role", "decode")), ("nobody's", ()), ("no server", ()), ("no server's", ())],
)
def test_the_example_says_that_nobody_listens(kind: str, role: tuple[str, ...], tmp_path: Path) -> None:
    """Found by a newcomer: both processes computed all, and it looked like a hand-over that does not work."""
    place = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left:
        left.bind(str(tmp_path / "socket" if kind == "nobody's" else tmp_path / "other"))
    with socket.socket() as taken:  # a port that is nobody's while it is held and not listened on
        taken.bind(("127.0.0.1", 0))
        urls = {
            "no server": f"redis://127.0.0.1:{taken.getsockname()[1]}/0",
            "no server's": f"unix://{place}",
        }
        words = [str(ROOT / "examples" / "prefill_here_decode_there.py"), urls.get(kind, str(place)), *role]
        done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    who = "Redis or Valkey" if kind in urls else "kvstore serve"
    why = "No such file or directory" if not place.exists() and kind != "no server" else "Connection refused"
    assert example.why_unreachable(f"{shared_server().unix_url}?namespace=here") == ""
    assert done.stderr.splitlines()[-1] == f"{words[1]}: no {who} listens there ({why})"


def test_the_example_of_generate_reuses_in_the_call_and_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_tiny_model(tmp_path / "model")
    for first in (" 0 reused {}", "{'disk': "):
        words = ("--model", str(folder), "--disk", str(tmp_path / "disk"))
        assert run("reuse_in_generate.py", *words, monkeypatch=monkeypatch) == 0
        lines = capsys.readouterr().out.splitlines()
        assert first in lines[0]
        assert ["{'device': " in line for line in lines[1:]] == [True, True]
