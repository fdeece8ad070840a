"""Case 008 over what processes share: after a reset nothing stored before is a hit for anybody, in any tier."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import pytest

from allocator import TierError
from kvstore import Identity
from kvstore.disk_tier.tier import DiskTier
from kvstore.redis_tier.frames import KeyNames
from kvstore.redis_tier.tier import RedisTier
from tests.kvstore.conftest import full_geometry
from tests.kvstore.disk_kit import program
from tests.kvstore.driving import run_prompt
from tests.servers import Server, shared_server
from tests.stopwatch import Stopwatch

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable
    from pathlib import Path

    from kvstore import KVStore

B = 16
PROMPT = list(range(8 * B + 1))
OTHER_PROCESS = """
    import json, sys, time
    from kvstore import Identity, KVStore, KVStoreConfig
    from tests.kvstore.conftest import full_geometry
    from tests.kvstore.driving import check_bytes, run_prompt

    B = 16
    geometry = full_geometry()
    config = KVStoreConfig.from_mapping(json.loads(sys.argv[1]))
    store = KVStore(geometry, Identity(model="toy", weights="w0", geometry=geometry), config)
    PROMPT = list(range(8 * B + 1))

    def look():
        while (hit := store.lookup(PROMPT)).pending:
            time.sleep(0.001)
        return hit.tokens

    def fill():
        ready = run_prompt(store, "s", PROMPT)
        check_bytes(store, "s", PROMPT)
        store.preempt("s")
        for _ in range(100):
            store.wait(0.02)
            store.step()
        return ready

    def look_at_once():  # not a moment after the reset, and without asking again
        return store.lookup(PROMPT).tokens

    print("ready", flush=True)
    for line in sys.stdin:
        print(eval(line.strip())(), flush=True)
"""


class Other:
    """A second process with a store; it answers one call a line."""

    def __init__(self, **settings: object) -> None:
        slot = full_geometry().full_slot_bytes(0)
        config = {"device_bytes": 24 * slot, "codec": "raw", "share": True, "load_always": True, **settings}
        self.process: subprocess.Popen[bytes] = program(OTHER_PROCESS, json.dumps(config))
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().decode().strip()

    def call(self, name: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{name}\n".encode())
        self.process.stdin.flush()
        return self._line()

    def __enter__(self) -> Other:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.process.communicate(timeout=20)
        finally:
            self.process.kill()


def test_case_008_a_process_attached_before_a_reset_misses_in_all_tiers_from_then_on(
    make_store: Callable[..., KVStore], tmp_path: Path
) -> None:
    url = shared_server().unix_url + "?namespace=epoch008"
    slot = full_geometry().full_slot_bytes(0)
    shared = {"redis_url": url, "share": True, "load_always": True, "io_threads": "thread"}
    lower = {"host_bytes": 24 * slot, "disk_path": str(tmp_path / "other"), "disk_bytes": "8 MiB"}
    first = make_store(blocks=24, **shared)
    run_prompt(first, "a", PROMPT)
    first.preempt("a")
    while first.metrics.get("spilled_blocks", tier="remote") < 8:
        first.wait(0.05)
        first.step()
    with Other(redis_url=url, **lower) as other:
        assert other.call("fill") == str(8 * B), "from the server; on its device from now on"
        for tier in (0, 1):
            assert other.call(f"lambda: store.metrics.get('spilled_blocks', tier=store.tiers[{tier}].name)") == "8"
        assert other.call("look") == str(8 * B)
        first.reset()
        assert other.call("look_at_once") == "0"
        assert other.call("look") == "0"
        epoch = first.identity.epoch
        assert other.call("lambda: store.identity.epoch") == str(epoch)
        assert other.call("fill") == "0"
        assert other.call("look") == str(8 * B), "what was stored since is a hit"
    again = make_store(blocks=24, disk_path=lower["disk_path"], disk_bytes="8 MiB", share=True, load_always=True)
    assert again.identity.epoch == epoch, "its disk remembers, also without the server"


def test_case_008_the_control_without_a_reset_hits(make_store: Callable[..., KVStore]) -> None:
    url = shared_server().unix_url + "?namespace=epochcontrol"
    with Other(redis_url=url) as other:
        assert other.call("fill") == "0"
        time.sleep(1.2)  # longer than an epoch counts: it has to be read again, and is the same
        assert other.call("look") == str(8 * B)


def test_case_008_a_directory_opened_again_remembers_the_reset(
    make_store: Callable[..., KVStore], tmp_path: Path
) -> None:
    settings = {"disk_path": str(tmp_path), "disk_bytes": "8 MiB", "share": True, "load_always": True}
    with Other(**settings) as other:
        other.call("fill")
        other.call("fill")
    store = make_store(blocks=24, **settings)
    assert store.lookup(PROMPT).tokens == 8 * B
    chain = store.prepare(PROMPT)
    store.reset()
    store.close()
    with Other(**settings) as other:  # same identity, epoch 0, as before
        assert other.call("lambda: store.identity.epoch") == "1"
        assert other.call("look") == "0"
        assert other.call("fill") == "0"
    last = make_store(blocks=24, **settings)
    assert last.lookup(PROMPT).tokens == 8 * B
    assert last.lookup_hashes(chain.root, chain.hashes, len(PROMPT)).tokens == 0
    last.close()
    tier = DiskTier(tmp_path, 8 << 20)
    assert tier.raise_epoch(0) == 2
    tier.close()


def test_tiers_that_lag_are_told_at_start(make_store: Callable[..., KVStore], tmp_path: Path) -> None:
    url = shared_server().unix_url + "?namespace=epochlag"
    settings = {"disk_path": str(tmp_path), "disk_bytes": "8 MiB", "share": True}
    store = make_store(blocks=8, redis_url=url, **settings)
    epoch = store.identity.epoch
    assert epoch > 0, "of the namespace"
    store.close()
    assert make_store(blocks=8, **settings).identity.epoch == epoch
    ahead = Identity(model="toy", weights="w0", geometry=full_geometry(), epoch=epoch + (1 << 50))
    assert make_store(blocks=8, redis_url=url, identity=ahead).identity.epoch >= ahead.epoch
    assert make_store(blocks=8, redis_url=url).identity.epoch >= ahead.epoch


def test_a_store_that_starts_while_the_server_is_away_takes_its_epoch_up_later(
    make_store: Callable[..., KVStore],
) -> None:
    with Server() as server:
        url = server.unix_url
        epoch = make_store(blocks=8, redis_url=url).identity.epoch
        server.kill()
        store = make_store(blocks=24, redis_url=url, io_threads="thread", load_always=True)
        assert store.identity.epoch == 0
        run_prompt(store, "early", PROMPT)
        server.start()
        server.command("SET", "kv1:epoch", epoch)
        deadline = time.monotonic() + 10
        while store.identity.epoch != epoch:
            assert time.monotonic() < deadline
            store.step()
            time.sleep(0.01)
        assert store.lookup(PROMPT).tokens == 0
        store.finish("early")


def test_an_epoch_that_was_lost_does_not_fall_behind_what_is_in_use() -> None:
    server, namespace = shared_server(), "?namespace=epochlost"
    tier = RedisTier(server.unix_url + namespace)
    epoch = tier.read_epoch()
    server.command("SET", "epochlost:epoch", 5)
    assert tier.read_epoch() > epoch
    assert int(server.command("GET", "epochlost:epoch")) > epoch
    tier.close()


def test_a_reset_without_the_server_raises_and_does_not_wait_for_others(make_store: Callable[..., KVStore]) -> None:
    with Server() as server:
        store = make_store(blocks=24, redis_url=server.unix_url, load_always=True, host_blocks=24)
        run_prompt(store, "a", PROMPT)
        before = store.identity.epoch
        server.kill()
        with Stopwatch() as watch, pytest.raises(TierError, match="remote"):
            store.reset()
        assert watch.seconds < 0.9, "others are given a second to notice, where there is a server to notice it at"
        assert store.identity.epoch > before
        assert store.lookup(PROMPT).tokens == 0


def test_an_operator_sees_what_a_root_is(make_store: Callable[..., KVStore]) -> None:
    server = shared_server()
    store = make_store(blocks=24, redis_url=server.unix_url + "?namespace=words", load_always=True)
    other = Identity(model="toy", weights=b"\x01\x02", geometry=full_geometry(), tenant="acme", adapter="law")
    for name, identity in (("own", None), ("other", other)):
        run_prompt(store, name, PROMPT, identity=identity)
        store.preempt(name)
        store.step()
    names = KeyNames("words")

    def words(root: bytes) -> object:
        found = server.command("GET", names.root(root))
        return found if found is None else json.loads(found)

    epoch = str(store.identity.epoch)
    assert words(store.identity.root()) == {"model": "toy", "weights": "w0", "epoch": epoch}
    root = store.prepare(PROMPT, identity=other).root
    assert words(root) == {"model": "toy", "weights": "0102", "tenant": "acme", "adapter": "law", "epoch": epoch}
    assert server.command("PTTL", names.root(root)) > 0
