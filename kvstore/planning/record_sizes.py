"""Bytes of a cold block by codec, from quant's record layouts: scales, zero points and padding counted.

The codecs themselves need torch; their layouts do not. A test holds both against each other.
"""

from __future__ import annotations

from collections.abc import Callable

from allocator import CacheGroup, ConfigError, KVGeometry
from quant import CodecError, record_bytes
from quant.record_layout import RUN_TOKENS, int8k_layout

_RECORD_BYTES: dict[str, Callable[[int, int], int]] = {
    "int8k": lambda key_dim, value_dim: int8k_layout(key_dim, value_dim).record_bytes,
    "int4": record_bytes,
}
CODECS = ("raw", *_RECORD_BYTES)


def cold_block_bytes(geometry: KVGeometry, codec: str) -> tuple[int, ...]:
    """Bytes of one encoded block, a number a cache group; () for raw, which has no cold form.

    Raises ConfigError naming the setting that the codec cannot hold.
    """
    if codec == "raw":
        return ()
    if codec not in _RECORD_BYTES:
        raise ConfigError(f"codec: got {codec!r}; expected one of {', '.join(CODECS)}")
    if geometry.block_tokens % RUN_TOKENS:
        raise ConfigError(
            f"block_tokens: got {geometry.block_tokens} with codec {codec!r}; expected a multiple of {RUN_TOKENS}"
        )
    if geometry.dtype_bytes < 2:
        raise ConfigError(f"dtype: got {geometry.dtype} with codec {codec!r}; expected a 16 or 32 bit type")
    return tuple(_block_bytes(geometry, group, codec) for group in geometry.groups)


def _block_bytes(geometry: KVGeometry, group: CacheGroup, codec: str) -> int:
    try:
        one = _RECORD_BYTES[codec](group.key_dim, group.value_dim)
    except CodecError as error:
        raise ConfigError(f"cache group {group.name!r} cannot be stored as {codec!r}: {error}") from error
    return one * len(group.layers) * group.kv_heads * (geometry.block_tokens // RUN_TOKENS)
