"""Public bug reports of other systems, by number: what concerns quantisation and layout of one block."""

from __future__ import annotations

import pytest
import torch

from quant import BlockShape, BlockTooLossy, CodecError, get_codec, record_layout
from quant.int4_records import (
    decode_records,
    decode_records_rotated,
    encode_records_checked,
    unpack_records,
    validate_records,
)
from quant.rotation import rotate_back
from quant.testing import random_block


@pytest.mark.parametrize("factor", [50.0, 100.0])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_case_013_outlier_key_channels_do_not_cost_the_others(factor: float, dim: int) -> None:
    draw = torch.Generator().manual_seed(13)
    keys = torch.randn(256, 16, dim, generator=draw)
    keys[..., [3, dim - 1]] = factor + 3.0 * torch.randn(256, 16, 2, generator=draw)
    plain = keys.clone()
    plain[..., [3, dim - 1]] = torch.randn(256, 16, 2, generator=draw)
    errors = []
    for tensor in (keys, plain):
        records, accepted = encode_records_checked(tensor.to(torch.bfloat16), None)
        assert bool(accepted.all())
        decoded = decode_records(records, dim, 0)[0]
        channel = (decoded - tensor).norm(dim=(0, 1)) / tensor.norm(dim=(0, 1))
        assert float(channel.max()) <= 0.10
        errors.append((decoded - tensor)[..., 4 : dim - 1].norm().item())
    # Their codes are the same; their scales are read in units of the head's largest, and so rounded apart.
    assert errors[0] <= 1.005 * errors[1], "the other channels must not notice"


def test_case_027_selecting_reordering_and_cropping_blocks_never_rounds_again() -> None:
    codec, shape = get_codec("int4"), BlockShape(2, 3, 16, 64, 64)
    keys, values = random_block(shape, torch.bfloat16, 1, (6,))
    out = torch.empty((6, codec.encoded_bytes(shape, "bfloat16")), dtype=torch.uint8)
    assert codec.encode_batch(keys, values, out).all()
    all_keys, all_values = torch.empty_like(keys), torch.empty_like(keys)
    codec.decode_into(out, all_keys, all_values)
    for order in ([0, 1, 2], [5, 3, 3, 0], [2]):
        some_keys, some_values = torch.empty_like(keys[order]), torch.empty_like(keys[order])
        codec.decode_into(out[order], some_keys, some_values)
        assert torch.equal(some_keys, all_keys[order])
        assert torch.equal(some_values, all_values[order])
    before = out.clone()
    assert codec.encode_batch(keys[4:5], values[4:5] if values is not None else None, out[2:3]).all()
    untouched = [0, 1, 3, 4, 5]
    assert torch.equal(out[untouched], before[untouched])
    assert torch.equal(out[2], before[4])


@pytest.mark.parametrize("value", [0.0, -0.0, 0.1, -0.1, 1e-6, -1e-6, 6e4, -6e4, 1e-30, -1e-30, -1.0, 3e33, -3e33])
@pytest.mark.parametrize("other", [None, 0.0, 0.2, -7.0, 6e4])
@pytest.mark.parametrize("name", ["int4", "int8k"])
def test_case_055_constant_and_nearly_constant_channels(value: float, other: float | None, name: str) -> None:
    codec, shape = get_codec(name), BlockShape(1, 2, 16, 64, 64)
    keys = torch.full(shape.keys_shape, value)
    if other is not None:
        keys[0, 1, 5, 9] = other
    if name == "int8k" and abs(value) > 6e4:  # beyond fp16
        with pytest.raises(BlockTooLossy):
            codec.encode(keys, keys)
        return
    payload = codec.encode(keys, keys)
    assert bool(codec.validate(payload, shape, "float32"))
    decoded_keys, decoded_values = codec.decode(payload, shape, torch.float32)
    assert decoded_values is not None
    assert bool(decoded_keys.isfinite().all())
    assert bool(decoded_values.isfinite().all())
    error = (decoded_keys - keys).abs().double()
    if name == "int4":
        records = torch.frombuffer(bytearray(payload), dtype=torch.uint8).view(2, -1)
        step = unpack_records(records, 64, 64).key_scales.view(1, 2, 1, 64).double()
        spread = (keys.amax(2, keepdim=True) - keys.amin(2, keepdim=True)).double() / step
        # half a step of the decoded scale; where e4m3 rounded it down, the one larger value gives way by that much more
        allowed = 0.5 + (spread - 15.0).clamp_min(0.0)
        assert bool((error <= step * allowed * 1.0001).all())
    else:
        step = ((keys.amax(3) - keys.amin(3)).double() / 255).clamp_min(2.0**-24)[..., None]
        assert bool((error <= step * 0.501 + keys.abs() * 2.0**-10 / 255 + 2.0**-24).all())
    assert float((decoded_values - keys).double().norm()) <= 0.15 * float(keys.double().norm()) + 2.0**-100


def test_case_055_subnormals_and_denormal_mixtures() -> None:
    keys = (torch.arange(16 * 64, dtype=torch.int32).view(1, 16, 64) * 7919).view(torch.float32)
    assert 0 < float(keys[0, 15, 63]) < 2.0**-126
    records, accepted = encode_records_checked(keys, keys)
    assert accepted.all()
    for decoded in decode_records(records, 64, 64):
        assert decoded is not None
        assert bool(((decoded - keys).abs() <= 2.0**-109).all())
    keys[0, :, 5] = 1.0
    records, accepted = encode_records_checked(keys, None)
    assert accepted.all()
    assert bool(((decode_records(records, 64, 0)[0] - keys).abs() <= 1 / 127).all())


@pytest.mark.parametrize("name", ["int4", "int8k"])
@pytest.mark.parametrize("value", [3e38, -3e38, 6e33])
def test_case_055_what_no_scale_can_carry_is_refused(name: str, value: float) -> None:
    codec, shape = get_codec(name), BlockShape(1, 1, 16, 64, 64)
    keys = torch.randn(2, *shape.keys_shape)
    bad = keys.clone()
    bad[1, 0, 0, 3, 3] = value
    out = torch.empty((2, codec.encoded_bytes(shape, "float32")), dtype=torch.uint8)
    assert codec.encode_batch(bad, keys, out).tolist() == [True, False]
    assert codec.encode_batch(keys, bad, out).tolist() == [True, False]


@pytest.mark.parametrize("dim", [8, 24, 64, 80, 96, 128, 192, 256, 512, 576])
@pytest.mark.parametrize("name", ["int4", "int8k"])
def test_case_089_every_head_dim_works_and_reports_its_real_size(name: str, dim: int) -> None:
    codec = get_codec(name)
    for shape in (BlockShape(1, 2, 16, dim, dim), BlockShape(2, 1, 32, dim, 0), BlockShape(1, 1, 16, dim, 64)):
        keys, values = random_block(shape, torch.bfloat16, dim)
        payload = codec.encode(keys, values)
        assert len(payload) == codec.encoded_bytes(shape, "bfloat16")
        decoded = codec.decode(payload, shape, "bfloat16")
        for original, found in zip((keys, values), decoded, strict=True):
            if original is not None and found is not None:
                difference = (found.float() - original.float()).norm(dim=(-1, -2)) / original.float().norm(dim=(-1, -2))
                assert float(difference.max()) < 0.15


@pytest.mark.parametrize("dim", [0, 1, 4, 12, 60, 100, 1032])
@pytest.mark.parametrize("name", ["int4", "int8k"])
def test_case_089_other_head_dims_are_an_error_before_any_work(name: str, dim: int) -> None:
    with pytest.raises(CodecError, match=r"dim"):
        get_codec(name).encoded_bytes(BlockShape(1, 1, 16, dim, 64), "bfloat16")
    if dim:
        with pytest.raises(CodecError, match=f"value_dim.*{dim}"):
            get_codec(name).encoded_bytes(BlockShape(1, 1, 16, 64, dim), "bfloat16")


def test_case_116_every_reader_sees_the_same_floats() -> None:
    shape = BlockShape(2, 3, 32, 64, 80)
    codec = get_codec("int4")
    keys, values = random_block(shape, torch.float32, 3)
    payload = torch.frombuffer(bytearray(codec.encode(keys, values)), dtype=torch.uint8)
    block_keys, block_values = codec.decode(payload, shape, torch.float32)
    assert block_values is not None
    records = payload.view(-1, record_layout(64, 80).record_bytes)
    flat_keys, flat_values = block_keys.view(-1, 16, 64), block_values.view(-1, 16, 80)
    direct = decode_records(records, 64, 80)
    rotated = decode_records_rotated(records, 64, 80)
    parts = unpack_records(records, 64, 80)
    assert direct[1] is not None
    assert rotated[1] is not None
    assert parts.value_codes is not None
    assert parts.value_scales is not None
    assert parts.value_zeros is not None
    assert torch.equal(direct[0], flat_keys)
    assert torch.equal(rotated[0], flat_keys)
    assert torch.equal(direct[1], flat_values)
    by_hand = (parts.key_codes - parts.key_zeros[:, None]) * parts.key_scales[:, None]
    assert torch.equal(by_hand, flat_keys)
    by_hand = (parts.value_codes - parts.value_zeros[..., None]) * parts.value_scales[..., None]
    assert torch.equal(by_hand, rotated[1])
    assert torch.allclose(rotate_back(by_hand), flat_values, rtol=1e-5, atol=1e-5 * float(flat_values.abs().max()))


@pytest.mark.parametrize("scale", [0.0, -0.25, float("inf"), float("nan")])
def test_case_116_zero_negative_and_non_finite_scales_are_rejected(scale: float) -> None:
    records = encode_records_checked(torch.randn(1, 16, 64), torch.randn(1, 16, 64))[0]
    layout = record_layout(64, 64)
    for at in (layout.key_base, layout.value_base):
        bad = records.clone()
        bad[0, at : at + 2] = torch.tensor([scale]).to(torch.bfloat16).view(torch.uint8)
        assert not bool(validate_records(bad, 64, 64))


@pytest.mark.parametrize("block_tokens", [1, 2, 3, 4, 8, 15, 16, 17, 32, 128, 256])
@pytest.mark.parametrize("name", ["int4", "int8k", "raw"])
def test_case_143_block_sizes_work_or_are_refused_by_name(name: str, block_tokens: int) -> None:
    codec, shape = get_codec(name), BlockShape(1, 2, block_tokens, 64, 64)
    keys, values = random_block(shape, torch.bfloat16, block_tokens)
    if name != "raw" and block_tokens % 16:
        with pytest.raises(CodecError, match=f"multiple of 16.*got {block_tokens}"):
            codec.encoded_bytes(shape, "bfloat16")
        with pytest.raises(CodecError, match=f"multiple of 16.*got {block_tokens}"):
            codec.encode(keys, values)
        return
    decoded, _ = codec.decode(codec.encode(keys, values), shape, "bfloat16")
    assert float((decoded.float() - keys.float()).norm() / keys.float().norm()) < 0.15


def test_long_blocks_are_runs_of_independent_records() -> None:
    """Errors do not grow with position: every run of a long block equals the same tokens encoded as their own block."""
    codec, shape = get_codec("int4"), BlockShape(1, 2, 512, 64, 64)
    keys, values = random_block(shape, torch.bfloat16, 5)
    assert values is not None
    long_keys, long_values = codec.decode(codec.encode(keys, values), shape, "bfloat16")
    assert long_values is not None
    for start in range(0, 512, 16):
        part = slice(start, start + 16)
        short = codec.decode(
            codec.encode(keys[:, :, part], values[:, :, part]), BlockShape(1, 2, 16, 64, 64), "bfloat16"
        )
        assert short[1] is not None
        assert torch.equal(short[0], long_keys[:, :, part])
        assert torch.equal(short[1], long_values[:, :, part])
