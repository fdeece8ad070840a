"""A good client's lookups while others flood the daemon, beside the same with nobody else there: for suite `daemon`.

python -m benchmarks.suites.daemon_flood SOCKET       a flooder: a kind on standard input begins it, "rest" ends it
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.rows import Options, Row, compared
from kvstore.daemon import protocol
from kvstore.daemon.client import DaemonTier
from kvstore.tier import CopyKey

_FLOODERS = 2
_MOST_TIMES = 3
_STRANGER_UID = 65_534
_NOTE = (
    "p99 of a good client's lookup of 16 hashes, one a millisecond, while two processes send {what} as fast as they "
    "can. The baseline is three times the p99 of the same with nobody else there, in the same run."
)
KINDS = {
    "requests": "lookups of 1,024 hashes",
    "leases": "leases: 64 copies reserved that nobody writes, 512 acquired",
    "unread": "lookups of 1,024 hashes whose answers they never read",
    "connections": "connections that end at once",
    "handshakes": "connections that say Hello and end",
    "silence": "connections that say nothing",
    "garbage": "garbage",
    "oversized": "messages that are longer than any may be",
    "truncated": "messages that end too early",
    "versions": "a Hello of another version",
    "strangers": "connections of a user who is not on the list",
}
"""What can flood; the last one takes root to play."""
_HELLO = protocol.encode(protocol.Hello(1, protocol.MAGIC, protocol.VERSION, "flood"))
_FORM = (bytes(32), 0, "raw", True, (0, 1), (0, 1), b"", 16, 64, 64, "float32")
_SENT_AT_ONCE = {
    "handshakes": _HELLO,
    "garbage": b"\xff" * 5000,
    "oversized": bytes(protocol.LONGEST_BYTES + 1),
    "truncated": _HELLO[:-3],
    "versions": protocol.encode(protocol.Hello(1, protocol.MAGIC, protocol.VERSION + 1, "flood")),
}


class Flooders:
    """Processes that flood a daemon in the way last asked for."""

    def __init__(self, path: str, count: int = _FLOODERS) -> None:
        command = [sys.executable, "-m", "benchmarks.suites.daemon_flood", path]
        root = Path(__file__).parents[2]
        self._processes = [
            subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(count)
        ]

    def say(self, line: str) -> None:
        """A kind, or "rest"; returns when all do it."""
        for one in self._processes:
            assert one.stdin is not None
            one.stdin.write(f"{line}\n")
            one.stdin.flush()
        for one in self._processes:
            assert one.stdout is not None
            if one.stdout.readline() != f"{line}\n":
                raise RuntimeError("a flooder ended; its error is above")

    def close(self) -> None:
        for one in self._processes:
            one.communicate()


def flood_rows(options: Options, path: str, tier: DaemonTier, keys: Sequence[CopyKey]) -> Iterator[Row]:
    """One row a kind of flood."""
    seconds = 0.1 if options.quick else 0.5
    kinds = [kind for kind in KINDS if kind != "strangers" or os.geteuid() == 0]
    flooders = Flooders(path)
    flooders.say("rest")
    tier.pin(keys)  # a flood of leases may evict what may go
    try:
        for kind in kinds:
            flooded, quiet = [], []
            for _ in range(min(5, options.rounds)):
                quiet.append(p99_seconds(tier, keys, seconds))
                flooders.say(kind)
                flooded.append(p99_seconds(tier, keys, seconds))
                flooders.say("rest")
            limit = [1e6 * _MOST_TIMES * statistics.median(quiet)] * len(flooded)
            case, ours = f"flood_of_{kind}_p99_over_3_quiet", [1e6 * one for one in flooded]
            note = _NOTE.format(what=KINDS[kind])
            yield compared("daemon", case, "us", ours, better="smaller", baseline="limit", theirs=limit, note=note)
    finally:
        flooders.close()
        tier.unpin(keys)


def p99_seconds(tier: DaemonTier, keys: Sequence[CopyKey], seconds: float) -> float:
    """Of lookups of these keys, all of which are there."""
    hashes, took, until = [key.hash for key in keys], list[float](), time.monotonic() + seconds
    while time.monotonic() < until:
        started = time.perf_counter()
        found = tier.leading_run(keys[0], hashes)
        took.append(time.perf_counter() - started)
        if found != len(keys):
            raise RuntimeError(f"a lookup found {found} of {len(keys)}: {tier.counters()}")
        time.sleep(0.001)
    return sorted(took)[int(0.99 * len(took))]


def main() -> None:
    path, stop, flood = sys.argv[1], threading.Event(), threading.Thread()
    for line in sys.stdin:
        stop.set()
        if flood.is_alive():
            flood.join()
        kind, stop = line.strip(), threading.Event()
        if kind != "rest":
            flood = threading.Thread(target=_flood, args=(kind, path, stop.is_set), daemon=True)
            flood.start()
        print(kind, flush=True)


def _flood(kind: str, path: str, is_over: Callable[[], bool]) -> None:
    if kind == "strangers":
        os.setresuid(_STRANGER_UID, _STRANGER_UID, 0)
    held: list[socket.socket] = []
    while not is_over():
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.settimeout(1.0)
        try:
            sock.connect(path)
            _misuse(sock, kind, is_over)
            if kind == "silence" and len(held) < 16:
                held.append(sock)
                continue
        except OSError:
            time.sleep(0.001)
        sock.close()
        if len(held) == 16:
            while held:
                held.pop().close()
    if kind == "strangers":
        os.setresuid(0, 0, 0)
    for sock in held:
        sock.close()


def _misuse(sock: socket.socket, kind: str, is_over: Callable[[], bool]) -> None:
    """One connection."""
    if kind in _SENT_AT_ONCE:
        sock.send(_SENT_AT_ONCE[kind])
        sock.recv(protocol.LONGEST_BYTES)
    if kind not in ("requests", "leases", "unread"):
        return
    for message in (_HELLO, protocol.encode(protocol.Form(2, 0, *_FORM))):
        sock.send(message)
        sock.recv(protocol.LONGEST_BYTES)
    lookup = protocol.encode(protocol.Contains(3, 0, bytes(range(32)) * protocol.PAGE_HASHES))
    while not is_over():
        if kind == "unread":
            sock.send(lookup)
            continue
        for packet in [lookup] if kind == "requests" else _leases():
            sock.send(packet)
            if not sock.recv(protocol.LONGEST_BYTES):
                return


def _leases() -> list[bytes]:
    fresh, acquired = os.urandom(64 * protocol.HASH_BYTES), bytes(range(32)) * protocol.PAGE_ITEMS
    return [
        protocol.encode(protocol.Reserve(4, 0, fresh, bytes(64 * protocol.HASH_BYTES), [5000] * 64)),
        protocol.encode(protocol.Acquire(5, 0, acquired, [4096] * protocol.PAGE_ITEMS)),
    ]


if __name__ == "__main__":
    main()
