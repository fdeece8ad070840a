"""What takes copies away before their time: a client that deletes, clears or suspects them, an operator's flush.

Any thread. The daemon's lock is held for a few hundred copies at a time, so nobody waits longer than for a store.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvstore.daemon.forms import lower_root
from kvstore.daemon.lower import taken_out
from kvstore.frame.parsing import FrameFault

if TYPE_CHECKING:
    from kvstore.daemon.arena import ArenaIndex
    from kvstore.daemon.core import Core
    from kvstore.daemon.forms import Form
    from kvstore.daemon.holder import Holder

_AT_ONCE, _OTHERS_SECONDS = 256, 0.0002
_LOOKED_AT_BYTES = 32 << 20  # for one request; a few milliseconds, as its place in the rate has it


def delete(core: Core, holder: Holder, form: Form, hashes: tuple[bytes, ...]) -> int:
    """Here and below, but for what is pinned here; how many copies went."""
    gone: set[bytes] = set()
    with core.lock:
        for hash in dict.fromkeys(hashes):
            entry = holder.arena.find(form.key(hash))
            if entry is not None and not entry.pin_count:
                holder.arena.unlink(entry)
                gone.add(hash)
    unpinned = [hash for hash in dict.fromkeys(hashes) if holder.arena.find(form.key(hash)) is None]
    for lower in core.lowers:
        there = [hash for hash, flag in zip(unpinned, lower.presence(form, unpinned), strict=True) if flag == 1]
        lower.delete(form, unpinned)
        gone.update(there)
    return len(gone)


def clear(core: Core, arena: ArenaIndex, roots: set[bytes], *, all_allowed: bool) -> int:
    """Drop every copy of these roots, pins included, and what is being written or fetched of them; how many went from
    the arena. TierError: some below may be left."""
    with core.lock:
        arena.note_cleared(roots)
        families = [family for name, family in arena.families.items() if name[0] in roots]
        entries = [entry for family in families for entry in family.values()]
    count = 0
    for at in range(0, len(entries), _AT_ONCE):
        with core.lock:
            linked = [entry for entry in entries[at : at + _AT_ONCE] if entry.is_linked]
            for entry in linked:
                arena.unlink(entry)
        count += len(linked)
        time.sleep(_OTHERS_SECONDS)  # else this thread has the lock again before who waits for it is awake
    lower_roots = {lower_root(root, arena.domain) for root in roots}
    for lower in core.lowers:
        lower.clear(lower_roots, all_allowed=all_allowed)
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
