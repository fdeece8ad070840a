"""What the CUDA part raises. Imports nothing; anyone may catch these.

CudaError(RuntimeError)
  CudaUnavailable     no CuPy, no card, or kernels that do not compile here: say why, use the torch path
  CudaMemoryError     memory that cannot be registered, exported or opened
    StaleMemoryError       an IPC handle of an allocation that is not what it was when the handle was made
"""

from __future__ import annotations


class CudaError(RuntimeError):
    """Base of the errors of quant.cuda."""


class CudaUnavailable(CudaError):  # noqa: N818 - says a state, not a mistake
    """CUDA kernels cannot run in this process; the message is the reason that `status()` gives."""


class CudaMemoryError(CudaError):
    """Host or device memory that the driver does not register, export or open."""


class StaleMemoryError(CudaMemoryError):
    """An IPC handle names an allocation that has gone, grown or been replaced since."""
