"""Bytes in the slab: what is written by slot is read by table entry, at any offset, in any layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from allocator import CacheGroup, ConfigError, ExtentLayout, GroupKind, KVGeometry, Slab, UsageError
from engine_adapter import paged_cache
from engine_adapter.paged_cache import PagedCache
from quant import get_codec, native
from tests.engine_adapter.paged_kit import make_slab


def _geometry(*, layers: int = 3, kv_heads: int = 2, key_dim: int = 16, value_dim: int = 16, **rest: Any) -> KVGeometry:
    kind = GroupKind.FULL if value_dim else GroupKind.LATENT
    group = CacheGroup(kind=kind, layers=tuple(range(layers)), kv_heads=kv_heads, key_dim=key_dim, value_dim=value_dim)
    return KVGeometry(groups=(group,), **{"dtype": "float32", **rest})


def _patterned(geometry: KVGeometry, layer: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Values that name their own place: no two of a test are the same."""
    group = geometry.groups[0]
    count = tokens * group.kv_heads * (group.key_dim + group.value_dim)
    flat = torch.arange(layer * count, (layer + 1) * count, dtype=torch.float32)
    both = flat.view(tokens, group.kv_heads, -1)
    return both[..., : group.key_dim], both[..., group.key_dim :] if group.value_dim else None


@pytest.fixture(params=["C", "torch"])
def writer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What scatters the KV of a step: the C kernels, or torch where there are none."""
    if request.param == "C" and native.kernels is None:
        pytest.skip(f"no C kernels: {native.reason}")
    if request.param == "torch":
        monkeypatch.setattr(paged_cache, "group_layout", lambda *_: None)
    return str(request.param)


@pytest.mark.parametrize("block_tokens", [1, 4, 16, 17, 32])
@pytest.mark.parametrize("dims", [(16, 16), (24, 16), (40, 0)])
@pytest.mark.parametrize("tokens", [1, 3, 50])
def test_case_128_patterned_values_survive_in_every_layout(
    writer: str, block_tokens: int, dims: tuple[int, int], tokens: int
) -> None:
    geometry = _geometry(
        kv_heads=1 if dims[1] == 0 else 2, key_dim=dims[0], value_dim=dims[1], block_tokens=block_tokens
    )
    blocks = -(-tokens // block_tokens)
    slab, slots = make_slab(geometry, blocks + 3)
    cache = PagedCache(slab, geometry)
    table = np.array(slots[0][: blocks + 3][::-1][:blocks], np.int64)
    positions = np.arange(tokens)
    mapping = table[positions // block_tokens] * block_tokens + positions % block_tokens
    for layer in range(3):
        keys, values = _patterned(geometry, layer, tokens)
        cache.write(layer, mapping, keys, values)
    for layer in range(3):
        keys, values = _patterned(geometry, layer, tokens)
        found_keys, found_values = cache.gather(layer, table << 1)
        assert torch.equal(found_keys[:, :tokens].transpose(0, 1), keys)
        if values is not None:
            assert torch.equal(found_values[:, :tokens].transpose(0, 1), values)
    expected = slab.keys_view(0)[int(table[0]), 1, 0, 0]
    assert torch.equal(expected, _patterned(geometry, 1, tokens)[0][0, 0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_tensors_of_any_strides_and_dtype_are_written(writer: str, dtype: str) -> None:
    geometry = _geometry(dtype=dtype)
    slab, slots = make_slab(geometry, 3)
    cache = PagedCache(slab, geometry)
    mapping = np.array([16 * slots[0][1] + 3, 16 * slots[0][2] + 15, 16 * slots[0][0]], np.int64)
    keys, values = torch.randn(2, 16, 3).permute(2, 0, 1), torch.randn(3, 16, 2).transpose(1, 2)
    index = cache.write_index(0, mapping)
    for layer in range(3):
        cache.write(layer, index, keys + layer, values - layer)
    for token, place in enumerate(mapping.tolist()):
        found_keys, found_values = slab.keys_view(0)[place // 16], slab.values_view(0)[place // 16]
        for layer in range(3):
            assert torch.equal(found_keys[layer, :, place % 16], (keys[token] + layer).to(cache.dtype))
            assert torch.equal(found_values[layer, :, place % 16], (values[token] - layer).to(cache.dtype))
    untouched = slab.keys_view(0)[slots[0][1], 0, :, 4:]
    assert untouched.isnan().all()


@pytest.mark.skipif(native.kernels is None, reason=f"no C kernels: {native.reason}")
@pytest.mark.parametrize("place", [-1, 1 << 40])
def test_places_outside_the_slab_are_refused(place: int) -> None:
    geometry = _geometry()
    slab, _ = make_slab(geometry, 3)
    with pytest.raises(UsageError, match=f"the slot mapping names places.*{place}"):
        PagedCache(slab, geometry).write_index(0, np.array([5, place], np.int64))


@pytest.mark.skipif(native.kernels is None, reason=f"no C kernels: {native.reason}")
def test_kv_of_more_tokens_than_places_is_refused() -> None:
    geometry = _geometry()
    slab, slots = make_slab(geometry, 3)
    cache = PagedCache(slab, geometry)
    keys = torch.zeros(2, 2, 16)
    with pytest.raises(UsageError, match="KV of 2 tokens for 1 places"):
        cache.write(0, np.array([16 * slots[0][0]], np.int64), keys, keys)


def test_gather_batch_pads_with_zeros_and_keeps_order() -> None:
    geometry = _geometry()
    slab, slots = make_slab(geometry, 8)
    cache = PagedCache(slab, geometry)
    mapping = np.arange(8 * 16) + slots[0][0] * 16
    keys, values = _patterned(geometry, 0, 128)
    cache.write(0, mapping, keys, values)
    first = slots[0][0]
    tables = [np.array([first + 5]) << 1, np.array([first + 3, first, first + 6]) << 1]
    found, _ = cache.gather_batch(0, tables)
    by_block = keys.transpose(0, 1).unflatten(1, (8, 16))
    assert torch.equal(found[0, :, :16], by_block[:, 5])
    assert not found[0, :, 16:].any()
    assert torch.equal(found[1], by_block[:, [3, 0, 6]].flatten(1, 2))


def test_gather_of_int4_entries_is_what_the_codec_decodes() -> None:
    geometry = _geometry(dtype="bfloat16")
    slab, slots = make_slab(geometry, 4, cold=True)
    codec = get_codec("int4")
    cache = PagedCache(slab, geometry, codec)
    keys, values = torch.randn(3, 2, 16, 16).bfloat16(), torch.randn(3, 2, 16, 16).bfloat16()
    payload = codec.encode(keys, values)
    slot = slots[1][2]
    slab.slot_bytes_view(1, slot)[:] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    expected = torch.empty_like(keys), torch.empty_like(values)
    codec.decode_into(payload, *expected)
    for layer in range(3):
        found = cache.gather(layer, np.array([slot << 1 | 1]))
        assert torch.equal(found[0], expected[0][layer])
        assert torch.equal(found[1], expected[1][layer])


def test_case_074_offsets_beyond_32_bits() -> None:
    """A sparse slab of 5 GiB: slots at the first, the last and the places around 2^31 and 2^32 keep their bytes."""
    geometry = _geometry(layers=2, kv_heads=4, key_dim=64, value_dim=64, dtype="bfloat16")
    slot_bytes = geometry.full_slot_bytes(0)
    total = 5 << 30
    slab = Slab(ExtentLayout(total, (slot_bytes,)), geometry)
    cache = PagedCache(slab, geometry)
    last = slab.layout.slot_count(0) - 1
    edges = [2**31 // slot_bytes, 2**32 // slot_bytes]
    slots = np.array(sorted({0, last, *(edge + step for edge in edges for step in (-1, 0, 1))}))
    assert int(slots[-1]) * slot_bytes > 2**32
    torch.manual_seed(0)
    written = {}
    for slot in slots.tolist():
        keys, values = torch.randn(16, 4, 64).bfloat16(), torch.randn(16, 4, 64).bfloat16()
        cache.write(1, slot * 16 + np.arange(16), keys, values)
        written[slot] = (keys, values)
    for slot, (keys, values) in written.items():
        found_keys, found_values = cache.gather(1, np.array([slot << 1]))
        assert torch.equal(found_keys.transpose(0, 1), keys), slot
        assert torch.equal(found_values.transpose(0, 1), values), slot
        assert torch.equal(slab.keys_view(0)[slot, 1].transpose(0, 1), keys), slot
        assert not slab.keys_view(0)[slot, 0].any(), slot


def test_tensors_that_do_not_fit_the_geometry_are_refused() -> None:
    geometry = _geometry()
    slab, slots = make_slab(geometry, 2)
    cache = PagedCache(slab, geometry)
    mapping = np.array([slots[0][0] * 16])
    with pytest.raises(ConfigError, match="geometry expects"):
        cache.write(0, mapping, torch.zeros(1, 3, 16), torch.zeros(1, 3, 16))
    with pytest.raises(ConfigError, match="geometry expects"):
        cache.write(0, mapping, torch.zeros(1, 2, 16), None)
    with pytest.raises(UsageError, match="layer 3"):
        cache.write(3, mapping, torch.zeros(1, 2, 16), torch.zeros(1, 2, 16))
    with pytest.raises(UsageError, match="dropped"):
        cache.gather(0, np.array([slots[0][0] << 1, -1]))
    with pytest.raises(UsageError, match="no cold codec"):
        cache.gather(0, np.array([1]))


def test_a_slab_of_another_geometry_is_refused() -> None:
    geometry = _geometry()
    slab, _ = make_slab(geometry, 2)
    with pytest.raises(ConfigError, match="geometry expects"):
        PagedCache(slab, _geometry(kv_heads=4, key_dim=8, value_dim=8))
