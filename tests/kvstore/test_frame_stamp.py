"""Stamped headers are the ones that frame.build makes, and nothing else passes for them."""

from __future__ import annotations

import pytest

from kvstore.copy_key import CopyKey
from kvstore.frame.build import joined_checksums
from kvstore.frame.layout import Cut
from kvstore.frame.parsing import FrameHeader, FrameSpec, build_joined_header, parse_header
from kvstore.frame.specs import plain_specs
from kvstore.frame.stamp import HeaderStamp
from kvstore.testing.transfer_contract import key_of, payload_of

FORMS = [
    key_of(1),
    key_of(1, exact=False, codec="int4", parameters=b"table of bits", heads=(2, 4), layers=(3, 9), group=1),
]


def spec_of(key: CopyKey, size: int = 1000) -> FrameSpec:
    return FrameSpec(key, 16, 64, 128, "bfloat16", size)


def cut_in(form: CopyKey, segments: int) -> Cut | None:
    first, last = form.layers
    if segments == 1:
        return None
    return Cut(((first, first + 1), (first + 1, first + 3), (first + 3, last)), (300, 300, 400))


@pytest.mark.parametrize("form", FORMS, ids=["raw", "int4"])
@pytest.mark.parametrize("segments", [1, 3])
def test_a_stamp_makes_the_headers_that_frame_build_makes(form: CopyKey, segments: int) -> None:
    cut = cut_in(form, segments)
    stamp = HeaderStamp(spec_of(form), cut)
    for number in range(20):
        key = form.with_hash(key_of(number).hash)
        rows = [payload_of(key, 1000)]
        checksums = joined_checksums(rows, stamp.cut.sizes)
        header = stamp.build(key.hash, checksums)
        assert header == build_joined_header(spec_of(key), rows, checksums, cut=cut)
        assert stamp.checksums_in(header, key.hash) == checksums
        assert stamp.header_bytes == len(header)
        assert isinstance(parse_header(header, spec_of(key), frame_bytes=len(header) + 1000, keyed=False), FrameHeader)


@pytest.mark.parametrize("form", FORMS, ids=["raw", "int4"])
@pytest.mark.parametrize("segments", [1, 3])
def test_no_other_header_fits_a_stamp(form: CopyKey, segments: int) -> None:
    stamp, sums = HeaderStamp(spec_of(form), cut_in(form, segments)), [bytes(range(16))] * segments
    header = stamp.build(form.hash, sums)
    for place in range(len(header)):
        for bit in range(8):
            bad = bytearray(header)
            bad[place] ^= 1 << bit
            assert stamp.checksums_in(bad, form.hash) is None, place
    for length in range(len(header)):
        assert stamp.checksums_in(header[:length], form.hash) is None
    assert stamp.checksums_in(header + b"\x00", form.hash) is None
    assert stamp.checksums_in(header, key_of(2).hash) is None
    others = [
        spec_of(form._replace(root=bytes(32))),
        spec_of(form._replace(exact=not form.exact)),
        spec_of(form._replace(group=7)),
        spec_of(form._replace(layers=(0, 40))),
        spec_of(form, 999),
        FrameSpec(form, 16, 64, 128, "float16", 1000),
        plain_specs(form, 1000),
    ]
    for spec in others:
        other = HeaderStamp(spec).build(form.hash, sums[:1])
        assert stamp.checksums_in(other, form.hash) is None
