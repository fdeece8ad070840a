"""`kvstore top` in a real terminal: it updates, fits a new size, outlives the daemon and gives the terminal back."""

from __future__ import annotations

import fcntl
import io
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

import pytest
from rich.console import Console

from kvstore.cli.top import drawn
from kvstore.testing.transfer_contract import key_of
from kvstore.tier import ResultCode
from tests.kvstore.daemon.http_kit import served
from tests.kvstore.daemon.kit import ROOT, look_up, put, tier_at

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
            look_up(tier, [key_of(n) for n in range(64)])
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
            terminal.shows("no lookups yet", since=len(terminal.raw))
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


STATS = {
    "ready": True, "time_seconds": 1.0, "budget": {"limit_bytes": 128 << 30},
    "pid": 1234567, "uptime_seconds": 86400.0 * 30, "connections": 64, "counts": {}, "arenas": {},
    "lookups": {
        "lookups": 10**7, "asked_blocks": 10**9, "hit_blocks": {"host": 6 * 10**8}, "reused_tokens": 10**10,
        "stored_bytes": 0, "read_bytes": 0,
        "missed_blocks": {"never_stored": 3 * 10**8, "evicted": 10**8}, "saved_prefill_seconds": 123456.7,
    },
    "leases": {"quarantined_slots": 0},
    "tiers": {
        "host": {"state": "ok", "used_bytes": 100 << 30, "capacity_bytes": 128 << 30},
        **{
            name: {
                "state": state, "used_bytes": 900 << 30, "capacity_bytes": 999 << 30,
                "queues": {"spill": 999, "fetch": 99},
                "counts": {"spilled_bytes": 999 << 30, "fetched_bytes": 888 << 30, "spills_dropped": 123456},
            }
            for name, state in (("disk", "ok"), ("remote", "dropped"))
        },
    },
    "tenants": {f"tenant-{n:02}-" + "x" * 53: {"used_bytes": 100 << 20, "quota_bytes": 1 << 30, "counts": {}}
                for n in range(20)},
    "prefixes": [{"root": "ab" * 6, "block": "cd" * 6, "tenant": "t" * 64, "lookups": 123456, "hit_blocks": 1234567,
                  "longest_tokens": 131072} for _ in range(20)],
    "pins": [{"name": "p" * 64, "domain": "", "root": "ab" * 6, "block": "cd" * 6, "copies": 12345,
              "pinned_bytes": 10 << 30, "seconds_left": 86399.0} for _ in range(5)],
}  # fmt: skip


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (120, 40), (80, 60), (60, 24)])
def test_every_figure_is_whole_in_a_small_terminal(columns: int, rows: int) -> None:
    """Found by an operator: at 80 columns heads and figures were cut to a few letters, and what was below the last line
    was missing without a word."""
    console = Console(width=columns, height=rows, file=io.StringIO(), force_terminal=True, color_system=None)
    console.set_alt_screen(True)
    lines = console.render_lines(drawn(STATS, []), pad=False)
    shown = ["".join(part.text for part in line).rstrip() for line in lines]
    assert len(shown) <= rows, "more than the terminal has"
    assert max(map(len, shown)) <= columns
    text = "\n".join(shown)
    names = re.compile(r"(tenant-\d\d-x*|t+|p+)…")  # they alone give way
    assert "…" not in names.sub("", text), text
    assert all(word in text for word in ("remote", "dropped", "999/99", "123456", "100 GiB", "131072 tokens"))
    assert re.search(r"tenant \+\d+", text)
    if columns >= 80:
        assert "999 GiB/888 GiB" in text
