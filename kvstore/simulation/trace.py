"""A trace: what requests asked for and when, as arrays, so that twenty million blocks fit a small memory.

Read by `kvstore.simulation.reading`, made by `kvstore.simulation.workloads`, replayed by `kvstore.simulation.replay`.
Immutable; processes share it by fork. A block is known by a 64-bit key, well mixed, that stands for its whole prefix.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from allocator import ConfigError
from allocator.block_marks import PRIORITY_DEFAULT

Keys: TypeAlias = "npt.NDArray[np.uint64]"
Counts: TypeAlias = "npt.NDArray[np.int64]"
KEY_MAX = (1 << 64) - 1
_MOST_BLOCK_TOKENS = 1 << 20


class TraceError(ConfigError):
    """A trace that cannot be replayed: where, what was found, what was expected."""


@dataclass(frozen=True, slots=True)
class Request:
    """One line of a trace. block_ids: one a block of the prompt, a partly filled last one included."""

    seconds: float
    input_tokens: int
    output_tokens: int
    block_ids: list[int]
    session: int = 0  # 0: not told
    tenant: int = 0  # 0: not told
    priority: int = PRIORITY_DEFAULT
    line: int = 0  # of the file that it was read from


@dataclass(frozen=True, slots=True)
class Trace:
    """starts[i]:starts[i + 1] are the blocks of request i; the first full_counts[i] of them can be shared."""

    name: str
    block_tokens: int
    keys: Keys
    starts: Counts
    full_counts: Counts
    input_tokens: Counts
    output_tokens: Counts
    seconds: npt.NDArray[np.float64]
    sessions: Keys
    tenants: Counts  # 0: not told; else numbered from 1 on, as they came
    priorities: Counts
    unique_count: int

    def __len__(self) -> int:
        return len(self.full_counts)

    @property
    def block_count(self) -> int:
        """Blocks that requests present, all together."""
        return len(self.keys)

    def capacity_blocks(self, percent: float) -> int:
        """That share of the unique blocks, rounded down, at least one."""
        return max(1, int(self.unique_count * percent / 100))


def build(name: str, block_tokens: int, requests: Iterable[Request], *, file: str | None = None) -> Trace:
    """A trace of requests, put in order of time; those of one time stay as given.

    file: its name, for a TraceError where an id follows different ones, though each is to stand for all before it.
    """
    if not 1 <= block_tokens <= _MOST_BLOCK_TOKENS:
        raise TraceError(f"{name}: got blocks of {block_tokens} tokens; expected 1 to {_MOST_BLOCK_TOKENS}")
    keys, columns = _collected(requests)
    if not columns:
        raise TraceError(f"{name}: got no request; expected at least one")
    seconds = np.array([row[3] for row in columns], dtype=np.float64)
    lengths = np.array([row[0] for row in columns], dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    if file is not None:
        _check_parents(file, keys, starts, [row[7] for row in columns])
    if bool((np.diff(seconds) < 0).any()):
        order = np.argsort(seconds, kind="stable")
        seconds, lengths, columns = seconds[order], lengths[order], [columns[place] for place in order.tolist()]
        came_from = starts[order]
        starts = np.concatenate([[0], np.cumsum(lengths)])
        keys = keys[np.repeat(came_from - starts[:-1], lengths) + np.arange(len(keys))]
    input_tokens = np.array([row[1] for row in columns], dtype=np.int64)
    mixed = mix(keys)
    return Trace(
        name=name,
        block_tokens=block_tokens,
        keys=mixed,
        starts=starts,
        full_counts=np.minimum(lengths, input_tokens // block_tokens),
        input_tokens=input_tokens,
        output_tokens=np.array([row[2] for row in columns], dtype=np.int64),
        seconds=seconds,
        sessions=np.array([row[4] for row in columns], dtype=np.uint64),
        tenants=np.array([row[5] for row in columns], dtype=np.int64),
        priorities=np.array([row[6] for row in columns], dtype=np.int64),
        unique_count=len(np.unique(mixed)),
    )


def first_requests(trace: Trace, count: int) -> Trace:
    """The first `count` of them to arrive; all where there are no more."""
    if count < 1:
        raise TraceError(f"requests: got {count}; expected at least 1")
    if count >= len(trace):
        return trace
    keys = trace.keys[: int(trace.starts[count])]
    return replace(
        trace,
        keys=keys,
        starts=trace.starts[: count + 1],
        full_counts=trace.full_counts[:count],
        input_tokens=trace.input_tokens[:count],
        output_tokens=trace.output_tokens[:count],
        seconds=trace.seconds[:count],
        sessions=trace.sessions[:count],
        tenants=trace.tenants[:count],
        priorities=trace.priorities[:count],
        unique_count=len(np.unique(keys)),
    )


def _check_parents(file: str, keys: Keys, starts: Counts, lines: list[int]) -> None:
    is_first = np.zeros(len(keys) + 1, dtype=bool)
    is_first[starts[:-1]] = True
    is_first = is_first[:-1]
    parents = np.concatenate([keys[:1], keys[:-1]])
    parents[is_first] = 0
    order = np.argsort(keys, kind="stable")
    same = keys[order[1:]] == keys[order[:-1]]
    differs = (parents[order[1:]] != parents[order[:-1]]) | (is_first[order[1:]] != is_first[order[:-1]])
    wrong = order[1:][same & differs]
    if len(wrong):
        place = int(wrong.min())
        earlier = order[np.searchsorted(keys[order], keys[place])]
        before = ["nothing" if is_first[one] else f"block {parents[one]}" for one in (place, earlier)]
        line = lines[int(np.searchsorted(starts, place, side="right")) - 1]
        raise TraceError(
            f"{file}, line {line}: got block id {keys[place]} after {before[0]}, where it came after {before[1]} "
            "before; expected an id to stand for one prefix"
        )


def _collected(requests: Iterable[Request]) -> tuple[Keys, list[tuple[int, int, int, float, int, int, int, int]]]:
    pieces: list[Keys] = []
    pending: list[int] = []
    columns = []
    numbers: dict[int, int] = {0: 0}
    for one in requests:
        pending += one.block_ids
        tenant = numbers.setdefault(one.tenant, len(numbers))
        lengths = (len(one.block_ids), one.input_tokens, one.output_tokens)
        columns.append((*lengths, one.seconds, one.session, tenant, one.priority, one.line))
        if len(pending) > 1 << 16:
            pieces.append(np.array(pending, dtype=np.uint64))
            pending = []
    pieces.append(np.array(pending, dtype=np.uint64))
    return np.concatenate(pieces), columns


def mix(numbers: Keys) -> Keys:
    """A one-to-one mixing of 64 bits (splitmix64), so that any bits of a key are as good as any others."""
    mixed = numbers + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def each(trace: Trace) -> Iterator[tuple[int, Keys, list[bytes]]]:
    """(number, keys of the full blocks, the same as names) of every request."""
    starts, full_counts = trace.starts.tolist(), trace.full_counts.tolist()
    keys = trace.keys
    for number, full in enumerate(full_counts):
        own = keys[starts[number] : starts[number] + full]
        raw = own.tobytes()
        yield number, own, [raw[place : place + 8] for place in range(0, 8 * full, 8)]
