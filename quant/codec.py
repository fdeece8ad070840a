"""What every block codec promises, the registry of codecs, and the errors a codec may raise.

Anyone may call it; nothing here holds state except the registry, which is filled at import and read afterwards.
This module does not import torch: a codec's own module does, and is imported when the codec is asked for.

    CodecError(ValueError)      misuse: shapes, dtypes, lengths or names that do not fit. The caller's mistake.
    BlockTooLossy(Exception)    the values: NaN, Inf, out of range, or an error above the bound. Keep the block raw.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    import torch

Payload: TypeAlias = "bytes | bytearray | memoryview | torch.Tensor"
DtypeName: TypeAlias = "str | torch.dtype"


class CodecError(ValueError):
    """Tensors, dtypes, lengths or names that do not fit the codec. Says what was given and what was expected."""


@dataclass(frozen=True, slots=True)
class HeadError:
    """Why one (layer, KV head) part of a block was refused.

    `part` is "keys" or "values"; `relative_error` is the RMS error over the RMS of the original (inf where the
    original holds NaN, Inf or a magnitude the scales cannot carry); `bound` is what it was held against.
    """

    block: int
    layer: int
    kv_head: int
    part: str
    relative_error: float
    bound: float


class BlockTooLossy(Exception):  # noqa: N818 - a public name of the design
    """The block cannot be carried by this codec within its error bound; it must stay raw.

    `errors` names each refused (layer, KV head) part with its measured relative error.
    """

    def __init__(self, message: str, errors: tuple[HeadError, ...] = ()) -> None:
        super().__init__(message)
        self.errors = errors


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Shape of one block: keys [layers, kv_heads, block_tokens, key_dim], values [..., value_dim].

    `value_dim` 0 is a latent (MLA) block: it has no values tensor. Raises CodecError when a count is not positive.
    """

    layers: int
    kv_heads: int
    block_tokens: int
    key_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "block_tokens", "key_dim"):
            count = getattr(self, name)
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise CodecError(f"BlockShape.{name} must be a positive int, got {count!r}")
        if not isinstance(self.value_dim, int) or isinstance(self.value_dim, bool) or self.value_dim < 0:
            raise CodecError(f"BlockShape.value_dim must be an int >= 0 (0: latent), got {self.value_dim!r}")

    @property
    def is_latent(self) -> bool:
        """True when the block has no values tensor."""
        return self.value_dim == 0

    @property
    def element_count(self) -> int:
        """Values in one block, keys and values together."""
        return self.layers * self.kv_heads * self.block_tokens * (self.key_dim + self.value_dim)

    @property
    def keys_shape(self) -> tuple[int, int, int, int]:
        """Shape of the keys of one block."""
        return (self.layers, self.kv_heads, self.block_tokens, self.key_dim)

    @property
    def values_shape(self) -> tuple[int, int, int, int]:
        """Shape of the values of one block; its last entry is 0 for a latent block."""
        return (self.layers, self.kv_heads, self.block_tokens, self.value_dim)


@runtime_checkable
class BlockCodec(Protocol):
    """Tensors of a block to bytes and back. Stateless after construction, so safe from any thread.

    Tensors: `keys` [..., layers, kv_heads, block_tokens, key_dim] and `values` [..., value_dim] (None for a latent)
    of one dtype, any strides, one device. `...` are optional batch dimensions, the same for all arguments. `out` and
    tensor payloads are uint8 [..., encoded_bytes] whose last dimension is contiguous.
    """

    @property
    def name(self) -> str:
        """Registry name; stored in frames and copy keys."""

    @property
    def exact(self) -> bool:
        """True when decode gives back the very bits that were encoded."""

    def parameters(self) -> bytes:
        """Canonical bytes of everything that changes the payload's layout; part of frame header and copy key."""

    def encoded_bytes(self, shape: BlockShape, dtype: DtypeName) -> int:
        """Payload bytes of one block of `shape`, whatever its values. Raises CodecError if unsupported."""

    def encode(self, keys: torch.Tensor, values: torch.Tensor | None) -> bytes:
        """Payload of one block. Raises CodecError, BlockTooLossy."""

    def encode_into(self, keys: torch.Tensor, values: torch.Tensor | None, out: torch.Tensor) -> None:
        """Encode into `out`. Raises CodecError; BlockTooLossy if any block is refused (then `out` is unspecified)."""

    def encode_batch(self, keys: torch.Tensor, values: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
        """Encode N blocks into `out` uint8 [N, encoded_bytes]; bool [N], False where refused (that row unspecified).

        Raises CodecError for shapes and dtypes, never for values.
        """

    def decode(self, payload: Payload, shape: BlockShape, dtype: DtypeName) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Keys and values of one block in `dtype`. Raises CodecError when lengths or dims do not fit."""

    def decode_into(self, payload: Payload, keys: torch.Tensor, values: torch.Tensor | None) -> None:
        """Decode into tensors that the caller owns. Any byte content decodes without raising; see validate."""

    def validate(self, payload: Payload, shape: BlockShape, dtype: DtypeName) -> torch.Tensor:
        """bool [...], True where the payload is one that this codec could have written.

        A payload of the wrong length is False, not an error. A True payload decodes to finite numbers (lossy codecs).
        """


CodecFactory: TypeAlias = Callable[..., BlockCodec]

_BUILT_IN: dict[str, tuple[str, str]] = {
    "raw": ("quant.raw", "RawCodec"),
    "int4": ("quant.int4", "Int4Codec"),
    "int8k": ("quant.int8k", "Int8KCodec"),
}
_registered: dict[str, CodecFactory] = {}


def register(name: str, factory: CodecFactory) -> None:
    """Make `factory(**params)` reachable as get_codec(name, **params). Raises CodecError if the name is taken."""
    if name in _BUILT_IN or name in _registered:
        raise CodecError(f"codec name {name!r} is already taken; known: {', '.join(codec_names())}")
    _registered[name] = factory


def codec_names() -> tuple[str, ...]:
    """Names that get_codec knows, sorted."""
    return tuple(sorted({*_BUILT_IN, *_registered}))


def get_codec(name: str, **params: Any) -> BlockCodec:
    """The codec of that name. Raises CodecError for an unknown name or parameters that it does not take."""
    factory = _registered.get(name)
    if factory is None:
        if name not in _BUILT_IN:
            raise CodecError(f"unknown codec {name!r}; known: {', '.join(codec_names())}")
        module, attribute = _BUILT_IN[name]
        factory = getattr(importlib.import_module(module), attribute)
    try:
        return factory(**params)
    except (TypeError, ValueError) as error:
        if isinstance(error, CodecError):
            raise
        raise CodecError(f"codec {name!r} does not take {sorted(params)}: {error}") from error


def codec_from_parameters(name: str, parameters: bytes) -> BlockCodec:
    """The codec that wrote a copy, from what frame header or copy key carry. Raises CodecError if malformed."""
    codec = get_codec(name)
    if codec.parameters() == parameters:
        return codec
    rebuild = getattr(type(codec), "from_parameters", None)
    if rebuild is None:
        raise CodecError(f"codec {name!r} has no parameters but {len(parameters)} bytes of them were given")
    rebuilt: BlockCodec = rebuild(parameters)
    return rebuilt
