"""What kernels must reproduce before they are used on a machine: fixed inputs, digests of the reference's bytes.

numpy only: no cupy, no torch. The inputs are small integers times powers of two, so they are the same numbers in every
element kind, and so are the records. The digests were taken from the torch reference; a test takes them again.
"""

from __future__ import annotations

import hashlib
from typing import Any, TypeAlias

import numpy as np

from quant.cuda.driver import Bytes, DeviceBuffer, Driver
from quant.cuda.launches import (
    BlockCounts,
    RecordPlace,
    TensorPlace,
    copy_launch,
    decode_launches,
    encode_launches,
    item_bytes,
)
from quant.record_layout import RUN_TOKENS, RecordLayout, record_layout

Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float32]]"

BLOCKS = 3  # of one layer, one head, one run; the last holds a NaN
_BOUND = 0.3, 0.3 * 15.0 / 7.0  # of 4-bit and of 3-bit codes
EXPECTED = {  # records of the accepted blocks, then decoded keys and values in fp32
    (128, 128, 4, 4): ("c89df28c5db42d18", "889267a768870264"),
    (80, 96, 5, 3): ("adf76432d96e43d8", "8368a8a7b79692d2"),
    (576, 0, 4, 4): ("ffd023b63d889d14", "8ed3831c5c587f35"),
    (64, 512, 4, 3): ("dd50f4bfdeba7008", "2b804ffc561fc5e3"),
}


def inputs(dim: int, salt: int) -> Floats:
    """float32 [BLOCKS, 16, dim]: an integer of 7 bits and a sign times a power of two of the channel."""
    index = np.arange(BLOCKS * RUN_TOKENS * dim, dtype=np.uint64) + np.uint64(salt << 20)
    mixed = ((index * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)) & np.uint64(0xFFFFFFFF)
    whole = (mixed >> np.uint64(25)).astype(np.int64) - 64
    scale = np.exp2((np.arange(dim) * 7 % 5 - 6).astype(np.float64))
    found = (whole.reshape(BLOCKS, RUN_TOKENS, dim) * scale).astype(np.float32)
    found[BLOCKS - 1, 5, dim // 2 + 1] = np.nan
    return found


def as_kind(values: Floats, kind: str) -> Bytes:
    """The bytes of the values in an element kind, which carries them exactly."""
    if kind == "fp32":
        return values.reshape(-1).view(np.uint8)
    if kind == "fp16":
        return values.astype(np.float16).reshape(-1).view(np.uint8)
    return (values.reshape(-1).view(np.uint32) >> np.uint32(16)).astype(np.uint16).view(np.uint8)


def digest(*parts: Bytes) -> str:
    """SHA-256 of the parts' bytes, 16 hex digits of it."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(np.ascontiguousarray(part).tobytes())
    return whole.hexdigest()[:16]


def _place(buffer: DeviceBuffer, dim: int, kind: str) -> TensorPlace:
    row = dim * item_bytes(kind)
    return TensorPlace(buffer.address, RUN_TOKENS * row, RUN_TOKENS * row, RUN_TOKENS * row, row)


def run_int4(driver: Driver, kind: str, layout: RecordLayout, stream: int) -> tuple[list[int], Bytes, list[Bytes]]:
    """(accepted flags, records [BLOCKS, record_bytes], decoded keys and values as bytes) of the fixed inputs."""
    dims = [dim for dim in (layout.key_dim, layout.value_dim) if dim]
    sources = [driver.upload(as_kind(inputs(dim, salt), kind), stream) for salt, dim in enumerate(dims)]
    records = driver.upload(np.zeros(BLOCKS * layout.record_bytes, np.uint8), stream)
    accepted = driver.upload(np.ones(BLOCKS, np.uint8), stream)
    counts = BlockCounts(BLOCKS, 1, 1, 1)
    places = [_place(source, dim, kind) for source, dim in zip(sources, dims, strict=True)]
    pair = places[0], places[1] if len(places) > 1 else None
    place = RecordPlace(records.address, layout.record_bytes)
    bounds = _BOUND[0], _BOUND[1] if layout.value_bits == 3 else _BOUND[0]
    driver.launch(encode_launches(pair, place, accepted.address, counts, layout, kind, bounds), stream)
    flags = [int(flag) for flag in driver.download(accepted, stream)]
    coded = driver.download(records, stream).reshape(BLOCKS, layout.record_bytes)
    driver.launch(decode_launches(place, pair, counts, layout, kind), stream)
    decoded = [driver.download(source, stream) for source in sources]
    return flags, coded, decoded


def check_int4(driver: Driver, kind: str, stream: int = 0) -> str | None:
    """None, or what the int4 kernels of an element kind do wrong. Decoded numbers are compared in fp32 only."""
    for dims, (records, decoded) in EXPECTED.items():
        layout = record_layout(*dims)
        flags, coded, numbers = run_int4(driver, kind, layout, stream)
        if flags != [1, 1, 0]:
            return f"self-test failed: refusals at dims {dims} are {flags}"
        if digest(coded[: BLOCKS - 1]) != records:
            return f"self-test failed: records at dims {dims} differ from the reference"
        if kind == "fp32" and digest(*(_accepted_part(part) for part in numbers)) != decoded:
            return f"self-test failed: decoded numbers at dims {dims} differ from the reference"
    return None


def _accepted_part(part: Bytes) -> Bytes:
    return part.reshape(BLOCKS, -1)[: BLOCKS - 1]


def check_pages(driver: Driver, stream: int = 0) -> str | None:
    """None, or what the page copies do wrong: five pages reversed, of a size that fills no thread block."""
    page_bytes, count = 16 * 131, 5
    content = (np.arange(page_bytes * count, dtype=np.uint32) * np.uint32(2654435761) >> np.uint32(24)).astype(np.uint8)
    source = driver.upload(content, stream)
    target = driver.upload(np.zeros_like(content), stream)
    offsets = driver.upload((np.arange(count - 1, -1, -1, dtype=np.int64) * page_bytes).view(np.uint8), stream)
    launch = copy_launch(
        RecordPlace(target.address, page_bytes), RecordPlace(source.address, 0, offsets.address), page_bytes, count
    )
    driver.launch([launch] if launch else [], stream)
    expected = content.reshape(count, page_bytes)[::-1].reshape(-1)
    return None if bool((driver.download(target, stream) == expected).all()) else "self-test failed: page copies"
