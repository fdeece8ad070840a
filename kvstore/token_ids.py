"""Token ids as a checked uint32 array. Pure values, any thread."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from allocator.errors import UsageError
from kvstore.operations import native_hashing

TOKEN_LIMIT = 1 << 32
_FEW = 64  # ids that are converted before a call into C would be decided on

TokenIds: TypeAlias = "Sequence[int] | npt.NDArray[np.integer]"


def as_token_array(token_ids: TokenIds) -> array[int]:
    """Checked token ids as a uint32 array. UsageError names the index and value of the first bad one."""
    if isinstance(token_ids, np.ndarray):
        return _from_numpy(token_ids)
    if not isinstance(token_ids, list | tuple):
        if hasattr(token_ids, "__array__"):
            return _from_numpy(np.asarray(token_ids))
        unordered = isinstance(token_ids, Set | Mapping)
        if unordered or isinstance(token_ids, str | bytes | bytearray) or not isinstance(token_ids, Iterable):
            raise UsageError(f"token ids: got {type(token_ids).__name__}; expected a list of int or an integer array")
        token_ids = list(token_ids)
    native = native_hashing() if len(token_ids) > _FEW else None
    if native is not None and (exact := native.token_bytes(token_ids)) is not None:
        return array("I", exact)
    try:
        tokens = array("I", token_ids)
    except (TypeError, OverflowError, ValueError):
        raise _bad_token(token_ids) from None
    if tokens:  # array() takes True for 1: only where a 0 or 1 came out can a bool have gone in
        small = np.flatnonzero(np.frombuffer(tokens, dtype=np.uint32) < 2)
        if any(isinstance(token_ids[index], bool) for index in small):
            raise _bad_token(token_ids)
    return tokens


def _from_numpy(ids: npt.NDArray[np.integer]) -> array[int]:
    if ids.ndim != 1 or (ids.dtype.kind not in "iu" and ids.size):
        raise UsageError(f"token ids: got an array of {ids.dtype} and shape {ids.shape}; expected one row of integers")
    tokens = array("I")
    if ids.size:
        if ids.dtype != np.uint32 and ((ids < 0) | (ids >= TOKEN_LIMIT)).any():
            bad = np.flatnonzero((ids < 0) | (ids >= TOKEN_LIMIT))
            raise UsageError(f"token id at index {bad[0]} is {ids[bad[0]]}; expected an int in [0, 2**32)")
        tokens.frombytes(np.ascontiguousarray(ids, dtype=np.uint32).tobytes())
    return tokens


def _bad_token(token_ids: Sequence[object]) -> UsageError:
    for index, value in enumerate(token_ids):
        good = isinstance(value, int | np.integer) and not isinstance(value, bool)
        if not good or not 0 <= int(value) < TOKEN_LIMIT:  # type: ignore[call-overload]
            kind = type(value).__name__
            return UsageError(f"token id at index {index} is {value!r} ({kind}); expected an int in [0, 2**32)")
    return UsageError("token ids: expected ints in [0, 2**32)")  # pragma: no cover - the array refused, so one is bad
