"""Wrong arguments: refused at once, by a message that says what was given and what was expected."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvstore import ConfigError, Identity, KVStore, KVStoreConfig, Lease, UsageError
from tests.kvstore.conftest import full_geometry

if TYPE_CHECKING:
    from collections.abc import Callable

PROMPT = list(range(40))
GEOMETRY = full_geometry()
IDENTITY = Identity(model="toy", weights="w0", geometry=GEOMETRY)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"geometry": None}, "geometry: got None (NoneType); expected KVGeometry"),
        ({"geometry": IDENTITY}, "expected KVGeometry"),
        ({"identity": "toy"}, "identity: got str; expected kvstore.Identity"),
        ({"config": {"device_bytes": 1}}, "config: got {'device_bytes': 1} (dict); expected KVStoreConfig"),
        ({"device": "cudda"}, "device: got 'cudda'; expected 'cpu' or"),
        ({"device": 0}, "device: got 0 (int); expected text"),
        ({"tiers": [1]}, "tiers: got [1]; expected a list of kvstore.Tier"),
        ({"tiers": "host"}, "tiers: got 'host'; expected a list of kvstore.Tier"),
        ({"config": KVStoreConfig(device_bytes=100)}, "device memory of 100 bytes holds 0 extents"),
        ({"clock": 5}, "clock: got 5 (int); expected a function that returns seconds"),
        ({"clock": lambda: "noon"}, "clock: returned 'noon' (str); expected seconds as a number"),
        (
            {"identity": Identity(model="", weights="w0", geometry=GEOMETRY)},
            "identity: its model is ''; expected a name",
        ),
        ({"placeholder_ids": ["x"]}, "placeholder_ids: got 'x'"),
    ],
)
def test_a_store_says_what_it_cannot_be_made_of(wrong: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"geometry": GEOMETRY, "identity": IDENTITY, "config": KVStoreConfig()} | wrong
    with pytest.raises((ConfigError, UsageError)) as caught:
        KVStore(given.pop("geometry"), given.pop("identity"), given.pop("config"), **given)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda store: store.wait("a"), "timeout_seconds: got 'a' (str); expected seconds, 0 or more"),
        (lambda store: store.wait(-1), "timeout_seconds: got -1 (int)"),
        (lambda store: store.wait(None), "timeout_seconds: got None (NoneType)"),
        (lambda store: store.wait_layer("live", 0, -1), "timeout_seconds: got -1 (int); expected seconds, 0 or more"),
        (lambda store: store.wait_layer("live", -1, 1.0), "layer: got -1 (int); expected an int >= 0"),
        (lambda store: store.wait_layer("live", True, 1.0), "layer: got True (bool)"),
        (lambda store: store.admit("a", PROMPT, lease="x"), "lease: got 'x'; expected the Lease that pin gave"),
        (lambda store: store.admit("a", PROMPT, exact="no"), "exact: got 'no' (str); expected True or False"),
        (lambda store: store.lookup(PROMPT, exact=1), "exact: got 1 (int); expected True or False"),
        (lambda store: store.pin(PROMPT, exact="no"), "exact: got 'no' (str)"),
        (lambda store: store.promote(PROMPT, exact=None), "exact: got None (NoneType)"),
        (lambda store: store.unpin(None), "lease: got None; expected the Lease that pin gave"),
        (lambda store: store.admit("a", PROMPT, spare_blocks=5), "spare_blocks: got 5; expected 1 counts"),
        (lambda store: store.admit("a", PROMPT, spare_blocks=[1, 2]), "spare_blocks: got [1, 2]; expected 1 counts"),
        (lambda store: store.admit("a", PROMPT, spare_blocks=[-1]), "spare_blocks: got -1"),
    ],
)
def test_a_call_says_what_it_was_given(
    make_store: Callable[..., KVStore], call: Callable[[KVStore], Lease], said: str
) -> None:
    store = make_store()
    with pytest.raises(UsageError) as caught:
        call(store)
    assert said in str(caught.value)
    assert store.sequence_ids() == []


@pytest.mark.parametrize("now", [float("nan"), float("inf"), "1", True])
def test_a_step_at_no_time_is_refused(make_store: Callable[..., KVStore], now: Any) -> None:
    store = make_store()
    with pytest.raises(UsageError, match="now"):
        store.step(now)
    store.step(5)
