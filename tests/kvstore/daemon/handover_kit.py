"""A small service manager for tests: keeps what daemons hand over, as systemd does, and gives it to the next one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from kvstore.daemon import Daemon, DaemonSettings
from kvstore.daemon.notify import MOST_MESSAGE_BYTES, MOST_MESSAGE_FDS, NotifySocket
from kvstore.tier import Tier
from tests.kvstore.daemon.kit import ROOT, ServeProcess, until


class FdStore:
    """Listens at a real notify socket and takes descriptors by SCM_RIGHTS."""

    def __init__(self, directory: Path) -> None:
        self.path = str(directory / "notify.sock")
        self.kept: dict[str, list[int]] = {}
        self.said: list[str] = []
        self._lock = threading.Lock()
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.bind(self.path)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while True:
            message, descriptors, _, _ = socket.recv_fds(self._sock, MOST_MESSAGE_BYTES, MOST_MESSAGE_FDS)
            if message == b"end":
                return
            fields = dict(line.partition("=")[::2] for line in message.decode().splitlines())
            with self._lock:
                if fields.get("FDSTORE") == "1":
                    assert fields["FDPOLL"] == "0"
                    self.kept.setdefault(fields["FDNAME"], []).extend(descriptors)
                elif fields.get("FDSTOREREMOVE") == "1":
                    for descriptor in self.kept.pop(fields["FDNAME"], []):
                        os.close(descriptor)
                else:
                    self.said.append(message.decode())

    def given(self) -> dict[str, list[int]]:
        """Duplicates, as a started process gets them. What was sent before has arrived."""
        NotifySocket(self.path).tell("BARRIER")
        until(lambda: "BARRIER" in self.said)
        with self._lock:
            self.said.clear()
            return {name: [os.dup(one) for one in some] for name, some in self.kept.items()}

    def daemon(self, settings: DaemonSettings, lowers: list[Tier] | None = None) -> Daemon:
        """One that hands over to this and begins with what this has; started."""
        daemon = Daemon(settings, lowers, notify=NotifySocket(self.path), found=self.given())
        daemon.start()
        return daemon

    def close(self) -> None:
        NotifySocket(self.path).tell("end")
        self._thread.join()
        self._sock.close()
        for some in self.kept.values():
            for descriptor in some:
                os.close(descriptor)


def taken_over(daemon: Daemon) -> dict[str, Any]:
    report = daemon.stats()["handover"]
    assert isinstance(report, dict)
    return report


BECOME = (
    "import os, sys; from kvstore.daemon.keeper import become\n"
    "names = [one for one in sys.argv[1].split(',') if one]\n"
    "named = [(name, int(fd)) for name, _, fd in (one.partition('=') for one in names)]\n"
    "become(sys.argv[2:], dict(os.environ), named)"
)


class StoredProcess(ServeProcess):
    """`kvstore serve` as a service manager would start it."""

    def __init__(self, store: FdStore, socket_path: Path, *arguments: str) -> None:
        given = store.given()
        named = ",".join(f"{name}={one}" for name, some in given.items() for one in some)
        descriptors = [one for some in given.values() for one in some]
        serve = [sys.executable, "-m", "kvstore.cli", "serve", "--socket", str(socket_path), *arguments]
        self.process = subprocess.Popen(
            [sys.executable, "-c", BECOME, named, *serve],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=dict(os.environ) | {"NOTIFY_SOCKET": store.path},
            pass_fds=descriptors,
        )
        for descriptor in descriptors:
            os.close(descriptor)
        assert self.process.stdout is not None
        self.lines = [self.process.stdout.readline()]
        while "ready on" not in self.lines[-1]:
            assert self.lines[-1], (self.lines, self.process.communicate(timeout=10))
            self.lines.append(self.process.stdout.readline())
