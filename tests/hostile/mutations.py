"""Frames that somebody else made: a good one changed field by field, at random, or put together with good checksums."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

import xxhash
import zstandard

from kvstore.frame.layout import CHECK_BYTES, FIXED, header_layout
from kvstore.frame.parsing import FrameSpec, build_scatter

FIELDS = (8, 2, 2, 4, 32, 16, 16, 16, 2, 2, 4, 2, 2, 2, 2, 4, 4, 8, 8, 4, 2, 2)
"""Bytes of each field of the fixed part, in order."""
assert sum(FIELDS) == FIXED.size

PICKLES = (b"cos\nsystem\n(S'true'\ntR.", b"\x80\x04}\x94\x8c\x03key\x94K\x01s.", b"\x80\x05cposix\nsystem\n.")
BOMB = zstandard.ZstdCompressor(level=1).compress(bytes(64 << 20))


def frame_of(spec: FrameSpec, payload: bytes, secret: bytes | None = None) -> bytes:
    return b"".join(build_scatter(spec, [payload], secret=secret))


def sealed(frame: bytes, spec: FrameSpec, *, payload: bool) -> bytes:
    """With right checksums over whatever it holds now: then only the checks of the fields stand.

    payload: of the payload, too. Without a secret such a frame under its own name is as good as any: for signed ones.
    """
    body = bytearray(frame)
    table_at, _, head_bytes = header_layout(len(spec.key.parameters), 1)
    if len(body) < head_bytes:
        return bytes(body)
    if payload:
        body[table_at + 24 : table_at + 40] = xxhash.xxh3_128(bytes(body[head_bytes:])).digest()
    body[head_bytes - CHECK_BYTES : head_bytes] = xxhash.xxh3_128(bytes(body[: head_bytes - CHECK_BYTES])).digest()
    return bytes(body)


def _field(draw: random.Random, body: bytearray) -> None:
    """One field of the fixed part gets a value that a program might trip over."""
    which = draw.randrange(len(FIELDS))
    at, size = sum(FIELDS[:which]), FIELDS[which]
    old = int.from_bytes(body[at : at + size], "little")
    limit = 1 << 8 * size
    new = draw.choice((0, 1, limit - 1, limit >> 1, old + 1, old - 1, old << 1, old ^ 1 << draw.randrange(8 * size)))
    body[at : at + size] = (new % limit).to_bytes(size, "little")


def _segment(draw: random.Random, body: bytearray) -> None:
    at = FIXED.size + 8 * draw.randrange(8)
    body[at : at + 8] = struct.pack("<q", draw.choice((-1, 0, 1, 1 << 62, -(1 << 63), draw.getrandbits(63))))


def _bit(draw: random.Random, body: bytearray) -> None:
    if body:
        body[draw.randrange(len(body))] ^= 1 << draw.randrange(8)


def _noise(draw: random.Random, body: bytearray) -> None:
    at = draw.randrange(len(body) + 1)
    stop = min(len(body), at + draw.randrange(1, 64))
    body[at:stop] = draw.randbytes(stop - at)


def _cut(draw: random.Random, body: bytearray) -> None:
    del body[draw.randrange(len(body) + 1) :]


def _take(draw: random.Random, body: bytearray) -> None:
    at = draw.randrange(len(body) + 1)
    del body[at : at + draw.randrange(1, 40)]


def _insert(draw: random.Random, body: bytearray) -> None:
    at = draw.randrange(len(body) + 1)
    body[at:at] = draw.randbytes(draw.randrange(1, 40))


def _move(draw: random.Random, body: bytearray) -> None:
    at = draw.randrange(len(body) + 1)
    body[at : at + 16] = body[at // 2 : at // 2 + 16]


CHANGES: tuple[Callable[[random.Random, bytearray], None], ...] = (
    _field, _field, _field, _segment, _bit, _noise, _cut, _take, _insert, _move,
)  # fmt: skip


class Mutator:
    """An endless supply of changes of a good frame of `spec`, and of the frames that `others` makes."""

    def __init__(
        self, seed: int, spec: FrameSpec, good: bytes, secret: bytes | None, others: Callable[[], tuple[bytes, ...]]
    ) -> None:
        self._draw = random.Random(seed)
        self._spec, self._good, self._is_signed, self._others = spec, good, secret is not None, others

    def next(self) -> bytes:
        draw, good = self._draw, self._good
        if draw.random() < 0.03:
            bombed = good[: self._spec.header_bytes(1)] + BOMB
            return draw.choice((*self._others(), *PICKLES, BOMB, bombed, b"", good * 2, bytes(len(good))))
        body = bytearray(good)
        for _ in range(draw.choice((1, 1, 1, 2, 3))):
            draw.choice(CHANGES)(draw, body)
        return sealed(bytes(body), self._spec, payload=self._is_signed) if draw.random() < 0.5 else bytes(body)
