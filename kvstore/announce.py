"""What the device tier tells listeners: which blocks became hits and which are gone. Runs under the store's lock.

The codec in an event is that of the copy at that moment; a block that cools stays stored, so that is no event. Tiers
below the device are not announced: what they evict by themselves is not known here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from allocator import FULL
from kvstore.events import BlockRemoved, BlockStored

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.events import EventStream
    from kvstore.identity import HashChain

DEVICE = "device"


class Announcer:
    """cold_codec: the name of the codec of INT4 blocks."""

    def __init__(self, events: EventStream, cold_codec: str | None, block_tokens: int) -> None:
        self.events = events
        self._block_tokens = block_tokens
        self._codecs = ("raw", cold_codec or "raw")

    @property
    def heard(self) -> bool:
        """False while nobody listens: then callers spare the work."""
        return self.events.has_subscribers

    def stored(self, group: int, chain: HashChain, positions: range, exact: bool, form: int = FULL) -> None:
        """Blocks at `positions` of a chain."""
        hashes, size = chain.hashes, self._block_tokens
        named = tuple(hashes[positions.start : positions.stop])
        parent = hashes[positions.start - 1] if positions.start else None
        tokens = chain.tokens(positions.start * size, positions.stop * size)
        self.events.publish(BlockStored(DEVICE, group, named, parent, self._codecs[form], exact, size, tokens))

    def sealed(self, group: int, chain: HashChain, start: int, fresh: Sequence[bool], exact: bool) -> None:
        """Blocks from position `start` of a chain were sealed; `fresh` where they are new."""
        if all(fresh):
            self.stored(group, chain, range(start, start + len(fresh)), exact)
            return
        for position, one in enumerate(fresh, start):
            if one:
                self.stored(group, chain, range(position, position + 1), exact)

    def evicted(self, group: int, hashes: Sequence[bytes], computed_exact: Sequence[bool], form: int) -> None:
        for exact in (True, False):
            gone = tuple(one for one, flag in zip(hashes, computed_exact, strict=True) if flag == exact)
            if gone:
                self.events.publish(BlockRemoved(DEVICE, group, gone, self._codecs[form], exact))
