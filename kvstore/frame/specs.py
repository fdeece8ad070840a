"""From a copy's key and payload size to what its frame must say (FrameSpec), for tiers that store frames.

A tier knows keys and bytes; tokens, dims and dtype come from the geometry of the store that it serves. Pure functions;
any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from kvstore.copy_key import CopyKey
from kvstore.frame.layout import FrameSpec

if TYPE_CHECKING:
    from allocator import KVGeometry

SpecSource: TypeAlias = Callable[[CopyKey, int], FrameSpec]
"""(key, payload bytes) -> the frame that a copy of this key has. For keys of one family only `key` differs in it."""


def plain_specs(key: CopyKey, payload_bytes: int) -> FrameSpec:
    """For a tier without a geometry: one token of one dim, of dtype "bytes"; key and length are still checked."""
    return FrameSpec(key, 1, 1, 0, "bytes", payload_bytes)


def geometry_specs(geometry: KVGeometry) -> SpecSource:
    """The frames of a store of this geometry. A key of a group that it does not have gets the plain form."""
    shapes = [(group.key_dim, group.value_dim or 0) for group in geometry.groups]
    block_tokens, dtype = geometry.block_tokens, geometry.dtype

    def spec(key: CopyKey, payload_bytes: int) -> FrameSpec:
        if key.group >= len(shapes):
            return plain_specs(key, payload_bytes)
        return FrameSpec(key, block_tokens, *shapes[key.group], dtype, payload_bytes)

    return spec
