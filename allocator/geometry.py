"""What one block of a model holds: cache groups, shapes, bytes and the fingerprint of the whole.

Pure values, built once at start and shared freely between threads. Nothing here touches memory.

Layout of a block, in a slot and in a stored frame: `[layers, kv_heads, (K, V), block_tokens, dim]`. K and V may differ
in dim; a latent group (MLA) has one head and no V.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from allocator.errors import GeometryError

DTYPE_BYTES: dict[str, int] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}

BLOCK_TOKENS_MAX = 65_536
_FINGERPRINT_SCHEME = b"kv-geometry-1"


class GroupKind(StrEnum):
    """How the layers of a group attend."""

    FULL = "full"
    SLIDING = "sliding"
    LATENT = "latent"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """Layers of one geometry; they share block tables.

    `layers` are the model's layer numbers. `window_tokens` counts the token itself: a token at position p of a sliding
    group reads positions `[p - window_tokens + 1, p]`. `lookahead_tokens` says that KV depends on that many following
    tokens (draft heads): the key of such a block must contain them.
    Raises GeometryError for anything that cannot be.
    """

    kind: GroupKind
    layers: tuple[int, ...]
    kv_heads: int
    key_dim: int
    value_dim: int
    window_tokens: int | None = None
    lookahead_tokens: int = 0

    def __post_init__(self) -> None:
        if self.kind not in tuple(GroupKind):
            raise GeometryError(f"cache group: got kind {self.kind!r}; expected one of {', '.join(GroupKind)}")
        object.__setattr__(self, "kind", GroupKind(self.kind))
        given: object = self.layers
        if not isinstance(given, Iterable) or isinstance(given, str):
            raise GeometryError(f"cache group: got layers {self.layers!r}; expected layer numbers")
        object.__setattr__(self, "layers", tuple(self.layers))
        self._check_kinds()
        where = f"cache group of layers {_ranges(self.layers)!r}"
        if not self.layers or min(self.layers) < 0 or len(set(self.layers)) != len(self.layers):
            raise GeometryError(f"{where}: expected at least one layer, none negative, none twice, got {self.layers}")
        if self.kv_heads < 1 or self.key_dim < 1 or self.value_dim < 0 or self.lookahead_tokens < 0:
            raise GeometryError(
                f"{where}: expected kv_heads >= 1, key_dim >= 1, value_dim >= 0, lookahead_tokens >= 0, got "
                f"{self.kv_heads}, {self.key_dim}, {self.value_dim}, {self.lookahead_tokens}"
            )
        if (self.kind is GroupKind.SLIDING) != (self.window_tokens is not None):
            raise GeometryError(f"{where}: a sliding group, and no other, has window_tokens; got {self.window_tokens}")
        if self.window_tokens is not None and self.window_tokens < 1:
            raise GeometryError(f"{where}: expected window_tokens >= 1, got {self.window_tokens}")
        if (self.kind is GroupKind.LATENT) != (self.value_dim == 0):
            raise GeometryError(f"{where}: a latent group, and no other, has value_dim 0; got {self.value_dim}")
        if self.kind is GroupKind.LATENT and self.kv_heads != 1:
            raise GeometryError(f"{where}: a latent group has one head, got {self.kv_heads}")

    def _check_kinds(self) -> None:
        """GeometryError for a count that is no int: 2.0 and True would give the same shape another fingerprint."""
        counts = [("layers", layer) for layer in self.layers]
        counts += [(name, getattr(self, name)) for name in ("kv_heads", "key_dim", "value_dim", "lookahead_tokens")]
        if self.window_tokens is not None:
            counts.append(("window_tokens", self.window_tokens))
        for name, count in counts:
            if isinstance(count, bool) or not isinstance(count, int):
                raise GeometryError(f"cache group: got {name} {count!r} ({type(count).__name__}); expected an int")

    @property
    def name(self) -> str:
        """Short text for messages and metrics, e.g. `sliding:0-4,6`."""
        return f"{self.kind.value}:{_ranges(self.layers)}"

    @property
    def token_elements(self) -> int:
        """Values that one token stores over all layers of the group."""
        return len(self.layers) * self.kv_heads * (self.key_dim + self.value_dim)

    def block_elements(self, block_tokens: int) -> int:
        """Values that one block of `block_tokens` tokens stores."""
        return self.token_elements * block_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGeometry:
    """All cache groups of a model (unsharded), the block size and the stored dtype.

    `position` names the rope or position scheme; `scale_identity` the calibration of an FP8 engine. Both only enter
    the fingerprint. Raises GeometryError naming the group that cannot be.
    """

    groups: tuple[CacheGroup, ...]
    block_tokens: int = 16
    dtype: str = "bfloat16"
    position: str = ""
    scale_identity: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.groups, Iterable) or not all(isinstance(one, CacheGroup) for one in self.groups):
            raise GeometryError(f"groups: got {self.groups!r}; expected CacheGroups")
        object.__setattr__(self, "groups", tuple(self.groups))
        if not self.groups:
            raise GeometryError("expected at least one cache group, got none")
        for name in ("position", "scale_identity"):
            if not isinstance(getattr(self, name), str):
                raise GeometryError(f"{name}: got {getattr(self, name)!r}; expected text")
        names = ", ".join(group.name for group in self.groups)
        if isinstance(self.block_tokens, bool) or not isinstance(self.block_tokens, int):
            raise GeometryError(f"groups {names}: expected an integer block_tokens, got {self.block_tokens!r}")
        if not 1 <= self.block_tokens <= BLOCK_TOKENS_MAX:
            raise GeometryError(f"groups {names}: expected block_tokens 1..{BLOCK_TOKENS_MAX}, got {self.block_tokens}")
        if self.dtype not in DTYPE_BYTES:
            raise GeometryError(f"groups {names}: expected a dtype of {sorted(DTYPE_BYTES)}, got {self.dtype!r}")
        seen: dict[int, str] = {}
        for group in self.groups:
            for layer in group.layers:
                if layer in seen:
                    raise GeometryError(f"group {group.name}: layer {layer} is in group {seen[layer]} already")
                seen[layer] = group.name

    @classmethod
    def uniform(
        cls,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: str = "bfloat16",
        block_tokens: int = 16,
        window_tokens: int | None = None,
        position: str = "",
    ) -> KVGeometry:
        """One group of `layers` equal layers: MHA, GQA or MQA, sliding when `window_tokens` is given."""
        kind = GroupKind.FULL if window_tokens is None else GroupKind.SLIDING
        group = CacheGroup(
            kind=kind,
            layers=_first_layers(layers),
            kv_heads=kv_heads,
            key_dim=head_dim,
            value_dim=head_dim,
            window_tokens=window_tokens,
        )
        return cls(groups=(group,), block_tokens=block_tokens, dtype=dtype, position=position)

    @classmethod
    def latent(
        cls,
        *,
        layers: int,
        latent_dim: int,
        rope_dim: int,
        dtype: str = "bfloat16",
        block_tokens: int = 16,
        position: str = "",
    ) -> KVGeometry:
        """MLA: one head of `latent_dim + rope_dim` values a token and layer, no V."""
        group = CacheGroup(
            kind=GroupKind.LATENT, layers=_first_layers(layers), kv_heads=1, key_dim=latent_dim + rope_dim, value_dim=0
        )
        return cls(groups=(group,), block_tokens=block_tokens, dtype=dtype, position=position)

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one stored value."""
        return DTYPE_BYTES[self.dtype]

    def full_slot_bytes(self, group: int) -> int:
        """Bytes of one block of group number `group` in full precision, without padding."""
        return self.groups[group].block_elements(self.block_tokens) * self.dtype_bytes

    def group_token_bytes(self, group: int) -> int:
        """Bytes that one token needs in group number `group`, in full precision."""
        return self.groups[group].token_elements * self.dtype_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes that one token needs in all groups, in full precision (windows ignored)."""
        return sum(self.group_token_bytes(group) for group in range(len(self.groups)))

    def group_of_layer(self, layer: int) -> tuple[int, int]:
        """(group number, position inside that group) of a model layer. GeometryError when no group has it."""
        for number, group in enumerate(self.groups):
            if layer in group.layers:
                return number, group.layers.index(layer)
        raise GeometryError(f"expected a layer of {[group.name for group in self.groups]}, got {layer}")

    def fingerprint(self) -> bytes:
        """SHA-256 (32 bytes) over tagged, length-prefixed fields: no two geometries collide, None is not 0."""
        digest = hashlib.sha256()
        _feed(digest, "scheme", _FINGERPRINT_SCHEME)
        _feed(digest, "block_tokens", _number(self.block_tokens))
        _feed(digest, "dtype", self.dtype.encode())
        _feed(digest, "position", self.position.encode())
        _feed(digest, "scale_identity", self.scale_identity.encode())
        _feed(digest, "groups", _number(len(self.groups)))
        for group in self.groups:
            _feed(digest, "kind", group.kind.value.encode())
            _feed(digest, "layers", b"".join(_number(layer) for layer in group.layers))
            _feed(digest, "kv_heads", _number(group.kv_heads))
            _feed(digest, "key_dim", _number(group.key_dim))
            _feed(digest, "value_dim", _number(group.value_dim))
            _feed(digest, "window_tokens", None if group.window_tokens is None else _number(group.window_tokens))
            _feed(digest, "lookahead_tokens", _number(group.lookahead_tokens))
        return digest.digest()


def _first_layers(count: int) -> tuple[int, ...]:
    if isinstance(count, bool) or not isinstance(count, int):
        raise GeometryError(f"layers: got {count!r} ({type(count).__name__}); expected how many, an int")
    return tuple(range(count))


def _number(value: int) -> bytes:
    return struct.pack("<Q", value)


def _feed(digest: hashlib._Hash, tag: str, content: bytes | None) -> None:
    name = tag.encode()
    digest.update(struct.pack("<I", len(name)) + name)
    digest.update(b"\x00" if content is None else b"\x01" + struct.pack("<Q", len(content)) + content)


def _ranges(layers: tuple[int, ...]) -> str:
    """(0, 1, 2, 4) -> '0-2,4'."""
    pieces: list[list[int]] = []
    for layer in layers:
        if pieces and layer == pieces[-1][1] + 1:
            pieces[-1][1] = layer
        else:
            pieces.append([layer, layer])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in pieces)
