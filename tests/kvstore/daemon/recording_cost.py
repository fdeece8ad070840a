"""What the daemon's recorder costs: processor time of the daemon for a flood of lookups of 16 blocks, recorded and not.

    python -m tests.kvstore.daemon.recording_cost

One daemon in a process of its own, whose recorder is taken away and given back in turn, so that what else differs
between processes or from minute to minute differs for both. A lookup is a question (`Run`) and what became of
it (`Looked`).
Both times are the process's own, all of its threads, up to when nothing waits for the writer any more.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from kvstore.config import KVStoreConfig
from kvstore.daemon import Daemon, DaemonSettings, protocol
from kvstore.daemon.protocol import HASH_BYTES
from kvstore.trace_recorder import FILE_VARIABLE
from tests.kvstore.daemon.kit import RawClient

HASHES, LOOKUPS, ROUNDS = 16, 4000, 40


def serve(socket_path: str) -> None:
    """Until standard input ends. A line there says whether to record, and is answered when that holds."""
    settings = DaemonSettings(
        store=KVStoreConfig(host_bytes=4 << 20), socket_path=socket_path, requests_per_second=10**7
    )
    gc.set_threshold(100, 5, 1 << 30)  # as `kvstore serve` does
    daemon = Daemon(settings, [])
    daemon.start()
    recording = daemon.core.recording
    assert recording is not None
    for line in sys.stdin:
        daemon.core.recording = recording if line == "on\n" else None
        while len(recording._waiting):
            time.sleep(0.001)
        time.sleep(0.02)
        print(time.process_time(), recording.dropped_messages, flush=True)
    daemon.core.recording = recording
    daemon.stop()


def flood(client: RawClient, name: bytes, is_told: bool) -> None:
    hashes = b"".join((name + bytes([place])).ljust(HASH_BYTES, b".") for place in range(HASHES))
    prompt, outcomes = hashes[:HASH_BYTES], bytes(HASHES)
    for _ in range(LOOKUPS):
        client.tell(protocol.Looked, 0, prompt, 0, hashes, outcomes, (), HASHES)
        if is_told:
            client.ask(protocol.Run, 0, hashes)
    client.ask(protocol.Run, 0, hashes)


def measure(rounds: int = ROUNDS) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path, trace = f"{folder}/d.sock", Path(folder) / "trace.jsonl"
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.kvstore.daemon.recording_cost", path],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {FILE_VARIABLE: str(trace)},
        )  # fmt: skip
        orders, answers = process.stdin, process.stdout
        assert orders is not None
        assert answers is not None

        def turned(word: str) -> tuple[float, int]:
            print(word, file=orders, flush=True)
            seconds, dropped = answers.readline().split()
            return float(seconds), int(dropped)

        turned("off")
        client = RawClient(path)
        client.form()
        for is_told in (True, False):
            spent: dict[str, list[float]] = {"on": [], "off": []}
            for turn in range(rounds + 1):
                for word in ("on", "off") if turn % 2 else ("off", "on"):
                    began, _ = turned(word)
                    flood(client, os.urandom(8), is_told)
                    ended, dropped = turned(word)
                    if turn:
                        spent[word].append(1e6 * (ended - began) / LOOKUPS)
            off, on = median(spent["off"]), median(spent["on"])
            more = median(a - b for a, b in zip(spent["on"], spent["off"], strict=True))
            what = "asked and told" if is_told else "told alone"
            print(f"{what}: {off:.2f} us of the daemon's processor time a lookup, {on:.2f} recorded;", end=" ")
            print(f"in pairs {more:+.2f} us, {100 * more / off:+.1f} %; {dropped} dropped", flush=True)
        client.close()
        orders.close()
        process.wait(60)
        print(f"{sum(1 for _ in trace.open('rb')) - 1} lines")


if __name__ == "__main__":
    serve(sys.argv[1]) if len(sys.argv) > 1 else measure()
