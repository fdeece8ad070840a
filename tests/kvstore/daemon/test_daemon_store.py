"""Whole stores over a daemon: what one computed another reads, through deaths, and from the disk without a daemon."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from allocator.errors import TierError
from kvstore import Identity
from kvstore.daemon import DaemonTier
from kvstore.executor import ThreadExecutor
from kvstore.frame.specs import geometry_specs
from tests.kvstore.conftest import full_geometry
from tests.kvstore.daemon.kit import ServeProcess, until
from tests.kvstore.driving import check_bytes, run_prompt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvstore import KVStore

B = 16
PROMPT = list(range(10 * B + 5))


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServeProcess]:
    arguments = ("--host-bytes", "8 MiB", "--disk-path", str(tmp_path / "disk"), "--disk-bytes", "64 MiB")
    server = ServeProcess(tmp_path / "d.sock", *arguments)
    yield server
    server.stop()


def tier(tmp_path: Path) -> DaemonTier:
    specs = geometry_specs(full_geometry())
    return DaemonTier(str(tmp_path / "d.sock"), ThreadExecutor("daemon"), specs=specs, timeout_seconds=2)


def stored(store: KVStore, blocks: int) -> None:
    """Compute the prompt and have its blocks copied to the daemon."""
    run_prompt(store, "a", PROMPT)
    store.preempt("a")
    deadline = time.monotonic() + 10
    while store.metrics.get("spilled_blocks", tier="daemon") < blocks:
        assert time.monotonic() < deadline
        store.wait(0.05)
        store.step()


def test_a_second_store_reuses_what_the_first_computed(
    make_store: Callable[..., KVStore], tmp_path: Path, served: ServeProcess
) -> None:
    common = {"blocks": 16, "share": True, "load_always": True, "io_threads": "thread"}
    stored(make_store(tiers=[tier(tmp_path)], **common), 10)
    second = make_store(tiers=[tier(tmp_path)], **common)
    assert second.lookup(PROMPT).by_tier.get("daemon") == 10 * B
    assert run_prompt(second, "b", PROMPT) == 10 * B
    check_bytes(second, "b", PROMPT)
    other = Identity(model="toy", weights="w1", geometry=full_geometry())
    assert make_store(tiers=[tier(tmp_path)], identity=other, **common).lookup(PROMPT).tokens == 0

    served.kill()
    until(lambda: second.lookup(PROMPT).by_tier.get("daemon") is None)
    third = make_store(tiers=[tier(tmp_path)], **common)
    assert run_prompt(third, "c", PROMPT) == 0, "without a daemon it is computed"
    check_bytes(third, "c", PROMPT)
    with pytest.raises(TierError):
        third.reset()


def test_what_the_daemon_wrote_to_disk_a_store_reads_in_its_own_process(
    make_store: Callable[..., KVStore], tmp_path: Path, served: ServeProcess
) -> None:
    common = {"blocks": 16, "share": True, "load_always": True, "io_threads": "thread"}
    stored(make_store(tiers=[tier(tmp_path)], **common), 10)
    assert served.stop() == (0, "")
    own = make_store(disk_path=str(tmp_path / "disk"), disk_bytes="64 MiB", **common)
    assert run_prompt(own, "b", PROMPT) == 10 * B
    check_bytes(own, "b", PROMPT)


def test_a_reset_reaches_the_daemon_and_its_disk(
    make_store: Callable[..., KVStore], tmp_path: Path, served: ServeProcess
) -> None:
    common = {"blocks": 16, "share": True, "load_always": True, "io_threads": "thread"}
    first = make_store(tiers=[tier(tmp_path)], **common)
    stored(first, 10)
    first.reset()
    assert make_store(tiers=[tier(tmp_path)], **common).lookup(PROMPT).tokens == 0
    assert served.process.poll() is None
