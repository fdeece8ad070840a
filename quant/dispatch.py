"""Which implementation runs an operation on a device: decided once, in one place, and open to look at.

An *operation* is what several implementations do alike: "int4_encode", "decode_attention". Whoever owns one offers
its implementations, best first; each says why it cannot run here. The first that can is decided on when somebody asks
and kept from then on. `decisions` is what `kvstore doctor --kernels` prints and what the metric kernel_path shows;
`forced` is for tests and benchmarks, which must be able to run the others.

    offer("int4_encode", "cpu", [Implementation("native", native_absence, native_path), Implementation("torch")])
    if implementation_of("int4_encode", "cpu") == "native": ...

The setting KVSTORE_KERNELS=off takes away everything but the last one offered, which is the plain one.

Imports no torch. Any thread: a lock guards the table, and asking again costs a look into a dict.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial

SETTING = "KVSTORE_KERNELS"


def _always() -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Implementation:
    """name: "native", "torch", "cuda", "triton", "hashlib"...

    absence  why it cannot run here, "" when it can. Asked once; may import what it needs.
    variant  which of its forms runs, asked each time ("avx512"); "" when there is one only
    """

    name: str
    absence: Callable[[], str] = _always
    variant: Callable[[], str] = _always


@dataclass(frozen=True, slots=True)
class Speed:
    """What an operation reaches here: value in unit, and its ratio to `beside` in the same run (larger is better)."""

    value: float
    unit: str
    ratio: float
    beside: str

    def __str__(self) -> str:
        return f"{self.value:.3g} {self.unit}, {self.ratio:.2g} of {self.beside}"


@dataclass(frozen=True, slots=True)
class Decision:
    """What runs an operation on a device. implementation: "none" when nothing can.

    passed_over: better ones, best first, each with its reason.
    """

    operation: str
    device: str
    implementation: str
    variant: str
    passed_over: tuple[tuple[str, str], ...]

    @property
    def path(self) -> str:
        """One word for tables and metrics: "native-avx512", "torch"."""
        return f"{self.implementation}-{self.variant}" if self.variant else self.implementation


_NOTHING = Implementation("none")
_Key = tuple[str, str]
_lock = threading.RLock()
_offers: dict[_Key, tuple[Implementation, ...]] = {}
_decided: dict[_Key, tuple[Implementation, tuple[tuple[str, str], ...]]] = {}
_measures: dict[_Key, Callable[[], Speed]] = {}


def offer(
    operation: str,
    device: str,
    implementations: Sequence[Implementation],
    *,
    measure: Callable[[], Speed] | None = None,
) -> None:
    """State who can run an operation on a device ("cpu", "cuda"), best first. A later offer replaces an earlier one.

    measure: a quick figure of whatever runs it, for `doctor --measure`.
    """
    names = [one.name for one in implementations]
    if not names or len(set(names)) < len(names):
        raise ValueError(
            f"{operation} on {device}: got the implementations {names}; expected distinct ones, at least one"
        )
    with _lock:
        _offers[operation, device] = tuple(implementations)
        _decided.pop((operation, device), None)
        _measures.pop((operation, device), None)
        if measure is not None:
            _measures[operation, device] = measure


def withdraw(operation: str, device: str) -> None:
    """Take an offer back; nothing happens when there is none."""
    with _lock:
        for table in (_offers, _decided, _measures):
            table.pop((operation, device), None)


def implementation_of(operation: str, device: str) -> str:
    """Name of what runs it; "none" when nothing can. For callers in a hurry."""
    found = _decided.get((operation, device))
    return (found or _decide(operation, device))[0].name


def decision(operation: str, device: str) -> Decision:
    """What runs it and why nothing better. ValueError for an operation that nobody offers."""
    chosen, passed_over = _decided.get((operation, device)) or _decide(operation, device)
    return Decision(operation, device, chosen.name, chosen.variant(), passed_over)


def decisions(device: str | None = None) -> tuple[Decision, ...]:
    """All that was offered so far, or that of one device, in the order in which it was offered."""
    with _lock:
        keys = [key for key in _offers if device in (None, key[1])]
    return tuple(decision(*key) for key in keys)


def measured(operation: str, device: str) -> Speed | None:
    """A quick figure of the operation as it runs here; None where nothing runs it or nobody offered a measurement."""
    measure = _measures.get((operation, device))
    return measure() if measure is not None and implementation_of(operation, device) != "none" else None


@contextmanager
def forced(operation: str, device: str, name: str) -> Iterator[None]:
    """Run an operation on the named implementation for a while. ValueError when it cannot run here."""
    key = (operation, device)
    one = next((one for one in _offers.get(key, ()) if one.name == name), None)
    absence = "nobody offers it" if one is None else one.absence()
    if one is None or absence:
        known = ", ".join(one.name for one in _offers.get(key, ()))
        raise ValueError(
            f"{operation} on {device}: got {name!r}, which cannot run ({absence}); offered: {known or 'none'}"
        )
    with _lock:
        before = _decided.get(key)
        _decided[key] = (one, ())
    try:
        yield
    finally:
        with _lock:
            if before is None:
                _decided.pop(key, None)
            else:
                _decided[key] = before


def _decide(operation: str, device: str) -> tuple[Implementation, tuple[tuple[str, str], ...]]:
    key = (operation, device)
    with _lock:
        if key in _decided:
            return _decided[key]
        if key not in _offers:
            known = ", ".join(sorted(f"{name} on {place}" for name, place in _offers))
            raise ValueError(f"operation {operation!r} on {device!r}: nobody offers it; known: {known}")
        passed_over = []
        chosen = _NOTHING
        for one in _offers[key]:
            absence = _switched_off(key, one) or one.absence()
            if not absence:
                chosen = one
                break
            passed_over.append((one.name, absence))
        _decided[key] = (chosen, tuple(passed_over))
        return _decided[key]


def _switched_off(key: _Key, one: Implementation) -> str:
    off = os.environ.get(SETTING, "").strip().lower() == "off"
    return f"switched off by {SETTING}=off" if off and one is not _offers[key][-1] else ""


# what several offers ask --------------------------------------------------------------------------------------------


def native_absence(*functions: str) -> str:
    """Why the C kernels cannot run here, or which of the extension's functions that one needs are not in it."""
    from quant import native

    missing = [name for name in functions if not hasattr(native.kernels, name)]
    return native.reason or (f"the extension has no {', '.join(missing)}" if missing else "")


def native_variant() -> str:
    """The C path in use."""
    from quant import native

    return native.active_path() or ""


@lru_cache
def cuda_absence() -> str:
    """Why there is no CUDA device, asked of the driver; "" when there is one. Loads neither torch nor cupy."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no CUDA device (there is no driver: libcuda.so.1)"
    count = ctypes.c_int(0)
    status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if status:
        return f"no CUDA device (the driver answers {status})"
    return "" if count.value else "no CUDA device"


def module_absence(module: str, *packages: str) -> str:
    """Why an optional part cannot run: a package that is not installed, or what its `status()` says (runs, why not)."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        return f"no {', '.join(missing)}"
    if importlib.util.find_spec(module) is None:
        return f"{module} is not part of this version"
    runs, why_not = importlib.import_module(module).status()
    return "" if runs else str(why_not)


def _cuda_kernels_absence() -> str:
    return cuda_absence() or module_absence("quant.cuda", "cupy")


def _encode_speed() -> Speed:
    from quant import kernel_speed

    return kernel_speed.int4_encode()


def _decode_speed() -> Speed:
    from quant import kernel_speed

    return kernel_speed.int4_decode()


def _offer_own() -> None:
    """What quant itself can do. Page copies too: they are copies of bytes and know no tiers."""
    offers: tuple[tuple[str, str, str, Callable[[], Speed] | None], ...] = (
        ("int4_encode", "codec_encode", "torch", _encode_speed),
        ("int4_decode", "codec_decode", "torch", _decode_speed),
        ("page_copy", "page_copy", "numpy", None),
    )
    for operation, function, plain, measure in offers:
        native = Implementation("native", partial(native_absence, function), native_variant)
        offer(operation, "cpu", [native, Implementation(plain)], measure=measure)
        offer(
            operation,
            "cuda",
            [Implementation("cuda", _cuda_kernels_absence), Implementation("torch", cuda_absence)],
        )
    checksum = Implementation(
        "native", partial(native_absence, "checksum", "checksum_copy", "segments_write_all"), native_variant
    )
    offer("checksum", "cpu", [checksum, Implementation("xxhash")])


_offer_own()
