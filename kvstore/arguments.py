"""Checks of what callers hand in: what was given, what was expected. Pure functions, any thread."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

from allocator import UsageError

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


def text_id(name: str, value: object) -> str:
    """`value` as a text that is not empty and has no NUL."""
    if not isinstance(value, str) or not value or "\x00" in value:
        raise UsageError(f"{name}: got {value!r} ({type(value).__name__}); expected a text that is not empty, no NUL")
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
