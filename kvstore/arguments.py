"""Checks of what callers hand in: what was given, what was expected. Pure functions, any thread."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING

from allocator import ConfigError, KVGeometry, UsageError
from kvstore.config import KVStoreConfig
from kvstore.tier import Tier

if TYPE_CHECKING:
    from collections.abc import Sequence


def whole(name: str, value: object, least: int = 1, most: int | None = None) -> int:
    """`value` as an int in [least, most]; UsageError for anything else (bools and floats included)."""
    number = None
    if not isinstance(value, bool):
        try:
            number = operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            number = None
    if number is None or number < least or (most is not None and number > most):
        wanted = "a positive int" if least == 1 else f"an int >= {least}"
        wanted = wanted if most is None else f"an int in [{least}, {most}]"
        raise UsageError(f"{name}: got {value!r} ({type(value).__name__}); expected {wanted}")
    return number


def duration(name: str, value: object) -> float:
    """`value` as seconds, zero or more and finite; UsageError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise UsageError(f"{name}: got {value!r} ({type(value).__name__}); expected seconds, 0 or more")
    return float(value)


def moment(name: str, value: object) -> float:
    """`value` as a time on some clock, finite; UsageError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UsageError(f"{name}: got {value!r} ({type(value).__name__}); expected the clock's time in seconds")
    return float(value)


def text_id(name: str, value: object) -> str:
    """`value` as a text that is not empty and has no NUL."""
    if not isinstance(value, str) or not value or "\x00" in value:
        raise UsageError(f"{name}: got {value!r} ({type(value).__name__}); expected a text that is not empty, no NUL")
    return value


def truth(name: str, value: object) -> bool:
    """`value` as a bool: "no" is true in Python, so nothing else passes."""
    if type(value) is not bool:
        raise UsageError(f"{name}: got {value!r} ({type(value).__name__}); expected True or False")
    return value


def check_hashes(hashes: Sequence[bytes], token_count: int, block_tokens: int) -> None:
    """UsageError unless `hashes` may be the block hashes of a prompt of `token_count` tokens."""
    if token_count < 1 or len(hashes) > token_count // block_tokens:
        raise UsageError(
            f"lookup_hashes: got {len(hashes)} hashes for {token_count} tokens; expected one for each full block of "
            f"{block_tokens} tokens, and at least one token"
        )


def length(token_ids: Sequence[int]) -> int:
    """How many token ids there are; UsageError for what has no length."""
    try:
        return len(token_ids)
    except TypeError:
        kind = type(token_ids).__name__
        raise UsageError(f"token ids: got {kind}; expected a list of int or an integer array") from None


def check_clock(clock: object) -> None:
    """ConfigError unless `clock` can be called and answers with seconds."""
    if not callable(clock):
        raise ConfigError(f"clock: got {clock!r} ({type(clock).__name__}); expected a function that returns seconds")
    now = clock()
    if isinstance(now, bool) or not isinstance(now, int | float):
        raise ConfigError(f"clock: returned {now!r} ({type(now).__name__}); expected seconds as a number")


def check_store_arguments(geometry: object, config: object, device: object, tiers: object, clock: object) -> None:
    """ConfigError unless a store can be made of these: the kinds only, not whether they fit one another."""
    for name, value, kind in (("geometry", geometry, KVGeometry), ("config", config, KVStoreConfig)):
        if not isinstance(value, kind):
            raise ConfigError(f"{name}: got {value!r} ({type(value).__name__}); expected {kind.__name__}")
    if not isinstance(device, str):
        raise ConfigError(f"device: got {device!r} ({type(device).__name__}); expected text such as 'cpu' or 'cuda:0'")
    if tiers is not None and not (isinstance(tiers, list | tuple) and all(isinstance(tier, Tier) for tier in tiers)):
        raise ConfigError(f"tiers: got {tiers!r}; expected a list of kvstore.Tier, fast to slow, or None")
    check_clock(clock)


def check_spare_blocks(spare_blocks: Sequence[int], group_count: int) -> None:
    """UsageError unless there is none, or one count for each cache group."""
    counts = spare_blocks if isinstance(spare_blocks, list | tuple) else None
    if counts is None or (counts and len(counts) != group_count):
        raise UsageError(f"spare_blocks: got {spare_blocks!r}; expected {group_count} counts, one a cache group, or ()")
    for count in counts:
        whole("spare_blocks", count, 0)
