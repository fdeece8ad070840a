"""Properties of the int4 reference on drawn inputs: bit equality with the plain one, error bounds, purity."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quant.int4_records import (
    decode_records,
    decode_records_rotated,
    encode_records_checked,
    unpack_records,
    validate_records,
)
from quant.record_layout import record_layout
from quant.rotation import rotate_back, sign_list
from tests.quant import plain_int4

BITS = [(4, 4), (4, 3), (5, 4), (5, 3)]
DIMS = st.sampled_from([8, 16, 24, 40, 64])


@st.composite
def rows(draw: st.DrawFn, dim: int) -> list[list[float]]:
    """16 x dim binary32 values: a mix of scales, offsets, exact ties, outliers, subnormals and bit patterns."""
    seed = draw(st.integers(0, 2**32 - 1))
    source = torch.Generator().manual_seed(seed)
    x = torch.randn((16, dim), generator=source)
    kind = draw(st.sampled_from(["plain", "channels", "tokens", "grid", "sparse", "bits", "constant", "tiny"]))
    if kind == "channels":
        x = x * torch.exp2(torch.randint(-40, 40, (dim,), generator=source)) + torch.randn(dim, generator=source) * 50
    if kind == "tokens":
        x = x * torch.exp2(torch.randint(-40, 40, (16, 1), generator=source))
    if kind == "grid":  # many exact ties
        x = torch.randint(-30, 31, (16, dim), generator=source) * 0.5
    if kind == "sparse":
        x = x * (torch.rand((16, dim), generator=source) < 0.05) + draw(st.sampled_from([0.0, 1e-3, -7.0]))
    if kind == "bits":  # any finite bit pattern below the limit
        words = torch.randint(-(2**31), 2**31, (16, dim), generator=source).to(torch.int32)
        x = words.view(torch.float32)
        x = torch.where(x.abs() < 2.0**112, x, torch.zeros(()))
    if kind == "constant":
        x = torch.full((16, dim), draw(st.floats(-(2.0**111), 2.0**111, width=32)))
    if kind == "tiny":
        x = x * 2.0 ** draw(st.integers(-140, -90))
    return [[float(value) for value in row] for row in x]


@pytest.mark.parametrize("bits", BITS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_bytes_and_decision_equal_the_plain_implementation(bits: tuple[int, int], data: st.DataObject) -> None:
    key_dim, value_dim = data.draw(DIMS), data.draw(DIMS)
    keys, values = data.draw(rows(key_dim)), data.draw(rows(value_dim))
    records, accepted = encode_records_checked(
        torch.tensor([keys]), torch.tensor([values]), key_bits=bits[0], value_bits=bits[1]
    )
    expected = plain_int4.encode(keys, values, *bits)
    assert accepted.tolist() == [expected is not None]
    if expected is None:
        return
    assert records.numpy().tobytes() == expected
    assert validate_records(records, key_dim, value_dim, key_bits=bits[0], value_bits=bits[1]).all()
    got = decode_records(records, key_dim, value_dim, torch.float32, key_bits=bits[0], value_bits=bits[1])
    plain_keys, plain_values, _ = plain_int4.decode(expected, key_dim, value_dim, *bits)
    for tensor, plain in zip(got, (plain_keys, plain_values), strict=True):
        assert tensor is not None
        packed = b"".join(struct.pack(f"<{len(row)}f", *row) for row in plain)
        assert tensor.numpy().tobytes() == packed


@pytest.mark.parametrize("bits", BITS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_key_error_is_half_a_step_of_the_decoded_scale(bits: tuple[int, int], data: st.DataObject) -> None:
    dim = data.draw(DIMS)
    keys = torch.tensor([data.draw(rows(dim))])
    records, accepted = encode_records_checked(keys, None, key_bits=bits[0])
    if not accepted.all():
        return
    decoded = decode_records(records, dim, 0, torch.float32, key_bits=bits[0])[0].double()
    steps = unpack_records(records, dim, 0, key_bits=bits[0]).key_scales.double()[:, None]
    at = record_layout(dim, 0, bits[0]).key_scales
    subnormal = (records[:, at : at + dim] < 8)[:, None]
    x = keys.double()
    top = (1 << bits[0]) - 1
    spread = (x.amax(1, keepdim=True) - x.amin(1, keepdim=True)) / steps
    most = torch.where(subnormal, 1.5, 17 / 16) * top  # what rounding the scale down may cost at the upper end
    assert bool((spread <= most * 1.0001).all())
    allowed = 0.5 + (spread - top).clamp_min(0.0)
    slack = 1e-4 + 3e-7 * x.abs() / steps
    assert bool(((decoded - x).abs() / steps <= allowed + slack).all())


@pytest.mark.parametrize("value_bits", [3, 4])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_accepted_records_are_within_the_bound(value_bits: int, data: st.DataObject) -> None:
    """Measured in float64 against the originals, K and V apart; slack for the integer tally's 1/64 steps."""
    dim, bound = data.draw(DIMS), data.draw(st.sampled_from([0.05, 0.1, 0.15, 0.3]))
    keys, values = torch.tensor([data.draw(rows(dim))]), torch.tensor([data.draw(rows(dim))])
    records, accepted = encode_records_checked(keys, values, value_bits=value_bits, error_bound=bound)
    if not accepted.all() or float(keys.abs().max()) < 1e-24 or float(values.abs().max()) < 1e-24:
        return
    got = decode_records(records, dim, dim, torch.float32, value_bits=value_bits)
    for original, decoded, limit in zip(
        (keys, values), got, (bound, bound * (15 / 7 if value_bits == 3 else 1)), strict=True
    ):
        assert decoded is not None
        scale = original.double().abs().max()
        error = ((decoded.double() - original.double()) / scale).norm() / (original.double() / scale).norm()
        assert float(error) <= limit * 1.1 + 1e-3


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.sampled_from([16, 80, 192]), st.integers(0, 2**20))
def test_batches_are_independent(count: int, dim: int, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    keys, values = torch.randn((count, 16, dim), generator=source), torch.randn((count, 16, dim), generator=source)
    together, _ = encode_records_checked(keys, values)
    order = torch.randperm(count, generator=source)
    assert torch.equal(encode_records_checked(keys[order], values[order])[0], together[order])
    alone = torch.cat([encode_records_checked(keys[i : i + 1], values[i : i + 1])[0] for i in range(count)])
    assert torch.equal(alone, together)
    one = int(order[0])
    for many, single in zip(
        decode_records(together, dim, dim), decode_records(alone[one : one + 1], dim, dim), strict=True
    ):
        assert many is not None
        assert single is not None
        assert torch.equal(many[one], single[0])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_bytes_decode_and_valid_ones_are_finite(data: st.DataObject) -> None:
    kb, vb = data.draw(st.sampled_from(BITS))
    layout = record_layout(16, 24, kb, vb)
    keys, values = torch.randn(1, 16, 16), torch.randn(1, 16, 24)
    record = encode_records_checked(keys, values, key_bits=kb, value_bits=vb)[0]
    for place in data.draw(st.lists(st.integers(0, layout.record_bytes - 1), max_size=8)):
        record[0, place] = data.draw(st.integers(0, 255))
    valid = bool(validate_records(record, 16, 24, key_bits=kb, value_bits=vb))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for decode in (decode_records, decode_records_rotated):
            for tensor in decode(record, 16, 24, dtype, key_bits=kb, value_bits=vb):
                assert tensor is not None
                assert bool(tensor.isfinite().all()) or not valid


@pytest.mark.parametrize("part", ["key_scales", "value_scales"])
@pytest.mark.parametrize("byte", [0x00, 0x7F, 0x80, 0x81, 0xFF])
def test_scale_codes_no_encoder_writes_are_named_invalid(part: str, byte: int) -> None:
    record = encode_records_checked(torch.randn(2, 16, 64), torch.randn(2, 16, 64))[0]
    record[1, getattr(record_layout(64, 64), part) + 5] = byte
    assert validate_records(record, 64, 64).tolist() == [True, False]


@pytest.mark.parametrize("part", ["key_base", "value_base"])
@pytest.mark.parametrize("base", [0.0, -1.0, float("nan"), float("inf"), 2.0**107, 2.0**-101])
def test_scale_bases_no_encoder_writes_are_named_invalid(part: str, base: float) -> None:
    record = encode_records_checked(torch.randn(2, 16, 64), torch.randn(2, 16, 64))[0]
    at = getattr(record_layout(64, 64), part)
    record[1, at : at + 2] = torch.tensor([base]).to(torch.bfloat16).view(torch.uint8)
    assert validate_records(record, 64, 64).tolist() == [True, False]


def test_padding_must_be_zero() -> None:
    record = encode_records_checked(torch.randn(2, 16, 64), torch.randn(2, 16, 64))[0]
    assert not bool(record[:, 1180:].any())
    record[0, 1200] = 1
    assert validate_records(record, 64, 64).tolist() == [False, True]


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([8, 24, 64, 80, 128, 192, 512, 576]), st.integers(0, 2**20))
def test_rotating_back_once_equals_rotating_each(dim: int, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    values = torch.randn((3, 16, dim), generator=source)
    records = encode_records_checked(torch.randn(3, 16, 8), values)[0]
    plain, rotated = decode_records(records, 8, dim)[1], decode_records_rotated(records, 8, dim)[1]
    assert plain is not None
    assert rotated is not None
    weights = torch.softmax(torch.randn(3 * 16, generator=source), 0)
    direct = weights.double() @ plain.view(-1, dim).double()
    once = rotate_back(weights @ rotated.view(-1, dim))
    assert torch.allclose(once.double(), direct, rtol=1e-4, atol=1e-5 * float(plain.abs().max()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_dtype_of_the_input_leaves_no_trace(dtype: torch.dtype) -> None:
    keys, values = torch.randn(5, 16, 64).to(dtype), torch.randn(5, 16, 64).to(dtype)
    narrow = encode_records_checked(keys, values)[0]
    assert torch.equal(narrow, encode_records_checked(keys.float(), values.float())[0])


def test_decoding_to_a_narrow_dtype_rounds_once() -> None:
    records = encode_records_checked(torch.randn(5, 16, 64), torch.randn(5, 16, 64))[0]
    for wide, narrow in zip(
        decode_records(records, 64, 64), decode_records(records, 64, 64, torch.bfloat16), strict=True
    ):
        assert wide is not None
        assert narrow is not None
        assert torch.equal(wide.to(torch.bfloat16), narrow)


def test_float16_saturates() -> None:
    keys = torch.full((1, 16, 8), 65504.0, dtype=torch.float16)
    keys[0, :, 4:] = 61000.0
    records = encode_records_checked(keys, keys)[0]
    for tensor in decode_records(records, 8, 8):
        assert tensor is not None
        assert float(tensor.max()) > 65520.0, "or the test shows nothing"
    for tensor in decode_records(records, 8, 8, torch.float16):
        assert tensor is not None
        assert bool(tensor.isfinite().all())


def test_signs_are_the_published_ones() -> None:
    signs = sign_list(1024)
    packed = bytes(sum((signs[8 * i + j] < 0) << j for j in range(8)) for i in range(128)).hex()
    assert packed.startswith(
        "b329b2c9c22aad47296f26a7f4c20de61e606cd59e1b22cd34d081dd28c78ea2b83ceb355d231556f40dea37e2485f7e"
    )
    assert packed.endswith("68de7aa196eb4c777caed907cd47da52924619866d19610057db64b0e043c302")
    assert list(signs) == [plain_int4.sign(d) for d in range(1024)]
