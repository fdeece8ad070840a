"""What the daemon's tests share: daemons in this process and in their own, tiers, raw connections."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.config import KVStoreConfig
from kvstore.daemon import Daemon, DaemonSettings, DaemonTier, protocol
from kvstore.daemon.pace import Pace
from kvstore.daemon.session import Session
from kvstore.testing.transfer_contract import key_of, payload_of
from kvstore.tier import CopyKey, GetItem, Lookup, PutItem, ResultCode

ROOT = Path(__file__).resolve().parents[3]
PAYLOAD_BYTES = 4096
CEILING_SECONDS = 60.0


def settings(directory: Path, host_bytes: int = 4 << 20, **changes: Any) -> DaemonSettings:
    """All that is stored is written below, unless spill_policy says otherwise."""
    changes.setdefault("socket_path", str(directory / "d.sock"))
    store = KVStoreConfig(host_bytes=host_bytes, spill_policy=changes.pop("spill_policy", "everything"))
    return DaemonSettings(store=store, **changes)


def tier_at(path: str | Path, *arguments: Any, **changes: Any) -> DaemonTier:
    """A client that waits for an answer as long as a loaded machine takes: past its usual deadline a put FAILs."""
    return DaemonTier(str(path), *arguments, **{"timeout_seconds": 30} | changes)


@contextmanager
def checked_daemon(settings: DaemonSettings) -> Iterator[Daemon]:
    """In this process; at its end the arenas' rules must hold."""
    daemon = Daemon(settings)
    daemon.start()
    yield daemon
    daemon.stop()
    for arena in daemon.core.arenas.values():
        arena.check()


def look_up(tier: DaemonTier, keys: Sequence[CopyKey]) -> int:
    """As an engine does: ask, and say what it goes by; returns when the daemon has counted it."""
    hashes = [key.hash for key in keys]
    found = tier.leading_run(keys[0], hashes)
    copies = dict(enumerate(keys[:found]))
    tier.note_lookup(Lookup(keys[0], hashes, copies, range(found, len(keys)), len(keys)))
    if found:
        tier.note_reuse(keys[0], found)
    _ = tier.used_bytes
    return found


def counts(daemon: Daemon) -> dict[str, int]:
    return daemon.stats()["counts"]  # type: ignore[no-any-return]


def put(tier: DaemonTier, keys: Sequence[CopyKey], size: int = PAYLOAD_BYTES) -> list[ResultCode]:
    """Store each key's own payload; for tiers with an inline executor."""
    tier.submit_put([PutItem(key, [payload_of(key, size)]) for key in keys])
    return list(tier.poll()[-1].results)


def get(tier: DaemonTier, keys: Sequence[CopyKey], size: int = PAYLOAD_BYTES) -> list[ResultCode]:
    """Read; an OK with other bytes than the key's fails here."""
    buffers = [np.zeros(size, np.uint8) for _ in keys]
    tier.submit_get([GetItem(key, buffer) for key, buffer in zip(keys, buffers, strict=True)])
    results = list(tier.poll()[-1].results)
    for key, buffer, code in zip(keys, buffers, results, strict=True):
        assert code is not ResultCode.OK or np.array_equal(buffer, payload_of(key, size)), f"wrong bytes for {key}"
    return results


def until(condition: Callable[[], object], seconds: float = CEILING_SECONDS, what: str = "") -> float:
    """Seconds until it holds; fails when it does not in time. The ceiling is for machines that are busy elsewhere."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, f"not within {seconds} s: {what or condition}"
        time.sleep(0.002)
    return time.monotonic() - started


class ServeProcess:
    """`kvstore serve` in a process of its own; all that is stored is written below, unless `environ` says otherwise."""

    def __init__(
        self,
        socket_path: Path,
        *arguments: str,
        wait: bool = True,
        environ: dict[str, str] | None = None,
        under: Sequence[str] = (),
    ) -> None:
        """under: a command that runs it."""
        command = [*under, sys.executable, "-m", "kvstore.cli", "serve", "--socket", str(socket_path), *arguments]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
        kept["KVSTORE_SPILL_POLICY"] = "everything"
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=kept | (environ or {})
        )
        if wait:
            assert self.process.stdout is not None
            line = self.process.stdout.readline()
            assert "ready on" in line, (line, self.process.communicate(timeout=10))

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self._close()

    def stop(self) -> tuple[int, str]:
        """Exit code and standard error of a graceful stop."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        _, errors = self.process.communicate(timeout=30)
        return self.process.returncode, errors

    def rss_bytes(self) -> int:
        """Of its own; the shared memory and the files that it maps are budgeted elsewhere."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("RssAnon:")).split()[1]) << 10

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def _close(self) -> None:
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


class RawClient:
    """A connection that may say anything."""

    def __init__(
        self, path: str, *, hello: bool = True, timeout: float = CEILING_SECONDS, sock: socket.socket | None = None
    ) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) if sock is None else sock
        self.sock.settimeout(timeout)
        if sock is None:
            self.sock.connect(path)
        self.seq = 0
        self.welcome = self.ask(protocol.Hello, protocol.MAGIC, protocol.VERSION, "raw") if hello else None

    @classmethod
    def beside(cls, daemon: Daemon, *, hello: bool = True, uid: int | None = None) -> RawClient:
        """A session without the listening socket and its limits. uid: whose, by default our own."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        session = Session(daemon.core, theirs, os.geteuid() if uid is None else uid, os.getpid(), -1, Pace(1e9))
        threading.Thread(target=session.serve, daemon=True).start()
        return cls("", hello=hello, sock=ours)

    def ask(self, kind: type[protocol.Request], *fields: Any) -> Any:
        self.seq += 1
        self.sock.send(protocol.encode(kind(self.seq, *fields)))
        return self.answer()

    def tell(self, kind: type[protocol.Request], *fields: Any) -> None:
        self.seq += 1
        self.sock.send(protocol.encode(kind(self.seq, *fields)))

    def answer(self) -> Any:
        """The next answer; None at the end of the connection."""
        try:
            packet = self.sock.recv(protocol.LONGEST_BYTES)
        except ConnectionResetError:
            return None
        return protocol.decode_answer(packet) if packet else None

    def form(self, number: int = 0, key: CopyKey | None = None) -> Any:
        key = key_of(0) if key is None else key
        fields = (key.root, key.group, key.codec, key.exact, key.heads, key.layers, key.parameters)
        return self.ask(protocol.Form, number, *fields, 1, 1, 0, "bytes", "")

    def reserve(self, keys: Sequence[CopyKey], frame_bytes: int = 5000) -> list[tuple[Any, ...]]:
        hashes = b"".join(key.hash for key in keys)
        parents = b"".join(key.root for key in keys)
        answer = self.ask(protocol.Reserve, 0, hashes, parents, [frame_bytes] * len(keys))
        return list(protocol.PLACE.iter_unpack(answer.places))

    def close(self) -> None:
        self.sock.close()
