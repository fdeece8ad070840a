"""Case 008 over a daemon: after a reset nothing stored before is a hit for any process that is attached, or was."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from allocator.errors import TierError
from kvstore.daemon import Daemon, DaemonTier, protocol
from kvstore.daemon.epochs import DomainEpoch, DomainEpochs
from kvstore.disk_tier.tier import DiskTier
from kvstore.redis_tier.tier import RedisTier
from tests.kvstore.daemon.kit import RawClient, ServeProcess, settings, tier_at, until
from tests.kvstore.disk_kit import program
from tests.kvstore.driving import check_bytes, run_prompt
from tests.servers import Server, shared_server

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator

    from kvstore import KVStore

B = 16
PROMPT = list(range(8 * B + 1))
CLIENT = """
    import sys, time
    from kvstore import Identity, KVStore, KVStoreConfig
    from kvstore.daemon import DaemonTier
    from kvstore.executor import ThreadExecutor
    from kvstore.frame.specs import geometry_specs
    from tests.kvstore.conftest import full_geometry
    from tests.kvstore.driving import check_bytes, run_prompt

    B = 16
    geometry = full_geometry()
    slots = {"device_bytes": 24 * geometry.full_slot_bytes(0), "codec": "raw"}
    config = KVStoreConfig(share=True, load_always=True, fetch_deadline_seconds=10, **slots)
    specs = geometry_specs(geometry)
    tier = DaemonTier(sys.argv[1], ThreadExecutor("daemon"), specs=specs, timeout_seconds=5)  # on a loaded machine, too
    store = KVStore(geometry, Identity(model="toy", weights="w0", geometry=geometry), config, tiers=[tier])
    PROMPT = list(range(8 * B + 1))

    def look():
        hit = store.lookup(PROMPT)
        return hit.tokens, sorted(hit.by_tier)

    def fill():
        ready = run_prompt(store, "s", PROMPT)
        check_bytes(store, "s", PROMPT)
        store.preempt("s")
        until = time.monotonic() + 30
        while store.metrics.get("spilled_blocks", tier="daemon") < 8 and not ready and time.monotonic() < until:
            store.wait(0.02)
            store.step()
        return ready

    print("ready", flush=True)
    for line in sys.stdin:
        try:
            print(eval(line.strip())(), flush=True)
        except Exception as error:
            print(type(error).__name__, error, flush=True)
"""


class Client:
    """A process with a store above the daemon; it answers one call a line."""

    def __init__(self, path: Path) -> None:
        self.process: subprocess.Popen[bytes] = program(CLIENT, str(path))
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().decode().strip()

    def call(self, name: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{name}\n".encode())
        self.process.stdin.flush()
        return self._line()

    @property
    def epoch(self) -> int:
        return int(self.call("lambda: store.identity.epoch"))

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGCONT)
        try:
            self.process.communicate(timeout=20)
        finally:
            self.process.kill()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "d.sock"


def serve(path: Path) -> ServeProcess:
    return ServeProcess(path, "--host-bytes", "8 MiB", "--disk-path", f"{path.parent}/disk", "--disk-bytes", "64 MiB")


MISS = "(0, [])"
RESET = "store.reset"


def test_case_008_a_process_attached_to_the_daemon_misses_at_once(path: Path) -> None:
    server = serve(path)
    with Client(path) as first, Client(path) as second:
        assert first.call("fill") == "0"
        assert second.call("look") == f"({8 * B}, ['daemon'])"
        assert second.call("fill") == str(8 * B), "it is in its device now"
        assert first.call(RESET) == "None"
        assert second.call("look") == MISS, "the first question after the reset, in all tiers"
        assert first.epoch == second.epoch >= 1
        assert second.call("fill") == "0"
        assert first.call("look") == f"({8 * B}, ['daemon'])", "what was stored since is a hit"
    assert server.stop() == (0, "")


def test_case_008_the_epoch_outlives_the_daemon_and_reaches_who_was_away(path: Path) -> None:
    server = serve(path)
    with Client(path) as first, Client(path) as away:
        first.call("fill")
        away.call("fill")
        os.kill(away.process.pid, signal.SIGSTOP)
        assert first.call(RESET) == "None"
        raised = first.epoch
        server.kill()  # the one that was away has not seen it, and this daemon cannot tell it any more
        server = serve(path)
        os.kill(away.process.pid, signal.SIGCONT)
        deadline = time.monotonic() + 120
        while away.epoch != raised:
            assert time.monotonic() < deadline
            assert away.call("look") in (MISS, f"({8 * B}, ['device'])")
        assert away.call("look") == MISS
    with Client(path) as late:
        assert late.epoch == raised >= 1, "kept by the disk"
    assert server.stop() == (0, "")


def test_case_008_a_reset_without_a_daemon_raises_and_is_told_to_the_next_one(path: Path) -> None:
    server = ServeProcess(path, "--host-bytes", "8 MiB")
    with Client(path) as first, Client(path) as second:
        first.call("fill")
        second.call("fill")
        server.kill()
        assert first.call(RESET).startswith("TierError reset did not reach every tier: daemon: tier daemon: the epoch")
        server = ServeProcess(path, "--host-bytes", "8 MiB")
        deadline = time.monotonic() + 120
        while second.call("look") != MISS:
            assert time.monotonic() < deadline
        assert second.epoch == first.epoch >= 1
    assert server.stop() == (0, "")


def test_case_008_a_reset_on_another_host_reaches_the_clients_of_this_one(tmp_path: Path, path: Path) -> None:
    server = shared_server()
    url = server.unix_url + "?namespace=epochdaemon"
    daemon = Daemon(settings(tmp_path), [DiskTier(tmp_path / "disk", 8 << 20), RedisTier(url)])
    daemon.start()
    other_host = RedisTier(url)
    tier = tier_at(path)
    begun = tier.read_epoch()
    assert tier.seen_epoch() == begun > 0
    raised = other_host.raise_epoch(0)  # waits until others can have noticed
    until(lambda: tier.seen_epoch() == raised)
    lowers = daemon.core.lowers
    until(lambda: lowers[0].tier.read_epoch() == raised, what="the disk is told too")
    assert tier.raise_epoch(0) > raised
    until(lambda: other_host.read_epoch() == tier.seen_epoch())
    for one in (tier, other_host):
        one.close()
    daemon.stop()


def test_a_reset_that_a_tier_below_does_not_hear_of_raises(tmp_path: Path, path: Path) -> None:
    with Server() as server:
        remote = RedisTier(server.unix_url)
        daemon = Daemon(settings(tmp_path), [remote])
        daemon.start()
        tier = tier_at(path)
        before = tier.read_epoch()
        server.kill()
        with pytest.raises(TierError, match="did not reach every tier: remote"):
            tier.raise_epoch(0)
        assert tier.seen_epoch() in (None, before + 1), "raised all the same"
        tier.close()
        daemon.stop(0)


def test_another_domains_reset_holds_only_where_nothing_outlives_the_daemon(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path / "disk", 8 << 20)
    epochs = DomainEpochs([disk])
    theirs = epochs.of("team")
    with pytest.raises(TierError, match="only the daemon's own user"):
        theirs.rise(0)
    assert (theirs.value, epochs.of("").value, disk.read_epoch()) == (1, 0, 0)
    assert epochs.of("").rise(7) == disk.read_epoch() == 7
    epochs.close()
    disk.close()
    alone = DomainEpochs([])
    assert (alone.of("team").rise(0), alone.of("").value) == (1, 0)
    alone.close()


def test_an_epoch_never_falls(tmp_path: Path) -> None:
    epoch = DomainEpoch()
    assert [epoch.at_least(one) for one in (5, 3, 6)] == [5, 5, 6]
    assert epoch.rise(2) == 7
    epoch.close()
    daemon = Daemon(settings(tmp_path))
    daemon.start()
    client = RawClient(daemon.settings.socket_path)
    assert client.ask(protocol.Epoch, 1 << 62, False).count == 1 << 62
    assert client.ask(protocol.Epoch, 0, True).cause == protocol.Cause.LOWER
    tier = tier_at(daemon.settings.socket_path)
    assert tier.seen_epoch() == 1 << 62
    tier.close()
    assert client.ask(protocol.Epoch, (1 << 62) + 1, False).cause == protocol.Cause.GARBAGE
    client.close()
    daemon.stop()


def test_a_store_without_a_reset_goes_on_over_a_restart(
    make_store: Callable[..., KVStore], path: Path, control: ServeProcess
) -> None:
    common = {"blocks": 24, "share": True, "load_always": True, "io_threads": "thread"}
    store = make_store(daemon_socket=str(path), **common)
    run_prompt(store, "a", PROMPT)
    store.preempt("a")
    control.kill()
    again = serve(path)
    tier = store.tiers[0]
    assert isinstance(tier, DaemonTier)
    until(lambda: tier.is_up and tier.link.counts["daemon_restarts"])
    assert store.lookup(PROMPT).by_tier == {"device": 8 * B}, "a new daemon alone makes nothing void"
    assert run_prompt(store, "b", PROMPT) == 8 * B
    check_bytes(store, "b", PROMPT)
    store.close()
    assert again.stop() == (0, "")


@pytest.fixture
def control(path: Path) -> Iterator[ServeProcess]:
    server = serve(path)
    yield server
    if server.process.poll() is None:
        server.stop()
