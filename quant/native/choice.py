"""Which compiled path is used, and why each of the others is not.

Pure functions over the extension; quant.native runs them once at import, `kvstore doctor` and tests run them again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quant.native import selftest

ABI = 3
"""The number that csrc/kernels.h has too: an extension with another one is an old build."""
SETTING = "KVSTORE_KERNELS"
NEEDS: dict[str, tuple[str, ...]] = {
    "amx": ("amx_tile", "amx_int8"),
    "avx512bf16": ("avx512_bf16",),
    "avx512": ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"),
    "avx2": ("avx2", "fma", "f16c", "bmi2"),
    "baseline": (),
}
"""Every path there is, best first, and what it needs of the CPU beyond the next one, as /proc/cpuinfo spells it."""
FEATURES = ("avx2", "avx512", "avx512bf16", "amx", "sha")
"""Names of the bits of kernels.cpu(), lowest first, as csrc/kernels.h numbers them."""


@dataclass(frozen=True, slots=True)
class PathState:
    """One path. usable: it may be activated. failed: it runs here and a self-test says that it must not."""

    name: str
    usable: bool
    reason: str
    tested: bool = False

    @property
    def failed(self) -> bool:
        return self.tested and not self.usable


@dataclass(frozen=True, slots=True)
class Choice:
    """path: the one in use, None with `reason`. states: of all paths, best first."""

    path: str | None
    reason: str
    states: tuple[PathState, ...]


def refused_by_abi(extension: Any) -> str:
    """Why an extension is not the one that belongs to this source, "" when it is."""
    found = getattr(extension, "ABI", None)
    return "" if found == ABI else f"stale build (its ABI number is {found}, this version needs {ABI}); reinstall"


def states(extension: Any) -> tuple[PathState, ...]:
    """All paths, none of them tested."""
    compiled = dict(extension.paths())
    flags = _cpu_flags()
    found = []
    for name in [*NEEDS, *(name for name in compiled if name not in NEEDS)]:
        if name not in compiled:
            reason = "not compiled in: left out (KV_BUILD_PATHS), unknown to the compiler, or this is no x86-64"
        else:
            reason = "" if compiled[name] else _lacking(name, flags)
        found.append(PathState(name, usable=not reason, reason=reason))
    return tuple(found)


def after_self_test(extension: Any, state: PathState, checks: Mapping[str, selftest.Check] | None = None) -> PathState:
    """The state after the self-test, which leaves the path active. A path that cannot run here is not tried."""
    if not state.usable:
        return state
    wrong = selftest.failures(extension, state.name, checks)
    return replace(state, usable=not wrong, reason=wrong, tested=bool(selftest.CHECKS if checks is None else checks))


def choose(extension: Any, setting: str = "", checks: Mapping[str, selftest.Check] | None = None) -> Choice:
    """Activate the best path that passes its self-test, or the one that `setting` names.

    Worse paths than the chosen one are not tested here: a start should be quick.
    """
    wanted = setting.strip().lower()
    found = list(states(extension))
    usable = [state.name for state in found if state.usable]
    if wanted not in ("", "auto", *usable):
        expected = f"off, auto or a path that runs here ({', '.join(usable)})"
        return Choice(None, f"{SETTING}={setting!r}: expected {expected}", tuple(found))
    for place, state in enumerate(found):
        if state.usable and wanted in ("", "auto", state.name):
            found[place] = after_self_test(extension, state, checks)
            if found[place].usable:
                extension.activate(state.name)
                return Choice(state.name, "", tuple(found))
    failed = "; ".join(f"{state.name}: {state.reason}" for state in found if state.failed)
    return Choice(None, failed, tuple(found))


def cpu_features(extension: Any) -> tuple[str, ...]:
    """Names of what this CPU and this system have of what the paths use."""
    bits = int(extension.cpu())
    return tuple(name for place, name in enumerate(FEATURES) if bits >> place & 1)


def _lacking(name: str, flags: frozenset[str]) -> str:
    missing = [flag for one in _down_from(name) for flag in NEEDS[one] if flag not in flags]
    if missing and flags:
        return f"this CPU lacks {', '.join(missing)}"
    return "this CPU lacks it, or the system does not let processes use it"


def _down_from(name: str) -> Iterator[str]:
    """A path and those that it builds on, simplest first."""
    names = list(NEEDS)
    return reversed(names[names.index(name) :]) if name in NEEDS else iter(())


def _cpu_flags() -> frozenset[str]:
    """What Linux says that the CPU has, empty elsewhere. Only explains: the extension asks the CPU itself."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith("flags"):
                    return frozenset(line.partition(":")[2].split())
    except OSError:
        return frozenset()
    return frozenset()
