"""`kvstore top` in a real terminal: it updates, fits a new size, outlives the daemon and gives the terminal back."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

from kvstore.testing.transfer_contract import key_of
from kvstore.tier import ResultCode
from tests.kvstore.daemon.http_kit import served
from tests.kvstore.daemon.kit import ROOT, put, tier_at

_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]")
# A session's first terminal is the one that Ctrl-C comes from; tests that run in the background ignore that signal.
_IN_TERMINAL = 'exec env --default-signal=INT "$@" < "$0" > "$0" 2>&1'
ALTERNATE_ON, ALTERNATE_OFF, CURSOR_ON = "\x1b[?1049h", "\x1b[?1049l", "\x1b[?25h"


class Terminal:
    """A program in a pseudo-terminal of a size."""

    def __init__(self, *arguments: str, rows: int = 40, columns: int = 110) -> None:
        self.fd, inner = pty.openpty()
        self.resize(rows, columns)
        self.before = termios.tcgetattr(inner)
        self.process = subprocess.Popen(
            ["/bin/sh", "-c", _IN_TERMINAL, os.ttyname(inner), sys.executable, "-m", "kvstore.cli", *arguments],
            cwd=ROOT, stdin=inner, stdout=inner, stderr=inner, start_new_session=True,
            env=dict(os.environ) | {"TERM": "xterm-256color", "COLUMNS": "", "LINES": ""},
        )  # fmt: skip
        self.inner = inner
        self.poll = select.poll()  # select() knows no descriptor above 1023
        self.poll.register(self.fd, select.POLLIN)
        self.raw = ""

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))

    def read(self) -> None:
        while self.poll.poll(50):
            self.raw += os.read(self.fd, 1 << 16).decode("utf-8", "replace")

    def shows(self, *words: str, since: int = 0, seconds: float = 60) -> str:
        """Waits until what was drawn since then has all of them."""
        ends = time.monotonic() + seconds
        while True:
            self.read()
            text = _ESCAPE.sub("", self.raw[since:])
            if all(word in text for word in words):
                return text
            assert time.monotonic() < ends, (words, text[-3000:])
            assert self.process.poll() is None, text[-3000:]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.fd)
        os.close(self.inner)


def test_top_lives_through_new_figures_a_new_size_and_a_dead_daemon(tmp_path: Path) -> None:
    with served(tmp_path) as (daemon, web):
        tier = tier_at(daemon.settings.socket_path)
        terminal = Terminal("top", "--url", web.url, "--seconds", "0.2")
        port = web.url.rpartition(":")[2].strip("/")
        try:
            terminal.shows("ready", "1 clients")
            assert ALTERNATE_ON in terminal.raw
            assert put(tier, [key_of(n) for n in range(64)]) == [ResultCode.OK] * 64
            tier.leading_run(key_of(0), [key_of(n).hash for n in range(64)])
            terminal.shows("hits 100.0 %", "raw 27", since=len(terminal.raw))
            terminal.resize(24, 60)
            os.kill(terminal.process.pid, signal.SIGWINCH)
            time.sleep(0.5)
            mark = len(terminal.raw)
            text = terminal.shows("ready", "╯", since=mark)
            frame = max(re.findall(r"╭[^\r\n]*╮", text), key=len)
            assert len(frame) == 60, frame
        finally:
            tier.close()
            if terminal.process.poll() is not None:
                terminal.close()
    mark = len(terminal.raw)
    try:
        terminal.shows("no answer", since=mark)
        with served(tmp_path, http=port):
            terminal.shows("hits - since start", since=len(terminal.raw))
            os.write(terminal.fd, b"\x03")  # Ctrl-C
            terminal.process.wait(30)
        terminal.read()
        assert terminal.process.returncode == 0
        assert terminal.raw.count(ALTERNATE_OFF) == 1
        assert (
            terminal.raw.rstrip().endswith(CURSOR_ON)
            or CURSOR_ON in terminal.raw[terminal.raw.index(ALTERNATE_OFF) - 30 :]
        )
        assert termios.tcgetattr(terminal.inner) == terminal.before
    finally:
        terminal.close()
