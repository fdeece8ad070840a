"""Where a cache group lies in memory, as the C kernels read it: the fields of `kv_plan` in quant/native/csrc/paged.h.

Made once per cache and group; steps copy it and add their own fields. Used by PagedCache for writes and by the native
attention backend, on the thread that runs the model. Memory on the CPU only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from quant import native, record_bytes
from quant.record_layout import RUN_TOKENS

if TYPE_CHECKING:
    from allocator import KVGeometry, Slab
    from engine_adapter.batch import Int64Array
    from quant import BlockCodec

DTYPE_CODES = {"float32": 0, "bfloat16": 1, "float16": 2}
"""kv_dtype of attention.h."""
DIM_MAX = 1024
"""KV_DIM_MAX of attention.h."""
FIELDS = (
    "fields", "slices_address", "slice_count", "entries_address", "window_tokens", "block_tokens", "kv_heads",
    "key_dim", "value_dim", "dtype", "full_address", "full_slot_bytes", "full_layer_bytes", "full_head_bytes",
    "cold_address", "extent_bytes", "extent_slots", "cold_slot_bytes", "cold_layer_bytes", "record_bytes",
)  # fmt: skip
_PLACE = {name: at for at, name in enumerate(FIELDS)}
SLICES, SLICE_COUNT, ENTRIES = _PLACE["slices_address"], _PLACE["slice_count"], _PLACE["entries_address"]


def group_layout(slab: Slab, geometry: KVGeometry, group: int, cold_codec: BlockCodec | None) -> Int64Array | None:
    """int64[fields] of a group, no slices yet; None where the C kernels cannot work on it.

    Without INT4 slots, or with records that the kernels do not read, extent_slots is 0 (see reads_cold).
    """
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
    if _reads_records(slab, group, len(found.layers), found.kv_heads, cold_codec):
        size = record_bytes(found.key_dim, found.value_dim)
        values |= {
            "extent_slots": layout.per_extent[2 * group + 1],
            "cold_slot_bytes": layout.slot_bytes[2 * group + 1],
            "cold_layer_bytes": found.kv_heads * (tokens // RUN_TOKENS) * size,
            "record_bytes": size,
        }
    return np.array([values.get(name, 0) for name in FIELDS], np.int64)


def reads_cold(layout: Int64Array) -> bool:
    """Whether the kernels read the group's INT4 blocks."""
    return bool(layout[_PLACE["extent_slots"]])


def _reads_records(slab: Slab, group: int, layers: int, kv_heads: int, cold_codec: BlockCodec | None) -> bool:
    codec: Any = cold_codec
    if codec is None or codec.name != "int4" or not slab.layout.has_class(2 * group + 1):
        return False
    return all(codec.bits.pair(layer, head) == (4, 4) for layer in range(layers) for head in range(kv_heads))
