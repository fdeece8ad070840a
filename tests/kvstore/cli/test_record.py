"""`kvstore record` and signals: what ends the one who records ends the recorded command, and everybody learns how."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
RECORD = """
import signal
import sys
import kvstore.cli.record
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):  # whatever the tests themselves were started with
    signal.signal(number, signal.SIG_DFL)
kvstore.cli.record._ENDING_SECONDS = float(sys.argv[1])
from kvstore.cli import main
sys.exit(main(sys.argv[2:]))
"""
POLITE = """
    import os, signal, sys, time
    from pathlib import Path
    def leave(number, frame):
        Path(sys.argv[1]).write_text(str(number))
        sys.exit(7)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, leave)
    print(os.getpid(), flush=True)
    time.sleep(100)
"""
DEAF = """
    import os, signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(os.getpid(), flush=True)
    time.sleep(100)
"""
GROUP = """
    import os, subprocess, sys, time
    os.setpgid(0, 0)
    below = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    print(below.pid, flush=True)
    below.wait()
"""


def recording(tmp_path: Path, text: str, seconds: float = 60.0) -> tuple[subprocess.Popen[bytes], int]:
    """A recorder whose command has said a process id, and that."""
    inner = (sys.executable, "-c", textwrap.dedent(text), str(tmp_path / "got"))
    words = ("record", "--out", str(tmp_path / "trace.jsonl"), "--", *inner)
    process = subprocess.Popen(
        [sys.executable, "-c", RECORD, str(seconds), *words],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    with process.stdout as said:
        return process, int(said.readline())


def is_there(pid: int) -> bool:
    """A zombie that nobody reaps yet has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 60
    while is_there(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not is_there(pid)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_the_command_too(tmp_path: Path, number: signal.Signals) -> None:
    process, command = recording(tmp_path, POLITE)
    process.send_signal(number)
    assert process.wait(60) == 7, "not the command's own code"
    assert gone(command)
    assert (tmp_path / "got").read_text() == str(int(number))


def test_a_command_that_dies_of_it_says_so_as_a_shell_does(tmp_path: Path) -> None:
    process, command = recording(tmp_path, "import os, time; print(os.getpid(), flush=True); time.sleep(100)")
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGTERM
    assert gone(command)


def test_a_command_that_does_not_end_is_killed(tmp_path: Path) -> None:
    process, command = recording(tmp_path, DEAF, seconds=0.3)
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGKILL
    assert gone(command)


def test_a_command_with_a_group_of_its_own_takes_it_along(tmp_path: Path) -> None:
    process, below = recording(tmp_path, GROUP)
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGTERM
    assert gone(below)
