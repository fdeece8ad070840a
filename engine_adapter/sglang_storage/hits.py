"""How long a prefix can be restored, given which pages each pool has. Pure functions; any thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class PoolPages(NamedTuple):
    """flags: which pages of the prompt a pool has. trailing: 0 where it must have all, else how many of the last."""

    name: str
    flags: Sequence[bool]
    trailing: int = 0


def leading_run(flags: Sequence[bool]) -> int:
    found = list(flags)
    return found.index(False) if False in found else len(found)


def restorable(kv_flags: Sequence[bool], pools: Sequence[PoolPages]) -> tuple[dict[str, int], list[int]]:
    """Each pool's own longest prefix, and every prefix length (in pages) that all pools can restore.

    A pool that keeps a window's end only (states, sliding windows) has holes: 5 may be restorable where 4 is not.
    """
    run = leading_run(kv_flags)
    hits = {"kv": run} if run else {}
    lengths = list(range(1, run + 1))
    for pool in pools:
        if pool.trailing:
            good = [end for end in range(1, run + 1) if all(pool.flags[max(0, end - pool.trailing) : end])]
        else:
            good = list(range(1, leading_run(pool.flags[:run]) + 1))
        if good:
            hits[pool.name] = good[-1]
        allowed = set(good)
        lengths = [one for one in lengths if one in allowed]
    return hits, lengths
