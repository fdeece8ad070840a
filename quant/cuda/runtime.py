"""CuPy's side: finding a card, compiling kernels, launches, events, registration, IPC. The only file to import cupy.

cupy is imported when a device is asked for, never at import. One CudaDevice an index, made once; any thread (CuPy's
current device and stream are per thread, and are set around each call).
"""

from __future__ import annotations

import ctypes
import importlib.util
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from quant.cuda.driver import Bytes, DeviceBuffer, Event
from quant.cuda.errors import CudaMemoryError, CudaUnavailable
from quant.cuda.launches import Launch
from quant.cuda.source import OPTIONS, source_of

_HOST_TO_DEVICE = 1
_REGISTER_PORTABLE_MAPPED = 1 | 2
_lock = threading.Lock()
_devices: dict[int, CudaDevice] = {}


def first_line(error: BaseException) -> str:
    """The first line of an error that says something, and its type where there is none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _load_cupy() -> Any:
    if importlib.util.find_spec("cupy") is None:
        raise CudaUnavailable("no cupy")
    try:
        import cupy
    except Exception as error:  # a half-installed CuPy raises what it likes
        raise CudaUnavailable(f"cupy does not load: {first_line(error)}") from error
    return cupy


def cuda_device(index: int | None = None) -> CudaDevice:
    """The device of that index (None: the current one). Raises CudaUnavailable with a reason."""
    cupy = _load_cupy()
    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
        index = int(cupy.cuda.runtime.getDevice()) if index is None and count else index
    except Exception as error:
        raise CudaUnavailable(f"no device: {first_line(error)}") from error
    if index is None or not 0 <= index < count:
        raise CudaUnavailable("no device" if not count else f"no device {index}: there are {count}")
    with _lock:
        if index not in _devices:
            _devices[index] = CudaDevice(cupy, index)
        return _devices[index]


class _ForeignStream:
    """A raw stream handle in the form that CuPy 14 takes."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self._handle)


class _CudaEvent:
    """driver.Event over a CuPy event."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def done(self) -> bool:
        """Never blocks."""
        return bool(self.event.done)

    def wait(self) -> None:
        """Blocks; CuPy releases the GIL meanwhile."""
        self.event.synchronize()


class CudaDevice:
    """driver.Driver and driver.MemoryDriver over CuPy. Made by `cuda_device` only."""

    def __init__(self, cupy: Any, index: int) -> None:
        self._cupy = cupy
        self.index = index
        self._modules: dict[str, Any] = {}
        self._kernels: dict[tuple[str, str], Any] = {}
        self._compiling = threading.Lock()

    @property
    def description(self) -> str:
        """Card, compute capability and CuPy version."""
        found = self._cupy.cuda.runtime.getDeviceProperties(self.index)
        name = found["name"].decode() if isinstance(found["name"], bytes) else found["name"]
        return f"{name}, sm_{found['major']}{found['minor']}, CuPy {self._cupy.__version__}"

    # ---- kernels

    def compile(self, module: str) -> None:
        """Compiles and loads a module on this device, once. Raises CudaUnavailable with the compiler's reason."""
        self._module(module)

    def _module(self, name: str) -> Any:
        with self._compiling:
            if name not in self._modules:
                made = self._cupy.RawModule(code=source_of(name), options=OPTIONS, backend="nvrtc")
                try:
                    with self._cupy.cuda.Device(self.index):
                        made.compile()
                except Exception as error:
                    raise CudaUnavailable(f"compile failed: {first_line(error)}") from error
                self._modules[name] = made
            return self._modules[name]

    def _stream(self, handle: int) -> Any:
        streams = self._cupy.cuda
        if handle == 0:
            return streams.Stream.null
        if hasattr(streams.Stream, "from_external"):
            return streams.Stream.from_external(_ForeignStream(handle))
        return streams.ExternalStream(handle, self.index)

    def launch(self, launches: Sequence[Launch], stream: int) -> None:
        """Enqueues in order on a raw stream handle."""
        with self._cupy.cuda.Device(self.index), self._stream(stream):
            for launch in launches:
                name = launch.module, launch.kernel
                if name not in self._kernels:  # two threads may both do it: the same function twice
                    self._kernels[name] = self._module(launch.module).get_function(launch.kernel)
                self._kernels[name]((launch.grid,), launch.threads, (launch.job,), shared_mem=launch.shared_bytes)

    # ---- streams and events

    def new_stream(self) -> Any:
        """A stream that does not wait for the default one; `.ptr` is its handle, it dies with its last reference."""
        with self._cupy.cuda.Device(self.index):
            return self._cupy.cuda.Stream(non_blocking=True)

    def record(self, stream: int) -> Event:
        """An event after everything enqueued on the stream so far."""
        with self._cupy.cuda.Device(self.index):
            event = self._cupy.cuda.Event(disable_timing=True)
            event.record(self._stream(stream))
        return _CudaEvent(event)

    def wait_for(self, stream: int, event: Event) -> None:
        """Later work of the stream waits for the event, which may be of another device."""
        if not isinstance(event, _CudaEvent):
            raise TypeError(f"expected an event of a CUDA device, got {event!r}")
        with self._cupy.cuda.Device(self.index):
            self._stream(stream).wait_event(event.event)

    def synchronize(self) -> None:
        """Blocks until the device has done all its work."""
        with self._cupy.cuda.Device(self.index):
            self._cupy.cuda.runtime.deviceSynchronize()

    # ---- memory

    def upload(self, content: Bytes, stream: int) -> DeviceBuffer:
        """Through a pinned snapshot of its own, which the returned owner keeps along with the device memory."""
        size = max(1, content.nbytes)
        with self._cupy.cuda.Device(self.index), self._stream(stream) as queue:
            pinned = self._cupy.cuda.alloc_pinned_memory(size)
            np.frombuffer(pinned, np.uint8, content.nbytes)[:] = content.reshape(-1).view(np.uint8)
            memory = self._cupy.cuda.alloc(size)
            self._cupy.cuda.runtime.memcpyAsync(memory.ptr, pinned.ptr, content.nbytes, _HOST_TO_DEVICE, queue.ptr)
        return DeviceBuffer(int(memory.ptr), content.nbytes, (memory, pinned))

    def download(self, buffer: DeviceBuffer, stream: int) -> Bytes:
        """Blocks until the stream is idle, then copies."""
        with self._cupy.cuda.Device(self.index), self._stream(stream) as queue:
            queue.synchronize()
            array = self.view(buffer.address, buffer.size_bytes, buffer.owner)
            found: Bytes = self._cupy.asnumpy(array)
        return found

    def view(self, address: int, size_bytes: int, owner: object) -> Any:
        """cupy.ndarray uint8 [size_bytes] over device memory of another owner, a torch tensor, say: no copy."""
        memory = self._cupy.cuda.UnownedMemory(address, size_bytes, owner, self.index)
        pointer = self._cupy.cuda.MemoryPointer(memory, 0)
        return self._cupy.ndarray((size_bytes,), np.uint8, memptr=pointer)

    def enable_peer(self, peer: int) -> None:
        """Lets kernels of this device address memory of another. CudaMemoryError where the machine cannot."""
        runtime = self._cupy.cuda.runtime
        if not runtime.deviceCanAccessPeer(self.index, peer):
            raise CudaMemoryError(f"device {self.index} cannot address memory of device {peer}")
        with self._cupy.cuda.Device(self.index):
            try:
                runtime.deviceEnablePeerAccess(peer)
            except Exception as error:
                if "PeerAccessAlreadyEnabled" not in str(error):
                    raise CudaMemoryError(f"peer access to device {peer}: {first_line(error)}") from error

    def register_host(self, address: int, size_bytes: int) -> int:
        """cudaHostRegister, portable and mapped; the device's address of it."""
        runtime = self._cupy.cuda.runtime
        with self._cupy.cuda.Device(self.index):
            try:
                runtime.hostRegister(address, size_bytes, _REGISTER_PORTABLE_MAPPED)
                return int(runtime.pointerGetAttributes(address).devicePointer)
            except Exception as error:
                raise CudaMemoryError(
                    f"cannot register {size_bytes} bytes of host memory: {first_line(error)}"
                ) from error

    def unregister_host(self, address: int) -> None:
        """cudaHostUnregister."""
        try:
            self._cupy.cuda.runtime.hostUnregister(address)
        except Exception as error:
            raise CudaMemoryError(f"cannot unregister host memory: {first_line(error)}") from error

    def allocation_of(self, address: int) -> tuple[int, int]:
        """cuMemGetAddressRange, which CuPy does not wrap."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        with self._cupy.cuda.Device(self.index):
            self._cupy.cuda.runtime.free(0)  # makes the context current on this thread
            code = ctypes.CDLL("libcuda.so.1").cuMemGetAddressRange_v2(
                ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address)
            )
        if code:
            raise CudaMemoryError(f"no device allocation at {address:#x} (driver error {code})")
        return int(base.value), int(size.value)

    def card_id(self) -> bytes:
        """The card's place on the PCI bus, which processes with other device indices agree on."""
        return str(self._cupy.cuda.runtime.deviceGetPCIBusId(self.index)).encode()[:16].ljust(16, b"\0")

    def export_allocation(self, base: int) -> bytes:
        """cudaIpcGetMemHandle."""
        with self._cupy.cuda.Device(self.index):
            try:
                return bytes(self._cupy.cuda.runtime.ipcGetMemHandle(base))
            except Exception as error:
                raise CudaMemoryError(
                    f"this allocation has no IPC handle (pools of virtual memory have none): {first_line(error)}"
                ) from error

    def open_allocation(self, handle: bytes) -> int:
        """cudaIpcOpenMemHandle. Fails in the process that exported it."""
        with self._cupy.cuda.Device(self.index):
            try:
                return int(self._cupy.cuda.runtime.ipcOpenMemHandle(handle))
            except Exception as error:
                raise CudaMemoryError(f"cannot open an IPC handle: {first_line(error)}") from error

    def close_allocation(self, base: int) -> None:
        """cudaIpcCloseMemHandle."""
        with self._cupy.cuda.Device(self.index):
            self._cupy.cuda.runtime.ipcCloseMemHandle(base)
