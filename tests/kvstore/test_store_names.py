"""What a prompt is called: media, identities, hashed prompts and settings that must not be mixed up."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import pytest

from allocator import CacheGroup, ConfigError, GroupKind, KVGeometry, UsageError
from kvstore import HashChain, HostTier, Identity, KVStore, KVStoreConfig, Media
from tests.kvstore.conftest import full_geometry
from tests.kvstore.driving import fill

if TYPE_CHECKING:
    from collections.abc import Callable

B = 16


def test_case_053_media_survive_a_commit_that_passes_the_prompt(make_store: Callable[..., KVStore]) -> None:
    picture = Media(hashlib.sha256(b"picture").digest(), start=20, length=10)
    store = make_store()
    prompt = [7] * (2 * B + 8)
    answer = [8] * 12
    store.admit("seen", prompt, media=[picture])
    store.grow("seen", len(prompt) + len(answer))
    fill(store, "seen", [*prompt, *answer], 0)
    store.commit("seen", [*prompt, *answer])
    everything = [*prompt, *answer, 1]
    assert store.lookup(everything).tokens == B, "a block with a picture is served to a prompt without it"
    assert store.lookup(everything, media=[picture]).tokens == 3 * B


def test_case_053_placeholders_of_the_settings_count(make_store: Callable[..., KVStore]) -> None:
    store = make_store(placeholder_ids=(7,))
    with pytest.raises(UsageError, match="placeholder"):
        store.lookup([7] * 40)
    with pytest.raises(UsageError, match="placeholder"):
        store.admit("a", [7] * 40)


def test_a_failed_commit_changes_nothing(make_store: Callable[..., KVStore]) -> None:
    store = make_store()
    prompt = list(range(3 * B))
    store.admit("a", prompt)
    store.grow("a", 3 * B)
    fill(store, "a", prompt, 0)
    for bad in ([-1], [2**32], [0, 1, "x"], [1.0]):
        with pytest.raises(UsageError, match="token id"):
            store.commit("a", bad)  # type: ignore[arg-type]
    store.commit_prompt("a", 3 * B)
    assert store.lookup([*prompt, 1]).tokens == 3 * B


def test_a_hashed_prompt_and_another_identity_do_not_mix(make_store: Callable[..., KVStore]) -> None:
    store = make_store()
    adapter = Identity(model="toy", weights="w0", geometry=full_geometry(), adapter="a")
    prompt = list(range(4 * B + 1))
    plain, adapted = store.prepare(prompt), store.prepare(prompt, identity=adapter)
    for call in (store.lookup, lambda *a, **k: store.admit("x", *a, **k), lambda *a, **k: store.pin(*a, 5.0, **k)):
        with pytest.raises(UsageError, match="hashed"):
            call(plain, identity=adapter)  # type: ignore[operator]
        with pytest.raises(UsageError, match="media"):
            call(plain, media=[Media(bytes(32), 0, 1)])  # type: ignore[operator]
    assert store.lookup(adapted, identity=adapter).tokens == 0


def test_a_prompt_that_was_hashed_elsewhere_has_a_name_of_this_store_or_is_refused(
    make_store: Callable[..., KVStore],
) -> None:
    """Two models over one tier: the chain of one, handed to the other's store, would store its KV under that name."""
    geometry = full_geometry()
    tier = HostTier(1 << 20)
    first = make_store(tiers=[tier], identity=Identity(model="toy", weights="w0", geometry=geometry))
    other = Identity(model="toy", weights="w1", geometry=geometry)
    second = make_store(tiers=[tier], identity=other)
    prompt = list(range(4 * B + 1))
    foreign, own = first.prepare(prompt), HashChain(other.root(), B)
    own.extend(prompt)
    made_by_hand = HashChain(foreign.root, B)
    made_by_hand.extend(prompt)
    for chain in (foreign, foreign.fork(), made_by_hand):
        with pytest.raises(UsageError, match="hashed elsewhere, under another identity"):
            second.admit("a", chain)
        with pytest.raises(UsageError, match="hashed elsewhere"):
            second.lookup(chain)
        assert second.lookup(chain, identity=first.identity).tokens == 0, "said here too, it is meant"
    third = make_store(tiers=[tier], identity=other)
    adapter = Identity(model="toy", weights="w1", geometry=geometry, adapter="a")
    for chain in (own, second.prepare(prompt), third.prepare(prompt), second.prepare(prompt, identity=adapter)):
        assert second.lookup(chain).tokens == 0


def test_case_012_an_identity_of_another_geometry_is_refused(make_store: Callable[..., KVStore]) -> None:
    other = Identity(model="toy", weights="w0", geometry=full_geometry("bfloat16"))
    with pytest.raises(ConfigError, match="geometry"):
        make_store(identity=other)
    store = make_store()
    with pytest.raises(UsageError, match="geometry"):
        store.lookup(list(range(40)), identity=other)
    with pytest.raises(UsageError, match="geometry"):
        store.admit("a", list(range(40)), identity=other)


def test_groups_whose_keys_need_later_tokens_are_refused() -> None:
    group = CacheGroup(kind=GroupKind.FULL, layers=(0,), kv_heads=1, key_dim=8, value_dim=8, lookahead_tokens=1)
    geometry = KVGeometry(groups=(group,), dtype="float32")
    with pytest.raises(ConfigError, match="lookahead"):
        KVStore(geometry, Identity(model="m", weights="w", geometry=geometry), KVStoreConfig(device_bytes=1 << 20))


def test_unknown_weights_are_not_shared(make_store: Callable[..., KVStore]) -> None:
    unknown = Identity(model="toy", weights=None, geometry=full_geometry())
    with pytest.raises(ConfigError, match="weights"):
        make_store(identity=unknown, share=True)
    store = make_store(share=True)
    with pytest.raises(ConfigError, match="weights"):
        store.lookup([1, 2], identity=unknown)
    assert make_store(identity=unknown).lookup([1, 2]).tokens == 0
