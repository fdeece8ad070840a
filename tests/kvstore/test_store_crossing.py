"""One server, one directory, many identities: what was stored under another one is a miss, in every backend."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from allocator import KVGeometry
from kvstore import Identity
from tests.kvstore.conftest import full_geometry
from tests.kvstore.driving import check_bytes, run_prompt
from tests.servers import shared_server

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvstore import KVStore

B = 16
PROMPT = list(range(8 * B + 1))
GEOMETRY = full_geometry()
OWN = Identity(model="toy", weights="w0", geometry=GEOMETRY, adapter="a", tenant="t")
OTHERS = {
    "weights": replace(OWN, weights="w1"),
    "model": replace(OWN, model="toy2"),
    "tenant": replace(OWN, tenant="u"),
    "no_tenant": replace(OWN, tenant=None),
    "adapter": replace(OWN, adapter="b"),
    "adapter_digest": replace(OWN, adapter=("a", 1, "x")),
    "no_adapter": replace(OWN, adapter=None),
    "extra": replace(OWN, extra=("x",)),
    "dtype": replace(OWN, geometry=full_geometry("float16")),
    "fp8": replace(OWN, geometry=full_geometry("float8_e4m3fn")),
    "layers": replace(OWN, geometry=KVGeometry.uniform(layers=4, kv_heads=1, head_dim=64, dtype="float32")),
    "heads": replace(OWN, geometry=KVGeometry.uniform(layers=2, kv_heads=4, head_dim=32, dtype="float32")),
    "block_tokens": replace(
        OWN, geometry=KVGeometry.uniform(layers=2, kv_heads=2, head_dim=64, dtype="float32", block_tokens=32)
    ),
}


class Backend:
    """Stores that share one place, one after the other."""

    def __init__(self, make_store: Callable[..., KVStore], place: dict[str, Any]) -> None:
        self._make_store, self._place = make_store, place

    def open(self, identity: Identity, **settings: object) -> KVStore:
        options = {"load_always": True, "share": True, "spill_policy": "everything"} | self._place | settings
        return self._make_store(blocks=32, geometry=identity.geometry, identity=identity, **options)

    def store(self, identity: Identity, **settings: object) -> None:
        writer = self.open(identity, **settings)
        run_prompt(writer, "writer", PROMPT)
        for _ in range(20):
            writer.step()
        writer.preempt("writer")
        for _ in range(5):
            writer.step()
        assert writer.tiers[0].used_bytes
        writer.close()

    def reused(self, identity: Identity, *, exact: bool = False, only_raw: bool = False, **settings: object) -> int:
        reader = self.open(identity, **settings)
        ready = run_prompt(reader, "reader", PROMPT, exact=exact)
        if identity.geometry == GEOMETRY:
            check_bytes(reader, "reader", PROMPT)
        if only_raw:
            assert not (reader.tables("reader")[0] & 1).any()
        reader.abort("reader")
        reader.close()
        return ready


@pytest.fixture(params=["redis", "disk"])
def backend(request: pytest.FixtureRequest, make_store: Callable[..., KVStore], tmp_path: Path) -> Backend:
    name = "".join(one for one in request.node.name if one.isalnum())
    if request.param == "redis":
        place = {"redis_url": shared_server().unix_url + f"?namespace={name[-24:]}"}
    else:
        place = {"disk_path": str(tmp_path), "disk_bytes": "16 MiB"}
    return Backend(make_store, place)


@pytest.mark.parametrize("changed", OTHERS)
def test_case_012_what_another_identity_stored_is_a_miss(backend: Backend, changed: str) -> None:
    backend.store(OWN)
    assert backend.reused(OTHERS[changed]) == 0
    assert backend.reused(OWN) == 8 * B, "and it is still there for whom it is"


def test_case_012_another_codec_reads_nothing_but_what_is_raw(backend: Backend) -> None:
    cold = {"codec": "int4", "residual_tokens": 0, "cool_blocks_per_step": 64, "error_bound": 0.9}
    backend.store(OWN, **cold)
    assert backend.reused(OWN, **cold) == 8 * B, "of which seven in INT4"
    for codec in ("int8k", "raw"):  # raw copies may lie beside those in INT4
        assert B <= backend.reused(OWN, only_raw=True, codec=codec) <= 8 * B


def test_a_reader_that_demands_exactness_never_gets_int4(backend: Backend) -> None:
    cold = {"codec": "int4", "residual_tokens": 0, "cool_blocks_per_step": 64, "error_bound": 0.9}
    backend.store(OWN, **cold)
    assert B <= backend.reused(OWN, exact=True, only_raw=True, **cold) <= 8 * B, "the first block never cools"
    backend.store(OWN, codec="raw")  # full copies side by side with those in INT4
    assert backend.reused(OWN, exact=True, only_raw=True, **cold) == 8 * B
