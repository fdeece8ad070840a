"""The slab: views over one allocation, their layout, and what stays apart."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from allocator import (  # noqa: E402
    COLD,
    FULL,
    CacheGroup,
    ExtentLayout,
    GeometryError,
    GroupKind,
    KVGeometry,
    Slab,
    UsageError,
)

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def hybrid(dtype: str = "float32") -> KVGeometry:
    return KVGeometry(
        groups=(
            CacheGroup(kind=GroupKind.FULL, layers=(2, 5), kv_heads=2, key_dim=24, value_dim=8),
            CacheGroup(kind=GroupKind.SLIDING, layers=(0, 1, 3, 4), kv_heads=2, key_dim=16, value_dim=16,
                       window_tokens=32),
            CacheGroup(kind=GroupKind.LATENT, layers=(6, 7, 8, 9), kv_heads=1, key_dim=64, value_dim=0),
        ),
        dtype=dtype,
    )  # fmt: skip


def make_slab(geometry: KVGeometry, extents: int = 5, device: str = "cpu") -> Slab:
    full = tuple(geometry.full_slot_bytes(group) for group in range(len(geometry.groups)))
    cold = tuple(size // 4 - 64 for size in full)
    base = ExtentLayout(max(full) * 64, full, cold, None).extent_bytes
    return Slab(ExtentLayout(base * extents + 7, full, cold, base), geometry, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_a_block_is_layers_heads_keys_then_values(dtype: str, device: str) -> None:
    """keys_view and values_view write what slot_bytes_view reads: [layers, kv_heads, (K, V), block_tokens, dim]."""
    geometry = hybrid(dtype)
    slab = make_slab(geometry, device=device)
    for group, spec in enumerate(geometry.groups):
        keys, values, full = slab.keys_view(group), slab.values_view(group), slab.full_view(group)
        slots = slab.layout.slot_count(2 * group)
        assert keys.shape == (slots, len(spec.layers), spec.kv_heads, 16, spec.key_dim)
        assert values.shape == (slots, len(spec.layers), spec.kv_heads, 16, spec.value_dim)
        expected = []
        slot = slots - 1
        for layer in range(len(spec.layers)):
            for head in range(spec.kv_heads):
                for view, dim in ((keys, spec.key_dim), (values, spec.value_dim)):
                    block = torch.randn(16, dim).to(getattr(torch, dtype)).to(device)
                    view[slot, layer, head] = block
                    expected.append(block.reshape(-1))
        flat = torch.cat([piece.view(torch.uint8) for piece in expected])
        assert torch.equal(slab.slot_bytes_view(2 * group, slot), flat)
        assert torch.equal(full[slot].contiguous().view(torch.uint8).reshape(-1), flat)


def test_writing_one_slot_touches_no_other() -> None:
    slab = make_slab(hybrid())
    for index in range(slab.layout.class_count):
        for slot in range(slab.layout.slot_count(index)):
            slab.bytes.zero_()
            slab.slot_bytes_view(index, slot).fill_(1)
            assert int(slab.bytes.sum()) == slab.layout.raw_slot_bytes[index]
            start = slab.layout.slot_offset_bytes(index, slot)
            assert slab.bytes[start] == 1


def test_cold_views_and_slot_bytes_are_the_same_bytes() -> None:
    slab = make_slab(hybrid())
    for group in range(3):
        index = 2 * group + COLD
        slots = np.arange(slab.layout.slot_count(index), dtype=np.int64)
        for slot in slots.tolist():
            slab.slot_bytes_view(index, slot).fill_(slot % 251 + 1)
        extents, places = slab.cold_index(group, slots)
        rows = slab.cold_view(group)[torch.from_numpy(extents), torch.from_numpy(places)]
        assert torch.equal(rows, (torch.arange(len(slots)) % 251 + 1).to(torch.uint8)[:, None].expand_as(rows))


def test_host_copies_go_through_memoryviews() -> None:
    slab = make_slab(hybrid())
    memory = slab.slot_memory(0, 3)
    memory[:] = bytes(range(256)) * (len(memory) // 256)
    slab.copy_slots(0, [3], [1])
    assert bytes(slab.slot_memory(0, 1)) == bytes(memory)
    assert slab.bytes.data_ptr() % (2 << 20) == 0
    slab.zero_slots(0, [3])
    assert not slab.full_view(0)[3].any()
    assert slab.full_view(0)[1].view(torch.uint8).any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_case_067_poison_is_nan_and_a_zeroed_tail_is_not(dtype: str) -> None:
    geometry = hybrid(dtype)
    slab = make_slab(geometry)
    for group in range(3):
        slab.poison(2 * group + FULL, [2])
        assert slab.full_view(group)[2].float().isnan().all()
        slab.keys_view(group)[2, :, :, :5] = 1
        slab.values_view(group)[2, :, :, :5] = 1
        slab.zero_tail(group, 2, 5)
        block = slab.full_view(group)[2].float()
        assert block.isfinite().all()
        spec = geometry.groups[group]
        assert block.sum() == 5 * len(spec.layers) * spec.kv_heads * (spec.key_dim + spec.value_dim)
        slab.poison(2 * group + COLD, [0])
        assert (slab.slot_bytes_view(2 * group + COLD, 0) == 255).all()


def test_case_074_bytes_beyond_4_gib_are_where_they_should_be() -> None:
    """A sparse 5 GiB map: first, last and crossing blocks of 2^31 and 2^32, through every view."""
    geometry = KVGeometry.uniform(layers=8, kv_heads=4, head_dim=64, dtype="float32")
    size = geometry.full_slot_bytes(0)
    slab = Slab(ExtentLayout(5 << 30, (size,), (size // 4,), extent_bytes=4 * size), geometry)
    last = slab.layout.slot_count(FULL) - 1
    slots = [0, (1 << 31) // size - 1, (1 << 31) // size, (1 << 32) // size - 1, (1 << 32) // size, last]
    for number, slot in enumerate(slots):
        slab.keys_view(0)[slot, -1, -1, -1] = number + 1
        slab.values_view(0)[slot, -1, -1, -1] = number + 1
    for number, slot in enumerate(slots):
        start = slot * size
        assert slab.layout.slot_offset_bytes(FULL, slot) == start
        tail = slab.bytes[start + size - 4 : start + size].view(torch.float32)
        assert tail.item() == number + 1
        assert slab.slot_memory(FULL, slot)[-4:].cast("f")[0] == number + 1
        assert torch.count_nonzero(slab.keys_view(0)[slot]) == 64
    slab.copy_slots(FULL, [last], [0])
    assert slab.values_view(0)[0, -1, -1, -1, 0] == len(slots)
    cold = slab.layout.slot_count(COLD) - 1
    slab.slot_bytes_view(COLD, cold).fill_(9)
    extents, places = slab.cold_index(0, np.array([cold], dtype=np.int64))
    assert (slab.cold_view(0)[int(extents[0]), int(places[0])] == 9).all()


@pytest.mark.parametrize("block_tokens", [1, 2, 3, 4, 8, 16, 17, 128, 256])
def test_case_143_slots_of_every_block_size_hold_their_block(block_tokens: int) -> None:
    """Slots that are no multiple of 64 bytes are padded; views skip the padding."""
    geometry = KVGeometry.uniform(layers=1, kv_heads=1, head_dim=5, dtype="bfloat16", block_tokens=block_tokens)
    slab = Slab(ExtentLayout(100_000, (geometry.full_slot_bytes(0),)), geometry)
    keys, values = slab.keys_view(0), slab.values_view(0)
    for slot in range(min(9, len(keys))):
        keys[slot], values[slot] = slot, -slot
    for slot in range(min(9, len(keys))):
        assert (keys[slot] == slot).all()
        assert (values[slot] == -slot).all()


def test_a_layout_of_another_geometry_is_refused() -> None:
    geometry = hybrid()
    with pytest.raises(GeometryError, match="expected a layout with full slots"):
        Slab(ExtentLayout(1 << 20, (4096,)), geometry)
    single = KVGeometry.uniform(layers=1, kv_heads=1, head_dim=8)
    slab = Slab(ExtentLayout(1 << 20, (single.full_slot_bytes(0),)), single)
    with pytest.raises(UsageError, match="no INT4 slots"):
        slab.cold_view(0)
