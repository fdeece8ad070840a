"""The C codec is the reference, bit for bit: every path that runs here, all dims, bits, dtypes and kinds of input."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quant import BlockCodec, BlockShape, CodecError, get_codec, native
from quant.int4_decode import decode_keys, decode_values_rotated, validate_keys, validate_values
from quant.int4_records import (
    decode_records,
    decode_records_into,
    decode_records_rotated,
    encode_records_checked,
    encode_records_into,
    validate_records,
)
from quant.record_layout import RecordLayout, record_layout
from quant.testing import CodecContract, bits_equal, random_block

PATHS = native.available_paths()
BITS = [(4, 4), (5, 4), (4, 3), (5, 3)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
DIMS = [(64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (512, 512), (576, 0), (80, 80), (8, 8), (24, 40)]
DIMS += [(192, 128), (16, 1024), (1024, 32), (72, 48), (112, 160), (320, 384)]

pytestmark = pytest.mark.skipif(not PATHS, reason=f"no C kernels: {native.reason}")


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each path that this CPU runs, in force."""
    with native.forced_path(request.param):
        yield request.param


KINDS = ["plain", "outliers", "channels", "tokens", "grid", "sparse", "constant", "tiny", "bits", "negative", "poison"]


def drawn(kind: str, dim: int, count: int, seed: int) -> torch.Tensor:
    """float32 [count, 16, dim] of one kind; "bits" and "poison" hold numbers that no scale carries."""
    source = torch.Generator().manual_seed(seed)
    shape = (count, 16, dim)
    x = torch.randn(shape, generator=source)
    if kind == "outliers":
        x[..., :: max(1, dim // 5)] *= 100.0
        x += torch.randn((count, 1, dim), generator=source) * 3
    if kind == "channels":
        x = x * torch.exp2(torch.randint(-40, 40, (count, 1, dim), generator=source)) + 50
    if kind == "tokens":
        x = x * torch.exp2(torch.randint(-40, 40, (count, 16, 1), generator=source))
    if kind == "grid":  # many exact ties
        x = torch.randint(-30, 31, shape, generator=source) * 0.5
    if kind == "sparse":
        x = x * (torch.rand(shape, generator=source) < 0.05) - 7.0 * (seed % 2)
    if kind == "constant":
        x = torch.full(shape, 1.0) * torch.randn((count, 1, 1), generator=source).exp2() * (-1) ** seed
    if kind == "tiny":
        x = x * 2.0 ** -(90 + seed % 60)
    if kind == "bits":
        x = torch.randint(-(2**31), 2**31, shape, generator=source).to(torch.int32).view(torch.float32)
    if kind == "negative":  # rotated values without a positive number: z is clamped
        x = -x.abs() * 1e-3 - 5.0
    if kind == "poison":
        for index, bad in enumerate((math.nan, math.inf, -math.inf, 2.0**112, -(2.0**112), 2.0**111, 3e38)):
            x[index % count, seed % 16, (seed + index) % dim] = bad
    return x


def compare(keys: torch.Tensor, values: torch.Tensor | None, bits: tuple[int, int], bound: float = 0.15) -> None:
    """Encode, decode, decode rotated and validate by C and by torch."""
    layout = record_layout(keys.shape[-1], 0 if values is None else values.shape[-1], *bits)
    expected = torch.empty((keys.shape[0], layout.record_bytes), dtype=torch.uint8)
    accepted = encode_records_into(keys, values, expected, layout, bound)
    records, found = encode_records_checked(keys, values, key_bits=bits[0], value_bits=bits[1], error_bound=bound)
    assert found.tolist() == accepted.tolist()
    assert torch.equal(records[accepted], expected[accepted])
    good = expected[accepted]
    if not len(good):
        return
    for dtype in DTYPES:
        compare_decoded(good, layout, dtype)
    assert validate_records(good, layout.key_dim, layout.value_dim, key_bits=bits[0], value_bits=bits[1]).all()


def compare_decoded(records: torch.Tensor, layout: RecordLayout, dtype: torch.dtype) -> None:
    dims, count = (layout.key_dim, layout.value_dim), len(records)
    bits = {"key_bits": layout.key_bits, "value_bits": layout.value_bits}
    keys = torch.empty((count, 16, dims[0]), dtype=dtype)
    values = torch.empty((count, 16, dims[1]), dtype=dtype) if dims[1] else None
    decode_records_into(records, keys, values, layout)
    got = decode_records(records, *dims, dtype, **bits)
    assert bits_equal(got[0], keys)
    assert bits_equal(got[1], values)
    decode_keys(records, keys, layout)
    if values is not None:
        decode_values_rotated(records, values, layout)
    got = decode_records_rotated(records, *dims, dtype, **bits)
    assert bits_equal(got[0], keys)
    assert bits_equal(got[1], values)


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_kinds_of_input(path: str, dims: tuple[int, int], dtype: torch.dtype) -> None:
    for seed, kind in enumerate(KINDS):
        keys = drawn(kind, dims[0], 8, seed).to(dtype)
        values = drawn(kind, dims[1], 8, seed + 1).to(dtype) if dims[1] else None
        compare(keys, values, (4, 4))


@pytest.mark.parametrize("bits", BITS[1:])
@pytest.mark.parametrize("dims", [(64, 64), (24, 40), (128, 96), (576, 0)])
def test_other_bits(path: str, bits: tuple[int, int], dims: tuple[int, int]) -> None:
    if not dims[1] and bits[1] == 3:
        return
    for seed, kind in enumerate(KINDS):
        values = drawn(kind, dims[1], 7, seed + 1) if dims[1] else None
        compare(drawn(kind, dims[0], 7, seed), values, bits)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_drawn_inputs(data: st.DataObject) -> None:
    dims = data.draw(st.tuples(st.integers(1, 40), st.integers(0, 40)).map(lambda d: (8 * d[0], 8 * d[1])))
    kinds = data.draw(st.tuples(st.sampled_from(KINDS), st.sampled_from(KINDS)))
    seed, dtype = data.draw(st.integers(0, 2**20)), data.draw(st.sampled_from(DTYPES))
    bound = data.draw(st.sampled_from([0.05, 0.075, 0.09, 0.1, 0.12, 0.15, 0.3, 1.0]))
    bits = data.draw(st.sampled_from(BITS)) if dims[1] else (data.draw(st.sampled_from([4, 5])), 4)
    keys = drawn(kinds[0], dims[0], 4, seed).to(dtype)
    values = drawn(kinds[1], dims[1], 4, seed + 1).to(dtype) if dims[1] else None
    for name in PATHS:
        with native.forced_path(name):
            compare(keys, values, bits, bound)


def test_decisions_at_the_bound(path: str) -> None:
    """Bounds a hair's breadth around each record's own error: the decision must fall as the reference's does."""
    for dim in (64, 128, 256):
        keys, values = drawn("plain", dim, 24, dim), drawn("outliers", dim, 24, dim + 1)
        for bound in torch.linspace(0.03, 0.14, 60).tolist():
            layout = record_layout(dim, dim)
            expected = torch.empty((24, layout.record_bytes), dtype=torch.uint8)
            accepted = encode_records_into(keys, values, expected, layout, bound)
            assert torch.equal(encode_records_checked(keys, values, error_bound=bound)[1], accepted)


def test_subnormals_flushed_or_not(path: str) -> None:
    """A process that flushes subnormals gets the same bytes (float16's own subnormals are no binary32 ones)."""
    keys, values = drawn("tiny", 64, 8, 3), drawn("tiny", 64, 8, 4)
    half = (torch.randn(8, 16, 64) * 2.0**-18).to(torch.float16)
    for pair in ((keys, values), (keys.to(torch.bfloat16), values.to(torch.bfloat16)), (half, half)):
        before = encode_records_checked(*pair)
        decoded = decode_records(before[0], 64, 64, pair[0].dtype)
        assert torch.set_flush_denormal(True)
        try:
            after = encode_records_checked(*pair)
            again = decode_records(before[0], 64, 64, pair[0].dtype)
        finally:
            torch.set_flush_denormal(False)
        assert torch.equal(after[0], before[0])
        assert torch.equal(after[1], before[1])
        assert bits_equal(again[0], decoded[0])
        assert bits_equal(again[1], decoded[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_hostile_records_are_named_invalid_as_by_the_reference(path: str, dtype: torch.dtype) -> None:
    source = torch.Generator().manual_seed(1)
    for bits in BITS:
        layout = record_layout(64, 48, *bits)
        keys, values = drawn("plain", 64, 60, 1), drawn("plain", 48, 60, 2)
        records = encode_records_checked(keys, values, key_bits=bits[0], value_bits=bits[1])[0]
        for row in records[10:]:
            place = int(torch.randint(layout.key_scales, layout.record_bytes, (1,), generator=source))
            row[place] = int(torch.randint(0, 256, (1,), generator=source))
        good = validate_keys(records, layout) & validate_values(records, layout)
        assert torch.equal(validate_records(records, 64, 48, key_bits=bits[0], value_bits=bits[1]), good)
        assert 10 <= int(good.sum()) < 60
        compare_decoded(records[good], layout, dtype)
        wild = torch.randint(0, 256, records.shape, generator=source, dtype=torch.uint8)
        decode_records(wild, 64, 48, dtype, key_bits=bits[0], value_bits=bits[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [(4, 4), ([[4, 5, 5], [4, 4, 5]], [[4, 4, 3], [3, 4, 4]])])
def test_slots_in_place(path: str, dtype: torch.dtype, bits: tuple[object, object]) -> None:
    """Slots of a slab with gaps, encoded and decoded where they lie, equal batches of copies."""
    codec = get_codec("int4", key_bits=bits[0], value_bits=bits[1])
    shape = BlockShape(2, 3, 32, 64, 64)
    slab = torch.zeros((7, 2, 3, 32 * 128), dtype=dtype)
    keys = slab[..., : 32 * 64].view(7, *shape.keys_shape)
    values = slab[..., 32 * 64 :].view(7, *shape.values_shape)
    block = random_block(shape, dtype, 5, (7,))
    keys.copy_(block[0])
    assert block[1] is not None
    values.copy_(block[1])
    keys[2, 1, 1, 17, 3] = math.nan
    size, slots = codec.encoded_bytes(shape, dtype), [5, 2, 0]
    memory = torch.full((4 * (size + 192),), 0xAB, dtype=torch.uint8)
    places = [2 * (size + 192), 64, size + 256]
    assert codec.encode_slots(keys, values, slots, memory, places).tolist() == [True, False, True]
    expected = torch.empty((3, size), dtype=torch.uint8)
    codec.encode_batch(keys[slots], values[slots], expected)
    for index in (0, 2):
        assert torch.equal(memory[places[index] : places[index] + size], expected[index])
    outside = torch.ones_like(memory, dtype=torch.bool)
    for place in places:
        outside[place : place + size] = False
    assert bool((memory[outside] == 0xAB).all())
    got = torch.empty((2, *shape.keys_shape), dtype=dtype), torch.empty((2, *shape.values_shape), dtype=dtype)
    assert codec.decode_slots(memory, torch.tensor([places[2], places[0]]), *got)
    wanted = torch.empty_like(got[0]), torch.empty_like(got[1])
    codec.decode_into(expected[[2, 0]], *wanted)
    assert bits_equal(got[0], wanted[0])
    assert bits_equal(got[1], wanted[1])


def test_large_batches_on_two_threads_and_around_the_caches(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    codec, shape = get_codec("int4"), BlockShape(2, 2, 32, 64, 64)
    keys, values = random_block(shape, torch.bfloat16, 1, (40,))
    out = torch.empty((40, codec.encoded_bytes(shape, "bfloat16")), dtype=torch.uint8)
    keys[13, 1, 0, 20, 1] = math.inf
    one = codec.encode_batch(keys, values, out).tolist()
    decoded = torch.empty_like(keys), torch.empty_like(keys)
    codec.decode_into(out, *decoded)
    again, streamed = torch.empty_like(out), (torch.empty_like(keys), torch.empty_like(keys))
    monkeypatch.setattr("quant.native.codec.STREAM_BYTES", 1)
    torch.set_num_threads(2)
    try:
        assert codec.encode_batch(keys, values, again).tolist() == one == [block != 13 for block in range(40)]
        codec.decode_into(out, *streamed)
    finally:
        torch.set_num_threads(1)
    kept = [block for block in range(40) if block != 13]
    assert torch.equal(again[kept], out[kept])
    assert bits_equal(streamed[0], decoded[0])
    assert bits_equal(streamed[1], decoded[1])


class TestContractOnEveryPath(CodecContract):
    """The public contract, path by path."""

    @pytest.fixture(autouse=True, params=PATHS)
    def _force(self, request: pytest.FixtureRequest) -> Iterator[None]:
        with native.forced_path(request.param):
            yield

    def make_codec(self) -> BlockCodec:
        return get_codec("int4")


class TestContractWithoutKernels(CodecContract):
    """The same on torch alone."""

    @pytest.fixture(autouse=True)
    def _off(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(native, "kernels", None)

    def make_codec(self) -> BlockCodec:
        return get_codec("int4")


SMALL = record_layout(16, 16, 4, 4).record_bytes


def small_blocks() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Four blocks of one record, keys and values, and memory for four payloads with a hole before and behind."""
    blocks = torch.randn(4, 1, 1, 16, 16, generator=torch.Generator().manual_seed(3))
    return blocks, blocks * 2, torch.zeros(6 * SMALL, dtype=torch.uint8)[SMALL : 5 * SMALL]


@pytest.mark.parametrize(
    ("slots", "places"),
    [([4], [0]), ([-1], [0]), ([1 << 40], [0]), ([0], [-1]), ([0], [3 * SMALL + 1]), ([0], [1 << 50]), ([0, 1], [0])],
)
def test_slots_and_places_that_are_not_there_are_refused(slots: list[int], places: list[int]) -> None:
    keys, values, memory = small_blocks()
    with pytest.raises(CodecError):
        get_codec("int4").encode_slots(keys, values, slots, memory, places)
    assert not memory.any()
    offsets = torch.tensor(places)
    if min(places) < 0 or max(places) > 3 * SMALL or len(slots) > 1:
        with pytest.raises(CodecError):
            get_codec("int4").decode_slots(memory, offsets, keys[: len(slots)], values[: len(slots)])


def test_offsets_and_memory_of_another_kind_are_refused() -> None:
    keys, values, memory = small_blocks()
    codec = get_codec("int4")
    for wrong in (torch.tensor([0], dtype=torch.int32), torch.tensor([0.0]), torch.tensor([[0]])):
        with pytest.raises(CodecError, match="int64"):
            codec.decode_slots(memory, wrong, keys[:1], values[:1])
    for part in (memory[::2], memory.view(2, -1)):
        with pytest.raises(CodecError, match="contiguous uint8"):
            codec.encode_slots(keys, values, [0], part, [0])
    spread = torch.tensor([0, -5, SMALL, 1 << 50])[::2]
    codec.encode_slots(keys, values, [1, 2], memory, [0, SMALL])
    found = torch.empty_like(keys[:2]), torch.empty_like(keys[:2])
    expected = torch.empty_like(keys[:2]), torch.empty_like(keys[:2])
    assert codec.decode_slots(memory, spread, *found)
    codec.decode_into(memory.view(4, SMALL)[:2], *expected)
    assert torch.equal(found[0], expected[0])


def test_targets_that_overlap_themselves_are_refused() -> None:
    keys, values, memory = small_blocks()
    codec = get_codec("int4")
    for strides in ((0, 1), (SMALL // 2, 1)):
        with pytest.raises(CodecError, match="overlap"):
            codec.encode_batch(keys, values, memory.as_strided((4, SMALL), strides))
    records = memory.view(4, SMALL)
    codec.encode_batch(keys, values, records)
    for expanded in (torch.empty(1, 1, 1, 16, 16).expand_as(keys), torch.empty(4, 1, 1, 1, 16).expand_as(keys)):
        with pytest.raises(RuntimeError, match="more than one element"):
            codec.decode_into(records, expanded, values)
