"""Which block holds a hash: one index a cache group, in two maps that never merge.

    exact   reading the block gives full precision: a raw copy of a block that was computed exactly
    lossy   anything else: an INT4 copy, or a raw block computed after something lossy was read

Called by the pool (which keeps it in step with block states) and, read-only, by a lookup; under the caller's lock.
Keys are 32-byte block hashes of the identity chain; an entry always points at a sealed or idle block.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress


class PrefixIndex:
    """hash -> block id, exact and lossy."""

    __slots__ = ("exact", "lossy")

    def __init__(self) -> None:
        self.exact: dict[bytes, int] = {}
        self.lossy: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self.exact) + len(self.lossy)

    def find(self, block_hash: bytes, exact_only: bool = False) -> int | None:
        """The block for one hash, the exact one first."""
        block_id = self.exact.get(block_hash)
        if block_id is None and not exact_only:
            block_id = self.lossy.get(block_hash)
        return block_id

    def find_lossy(self, block_hash: bytes) -> int | None:
        """The block that the lossy map names for one hash."""
        return self.lossy.get(block_hash)

    def find_many(self, hashes: Sequence[bytes], exact_only: bool = False) -> list[int]:
        """The block of each hash, -1 where there is none. Not prefix-closed: for sliding groups."""
        exact, lossy = self.exact.get, self.lossy.get
        if exact_only or not self.lossy:
            return [exact(block_hash, -1) for block_hash in hashes]
        found = []
        for block_hash in hashes:
            block_id = exact(block_hash)
            found.append(lossy(block_hash, -1) if block_id is None else block_id)
        return found

    def match(self, hashes: Sequence[bytes], exact_only: bool = False) -> list[int]:
        """Blocks of the leading unbroken run of `hashes`, exact ones first."""
        found: list[int] = []
        lossy = self.lossy
        if exact_only or not lossy:
            with suppress(KeyError):  # extend keeps what it took before the first miss
                found.extend(map(self.exact.__getitem__, hashes))
            return found
        exact_get, lossy_get = self.exact.get, lossy.get
        for block_hash in hashes:
            block_id = exact_get(block_hash)
            if block_id is None:
                block_id = lossy_get(block_hash)
                if block_id is None:
                    break
            found.append(block_id)
        return found

    def insert(self, block_hash: bytes, block_id: int, exact: bool) -> None:
        """Names a block. The caller has checked that the map has no other block for this hash."""
        (self.exact if exact else self.lossy)[block_hash] = block_id

    def remove(self, block_hash: bytes, exact: bool) -> None:
        """Forgets a hash in one map; KeyError when it is not there, which is a broken invariant."""
        del (self.exact if exact else self.lossy)[block_hash]


def window_first_block(token_count: int, window_tokens: int, block_tokens: int) -> int:
    """First block that the token after `token_count` tokens still reads in a sliding group."""
    return max(0, token_count - window_tokens + 1) // block_tokens
