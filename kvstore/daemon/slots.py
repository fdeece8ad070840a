"""What an arena is made of: segments cut into slots, the copies in them, whose they are, who may write there.

Pure bookkeeping, no bytes but the view that an entry gives of its frame. Under the daemon's lock.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore.copy_index import CopyEntry
from kvstore.copy_key import CopyKey
from kvstore.events import BlockStored

if TYPE_CHECKING:
    from kvstore.daemon.forms import Form
    from kvstore.daemon.segments import SegmentMemory
    from kvstore.tier import ByteRow

NO_ROW = -1
"""Of a copy or segment that is not written down for a successor."""


def slot_size(frame_bytes: int) -> int:
    """Slot bytes of a frame: at most 1/128 larger, so that frames of nearly one size share segments."""
    step = max(64, 1 << max(0, frame_bytes.bit_length() - 8))
    return -(-frame_bytes // step) * step or step


def stored_event(entry: ArenaEntry) -> BlockStored:
    """What listeners are told of a copy."""
    key = entry.key
    block_tokens = entry.form.block_tokens
    return BlockStored("host", key.group, (key.hash,), entry.parent, key.codec, key.exact, block_tokens)


class Tenant:
    """Whose copies these are within a domain. quota_bytes 0: no limit of its own."""

    __slots__ = ("counts", "name", "quota_bytes", "shelves", "used_bytes")

    def __init__(self, name: str, quota_bytes: int = 0) -> None:
        self.name = name
        self.quota_bytes = quota_bytes
        self.used_bytes = 0
        self.shelves: set[int] = set()  # that hold its copies
        self.counts: Counter[str] = Counter()


@dataclass(eq=False)
class SegmentHolder:
    """Who segments are leased to for writing.

    is_remote: another process; is_quarantined: its connection is gone and its process is not.
    """

    number: int
    is_remote: bool = field(default=False, kw_only=True)
    is_quarantined: bool = field(default=False, kw_only=True)
    uid: int = field(default=-1, kw_only=True)
    pid: int = field(default=0, kw_only=True)
    token: bytes = field(default=b"", kw_only=True)
    segments: set[ArenaSegment] = field(default_factory=set, kw_only=True)


class ArenaSegment:
    """A segment and its slots. `number` is never used twice; holder None: nobody may write."""

    __slots__ = (
        "_stays",
        "entries",
        "free_offsets",
        "holder",
        "is_recalled",
        "memory",
        "newest_tick",
        "number",
        "row",
        "slot_bytes",
    )

    def __init__(self, number: int, memory: SegmentMemory) -> None:
        self.number = number
        self.row = NO_ROW  # in the ledger, where there is one
        self.memory = memory
        self.holder: SegmentHolder | None = None
        self.slot_bytes = 0
        self.free_offsets: list[int] = []
        self.entries: set[ArenaEntry] = set()
        self.newest_tick = 0
        self.is_recalled = False
        self._stays: ArenaEntry | None = None  # one that was seen not to be able to go

    @property
    def needs_recall(self) -> bool:
        """A client may have it mapped for writing."""
        return self.holder is not None and self.holder.is_remote

    @property
    def may_be_emptied(self) -> bool:
        """Asked for every copy that is stored in a full arena, so what has stood in the way is looked at first."""
        if self.is_recalled:
            return False
        if self._stays is None or self._stays.may_be_dropped or self._stays not in self.entries:
            self._stays = next((entry for entry in self.entries if not entry.may_be_dropped), None)
        return self._stays is None


class ArenaEntry(CopyEntry):
    """One copy, its slot and its tenant. `form`: of whoever wrote it, so what its frame says. offered: the marks of the
    tiers below that have it, or to which it is on its way; offered_seconds: since when, by time.monotonic()."""

    __slots__ = ("form", "generation", "offered", "offered_seconds", "offset", "row", "segment", "shelf", "tenant")

    def __init__(
        self, key: CopyKey, parent: bytes | None, frame_bytes: int, segment: ArenaSegment, offset: int
    ) -> None:
        super().__init__(key, parent, frame_bytes, segment.slot_bytes)
        self.segment = segment
        self.offset = offset
        self.row = NO_ROW  # in the ledger
        self.generation = 0
        self.offered = 0
        self.offered_seconds = 0.0
        self.shelf = 0
        self.form: Form
        self.tenant: Tenant

    @property
    def may_be_dropped(self) -> bool:
        """With all of its segment, whatever hangs on it."""
        return self.is_linked and not self.reader_count and not self.pin_count

    @property
    def memory(self) -> ByteRow:
        """The frame, where it lies."""
        return self.segment.memory.memory[self.offset : self.offset + self.size_bytes]
