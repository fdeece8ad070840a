"""What a client's word on a lookup comes to for the daemon: which tier has the blocks, and why others are missed.

Clients say what they found and went by, once a request: what they ask before that (again while a tier is looking, by
piece, by form, before they store) counts nothing. Whether a copy is here is looked up and not believed. Any thread.
"""

from __future__ import annotations

from collections import Counter
from itertools import compress
from typing import TYPE_CHECKING

from kvstore.daemon.protocol import HERE, MISSED, NOT_ASKED
from kvstore.daemon.tally import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.daemon.core import Core
    from kvstore.daemon.forms import Form
    from kvstore.daemon.holder import Holder
    from kvstore.daemon.protocol import Looked


def note(
    core: Core, holder: Holder, form: Form, forms: Sequence[Form], message: Looked, hashes: tuple[bytes, ...]
) -> None:
    """Count one message. form, forms: those that it names; hashes: its own, as many as its outcomes."""
    if core.recording is not None:
        core.recording.looked(holder.number, form, message)
    outcomes, holder.root = message.outcomes, form.lower_template.root
    hit_blocks: Counter[str] = Counter()
    missed_blocks: Counter[str] = Counter()
    for index, one in enumerate(forms):
        for hash in _find(core, holder, one, _chosen(hashes, outcomes, HERE + index), hit_blocks):
            missed_blocks[_why_gone(core, holder, hash)] += 1
    if missed := outcomes.count(MISSED):
        prompt, end, cause = holder.missed
        if outcomes[0] != MISSED or (prompt, end) != (message.prompt, message.first):  # not the rest of a lookup
            cause = _why_missed(core, holder, form, hashes[outcomes.index(MISSED)])
        holder.missed = (message.prompt, message.first + len(outcomes), cause)
        missed_blocks[cause] += missed
    if counts := hit_blocks or missed_blocks:  # what nothing reads is where that is which is read behind it
        counts[max(counts, key=counts.__getitem__)] += message.covered_blocks
    if hit_blocks or missed_blocks:  # else all of it was in the client's own memory
        last = len(outcomes.rstrip(bytes([MISSED, NOT_ASKED])))
        core.tally.looked_up(
            form, Outcome(message.prompt, message.is_counted, hit_blocks, missed_blocks, message.first + last)
        )


def _chosen(hashes: tuple[bytes, ...], outcomes: bytes, wanted: int) -> list[bytes]:
    """The hashes whose outcome is `wanted`."""
    return list(compress(hashes, map(wanted.__eq__, outcomes))) if wanted in outcomes else []


def _find(core: Core, holder: Holder, form: Form, wanted: list[bytes], hit_blocks: Counter[str]) -> list[bytes]:
    """Count them by the tier that has them; those that none has."""
    family = holder.arena.families.get(form.family) or {}
    absent = [hash for hash in wanted if hash not in family]
    if len(wanted) > len(absent):
        hit_blocks["host"] += len(wanted) - len(absent)
    below = core.found_below(form, absent)
    hit_blocks.update(lower.tier.name for lower in below if lower is not None)
    return [hash for hash, lower in zip(absent, below, strict=True) if lower is None]


def _is_any_down(core: Core) -> bool:
    return any(one.state == "down" for one in core.lowers)


def _why_gone(core: Core, holder: Holder, hash: bytes) -> str:
    """Why a copy that was here at the lookup, as the client says, is not now."""
    if _is_any_down(core):
        return "tier_down"
    return "evicted" if hash in holder.arena.recently_evicted else "never_stored"


def _why_missed(core: Core, holder: Holder, form: Form, hash: bytes) -> str:
    """Why a lookup ended at this block; all behind it count under the same cause."""
    if not _is_any_down(core) and any(2 in lower.presence(form, [hash]) for lower in core.lowers):
        return "still_looking"
    is_stored = hash in (holder.arena.families.get(form.family) or {})  # then what it needs beside it went
    return "evicted" if is_stored else _why_gone(core, holder, hash)
