"""Where a cache group lies in memory, as the C kernels read it: the fields of `kv_plan` in quant/native/csrc/paged.h.

Made once per cache and group; steps copy it and add their own fields. Used by PagedCache for writes and by the native
attention backend, on the thread that runs the model. Memory on the CPU only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from engine_adapter.batch import Int64Array
from quant import BlockShape, native, record_bytes

if TYPE_CHECKING:
    from allocator import KVGeometry, Slab
    from quant import BlockCodec

DTYPE_CODES = {"float32": 0, "bfloat16": 1, "float16": 2}
"""kv_dtype of attention.h."""
DIM_MAX = 1024
"""KV_DIM_MAX of attention.h."""
FIELDS = (
    "fields", "slices_address", "slice_count", "entries_address", "window_tokens", "block_tokens", "kv_heads",
    "key_dim", "value_dim", "dtype", "full_address", "full_slot_bytes", "full_layer_bytes", "full_head_bytes",
    "cold_address", "extent_bytes", "extent_slots", "cold_slot_bytes", "cold_heads_address",
)  # fmt: skip
_PLACE = {name: at for at, name in enumerate(FIELDS)}
SLICES, SLICE_COUNT, ENTRIES = _PLACE["slices_address"], _PLACE["slice_count"], _PLACE["entries_address"]


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """Where a group lies. fields: int64[kv_plan], no slices yet; address: that of `fields`.

    cold_heads: int64[layers, kv_heads, 4], kv_cold_head, which a field points to; None without INT4 slots that the
    kernels read.
    """

    fields: Int64Array
    address: int
    cold_heads: Int64Array | None


def group_layout(slab: Slab, geometry: KVGeometry, group: int, cold_codec: BlockCodec | None) -> GroupLayout | None:
    """The layout of a group; None where the C kernels cannot work on it."""
    found = geometry.groups[group]
    usable = native.kernels is not None and slab.device.type == "cpu" and geometry.dtype in DTYPE_CODES
    if not usable or max(found.key_dim, found.value_dim) > DIM_MAX:
        return None
    item, tokens, layout = geometry.dtype_bytes, geometry.block_tokens, slab.layout
    head_bytes = tokens * (found.key_dim + found.value_dim) * item
    values: dict[str, int] = {
        "fields": len(FIELDS),
        "window_tokens": found.window_tokens or 0,
        "block_tokens": tokens,
        "kv_heads": found.kv_heads,
        "key_dim": found.key_dim,
        "value_dim": found.value_dim,
        "dtype": DTYPE_CODES[geometry.dtype],
        "full_address": slab.bytes.data_ptr(),
        "full_slot_bytes": layout.slot_bytes[2 * group],
        "full_layer_bytes": found.kv_heads * head_bytes,
        "full_head_bytes": head_bytes,
        "cold_address": slab.bytes.data_ptr(),
        "extent_bytes": layout.extent_bytes,
    }
    cold_heads = None
    if cold_codec is not None and cold_codec.name == "int4" and layout.has_class(2 * group + 1):
        cold_heads = _cold_heads(geometry, group, cold_codec)
        values |= {
            "extent_slots": layout.per_extent[2 * group + 1],
            "cold_slot_bytes": layout.slot_bytes[2 * group + 1],
            "cold_heads_address": cold_heads.ctypes.data,
        }
    fields = np.array([values.get(name, 0) for name in FIELDS], np.int64)
    return GroupLayout(fields, fields.ctypes.data, cold_heads)


def _cold_heads(geometry: KVGeometry, group: int, codec: Any) -> Int64Array:
    found = geometry.groups[group]
    shape = BlockShape(len(found.layers), found.kv_heads, geometry.block_tokens, found.key_dim, found.value_dim)
    heads = np.empty((shape.layers, shape.kv_heads, 4), np.int64)
    for layer, offsets in enumerate(codec.head_offsets(shape)):
        for head, offset in enumerate(offsets):
            key_bits, value_bits = codec.bits.pair(layer, head)
            size = record_bytes(found.key_dim, found.value_dim, key_bits, value_bits)
            heads[layer, head] = offset, size, key_bits, value_bits
    return heads
