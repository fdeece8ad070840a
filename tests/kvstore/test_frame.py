"""Frames: against a second writer made from the page, round trips, causes of refusal, segments, keyed hashes."""

from __future__ import annotations

import hashlib
import re
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import CopyKey, UsageError
from kvstore.frame.parsing import (
    Frame,
    FrameFault,
    FrameHeader,
    FrameSpec,
    build_header,
    build_into,
    build_scatter,
    parse_frame,
    parse_header,
)

PAGES = Path(__file__).parents[2] / "docs" / "formats"
SECRET = b"0123456789abcdef"


def key(**changes: object) -> CopyKey:
    fields = {
        "root": b"\x01" * 32,
        "group": 1,
        "hash": b"\x02" * 32,
        "codec": "int4",
        "exact": False,
        "heads": (0, 2),
        "layers": (0, 3),
        "parameters": b"k5v4",
    }
    return CopyKey(**(fields | changes))  # type: ignore[arg-type]


SPEC = FrameSpec(key(), 16, 64, 64, "bfloat16", 48)
PAYLOAD = bytes(range(48))


def frame_of(spec: FrameSpec = SPEC, payload: bytes = PAYLOAD, **options: object) -> bytes:
    return b"".join(build_scatter(spec, [payload], **options))  # type: ignore[arg-type]


def frame_by_the_page(spec: FrameSpec, pieces: list[tuple[int, int, bytes]], secret: bytes | None) -> bytes:
    """pieces: first layer, last layer, bytes."""
    k = spec.key
    payload = b"".join(piece for _, _, piece in pieces)
    table, offset = b"", 0
    for first, last, piece in pieces:
        checksum = xxhash.xxh3_128(piece).digest()
        table += struct.pack("<QQHHI", offset, len(piece), first, last, 0) + checksum
        offset += len(piece)
    parameters = k.parameters + bytes(-len(k.parameters) % 8)
    length = 144 + len(parameters) + len(table) + 48
    length += -length % 64
    head = b"KVFRAME\0" + struct.pack("<HHI", 1, int(k.exact) | (2 if secret else 0), length)
    head += k.hash + k.root[:16] + k.codec.encode().ljust(16, b"\0") + spec.dtype.encode().ljust(16, b"\0")
    head += struct.pack("<HHIHHHH", k.group, 0, spec.block_tokens, *k.heads, *k.layers)
    head += struct.pack("<IIQQ", spec.key_dim, spec.value_dim, len(payload), len(payload))
    head += struct.pack("<IHH", len(k.parameters), len(pieces), 0)
    assert len(head) == 144
    head = (head + parameters + table).ljust(length - 48, b"\0")
    keyed = bytes(32)
    if secret:
        keyed = hashlib.blake2b(head + payload, key=secret, digest_size=32, person=b"kvstore frame").digest()
    head += keyed
    return head + xxhash.xxh3_128(head).digest() + payload


@pytest.mark.parametrize("secret", [None, SECRET])
def test_frames_agree_with_the_page(secret: bytes | None) -> None:
    pieces = [PAYLOAD[:32], PAYLOAD[32:]]
    made = b"".join(build_scatter(SPEC, pieces, layer_ranges=[(0, 2), (2, 3)], secret=secret))
    assert made == frame_by_the_page(SPEC, [(0, 2, pieces[0]), (2, 3, pieces[1])], secret)
    assert isinstance(parse_frame(made, SPEC, secret=secret), Frame)


def test_the_pages_vectors() -> None:
    hashes = re.findall(r"^    ([0-9a-f]{64})$", (PAGES / "frame.md").read_text(encoding="utf-8"), re.M)
    root = re.findall(r"^    ([0-9a-f]{64})$", (PAGES / "identity.md").read_text(encoding="utf-8"), re.M)[0]
    block = re.findall(r"hash_1 +([0-9a-f]{64})", (PAGES / "identity.md").read_text(encoding="utf-8"))[1]
    spec = replace(SPEC, key=key(root=bytes.fromhex(root), hash=bytes.fromhex(block)))
    two = b"".join(build_scatter(spec, [PAYLOAD[:32], PAYLOAD[32:]], layer_ranges=[(0, 2), (2, 3)]))
    assert (len(two), hashlib.sha256(two).hexdigest()) == (368, hashes[0])
    one = frame_of(spec, secret=SECRET)
    assert (len(one), hashlib.sha256(one).hexdigest()) == (304, hashes[1])


@given(
    payload=st.binary(min_size=1, max_size=300),
    parameters=st.binary(max_size=20),
    exact=st.booleans(),
    keyed=st.booleans(),
    layers=st.integers(1, 6),
    data=st.data(),
)
@settings(max_examples=150, deadline=None)
def test_what_is_written_is_read(
    payload: bytes, parameters: bytes, exact: bool, keyed: bool, layers: int, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, 9))
    spec = FrameSpec(
        key(exact=exact, parameters=parameters, layers=(first, first + layers)), 16, 128, 0, "float32", len(payload)
    )
    count = data.draw(st.integers(1, min(layers, len(payload))))
    cuts = (
        sorted(data.draw(st.sets(st.integers(1, len(payload) - 1), min_size=count - 1, max_size=count - 1)))
        if count > 1
        else []
    )
    borders = (
        sorted(data.draw(st.sets(st.integers(1, layers - 1), min_size=count - 1, max_size=count - 1)))
        if count > 1
        else []
    )
    pieces = [payload[a:b] for a, b in zip([0, *cuts], [*cuts, len(payload)], strict=True)]
    ranges = [(first + a, first + b) for a, b in zip([0, *borders], [*borders, layers], strict=True)]
    secret = SECRET if keyed else None
    made = b"".join(build_scatter(spec, pieces, layer_ranges=ranges, secret=secret))
    out = bytearray(len(made) + 3)
    assert build_into(out, spec, pieces, layer_ranges=ranges, secret=secret) == len(made) == spec.frame_bytes(count)
    assert bytes(out[: len(made)]) == made
    parsed = parse_frame(made, spec, secret=secret)
    assert isinstance(parsed, Frame)
    assert bytes(parsed.payload) == payload
    assert [segment.layers for segment in parsed.header.segments] == ranges
    assert len(made) - len(payload) == parsed.header.header_bytes
    assert parsed.header.header_bytes % 64 == 0
    target = bytearray(len(payload))
    assert parsed.header.copy_payload(parsed.payload, target, secret) is None
    assert bytes(target) == payload


def test_nothing_is_copied_when_a_frame_is_scattered() -> None:
    pieces = [np.zeros(1 << 16, np.uint8), np.ones(1 << 16, np.uint8)]
    spec = replace(SPEC, payload_bytes=1 << 17)
    header, *parts = build_scatter(spec, pieces, layer_ranges=[(0, 1), (1, 3)])
    assert header.nbytes == spec.header_bytes(2)
    assert all(
        np.shares_memory(np.frombuffer(part, np.uint8), piece) for part, piece in zip(parts, pieces, strict=True)
    )


def test_a_payload_larger_than_the_cache_steps_survives() -> None:
    payload = np.random.default_rng(0).integers(0, 256, 3 * (256 << 10) + 77, dtype=np.uint8)
    spec = replace(SPEC, payload_bytes=payload.nbytes)
    out = np.zeros(spec.frame_bytes(1), np.uint8)
    build_into(out, spec, [payload])
    parsed = parse_frame(out, spec)
    assert isinstance(parsed, Frame)
    target = np.zeros_like(payload)
    assert parsed.header.copy_payload(parsed.payload, target) is None
    assert np.array_equal(target, payload)
    out[-1] ^= 1
    assert parsed.header.copy_payload(parsed.payload, target) is FrameFault.PAYLOAD_CHECKSUM


WRONG = [
    (FrameFault.HASH, {"key": key(hash=b"\x03" * 32)}),
    (FrameFault.ROOT, {"key": key(root=b"\x01" * 15 + b"\x02" * 17)}),
    (FrameFault.GROUP, {"key": key(group=2)}),
    (FrameFault.CODEC, {"key": key(codec="int8k")}),
    (FrameFault.EXACTNESS, {"key": key(exact=True)}),
    (FrameFault.RANGE, {"key": key(heads=(0, 1))}),
    (FrameFault.RANGE, {"key": key(heads=(2, 4))}),
    (FrameFault.RANGE, {"key": key(layers=(0, 4))}),
    (FrameFault.PARAMETERS, {"key": key(parameters=b"k4v4")}),
    (FrameFault.PARAMETERS, {"key": key(parameters=b"")}),
    (FrameFault.SHAPE, {"block_tokens": 32}),
    (FrameFault.SHAPE, {"key_dim": 128}),
    (FrameFault.SHAPE, {"value_dim": 0}),
    (FrameFault.SHAPE, {"dtype": "float16"}),
    (FrameFault.SIZE, {"payload_bytes": 47}),
    (FrameFault.SIZE, {"payload_bytes": 1 << 50}),
]


@pytest.mark.parametrize(("fault", "changes"), WRONG)
def test_case_012_and_019_a_good_frame_of_something_else_is_a_miss(
    fault: FrameFault, changes: dict[str, object]
) -> None:
    made = frame_of()
    assert parse_frame(made, replace(SPEC, **changes)) is fault  # type: ignore[arg-type]
    assert isinstance(parse_frame(made, SPEC), Frame)


def test_case_041_every_truncation_and_every_surplus_is_a_miss() -> None:
    for secret in (None, SECRET):
        made = frame_of(secret=secret)
        for length in range(len(made)):
            assert isinstance(parse_frame(made[:length], SPEC, secret=secret), FrameFault)
        assert parse_frame(made + b"\0", SPEC, secret=secret) is FrameFault.LENGTH


def test_case_019_only_the_holder_of_the_secret_can_sign() -> None:
    signed, plain = frame_of(secret=SECRET), frame_of()
    assert isinstance(parse_frame(signed, SPEC, secret=SECRET), Frame)
    assert parse_frame(signed, SPEC) is FrameFault.NO_SECRET
    assert parse_frame(plain, SPEC, secret=SECRET) is FrameFault.UNSIGNED
    assert parse_frame(frame_of(secret=b"another secret!!"), SPEC, secret=SECRET) is FrameFault.FORGED
    # A forger who can compute every checksum, but has no secret: other payload under a copied signature.
    other = bytearray(frame_of(payload=bytes(48), secret=SECRET))
    at = SPEC.header_bytes(1) - 48
    other[at : at + 32] = signed[at : at + 32]
    other[at + 32 : at + 48] = xxhash.xxh3_128(bytes(other[: at + 32])).digest()
    assert parse_frame(other, SPEC, secret=SECRET) is FrameFault.FORGED
    parsed = parse_header(other, SPEC, frame_bytes=len(other), keyed=True)
    assert isinstance(parsed, FrameHeader)
    assert parsed.copy_payload(other[at + 48 :], bytearray(48), SECRET) is FrameFault.FORGED


def test_segments_are_checked_one_by_one() -> None:
    pieces = [PAYLOAD[:16], PAYLOAD[16:40], PAYLOAD[40:]]
    made = b"".join(build_scatter(SPEC, pieces, layer_ranges=[(0, 1), (1, 2), (2, 3)]))
    header = parse_header(made[: SPEC.header_bytes(3)], SPEC, frame_bytes=len(made), keyed=False)
    assert isinstance(header, FrameHeader)
    assert [header.check_segment(index, piece) for index, piece in enumerate(pieces)] == [None] * 3
    assert header.check_segment(1, pieces[0]) is FrameFault.LENGTH
    assert header.check_segment(1, bytes(24)) is FrameFault.PAYLOAD_CHECKSUM
    assert header.check_payload(PAYLOAD[:-1]) is FrameFault.LENGTH
    assert header.copy_payload(PAYLOAD, bytearray(47)) is FrameFault.LENGTH


@pytest.mark.parametrize(
    ("field_at", "packed"),
    [(0, struct.pack("<Q", 1)), (8, struct.pack("<Q", 2**63)), (8, struct.pack("<Q", 0)), (16, struct.pack("<H", 1)),
     (18, struct.pack("<H", 9)), (20, struct.pack("<I", 1))],
)  # fmt: skip
def test_a_table_that_lies_is_a_miss_even_with_good_checksums(field_at: int, packed: bytes) -> None:
    made = bytearray(frame_of())
    at = 144 + 8 + field_at
    made[at : at + len(packed)] = packed
    end = SPEC.header_bytes(1)
    made[end - 16 : end] = xxhash.xxh3_128(bytes(made[: end - 16])).digest()
    assert parse_frame(made, SPEC) is FrameFault.TABLE


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"payload_bytes": 0}, "payload_bytes: got 0"),
        ({"block_tokens": True}, "block_tokens: got True"),
        ({"value_dim": -1}, "value_dim: got -1"),
        ({"key_dim": 2**32}, "key_dim"),
        ({"dtype": ""}, "dtype"),
        ({"dtype": "a-name-far-too-long"}, "dtype"),
        ({"dtype": "b\u00e9"}, "dtype"),
    ],
)
def test_a_spec_says_what_is_wrong_with_it(changes: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        replace(SPEC, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pieces", "ranges", "secret", "words"),
    [
        ([PAYLOAD[:-1]], None, None, "pieces of 47 bytes"),
        ([PAYLOAD, b""], [(0, 2), (2, 3)], None, "not empty"),
        ([PAYLOAD[:8], PAYLOAD[8:]], None, None, "2 pieces for 1 layer ranges"),
        ([PAYLOAD[:8], PAYLOAD[8:]], [(0, 1), (2, 3)], None, "follow each other"),
        ([PAYLOAD[:8], PAYLOAD[8:]], [(0, 1), (1, 2)], None, "cover"),
        ([PAYLOAD], [(0, 4)], None, "follow each other"),
        ([PAYLOAD], None, b"short", "secret: got 5 bytes"),
        ([PAYLOAD], None, b"x" * 65, "secret: got 65 bytes"),
    ],
)
def test_a_writer_is_told_what_does_not_add_up(
    pieces: list[bytes], ranges: list[tuple[int, int]] | None, secret: bytes | None, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        build_header(SPEC, pieces, layer_ranges=ranges, secret=secret)
    with pytest.raises(UsageError, match="at least 304"):
        build_into(bytearray(303), SPEC, [PAYLOAD])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"root": b"x"}, "root"),
        ({"hash": "x" * 32}, "hash"),
        ({"group": -1}, "group"),
        ({"group": True}, "group"),
        ({"codec": ""}, "codec"),
        ({"codec": "with\x00zero"}, "codec"),
        ({"codec": "seventeen letters"}, "codec"),
        ({"exact": 1}, "exact"),
        ({"heads": (2, 2)}, "heads"),
        ({"heads": [0, 2]}, "heads"),
        ({"layers": (-1, 2)}, "layers"),
        ({"layers": (0, 65536)}, "layers"),
        ({"parameters": "x"}, "parameters"),
    ],
)
def test_a_copy_key_says_what_is_wrong_with_it(changes: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        key(**changes)


def test_case_038_keys_of_shards_and_forms_have_names_of_their_own() -> None:
    keys = [
        key(),
        key(heads=(0, 1)),
        key(heads=(1, 2)),
        key(layers=(0, 1)),
        key(exact=True),
        key(parameters=b""),
        key(parameters=b"k5v4\x00"),
        key(codec="int4\x20"),
        key(group=258),
        key(root=b"\x09" * 32),
        key(hash=b"\x09" * 32),
    ]
    assert len({one.to_bytes() for one in keys}) == len({str(one) for one in keys}) == len(set(keys)) == len(keys)
    first = keys[0]
    assert first.with_hash(b"\x05" * 32) == key(hash=b"\x05" * 32)
    assert first.with_hashes([b"\x05" * 32, b"\x06" * 32])[1].hash == b"\x06" * 32
    assert {one.family for one in first.with_hashes([b"\x05" * 32, b"\x06" * 32])} == {first.family}
    assert str(first).startswith(f"kv1:{first.root.hex()}:g1:int4:l:h0-2:l0-3:p")
