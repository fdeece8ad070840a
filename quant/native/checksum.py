"""XXH3-128 of bytes: at once, piece by piece, or of a copy while it is made. A checksum, no signature.

What disk frames, remote frames and the daemon check their payloads with; the same 16 bytes as the xxhash package gives
(`xxh3_128(...).digest()`), and by that package where the C extension is missing (quant.dispatch decides: operation
"checksum"). Buffers are anything contiguous with the buffer protocol.

No torch, no numpy. Any thread; Python's lock is released meanwhile, so a Checksum belongs to one thread at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, TypeAlias

from quant import dispatch

Buffer: TypeAlias = Any
OPERATION = "checksum"
CHECKSUM_BYTES = 16
_PIECE_BYTES = 256 << 10  # copied and summed while it lies in cache


def checksum(buffer: Buffer) -> bytes:
    """XXH3-128 of one buffer."""
    if dispatch.implementation_of(OPERATION, "cpu") == "native":
        return _native().checksum(buffer)  # type: ignore[no-any-return]
    return _plain().xxh3_128_digest(buffer)  # type: ignore[no-any-return]


class Checksum:
    """XXH3-128 over pieces that follow each other, cut anywhere."""

    __slots__ = ("_plain", "_state")

    def __init__(self) -> None:
        native = dispatch.implementation_of(OPERATION, "cpu") == "native"
        self._state = _native().checksum_begin() if native else None
        self._plain = None if native else _plain().xxh3_128()

    def update(self, buffer: Buffer) -> None:
        """Go on over these bytes."""
        if self._plain is None:
            _native().checksum_update(self._state, buffer)
        else:
            self._plain.update(buffer)

    def copy(self, source: Buffer, target: Buffer) -> None:
        """Copy `source` to `target`, which is as long and elsewhere, and go on over what arrived there.

        ValueError when the lengths differ.
        """
        if self._plain is None:
            _native().checksum_copy(self._state, source, target)
            return
        for read, written in _pieces(source, target):
            written[:] = read
            self._plain.update(written)

    def digest(self) -> bytes:
        """Of the bytes so far; more may follow."""
        return (  # type: ignore[no-any-return]
            _native().checksum_digest(self._state) if self._plain is None else self._plain.digest()
        )


def _pieces(source: Buffer, target: Buffer) -> Iterator[tuple[memoryview, memoryview]]:
    read, written = memoryview(source).cast("B"), memoryview(target).cast("B")
    if written.nbytes != read.nbytes:
        raise ValueError(f"target: got {written.nbytes} bytes for a source of {read.nbytes}, expected as many")
    for at in range(0, read.nbytes, _PIECE_BYTES):
        yield read[at : at + _PIECE_BYTES], written[at : at + _PIECE_BYTES]


@cache
def _native() -> Any:
    from quant import native

    return native.kernels


@cache
def _plain() -> Any:
    import xxhash

    return xxhash
