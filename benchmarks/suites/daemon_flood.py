"""A good client's lookups while others flood the daemon, beside the same with nobody else there: for suite `daemon`.

python -m benchmarks.suites.daemon_flood KIND SOCKET       the flood itself, until its standard input ends
"""

from __future__ import annotations

import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.rows import Options, Row, compared
from kvstore.daemon import protocol
from kvstore.daemon.client import DaemonTier
from kvstore.tier import CopyKey

_FLOODERS = 2
_MOST_TIMES = 3
_NOTE = (
    "p99 of a good client's lookup of 16 hashes, one a millisecond, while two processes send {what} as fast as they "
    "can. The baseline is three times the p99 of the same with nobody else there, in the same run."
)
_KINDS = {"requests": "lookups of 1,024 hashes", "connections": "connections", "garbage": "garbage"}


def flood_rows(options: Options, path: str, tier: DaemonTier, keys: Sequence[CopyKey]) -> Iterator[Row]:
    """One row a kind of flood."""
    seconds = 0.2 if options.quick else 1.0
    for kind, what in _KINDS.items():
        flooded, quiet = [], []
        for _ in range(min(3, options.rounds)):
            quiet.append(_p99(tier, keys, seconds))
            command = [sys.executable, "-m", "benchmarks.suites.daemon_flood", kind, path]
            floods = [
                subprocess.Popen(
                    command, cwd=Path(__file__).parents[2], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
                for _ in range(_FLOODERS)
            ]
            for one in floods:
                assert one.stdout is not None
                one.stdout.readline()
            flooded.append(_p99(tier, keys, seconds))
            for one in floods:
                one.communicate()
        limit = [1e6 * _MOST_TIMES * statistics.median(quiet)] * len(flooded)
        case, ours = f"flood_of_{kind}_p99_over_3_quiet", [1e6 * one for one in flooded]
        note = _NOTE.format(what=what)
        yield compared("daemon", case, "us", ours, better="smaller", baseline="limit", theirs=limit, note=note)


def _p99(tier: DaemonTier, keys: Sequence[CopyKey], seconds: float) -> float:
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
    kind, path = sys.argv[1:]
    stop = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        stop.set()

    threading.Thread(target=wait, daemon=True).start()
    print("flooding", flush=True)
    while not stop.is_set():
        try:
            _flood(kind, path, stop)
        except OSError:
            time.sleep(0.001)


def _flood(kind: str, path: str, stop: threading.Event) -> None:
    """One connection."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(1.0)
        sock.connect(path)
        if kind == "garbage":
            sock.send(b"\xff" * 5000)
            sock.recv(protocol.LONGEST_BYTES)
        if kind != "requests":
            return
        form = (bytes(32), 0, "raw", True, (0, 1), (0, 1), b"", 16, 64, 64, "float32")
        for message in (protocol.Hello(1, protocol.MAGIC, protocol.VERSION, "flood"), protocol.Form(2, 0, *form)):
            sock.send(protocol.encode(message))
            sock.recv(protocol.LONGEST_BYTES)
        packet = protocol.encode(protocol.Contains(3, 0, bytes(range(32)) * protocol.PAGE_HASHES))
        while not stop.is_set():
            sock.send(packet)
            if not sock.recv(protocol.LONGEST_BYTES):
                return


if __name__ == "__main__":
    main()
