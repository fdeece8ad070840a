"""How what a client has to say is cut into messages. Pure; any thread."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvstore.daemon.protocol import HERE, MISSED, MOST_LOOKED_FORMS, NOT_ASKED, PAGE_HASHES, Looked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvstore.tier import CopyKey, Lookup


def looked_messages(lookup: Lookup, number_of: Callable[[CopyKey], int]) -> Iterator[partial[Looked]]:
    """Each lacks its `seq` alone. number_of: the form's number on the connection; may raise."""
    hashes, start = lookup.hashes, lookup.start
    if not hashes:
        return
    forms: dict[int, int] = {}  # number -> place in the message
    outcomes = bytearray([NOT_ASKED]) * len(hashes)
    missed = range(lookup.missed.start - start, min(lookup.missed.stop - start, len(hashes)))
    outcomes[missed.start : missed.stop] = bytes([MISSED]) * len(missed)
    family, place = None, 0
    for position, key in lookup.copies.items():
        if (own := key.family) != family:
            family, place = own, forms.setdefault(number_of(key), len(forms))
        if place < MOST_LOOKED_FORMS:
            outcomes[position - start] = HERE + place
    form, numbers = number_of(lookup.key), tuple(forms)[:MOST_LOOKED_FORMS]
    is_counted = False
    for first in range(0, len(hashes), PAGE_HASHES):
        part = bytes(outcomes[first : first + PAGE_HASHES])
        counts_here = not is_counted and part.count(NOT_ASKED) < len(part)
        is_counted |= counts_here
        yield partial(
            Looked,
            form=form,
            prompt=lookup.key.hash,
            first=start + first,
            hashes=b"".join(hashes[first : first + PAGE_HASHES]),
            outcomes=part,
            forms=numbers,
            tokens=lookup.tokens,
            covered_blocks=len(lookup.covered) if first <= lookup.covered.stop - start < first + PAGE_HASHES else 0,
            is_counted=counts_here,
        )


def runs(keys: Sequence[CopyKey], most: int) -> list[list[int]]:
    """Places of `keys`, in order, in runs of one form and at most so many."""
    runs: list[list[int]] = []
    family: Callable[[], object] | object = None
    for place, key in enumerate(keys):
        own = key.family
        if not runs or own != family or len(runs[-1]) >= most:
            runs.append([])
            family = own
        runs[-1].append(place)
    return runs
