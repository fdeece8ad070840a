"""Registry, names, sizes, parameters, bits tables, bounds; what the contract does not say about all codecs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import quant
from quant import (
    BlockShape,
    BlockTooLossy,
    CodecError,
    Int4Codec,
    codec_from_parameters,
    codec_names,
    get_codec,
    record_bytes,
    register,
)
from quant.codec import _registered
from quant.error_bound import relative_rms
from quant.int4_records import decode_records, decode_records_rotated, encode_records, encode_records_checked
from quant.record_layout import record_layout
from quant.rotation import sign_list
from quant.testing import random_block
from tests.quant.plain_int4 import Parts, butterflies


def test_importing_quant_does_not_import_torch() -> None:
    code = (
        "import sys, quant; from quant import get_codec, record_bytes; assert record_bytes(64, 64) == 1216; "
        "assert 'torch' not in sys.modules; quant.Int4Codec; assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_names_exist() -> None:
    assert all(getattr(quant, name) is not None for name in quant.__all__)
    assert set(quant.__all__) <= set(dir(quant))
    with pytest.raises(AttributeError, match="nonsense"):
        _ = quant.nonsense


def test_registry() -> None:
    assert {"raw", "int4", "int8k"} <= set(codec_names())
    with pytest.raises(CodecError, match=r"unknown codec 'int5'; known: int4, int8k, raw"):
        get_codec("int5")
    with pytest.raises(CodecError, match="does not take"):
        get_codec("raw", key_bits=5)
    with pytest.raises(CodecError, match="already taken"):
        register("int4", Int4Codec)
    register("test-only", Int4Codec)
    try:
        assert get_codec("test-only", key_bits=5).parameters() == Int4Codec(key_bits=5).parameters()
        assert "test-only" in codec_names()
    finally:
        del _registered["test-only"]


@pytest.mark.parametrize(
    ("dims", "used", "size"),
    [((64, 64), 1180, 1216), ((128, 128), 2332, 2368), ((256, 256), 4636, 4672), ((576, 0), 5762, 5824)],
)
def test_record_sizes(dims: tuple[int, int], used: int, size: int) -> None:
    assert record_layout(*dims).used_bytes == used
    assert record_bytes(*dims) == size


@pytest.mark.parametrize("bits", [(4, 4), (4, 3), (5, 4), (5, 3)])
@pytest.mark.parametrize("dims", [(8, 8), (64, 64), (80, 96), (192, 128), (576, 0)])
def test_offsets_are_those_of_the_format_page(dims: tuple[int, int], bits: tuple[int, int]) -> None:
    layout, plain = record_layout(*dims, *bits), Parts(*dims, *bits)
    names = {"value_codes": "v_codes", "key_plane": "k_plane", "value_plane": "v_plane", "key_scales": "k_scales",
             "key_zeros": "k_zeros", "value_scales": "v_scales", "value_zeros": "v_zeros", "key_base": "k_base",
             "value_base": "v_base"}  # fmt: skip
    assert {name: getattr(layout, name) for name in names} == {name: plain.at[other] for name, other in names.items()}
    assert (layout.used_bytes, layout.record_bytes) == (plain.used, plain.size)
    assert layout.record_bytes % 64 == 0


def test_block_sizes_of_real_models() -> None:
    codec = get_codec("int4")
    smollm2 = BlockShape(30, 3, 16, 64, 64)
    assert codec.encoded_bytes(smollm2, "bfloat16") == 109_440
    assert get_codec("raw").encoded_bytes(smollm2, "bfloat16") == 368_640
    assert codec.encoded_bytes(smollm2, "bfloat16") <= 0.30 * 368_640
    latent = BlockShape(27, 1, 16, 576, 0)
    assert codec.encoded_bytes(latent, "bfloat16") <= 0.32 * get_codec("raw").encoded_bytes(latent, "bfloat16")


def test_parameters_are_canonical() -> None:
    assert Int4Codec().parameters() == bytes.fromhex("010044")
    assert Int4Codec(key_bits=5, value_bits=3).parameters() == bytes.fromhex("010053")
    assert Int4Codec(key_bits=[[4, 4], [4, 4]]).parameters() == bytes.fromhex("010044")
    table = Int4Codec(key_bits=[[4, 5], [4, 4]], value_bits=3)
    assert table.parameters() == bytes.fromhex("0101" + "0200" + "0200" + "43534343")
    assert Int4Codec(error_bound=0.3).parameters() == Int4Codec().parameters(), "the bound changes no byte"
    again = codec_from_parameters("int4", table.parameters())
    assert again.parameters() == table.parameters()
    for bad in (
        "",
        "01",
        "0100",
        "020044",
        "010066",
        "01004400",
        "010101000100",
        "01010100010044",
        "010102000100444400",
    ):
        with pytest.raises(CodecError):
            codec_from_parameters("int4", bytes.fromhex(bad))


def test_bits_tables_place_every_head() -> None:
    shape = BlockShape(3, 2, 32, 64, 64)
    key_bits, value_bits = [[4, 5], [5, 5], [4, 4]], [[4, 4], [3, 3], [3, 4]]
    codec = Int4Codec(key_bits, value_bits)
    keys, values = random_block(shape, torch.bfloat16, 4)
    assert values is not None
    payload = codec.encode(keys, values)
    at = 0
    for layer in range(3):
        for head in range(2):
            bits = {"key_bits": key_bits[layer][head], "value_bits": value_bits[layer][head]}
            assert codec.head_offsets(shape)[layer][head] == at
            for run in range(2):
                tokens = slice(16 * run, 16 * run + 16)
                record = encode_records(keys[layer, head, tokens][None], values[layer, head, tokens][None], **bits)
                assert payload[at : at + record.shape[1]] == record.numpy().tobytes()
                at += record.shape[1]
    assert at == len(payload)


def test_a_shard_of_a_table_is_a_piece_of_the_payload() -> None:
    shape = BlockShape(2, 4, 16, 64, 64)
    codec = Int4Codec([[4, 5, 4, 5], [5, 4, 4, 4]])
    keys, values = random_block(shape, torch.bfloat16, 5)
    assert values is not None
    payload = codec.encode(keys, values)
    offsets = codec.head_offsets(shape)
    shard = codec.for_range(slice(0, 1), slice(2, 4))
    piece = shard.encode(keys[:1, 2:], values[:1, 2:])
    assert payload[offsets[0][2] : offsets[1][0]] == piece
    assert codec.for_range(slice(1, 2), slice(1, 4)).parameters() == Int4Codec().parameters()
    with pytest.raises(CodecError, match="empty"):
        codec.for_range(slice(2, 2), slice(0, 4))


def test_misfit_tables_and_bounds_are_refused() -> None:
    with pytest.raises(CodecError, match=r"bits table is for 1 layers x 2 KV heads, the block has 2 x 2"):
        Int4Codec([[4, 5]]).encoded_bytes(BlockShape(2, 2, 16, 64, 64), "bfloat16")
    with pytest.raises(CodecError, match="rectangular"):
        Int4Codec([[4, 5], [4]])
    with pytest.raises(CodecError, match="same"):
        Int4Codec([[4, 5]], [[4], [4]])
    for bits in ((6, 4), (4, 2), (3, 4), (4, 5)):
        with pytest.raises(CodecError, match="bits"):
            Int4Codec(*bits)
    for bound in (0.0, -1.0, 1.5, float("nan"), True, "0.1"):
        with pytest.raises(CodecError, match="error_bound"):
            Int4Codec(error_bound=bound)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [0, -1, True, 1.5])
def test_block_shapes_are_checked(count: object) -> None:
    with pytest.raises(CodecError, match="kv_heads"):
        BlockShape(1, count, 16, 64, 64)  # type: ignore[arg-type]


def test_extra_bits_pay() -> None:
    keys, values = torch.randn(64, 16, 64), torch.randn(64, 16, 64)
    errors = {}
    for kb, vb in ((4, 4), (5, 3)):
        got = decode_records(
            encode_records(keys, values, key_bits=kb, value_bits=vb), 64, 64, key_bits=kb, value_bits=vb
        )
        assert got[1] is not None
        errors[kb, vb] = float(relative_rms(keys, got[0]).mean()), float(relative_rms(values, got[1]).mean())
    assert errors[5, 3][0] < 0.56 * errors[4, 4][0]
    assert errors[5, 3][1] < 2.3 * errors[4, 4][1]


def test_error_bound_decides_and_says_why() -> None:
    shape = BlockShape(2, 2, 32, 64, 64)
    keys, values = random_block(shape, torch.float32, 6)
    assert values is not None
    values[1, 0, 16:] = torch.randn(16, 64)
    Int4Codec().encode(keys, values)
    with pytest.raises(BlockTooLossy) as refused:
        Int4Codec(error_bound=0.08).encode(keys, values)
    errors = refused.value.errors
    assert {error.part for error in errors} == {"values"}
    assert {(error.layer, error.kv_head) for error in errors} == {(layer, head) for layer in (0, 1) for head in (0, 1)}
    assert all(0.08 < error.relative_error < 0.15 and error.bound == 0.08 for error in errors)
    assert "0.08" in str(refused.value)


def test_the_bound_is_per_head_not_per_block() -> None:
    """One bad head among many good ones is enough."""
    keys, values = torch.randn(32, 16, 64), torch.randn(32, 16, 64)
    rotated = [15.0] + [0.499] * 63  # one channel of 15 steps, the others nearly half a step
    values[7] = torch.tensor(butterflies(rotated, rounded=False)) * torch.tensor(sign_list(64))
    _, accepted = encode_records_checked(keys, values)
    assert accepted.tolist() == [index != 7 for index in range(32)]


def test_decoding_into_given_tensors() -> None:
    records = encode_records(torch.randn(5, 16, 64), torch.randn(5, 16, 80))
    for decode in (decode_records, decode_records_rotated):
        fresh = decode(records, 64, 80, torch.bfloat16)
        given = torch.zeros(5, 16, 64).bfloat16(), torch.zeros(5, 16, 160).bfloat16()[..., :80]
        filled = decode(records, 64, 80, torch.bfloat16, out=given)
        assert filled[0] is given[0]
        assert filled[1] is given[1]
        assert fresh[1] is not None
        assert torch.equal(filled[0], fresh[0])
        assert torch.equal(filled[1], fresh[1])
        with pytest.raises(CodecError, match="out must hold"):
            decode(records, 64, 80, torch.float32, out=given)
        with pytest.raises(CodecError, match="out must hold"):
            decode(records, 64, 80, torch.bfloat16, out=(given[0], None))


def test_record_functions_check_their_input() -> None:
    keys, values = torch.randn(2, 16, 64), torch.randn(2, 16, 64)
    records = encode_records(keys, values)
    bad_calls: list[Callable[[], object]] = [
        lambda: encode_records(keys[:, :8], values),
        lambda: encode_records(keys, values[:1]),
        lambda: encode_records(keys.double(), values.double()),
        lambda: encode_records(keys[..., :60], values),
        lambda: decode_records(records[:, :-64], 64, 64),
        lambda: decode_records(records, 64, 128),
        lambda: decode_records(records, 64, 64, key_bits=5),
        lambda: decode_records(records.to(torch.int8), 64, 64),
        lambda: decode_records(records, 64, 64, torch.float64),
    ]
    for call in bad_calls:
        with pytest.raises(CodecError):
            call()


def test_raw_refuses_another_dtype() -> None:
    codec, shape = get_codec("raw"), BlockShape(1, 1, 16, 64, 64)
    keys, values = random_block(shape, torch.bfloat16, 0)
    with pytest.raises(CodecError, match="payload"):
        codec.decode(codec.encode(keys, values), shape, torch.float32)


def test_raw_payload_is_the_design_order() -> None:
    shape = BlockShape(2, 3, 16, 8, 24)
    keys = torch.arange(2 * 3 * 16 * 8, dtype=torch.float32).view(shape.keys_shape)
    values = -torch.arange(2 * 3 * 16 * 24, dtype=torch.float32).view(shape.values_shape)
    expected = torch.cat([keys.flatten(2), values.flatten(2)], 2)
    assert get_codec("raw").encode(keys, values) == expected.numpy().tobytes()


@pytest.mark.parametrize("bits", ["x", b"4", 4.0, None])
def test_bits_that_are_no_table_are_named(bits: object) -> None:
    with pytest.raises(CodecError, match="key_bits must be an int or"):
        get_codec("int4", key_bits=bits)
    with pytest.raises(CodecError, match="value_bits must be an int or"):
        get_codec("int4", value_bits=bits)


@pytest.mark.parametrize("name", ["raw", "int4", "int8k"])
def test_a_tuple_is_no_block_shape(name: str) -> None:
    with pytest.raises(CodecError, match=r"shape must be a BlockShape, got \(1, 1, 16, 8, 8\)"):
        get_codec(name).decode(b"", (1, 1, 16, 8, 8), torch.float32)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["raw", "int4", "int8k"])
@pytest.mark.parametrize("payload", [None, "x", 5])
def test_what_is_no_payload_is_refused(name: str, payload: Any) -> None:
    with pytest.raises(CodecError, match=rf"payload must be bytes or a uint8 tensor, got {payload!r} "):
        get_codec(name).decode(payload, BlockShape(1, 1, 16, 8, 8), torch.float32)
