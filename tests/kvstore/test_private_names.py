"""`share` off: no other process, and no later one, finds a store's copies, in whatever tier they lie."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from allocator import UsageError
from kvstore import HostTier, Identity, KVStore
from kvstore.executor import InlineExecutor
from kvstore.identity import HashChain
from tests.kvstore.conftest import full_geometry
from tests.servers import shared_server

PROMPT = list(range(1, 70))


def stored(store: KVStore, identity: Identity | None = None, prompt: list[int] = PROMPT) -> None:
    store.admit("one", prompt, identity=identity)
    store.grow("one", len(prompt))
    store.commit("one", prompt)
    store.finish("one")
    for _ in range(8):
        store.step()


def reused(store: KVStore, identity: Identity | None = None) -> int:
    """Tokens of the prompt that are there, wherever."""
    while (found := store.lookup(store.prepare(PROMPT, identity=identity))).pending:
        store.wait(1)
        store.step()
    return found.tokens


@pytest.mark.parametrize("weights", [None, "known"])
@pytest.mark.parametrize("place", ["disk", "redis"])
@pytest.mark.parametrize("share", [False, True])
def test_a_second_store_finds_nothing_unless_both_share(
    make_store: Callable[..., KVStore],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    weights: str | None,
    place: str,
    share: bool,
) -> None:
    if share and weights is None:
        pytest.skip("refused: test_identity.py")
    geometry = full_geometry()
    identity = Identity(model="m", weights=weights, geometry=geometry)
    url = shared_server().unix_url + f"?namespace=private{weights}{share}"
    settings = {"disk": {"disk_path": str(tmp_path)}, "redis": {"redis_url": url}}[place]
    settings |= {"share": share, "identity": identity, "spill_policy": "everything", "load_always": True}
    first = make_store(blocks=40, geometry=geometry, **settings)
    other = Identity(model="m", weights=weights, geometry=geometry, tenant="another")
    stored(first)
    stored(first, other)
    assert reused(first) > 0
    first.close()
    second = make_store(blocks=40, geometry=geometry, **settings)
    for one in (None, other):
        assert (reused(second, one) > 0) is share
    said = [record.getMessage() for record in caplog.records if "without share=True" in record.getMessage()]
    named = [line.split()[0] for line in said]
    assert named == ([] if share else [{"disk": "disk_path", "redis": "redis_url"}[place]] * 2)


def test_a_stores_own_copies_come_back_from_below(make_store: Callable[..., KVStore], tmp_path: Path) -> None:
    store = make_store(blocks=12, disk_path=str(tmp_path), share=False, spill_policy="everything", load_always=True)
    stored(store)
    for number in range(1, 4):
        stored(store, prompt=[1000 * number + at for at in range(90)])
    assert store.lookup(PROMPT).by_tier.get("disk", 0) > 0


def test_a_chain_with_a_name_that_others_can_make_is_refused(
    make_store: Callable[..., KVStore], tmp_path: Path
) -> None:
    """Else blocks could be written under it."""
    store = make_store(blocks=12, disk_path=str(tmp_path / "a"), share=False)
    chain = HashChain(store.identity.root(), store.geometry.block_tokens)
    chain.extend(PROMPT)
    with pytest.raises(UsageError, match="outside this store"):
        store.admit("one", chain)
    stranger = make_store(blocks=12, disk_path=str(tmp_path / "b"), share=False).prepare(PROMPT)
    with pytest.raises(UsageError, match="outside this store"):
        store.admit("one", stranger)
    store.admit("one", store.prepare(PROMPT).fork())
    assert store.sequence_ids() == ["one"]
    store.abort("one")


def test_tiers_that_the_caller_brings_and_a_daemon_count_as_reachable(
    make_store: Callable[..., KVStore], tmp_path: Path
) -> None:
    tiers = [HostTier(1 << 24, InlineExecutor())]
    for settings in ({"tiers": tiers}, {"daemon_socket": str(tmp_path / "nobody.sock")}):
        store = make_store(blocks=12, share=False, **settings)
        assert store.prepare(PROMPT).root != store.identity.root()


def test_a_store_alone_in_memory_has_names_that_anybody_can_make(
    make_store: Callable[..., KVStore],
) -> None:
    """Nobody can reach its copies, so a simulation's chains are good, and its decisions repeat."""
    store = make_store(blocks=12, host_blocks=12)
    assert store.prepare(PROMPT).root == store.identity.root()
