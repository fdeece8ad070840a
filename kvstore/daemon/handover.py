"""Shared memory that outlives the daemon: kept by systemd or the keeper, and what of it the next one takes over.

What is believed: the ledger's rows that are whole, and of these only copies whose frame, where it lies, is the header
that the copy must have. Payloads are checked as ever: by each reader, in what has arrived at it. So memory that changed
meanwhile, a slot that was being written and a row that does not belong to it are misses.

What may be written: a segment that a client had for writing stays that client's, quarantined, until its process is gone
or has said that it unmapped everything; where it cannot be known, nothing of the segment is taken. Leases, pins and
forms end with a daemon. Any doubt about the whole (another version or configuration, a daemon that died while it took
over) drops all of it; each is counted.

Used at the start, before there are clients; `make` and `forget` later, by the pool.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from allocator.errors import TierError
from kvstore.daemon.frames import FrameForm, FrameForms
from kvstore.daemon.holder import Holder
from kvstore.daemon.ledger import GOOD, TAKING_OVER, KeptCopy, KeptSegment, Ledger, RefusedLedgerError, process_start
from kvstore.daemon.segments import SEGMENT_NAME, SegmentMemory
from kvstore.daemon.slots import ArenaEntry, ArenaSegment, slot_size

if TYPE_CHECKING:
    from kvstore.daemon.arena import ArenaIndex
    from kvstore.daemon.core import Core
    from kvstore.daemon.forms import Form
    from kvstore.daemon.notify import NotifySocket
    from kvstore.daemon.settings import DaemonSettings

LEDGER_NAME = "kvstore-ledger"


class Handover:
    """See the module. found: descriptors of an earlier daemon, by name, which are owned from here on.

    refused: why all of it was dropped, "" where nothing was. CapacityError when there is no room for the ledger.
    """

    def __init__(self, settings: DaemonSettings, notify: NotifySocket, found: Mapping[str, list[int]]) -> None:
        self.refused = ""
        self.counts: Counter[str] = Counter()
        self.seconds = 0.0
        self._settings, self._notify = settings, notify
        ours = {name: some for name, some in found.items() if name == LEDGER_NAME or name.startswith(SEGMENT_NAME)}
        for descriptor in (one for name, some in found.items() if name not in ours for one in some):
            os.close(descriptor)
        ledgers = ours.pop(LEDGER_NAME, [])
        self._segments = ours
        self.ledger = self._begin(ledgers)
        self._kept_epochs: dict[str, int] = {}
        if self._is_taking_over:
            try:
                self._kept_epochs = self.ledger.read_epochs()
            except RefusedLedgerError as error:
                self._begin_anew(str(error))

    # memory ----------------------------------------------------------------------------------------------------------

    def make(self, size_bytes: int, at_leisure: bool) -> SegmentMemory:
        """A fresh segment, which the keeper has too. CapacityError."""
        memory = SegmentMemory(size_bytes, at_leisure)
        self._notify.keep(memory.name, memory.write_fd)
        return memory

    def forget(self, memory: SegmentMemory) -> None:
        """The keeper lets go of it too. Under the daemon's lock, so nobody waits: a name that stays is dropped by the
        next daemon, and its memory has been given back."""
        self._notify.remove(memory.name, wait=False)

    def read_epoch(self, domain: str) -> int:
        """As the earlier daemon left it; see DomainEpochs."""
        return self._kept_epochs.get(domain, 0)

    def write_epoch(self, domain: str, epoch: int) -> None:
        self.ledger.raise_epoch(domain, epoch)

    def close(self) -> None:
        self.ledger.close()

    def report(self) -> dict[str, Any]:
        """What was taken over, for statistics."""
        return {
            "refused": self.refused,
            "seconds": self.seconds,
            "copies": self.counts["kept"],
            "copy_bytes": self.counts["kept_bytes"],
            "segments": self.counts["segments"],
            "dropped": {
                name.removeprefix("dropped_"): count for name, count in self.counts.items() if "dropped_" in name
            },
            "unkept": self.ledger.counts["unkept"],
        }

    # the start -------------------------------------------------------------------------------------------------------

    def _begin(self, descriptors: list[int]) -> Ledger:
        self._is_taking_over = False
        if not descriptors and not self._segments:
            return self._fresh()
        for descriptor in descriptors[1:]:
            os.close(descriptor)
        try:
            if len(descriptors) != 1:
                raise RefusedLedgerError("no_ledger" if not descriptors else "two_ledgers")
            ledger = Ledger.opened(descriptors[0], self._settings)
        except RefusedLedgerError as error:
            if descriptors:
                os.close(descriptors[0])
            return self._fresh(str(error))
        self._is_taking_over = True
        return ledger

    def _begin_anew(self, cause: str) -> None:
        self.ledger.close()
        self._is_taking_over = False
        self._kept_epochs = {}
        self.ledger = self._fresh(cause)

    def _fresh(self, refused: str = "") -> Ledger:
        self.refused = refused
        for name, descriptors in self._segments.items():
            self._discard(name, descriptors)
        self._segments = {}
        self._notify.remove(LEDGER_NAME)
        ledger = Ledger.create(self._settings)
        self._notify.keep(LEDGER_NAME, ledger.descriptor)
        return ledger

    def _discard(self, name: str, descriptors: list[int]) -> None:
        """Give its memory back now."""
        self._notify.remove(name)
        for descriptor in descriptors:
            try:
                SegmentMemory.taken_over(descriptor, self._settings.segment_bytes, name).close()
            except TierError:
                os.close(descriptor)

    def take_over(self, core: Core) -> None:
        """What there is, into the arenas of a core that has not begun."""
        if not self._is_taking_over:
            return
        began, self.ledger.state = time.monotonic(), TAKING_OVER
        with core.lock:
            segments = self._take_segments(core)
            self._take_copies(core, segments)
            for arena in core.arenas.values():
                arena.end_take_over()
        self.ledger.state = GOOD
        self.seconds = time.monotonic() - began

    def _take_segments(self, core: Core) -> dict[int, tuple[ArenaSegment, ArenaIndex, Holder]]:
        """By row: the segment, its arena, and on whose shelves its copies are."""
        taken: dict[int, tuple[ArenaSegment, ArenaIndex, Holder]] = {}
        clients: dict[bytes, Holder] = {}
        nobody: dict[str, Holder] = {}
        for row in self.ledger.read_segments():
            descriptors = self._segments.pop(row.name, [])
            why_not = self._why_not(row, descriptors)
            holder, memory = None, None
            if row.is_held and not why_not:
                holder = clients.get(row.token) or self._client(core, row)
                if holder is not None:
                    clients[row.token] = holder
                elif process_start(row.pid) == row.started:
                    why_not = "unwatched_writer"
            if not why_not:
                try:
                    memory = SegmentMemory.taken_over(descriptors[0], core.settings.segment_bytes, row.name)
                except TierError:
                    why_not = "damaged"
            segment = None if memory is None else core.pool.take_over(memory)
            if segment is None:
                self.counts[f"dropped_segment_{why_not or 'budget'}"] += 1
                self._notify.remove(row.name)
                if memory is not None:
                    memory.close()
                elif descriptors:
                    self._discard(row.name, descriptors)
                continue
            arena = core.arena(row.domain)
            shelf = holder or nobody.setdefault(row.domain, core.stranger(row.domain, "an earlier daemon"))
            segment.row = row.row
            arena.take_over_segment(segment, row.slot_bytes, holder)
            if holder is None and row.is_held:
                self.ledger.keep_segment(segment, row.domain)  # its holder is dead
            taken[row.row] = segment, arena, shelf
        self.ledger.take_segments(set(taken))
        for name, descriptors in self._segments.items():  # made, and never given to anybody; or of a row that was torn
            self._discard(name, descriptors)
        self._segments = {}
        self.counts["segments"] = len(taken)
        return taken

    def _why_not(self, row: KeptSegment, descriptors: list[int]) -> str:
        settings = self._settings
        known = {"", *(name for name, _ in settings.domains)}
        uid = row.domain.removeprefix("uid-")
        if len(descriptors) != 1:
            return "missing"
        if row.domain not in known and not (uid.isdecimal() and settings.may_connect(int(uid))):
            return "domain"
        if row.is_held and not row.started:
            return "unseen_writer"
        return "" if 0 <= row.slot_bytes <= settings.segment_bytes else "damaged"

    def _client(self, core: Core, row: KeptSegment) -> Holder | None:
        """The process that may still write there, waited for. None: it is gone, or cannot be waited for."""
        if process_start(row.pid) != row.started:
            return None
        try:
            pid_fd = os.pidfd_open(row.pid)
        except OSError:
            return None
        if process_start(row.pid) != row.started:
            os.close(pid_fd)
            return None
        process: dict[str, Any] = {"uid": row.uid, "pid": row.pid, "token": row.token, "pid_fd": pid_fd}
        arena = core.arena(row.domain)
        holder = Holder(next(core.numbers), arena, "before the restart", is_remote=True, is_quarantined=True, **process)
        core.holders[holder.number] = holder
        return holder

    def _take_copies(self, core: Core, segments: dict[int, tuple[ArenaSegment, ArenaIndex, Holder]]) -> None:
        forms = self.ledger.read_forms()
        frames: dict[int, FrameForms] = {row: FrameForms(form.spec) for row, form in forms.items()}
        kept: dict[int, tuple[int, Form]] = {}
        taken: set[tuple[int, int]] = set()
        for row in sorted(self.ledger.read_copies()):
            form, place = forms.get(row.form), segments.get(row.segment)
            fault = "place" if form is None or place is None else ""
            if (row.segment, row.offset) in taken:
                fault = "twice"
            elif form is not None and place is not None:
                fault = _fault(row, form, place[0], place[1], frames[row.form])
            if fault or form is None or place is None:
                self.counts[f"dropped_{fault}"] += 1
                continue
            segment, arena, holder = place
            key = form.key(row.hash)
            entry = ArenaEntry(key, row.parent, row.frame_bytes, segment, row.offset)
            entry.row = row.row
            taken.add((row.segment, row.offset))
            kept[row.row] = row.form, form
            arena.take_over(entry, holder, form)
            core.known_forms.learn(form)
            self.counts["kept"] += 1
            self.counts["kept_bytes"] += row.frame_bytes
        self.ledger.take_copies(kept)
        for cause, count in self.ledger.counts.items():
            self.counts[f"dropped_{cause}"] += count
        self.ledger.counts.clear()


def _fault(row: KeptCopy, form: Form, segment: ArenaSegment, arena: ArenaIndex, frames: FrameForms) -> str:
    """Why a copy is not taken over, "" where it is."""
    key, slot = form.key(row.hash), segment.slot_bytes
    payload_bytes = row.frame_bytes - form.header_bytes
    if form.domain != arena.domain or row.parent == row.hash:
        return "place"
    if payload_bytes <= 0 or slot_size(row.frame_bytes) != slot or row.offset % slot:
        return "place"
    if row.offset + slot > arena.segment_bytes:
        return "place"
    if arena.find(key) is not None:
        return "twice"
    frame = segment.memory.memory[row.offset : row.offset + row.frame_bytes]
    known: FrameForm = frames.of(key, payload_bytes)
    return "" if known.names(key, frame) else "frame"
