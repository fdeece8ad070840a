"""What takes copies away before their time: a client that deletes, clears or suspects them, an operator's flush.

Any thread. The daemon's lock is held for a few hundred copies at a time, so nobody waits longer than for a store.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from allocator.errors import TierError
from kvstore.daemon.forms import lower_root
from kvstore.daemon.lower import taken_out
from kvstore.frame.parsing import FrameFault

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.copy_key import CopyKey
    from kvstore.daemon.arena import ArenaIndex
    from kvstore.daemon.core import Core
    from kvstore.daemon.forms import Form
    from kvstore.daemon.holder import Holder
    from kvstore.daemon.lower import LowerTier

_AT_ONCE, _OTHERS_SECONDS = 256, 0.0002
_LOOKED_AT_BYTES = 32 << 20  # for one request; a few milliseconds, as its place in the rate has it


def delete(core: Core, holder: Holder, form: Form, hashes: tuple[bytes, ...]) -> int:
    """Here and below, but for what is pinned here; how many copies went."""
    keys = form.template.with_hashes(list(dict.fromkeys(hashes)))
    gone = _dropped(core, holder.arena, keys)
    unpinned = [key.hash for key in keys if holder.arena.find(key) is None]
    for lower in core.lowers:
        there = [hash for hash, flag in zip(unpinned, lower.presence(form, unpinned), strict=True) if flag == 1]
        lower.delete(form, unpinned)
        gone.update(there)
    if core.lowers:
        _dropped(core, holder.arena, keys)  # what came up from there meanwhile
    return len(gone)


def _dropped(core: Core, arena: ArenaIndex, keys: Sequence[CopyKey]) -> set[bytes]:
    """Those that are here and not pinned, unlinked; what is on its way up is not found when it has arrived."""
    gone: set[bytes] = set()
    with core.lock:
        for key in keys:
            entry = arena.find(key)
            if entry is not None and not entry.pin_count:
                arena.unlink(entry)
                gone.add(key.hash)
            for lower in core.lowers:
                lower.forget_fetch(arena, key)
    return gone


def clear(core: Core, arena: ArenaIndex, roots: set[bytes], *, all_allowed: bool) -> int:
    """Drop every copy of these roots, pins included, and what is being written or fetched of them; how many went from
    the arena. TierError: some below may be left."""
    count = empty(core, arena, roots)
    lower_roots = {lower_root(root, arena.domain) for root in roots}
    clear_below(core.lowers, lambda lower: lower.clear(lower_roots, all_allowed=all_allowed))
    if core.lowers:
        empty(core, arena, roots)  # what was asked for meanwhile, and came up from there before it went there too
    return count


def clear_below(lowers: Sequence[LowerTier], clear_one: Callable[[LowerTier], None]) -> None:
    """Every tier, whatever becomes of the others. TierError, the first one's, when that is done."""
    failed: list[TierError] = []
    for lower in lowers:
        try:
            clear_one(lower)
        except TierError as error:
            failed.append(error)
    if failed:
        raise failed[0]


def empty(core: Core, arena: ArenaIndex, roots: set[bytes] | None) -> int:
    """The same here alone; None: of every root."""
    with core.lock:
        arena.note_cleared(roots)
        families = [family for name, family in arena.families.items() if roots is None or name[0] in roots]
        entries = [entry for family in families for entry in family.values()]
    count = 0
    for at in range(0, len(entries), _AT_ONCE):
        with core.lock:
            linked = [entry for entry in entries[at : at + _AT_ONCE] if entry.is_linked]
            for entry in linked:
                arena.unlink(entry)
        count += len(linked)
        time.sleep(_OTHERS_SECONDS)  # else this thread has the lock again before who waits for it is awake
    return count


def suspect(core: Core, holder: Holder, form: Form, hashes: tuple[bytes, ...]) -> None:
    """Copies that a reader found wrong: what does not check out here either goes. As many as one request may cost; the
    others are found wrong again."""
    left_bytes = _LOOKED_AT_BYTES
    for hash in dict.fromkeys(hashes):
        with core.lock:
            entry = holder.arena.find(form.key(hash))
            if entry is not None:
                entry.reader_count += 1
        if entry is None:
            continue
        found = taken_out(entry, checks=core.settings.checks(form.domain))
        with core.lock:
            if isinstance(found, FrameFault):
                core.counts[f"corrupt_{found}"] += 1
                if entry.is_linked:
                    holder.arena.unlink(entry)
            else:
                core.counts["suspect_but_whole"] += 1
            holder.arena.end_read(entry)
        left_bytes -= entry.size_bytes
        if left_bytes <= 0:
            return
