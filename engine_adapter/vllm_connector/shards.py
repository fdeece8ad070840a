"""Which heads a tensor-parallel rank has, which copies they can be read from, and what of a prompt is to be had.

A key names the heads [start, stop) of the whole model that its payload has. A rank stores its own heads; it reads them
from copies of its own range, of a larger one, or of smaller ones that make it up, so that engines of other sizes meet.
Ranks that have the same heads store them once where they share a tier. Called under the shelf's lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from allocator import ConfigError
from kvstore.residency import LowerCopy, Residency

if TYPE_CHECKING:
    from allocator import KVGeometry
    from kvstore.tier import CopyKey, Tier

Heads: TypeAlias = tuple[int, int]
_SPLITS = (1, 2, 4, 8)  # the whole, halves, quarters, eighths


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's part of a cache group's heads. is_stored: this rank is the one of its like that stores it for all."""

    heads: Heads
    is_stored: bool


def shard_of(kv_heads: int, rank: int, ranks: int) -> Shard:
    """As vLLM deals heads out: in order, and each to several ranks where there are more ranks than heads."""
    if max(kv_heads, ranks) % min(kv_heads, ranks):
        raise ConfigError(
            f"tensor_parallel_size: got {ranks} for {kv_heads} KV heads; expected a divisor or a multiple"
        )
    copies = max(1, ranks // kv_heads)
    each = max(1, kv_heads // ranks)
    first = rank // copies * each
    return Shard((first, first + each), rank % copies == 0)


def coverings(own: Heads, kv_heads: int) -> list[tuple[Heads, ...]]:
    """Ranges of other engines' ranks that have the heads `own`: one that is larger, or several that make it up."""
    start, stop = own
    larger: list[tuple[Heads, ...]] = []
    smaller: list[tuple[Heads, ...]] = []
    for count in _SPLITS:
        each = kv_heads // count
        if kv_heads % count or each == stop - start:
            continue
        if each > stop - start:
            first = start // each * each
            if stop <= first + each:
                larger.append(((first, first + each),))
        elif not start % each and not stop % each:
            smaller.append(tuple((first, first + each) for first in range(start, stop, each)))
    return larger + smaller


@dataclass(frozen=True, slots=True)
class ShardCopy(LowerCopy):
    """A copy of other head ranges; `key` is that of the first."""

    ranges: tuple[Heads, ...] = ()


def keys_of(copy: LowerCopy) -> list[CopyKey]:
    """The keys whose payloads make the copy."""
    if not isinstance(copy, ShardCopy):
        return [copy.key]
    return [copy.key._replace(heads=heads) for heads in copy.ranges]


@dataclass(slots=True)
class EngineBlocks:
    """vLLM's memory in place of a block pool: it has the first blocks of a prompt, and nothing else."""

    hashes: frozenset[bytes] = frozenset()

    def index(self, group: int) -> EngineBlocks:
        return self

    def match(self, hashes: Sequence[bytes], exact: bool) -> list[int]:
        ids: list[int] = []
        for one in hashes if exact else ():
            if one not in self.hashes:
                break
            ids.append(0)
        return ids

    def find(self, block_hash: bytes, exact: bool) -> int | None:
        return 0 if exact and block_hash in self.hashes else None

    def find_lossy(self, block_hash: bytes) -> int | None:
        return None


class ShardResidency(Residency):
    """Where the blocks of one rank are. shards: one a cache group.

    Windows begin at an engine block's first token: vLLM may hand the whole block to the next request.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        engine: EngineBlocks,
        tiers: Sequence[Tier],
        cold: tuple[str, bytes] | None,
        shards: Sequence[Shard],
    ) -> None:
        super().__init__(geometry, cast(Any, engine), tiers, cold)
        self.blocks_per_page = 1
        self.shards = tuple(shards)
        heads = [group.kv_heads for group in geometry.groups]
        self._coverings = [coverings(one.heads, whole) for one, whole in zip(shards, heads, strict=True)]

    def window_first(self, group: int, token_count: int) -> int:
        ratio = self.blocks_per_page
        return super().window_first(group, token_count) // ratio * ratio

    def copy_key(self, root: bytes, group: int, block_hash: bytes, form: int, exact: bool) -> CopyKey:
        return super().copy_key(root, group, block_hash, form, exact)._replace(heads=self.shards[group].heads)

    def _lower_copies(self, root: bytes, group: int, hashes: Sequence[bytes], exact: bool) -> list[LowerCopy | None]:
        best = super()._lower_copies(root, group, hashes, exact)
        if not self._coverings[group] or None not in best:
            return best
        for tier in self.tiers:
            for form, exactly in self._kinds(exact):
                template = self.copy_key(root, group, hashes[0], form, exactly)
                for ranges in self._coverings[group]:
                    self._fill(best, hashes, template, tier, form, ranges)
        return best

    def _fill(
        self,
        best: list[LowerCopy | None],
        hashes: Sequence[bytes],
        template: CopyKey,
        tier: Tier,
        form: int,
        ranges: tuple[Heads, ...],
    ) -> None:
        """Put copies of these ranges where there is none yet. One question where the first is not there."""
        places = [place for place, copy in enumerate(best) if copy is None]
        for heads in ranges:
            first = template._replace(heads=heads)
            if not places or not tier.contains(first.with_hashes([hashes[places[0]]]))[0]:
                return
            flags = tier.contains(first.with_hashes([hashes[place] for place in places]))
            places = [place for place, is_there in zip(places, flags, strict=True) if is_there]
        for place in places:
            key = template.with_hash(hashes[place])._replace(heads=ranges[0])
            best[place] = ShardCopy(key, tier, form, ranges)

    def _is_asked(self, root: bytes, group: int, hashes: Sequence[bytes], exact: bool) -> bool:
        if super()._is_asked(root, group, hashes, exact):
            return True
        if not hashes:
            return False
        others = [one for ranges in self._coverings[group] for one in ranges]
        return any(
            tier.pending_count([self.copy_key(root, group, hashes[0], form, exactly)._replace(heads=one)])
            for tier in self._slow_tiers
            for form, exactly in self._kinds(exact)
            for one in others
        )
