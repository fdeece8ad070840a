"""Quick figures of the codec as it runs here, for `kvstore doctor --measure`: some tenths of a second each.

They go through the public codec, so they measure whatever path is in use. `make bench` measures with care; this only
shows whether a machine is in the right league. Loads torch; called from one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from quant.codec import BlockCodec, BlockShape, get_codec
from quant.dispatch import Speed

_SHAPE = BlockShape(layers=128, kv_heads=8, block_tokens=16, key_dim=128, value_dim=128)  # 8 MiB: not in caches
_ROUNDS = 5


def int4_encode() -> Speed:
    """Bytes of bfloat16 encoded a second, beside a copy of them."""
    codec, keys, values, payload = _block()
    return _beside_copy(lambda: codec.encode_into(keys, values, payload), keys, values)


def int4_decode() -> Speed:
    """Bytes of bfloat16 decoded a second, beside a copy of them."""
    codec, keys, values, payload = _block()
    codec.encode_into(keys, values, payload)
    return _beside_copy(lambda: codec.decode_into(payload, keys, values), keys, values)


def _block() -> tuple[BlockCodec, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codec, K, V, room for the payload), K and V each bfloat16[128, 8, 16, 128]."""
    draw = torch.Generator().manual_seed(0)
    keys = torch.randn(_SHAPE.keys_shape, generator=draw).to(torch.bfloat16)
    values = torch.randn(_SHAPE.values_shape, generator=draw).to(torch.bfloat16)
    codec = get_codec("int4")
    return codec, keys, values, torch.empty(codec.encoded_bytes(_SHAPE, "bfloat16"), dtype=torch.uint8)


def _beside_copy(operation: Callable[[], object], keys: torch.Tensor, values: torch.Tensor) -> Speed:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the copy has one thread too
    try:
        return _alternating(operation, keys, values)
    finally:
        torch.set_num_threads(threads)


def _alternating(operation: Callable[[], object], keys: torch.Tensor, values: torch.Tensor) -> Speed:
    source = torch.stack((keys, values)).view(torch.uint8).numpy()
    target = source.copy()
    size = source.nbytes
    seconds, copy_seconds = [], []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        operation()
        middle = time.perf_counter()
        target[:] = source
        seconds.append(middle - start)
        copy_seconds.append(time.perf_counter() - middle)
    ours, copy = sorted(seconds)[_ROUNDS // 2], sorted(copy_seconds)[_ROUNDS // 2]
    return Speed(size / ours / 1e9, "GB/s on one core", copy / ours, "a copy")
