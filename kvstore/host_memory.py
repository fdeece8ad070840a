"""What this process may have of the machine's memory. Reads /proc and /sys; imports no torch. Any thread."""

from __future__ import annotations

import os
from pathlib import Path


def host_limit_bytes(root: Path = Path("/")) -> int:
    """All of it, or what its control groups leave it. root: where /proc and /sys are."""
    limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _lines(root / "proc/self/cgroup"):
        number, kinds, path = line.split(":", 2)
        if number == "0":
            base, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in kinds.split(","):
            base, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        group = Path(path.lstrip("/"))
        for one in (group, *group.parents):
            limit = min([limit, *(int(text) for text in _lines(base / one / name) if text.isdecimal())])
    return limit


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeError):
        return []
