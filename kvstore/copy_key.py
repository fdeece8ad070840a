"""The name of one stored copy of a block, in every tier below the device.

Immutable values, no lock. The byte form is specified in docs/formats/frame.md.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from typing import NamedTuple

from allocator.errors import UsageError

_LIMIT_16 = 1 << 16
_CODEC_BYTES = 16
_FORM = struct.Struct(f"<H{_CODEC_BYTES}sBHHHHI")


class _Fields(NamedTuple):
    root: bytes
    group: int
    hash: bytes
    codec: str
    exact: bool
    heads: tuple[int, int]
    layers: tuple[int, int]
    parameters: bytes


class CopyKey(_Fields):
    """root, group, hash, codec, exact, heads [start, stop), layers [start, stop), codec parameters.

    root and hash are 32 bytes; codec is a name of 1 to 16 ASCII characters; exact says that nothing lossy was read when
    the block was computed, whatever the codec does to it (only a raw copy of an exact block reads exact); heads and
    layers are ranges within the cache group; parameters are the codec's canonical bytes (bit tables). UsageError says
    which field is wrong.
    """

    __slots__ = ()

    def __new__(
        cls,
        root: bytes,
        group: int,
        hash: bytes,
        codec: str,
        exact: bool,
        heads: tuple[int, int],
        layers: tuple[int, int],
        parameters: bytes = b"",
    ) -> CopyKey:
        for name, value in (("root", root), ("hash", hash)):
            if not isinstance(value, bytes) or len(value) != 32:
                raise UsageError(f"copy key {name}: got {value!r}; expected 32 bytes")
        if isinstance(group, bool) or not isinstance(group, int) or not 0 <= group < _LIMIT_16:
            raise UsageError(f"copy key group: got {group!r}; expected an int in [0, 65536)")
        if not (isinstance(codec, str) and codec.isascii() and codec.isprintable() and 0 < len(codec) <= _CODEC_BYTES):
            raise UsageError(f"copy key codec: got {codec!r}; expected 1 to 16 printable ASCII characters")
        if not isinstance(exact, bool):
            raise UsageError(f"copy key exact: got {exact!r}; expected a bool")
        for name, span in (("heads", heads), ("layers", layers)):
            good = isinstance(span, tuple) and len(span) == 2 and all(type(end) is int for end in span)
            if not good or not 0 <= span[0] < span[1] < _LIMIT_16:
                raise UsageError(f"copy key {name}: got {span!r}; expected (start, stop), 0 <= start < stop < 65536")
        if not isinstance(parameters, bytes):
            raise UsageError(f"copy key parameters: got {type(parameters).__name__}; expected bytes")
        return super().__new__(cls, root, group, hash, codec, exact, heads, layers, parameters)

    @property
    def family(self) -> tuple[bytes, int, str, bool, tuple[int, int], tuple[int, int], bytes]:
        """Everything but the hash: the same for all blocks of a prompt in one form."""
        root, group, _, codec, exact, heads, layers, parameters = self
        return (root, group, codec, exact, heads, layers, parameters)

    def with_hash(self, hash: bytes) -> CopyKey:
        """The same form of another block; quick, checks nothing (hashes come from a HashChain)."""
        return tuple.__new__(CopyKey, (self[0], self[1], hash, *self[3:]))

    def with_hashes(self, hashes: Iterable[bytes]) -> list[CopyKey]:
        """The same form of many blocks, see with_hash."""
        root, group, _, *rest = self
        new = tuple.__new__
        return [new(CopyKey, (root, group, hash, *rest)) for hash in hashes]

    def to_bytes(self) -> bytes:
        """Canonical bytes: equal keys and only they have equal bytes."""
        root, group, hash, codec, exact, heads, layers, parameters = self
        form = (group, codec.encode("ascii"), exact, *heads, *layers, len(parameters))
        return b"kvcopy1\x00" + root + hash + _FORM.pack(*form) + parameters

    def __str__(self) -> str:
        """Text form for stores with text keys: namespace first, hash last."""
        parameters = hashlib.sha256(self.parameters).hexdigest()[:16] if self.parameters else "0"
        form = "x" if self.exact else "l"
        heads, layers = (f"{start}-{stop}" for start, stop in (self.heads, self.layers))
        which = f"g{self.group}:{self.codec}:{form}:h{heads}:l{layers}:p{parameters}"
        return f"kv1:{self.root.hex()}:{which}:{self.hash.hex()}"
