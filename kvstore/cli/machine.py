"""What `kvstore doctor` says about the machine: cores, threads, huge pages. Reads /proc and /sys; imports no torch."""

from __future__ import annotations

import mmap
import os
import re
from dataclasses import dataclass
from pathlib import Path

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_PROBE_BYTES = 16 << 20
_MEANING = {
    "always": "pools lie in huge pages",
    "madvise": "pools lie in huge pages: we ask for them (MADV_HUGEPAGE)",
    "never": "pools lie in 4 KiB pages: reading INT4 blocks in place is up to 1.7 times slower. As root: "
    f"echo madvise > {_HUGE_PAGES}",
    "unknown": "this system does not say; pools probably lie in small pages",
}


@dataclass(frozen=True, slots=True)
class HugePages:
    """setting: what the system is set to. granted_fraction: what a test pool got just now; None: unknown."""

    setting: str
    meaning: str
    granted_fraction: float | None


def huge_pages() -> HugePages:
    """The system's setting, and how much of 16 MiB asked for as pools ask comes in huge pages."""
    try:
        found = re.search(r"\[(\w+)\]", _HUGE_PAGES.read_text(encoding="ascii"))
    except OSError:
        found = None
    setting = found.group(1) if found else "unknown"
    granted = _granted_fraction()
    meaning = _MEANING.get(setting, _MEANING["unknown"])
    if granted is not None and granted < 0.5 and setting in ("always", "madvise"):
        meaning = f"none were free just now ({granted:.0%} of a test pool): memory is full or in pieces"
    return HugePages(setting, meaning, granted)


def _granted_fraction() -> float | None:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    with mmap.mmap(-1, _PROBE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pool:
        try:
            before = _huge_bytes()
            pool.madvise(mmap.MADV_HUGEPAGE)
            for place in range(0, _PROBE_BYTES, mmap.PAGESIZE):
                pool[place] = 1
            after = _huge_bytes()
        except OSError:
            return None
        return None if before is None or after is None else min(1.0, max(0, after - before) / _PROBE_BYTES)


def _huge_bytes() -> int | None:
    """Bytes of this process in transparent huge pages."""
    try:
        text = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return None
    found = re.search(r"^AnonHugePages:\s+(\d+) kB", text, re.MULTILINE)
    return int(found.group(1)) << 10 if found else None


def threads() -> dict[str, object]:
    """Cores that this process may use, and what limits or sets its threads."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "cores": cores,
        "cpu_quota": _cpu_quota(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
    }


def _cpu_quota() -> float | None:
    """Cores that the control group pays for, None without a limit."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None
