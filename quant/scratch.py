"""Work buffers that stay warm between pieces: fresh ones cost more in page faults than the arithmetic in them.

One set a thread (torch CPU tensors only; on other devices torch's caching allocator does this). A buffer is valid
until the same thread asks for the same name again, so no result may live in one.
"""

from __future__ import annotations

import math
import threading

import torch

KEPT_BYTES = 1 << 23  # a larger buffer is not kept


class _Buffers(threading.local):
    def __init__(self) -> None:
        self.by_name: dict[str, torch.Tensor] = {}


_buffers = _Buffers()


def scratch(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialised contiguous tensor, reused by the next call of this thread with the same name."""
    needed = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or needed > KEPT_BYTES:
        return torch.empty(shape, dtype=dtype, device=device)
    buffer = _buffers.by_name.get(name)
    if buffer is None or buffer.shape[0] < needed:
        buffer = torch.empty(needed, dtype=torch.uint8)
        _buffers.by_name[name] = buffer
    return buffer[:needed].view(dtype).view(shape)
