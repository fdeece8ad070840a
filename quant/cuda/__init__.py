"""int4 and page copies on CUDA cards, through CuPy. docs/cuda.md says what runs and how it is chosen.

Public names. Importing this package imports neither torch nor cupy; without a card everything says so clearly.

    status()                     (usable, reason), for `doctor`; never raises, imports no torch
    absence()                    the reason alone, "" when usable, for quant.dispatch
    cuda_codec_for(tensor, operation)   kernels for a CUDA tensor, or None: go on with torch
    cuda_device(index)           a device: streams, events, peer access, zero-copy views     (quant.cuda.runtime)
    PageCopier, PageSet, Fence   gather and scatter of pages on a stream                     (quant.cuda.pages)
    RegisteredHost               a host arena that the card reads and writes                 (quant.cuda.host_memory)
    MemoryExporter, MemoryOpener, MemoryHandle   device memory of another process            (quant.cuda.ipc)
    CudaError, CudaUnavailable, CudaMemoryError, StaleMemoryError
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from quant.cuda.errors import CudaError, CudaMemoryError, CudaUnavailable, StaleMemoryError
from quant.cuda.host_memory import RegisteredHost
from quant.cuda.ipc import MemoryExporter, MemoryHandle, MemoryOpener
from quant.cuda.pages import Fence, PageCopier, PageSet
from quant.cuda.runtime import CudaDevice, cuda_device, first_line
from quant.dispatch import implementation_of

if TYPE_CHECKING:
    from quant.cuda.codec import CudaCodec

__all__ = [
    "CudaDevice",
    "CudaError",
    "CudaMemoryError",
    "CudaUnavailable",
    "Fence",
    "MemoryExporter",
    "MemoryHandle",
    "MemoryOpener",
    "PageCopier",
    "PageSet",
    "RegisteredHost",
    "StaleMemoryError",
    "absence",
    "cuda_codec_for",
    "cuda_device",
    "status",
]

_lock = threading.Lock()
_reasons: dict[tuple[int, str], str | None] = {}  # (device index, element kind) -> why not
_codecs: dict[int, CudaCodec] = {}


def _check(device: CudaDevice, kind: str) -> str | None:
    """Compiles and tests the int4 kernels of an element kind on a device, once. None, or why they are not used."""
    from quant.cuda.self_test import check_int4

    with _lock:
        key = device.index, kind
        if key not in _reasons:
            try:
                device.compile(f"int4_{kind}")
                _reasons[key] = check_int4(device, kind)
            except CudaUnavailable as error:
                _reasons[key] = str(error)
            except Exception as error:  # a driver that fails in the middle is a reason, not a crash
                _reasons[key] = f"self-test failed: {first_line(error)}"
        return _reasons[key]


def status() -> tuple[bool, str]:
    """(True, card and versions) when the kernels compile and pass their self-test on the current device.

    Else (False, "no cupy" | "no device..." | "compile failed: ..." | "self-test failed: ..."). Never raises; imports no
    torch. The first call with a card compiles (seconds; CuPy keeps the result on disk), later ones are quick.
    """
    from quant.cuda.self_test import check_pages

    try:
        device = cuda_device()
        reason = _check(device, "bf16") or check_pages(device)
        return (True, device.description) if reason is None else (False, reason)
    except Exception as error:
        return False, first_line(error)


def absence() -> str:
    """Why the kernels cannot run here, "" when they can: `status` in the form that quant.dispatch asks for."""
    usable, reason = status()
    return "" if usable else reason


def cuda_codec_for(tensor: Any, operation: str = "int4_encode") -> CudaCodec | None:
    """The kernels for a tensor's device and dtype; None: go on with torch.

    None for tensors on the CPU, where quant.dispatch decided on something else for the operation ("int4_encode",
    "int4_decode"), and where the kernels of this device and dtype fail their self-test.
    """
    if not tensor.is_cuda or implementation_of(operation, "cuda") != "cuda":
        return None
    from quant.cuda.codec import KIND_OF, CudaCodec, TorchStream

    index, kind = tensor.device.index, KIND_OF.get(tensor.dtype)
    if kind is None:
        return None
    try:
        device = cuda_device(index)
    except CudaUnavailable:
        return None
    if _check(device, kind) is not None:
        return None
    if index not in _codecs:
        _codecs[index] = CudaCodec(TorchStream(device))
    return _codecs[index]
