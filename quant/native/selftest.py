"""A path proves itself before it is used: a few known answers per area, computed on every start.

A compiler that miscompiles one instruction set, a hypervisor that announces what it cannot do, a wheel on a machine
that nobody tried: all of them would be silently wrong KV. So each area has a check, and a path that fails one is passed
over for the next.

Each area's author adds its check to CHECKS. A check gets the extension with the path under test active and returns ""
or what was wrong; what it raises counts as wrong too. It may use neither torch nor numpy, and all checks together take
less than 5 ms a path. Called by quant.native at import, on one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

Check: TypeAlias = Callable[[Any], str]


def _codec_check(extension: Any) -> str:
    passed, encoded, decoded = extension.codec_selftest()
    return "" if passed else f"bytes (digests {encoded:#x}, {decoded:#x}) are not the reference's"


def _hash_check(extension: Any) -> str:
    from quant.native import check_hash

    return check_hash.check(extension)


def _attention_check(extension: Any) -> str:
    return "" if extension.attention_selftest() else "sums differ from plain arithmetic"


def _pages_check(extension: Any) -> str:
    from quant.native import check_pages

    return check_pages.check(extension)


def _checksum_check(extension: Any) -> str:
    from quant.native import check_checksum

    return check_checksum.check(extension)


CHECKS: dict[str, Check] = {
    "codec": _codec_check,
    "hash": _hash_check,
    "pages": _pages_check,
    "checksum": _checksum_check,
    "attention": _attention_check,
}
"""Area -> its check. The order is the order in which they run."""


def failures(extension: Any, path: str, checks: Mapping[str, Check] | None = None) -> str:
    """What is wrong with a path, "" when all checks pass. Leaves the path active. checks: CHECKS when None."""
    extension.activate(path)
    for area, check in (CHECKS if checks is None else checks).items():
        try:
            wrong = check(extension)
        except Exception as error:  # whatever a broken path does here is a reason not to use it
            wrong = f"{type(error).__name__}: {error}"
        if wrong:
            return f"self-test of {area} failed: {wrong}"
    return ""
