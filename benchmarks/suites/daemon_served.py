"""What the suites of the daemon share: one that runs meanwhile, and a timed transfer."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.rows import Stopwatch
from kvstore.tier import GetItem, PutItem, ResultCode, Tier

ROOT = Path(__file__).resolve().parents[2]
Bytes = npt.NDArray[np.uint8]


class Served:
    """`kvstore serve` while the suite runs."""

    def __init__(self, host_bytes: int, **settings: str) -> None:
        """settings: of the daemon's own table."""
        self.folder = tempfile.TemporaryDirectory(prefix="kvstore-bench-")
        self.path = f"{self.folder.name}/daemon.sock"
        command = [sys.executable, "-m", "kvstore.cli", "serve", "--socket", self.path, "--host-bytes", str(host_bytes)]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
        kept |= {f"KVSTORE_DAEMON_{name.upper()}": value for name, value in settings.items()}
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=kept)
        assert self.process.stdout is not None
        if "ready" not in self.process.stdout.readline():
            raise RuntimeError("kvstore serve did not start; its error is above")
        before = -1.0
        while (used := self._cpu_seconds()) > before + 0.02:  # it reserves its memory, at low priority
            before = used
            time.sleep(0.2)

    def _cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.folder.cleanup()

    def on_core(self, core: int | None) -> None:
        """Every thread of the daemon on one core, or on all."""
        cores = {core} if core is not None else os.sched_getaffinity(0)
        for thread in os.listdir(f"/proc/{self.process.pid}/task"):
            os.sched_setaffinity(int(thread), cores)


def moved(tier: Tier, items: Sequence[PutItem] | Sequence[GetItem]) -> float:
    """Seconds of one transfer, which must succeed whole."""
    submit = tier.submit_put if isinstance(items[0], PutItem) else tier.submit_get
    watch = Stopwatch()
    with watch:
        submit(items)
        (done,) = tier.poll()
    if set(done.results) != {ResultCode.OK}:
        raise RuntimeError(f"a transfer ended as {sorted(set(done.results))}: {tier.counters()}")
    return watch.seconds


def cut(memory: Bytes, size: int) -> list[Bytes]:
    return [memory[at : at + size] for at in range(0, memory.nbytes, size)]
