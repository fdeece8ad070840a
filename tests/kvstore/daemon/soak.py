"""`make soak`: eight clients at one daemon, mixed work, one of them killed every second; nothing wrong, nothing left.

    python -m tests.kvstore.daemon.soak --seconds 600

Content is derived from the key, so a wrong byte is seen by whoever reads it. At the end no lease, slot, segment of a
dead client or descriptor may be left, and the daemon's memory must be as it was after a warm-up, within 2 %. A run of
less than five minutes is still filling its tables and is not judged by memory.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from kvstore.daemon import DaemonTier, protocol
from kvstore.executor import ThreadExecutor
from kvstore.testing.transfer_contract import key_of, payload_of
from kvstore.tier import CopyKey, GetItem, PutItem, ResultCode
from tests.kvstore.daemon.kit import ROOT, RawClient, ServeProcess, look_up, until

CLIENTS = 8
_KEYS = 1500
_SIZES = (3000, 20_000, 60_000)
_LEAST_JUDGED_SECONDS = 300
_WARM_UP = 0.4
"""Share of the time after which memory is first looked at: by then the arena, the disk and their queues of copies that
may go are as full as they get."""


def client(path: str, seed: int) -> int:
    """Work until killed or told to stop on standard input; 1 when a byte was wrong."""
    draw = random.Random(seed)
    tier = DaemonTier(path, ThreadExecutor("soak"), timeout_seconds=2, fetch_seconds=1)
    stop: list[str] = []
    import threading

    threading.Thread(target=lambda: stop.append(sys.stdin.readline()), daemon=True).start()
    reading: dict[int, list[tuple[CopyKey, np.ndarray]]] = {}  # type: ignore[type-arg]
    done_count = 0
    while not stop:
        start = draw.randrange(_KEYS)
        keys = [key_of(number) for number in range(start, start + draw.randrange(1, 17))]
        size = [_SIZES[int.from_bytes(key.hash, "big") % 3] for key in keys]
        choice = draw.random()
        if choice < 0.3:
            items = [PutItem(key, [payload_of(key, n)]) for key, n in zip(keys, size, strict=True)]
            transfer = tier.submit_put(items)
        elif choice < 0.6:
            wanted = [(key, np.zeros(n, np.uint8)) for key, n in zip(keys, size, strict=True)]
            transfer = tier.submit_get([GetItem(key, buffer) for key, buffer in wanted])
            reading[transfer.id] = wanted
        elif choice < 0.9:
            look_up(tier, keys)
            transfer = None
        elif choice < 0.95:
            tier.unpin([key for key, held in zip(keys, tier.pin(keys), strict=True) if held])
            transfer = None
        else:
            tier.delete(keys[:1])
            transfer = None
        if transfer is not None and draw.random() < 0.1:
            transfer.cancel()
        while tier.queued_items > 64:
            time.sleep(0.001)
        for done in tier.poll():
            done_count += 1
            for (key, buffer), code in zip(reading.pop(done.transfer.id, []), done.results, strict=False):
                if code is ResultCode.OK and not np.array_equal(buffer, payload_of(key, buffer.nbytes)):
                    print(f"wrong bytes for {key}", flush=True)
                    return 1
    tier.close()
    print(f"done {done_count}", flush=True)
    return 0


def start_client(path: str, seed: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.kvstore.daemon.soak", "--client", path, "--seed", str(seed)]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def soak(seconds: float, *, kill_seconds: float = 1.0, clients: int = CLIENTS) -> dict[str, object]:
    """What came of it; AssertionError when something was wrong or left."""
    with tempfile.TemporaryDirectory(prefix="kvstore-soak-") as folder:
        path = Path(folder) / "d.sock"
        arguments = ("--host-bytes", "24 MiB", "--disk-path", f"{folder}/disk", "--disk-bytes", "256 MiB")
        server = ServeProcess(path, *arguments)
        draw, seed, kills = random.Random(1), clients, 0
        running = [start_client(str(path), n) for n in range(clients)]
        begun, warm_rss, rss_series = time.monotonic(), 0, list[int]()
        quiet_fds = server.descriptors()
        try:
            while time.monotonic() - begun < seconds:
                time.sleep(kill_seconds)
                place = draw.randrange(clients)
                victim = running[place]
                ended = victim.poll()
                assert ended is None, f"a client ended by itself: {victim.communicate()[0]}"
                victim.kill()
                victim.communicate()
                kills, seed = kills + 1, seed + 1
                running[place] = start_client(str(path), seed)
                rss_series.append(server.rss_bytes() >> 10)
                if not warm_rss and time.monotonic() - begun > _WARM_UP * seconds:
                    warm_rss = server.rss_bytes()
            end_rss = server.rss_bytes()  # with as many clients as there were then
            transfers = finish(running)
            report = check_nothing_left(path, server, quiet_fds)
        finally:
            for one in running:
                one.kill()
                one.communicate()
            code, errors = server.stop()
        assert (code, errors) == (0, ""), errors
        growth = end_rss / warm_rss - 1
        return (
            report
            | {"kills": kills, "transfers_of_the_last": transfers, "rss_growth": round(growth, 4)}
            | {"series": rss_series}
        )


def finish(running: list[subprocess.Popen[str]]) -> int:
    """End the clients that live; how many transfers they saw end."""
    total = 0
    for one in running:
        said, _ = one.communicate("stop\n", timeout=60)
        assert one.returncode == 0, said
        total += int(said.split()[-1])
    return total


def check_nothing_left(path: Path, server: ServeProcess, quiet_fds: int) -> dict[str, object]:
    """Everything that can be deleted is deleted: what is used then was leaked."""
    probe = RawClient(str(path))
    probe.form()
    for at in range(0, _KEYS + 64, 500):
        probe.ask(protocol.Delete, 0, b"".join(key_of(n).hash for n in range(at, at + 500)))
    until(lambda: probe.ask(protocol.Ping).used_bytes == 0, 10, "slots are left that nobody holds")
    segments = len(probe.ask(protocol.Ping).live)
    probe.close()
    until(lambda: server.descriptors() <= quiet_fds + 2 * segments + 8, 10, "descriptors are left")
    return {"descriptors": server.descriptors(), "quiet_descriptors": quiet_fds, "segments": segments}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--client", metavar="SOCKET")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    if asked.client:
        return client(asked.client, asked.seed)
    report = soak(asked.seconds)
    print(json.dumps(report))
    if asked.seconds >= _LEAST_JUDGED_SECONDS and abs(float(str(report["rss_growth"]))) > 0.02:
        print("the daemon's memory is not flat within 2 %", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
