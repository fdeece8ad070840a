"""Where the blocks of a prefix are: the union of device and tiers, and the longest hit valid in every cache group.

`Residency` only reads; it is called under the store's lock and changes nothing, so lookups are idempotent.

A hit of n blocks is valid when, in every full and latent group, all of the first n blocks have a copy that the
caller may read, and in every sliding group the blocks that cover the last `window_tokens - 1` tokens have one.
The device's own copies are preferred (they cost nothing), then tiers in their order, then raw before INT4.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from allocator import COLD, FULL, GroupKind
from allocator.prefix_index import window_first_block
from kvstore.arguments import truth
from kvstore.sequence import HitReason
from kvstore.tier import CopyKey, Lookup, Tier

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from allocator import BlockPool, KVGeometry, PrefixIndex
    from kvstore.costs import Stretch

_PROBE_BLOCKS = 32  # positions asked of a tier at once: long enough to amortise, short enough to stop early


@dataclass(frozen=True, slots=True)
class LowerCopy:
    """A copy in a tier below the device. `form` is the slot form that its payload fills."""

    key: CopyKey
    tier: Tier
    form: int

    @property
    def lossy(self) -> bool:
        return self.form == COLD or not self.key.exact


@dataclass(slots=True)
class GroupPlan:
    """Blocks of one group for a hit: `ids[i]` belongs to position `first + i`, -1 where `copies` has it instead."""

    first: int
    ids: list[int]
    copies: dict[int, LowerCopy] = field(default_factory=dict)
    lossy_at: int | None = None  # first position whose only readable copy is lossy
    pending: bool = False  # a tier is still looking for what would make it longer

    def note_lossy(self, position: int) -> None:
        if self.lossy_at is None or position < self.lossy_at:
            self.lossy_at = position

    def cut(self, blocks: int) -> None:
        """Forget everything from position `blocks` on."""
        if self.first + len(self.ids) > blocks:
            del self.ids[max(0, blocks - self.first) :]
            self.first = min(self.first, blocks)
            self.copies = {position: copy for position, copy in self.copies.items() if position < blocks}
            if self.lossy_at is not None and self.lossy_at >= blocks:
                self.lossy_at = None


@dataclass(slots=True)
class HitPlan:
    """pending: it may grow, a tier is still looking.

    stretches: what lies below the device, of which the first `loaded_stretches` are worth loading and in the plan.
    """

    blocks: int
    groups: list[GroupPlan]
    reason: HitReason | None
    pending: bool = False
    stretches: Sequence[Stretch] = ()
    loaded_stretches: int = 0
    found: HitPlan | None = None  # what there was, where costs have cut this one

    @property
    def lossy_at(self) -> int | None:
        """The first block that some group can only read lossy."""
        return min((plan.lossy_at for plan in self.groups if plan.lossy_at is not None), default=None)

    @property
    def first_read(self) -> int:
        """The first position that anything reads: windows of all groups may begin later than the prompt."""
        return min((plan.first for plan in self.groups), default=0) if self.blocks else 0

    @property
    def device_blocks(self) -> int:
        """The leading blocks that are ready now in all groups: everything before the first copy to fetch."""
        return min((min(plan.copies) for plan in self.groups if plan.copies), default=self.blocks)


class Residency:
    def __init__(self, geometry: KVGeometry, pool: BlockPool, tiers: Sequence[Tier], cold: tuple[str, bytes] | None):
        """cold: (name, parameters) of the codec of INT4 copies, None when every copy is raw."""
        self._geometry = geometry
        self._pool = pool
        self.tiers = tuple(tiers)
        self._slow_tiers = tuple(tier for tier in tiers if type(tier).pending_count is not Tier.pending_count)
        self._told_tiers = tuple(tier for tier in tiers if type(tier).note_lookup is not Tier.note_lookup)
        self._cold = cold
        self._block_tokens = geometry.block_tokens
        kinds = [group.kind for group in geometry.groups]
        self._prefix_groups = [index for index, kind in enumerate(kinds) if kind is not GroupKind.SLIDING]
        self._window_groups = [index for index, kind in enumerate(kinds) if kind is GroupKind.SLIDING]

    def copy_key(self, root: bytes, group: int, block_hash: bytes, form: int, exact: bool) -> CopyKey:
        """The canonical (unsharded) key of a copy of `block_hash` whose payload has slot form `form`."""
        kv_group = self._geometry.groups[group]
        name, parameters = ("raw", b"") if form == FULL or self._cold is None else self._cold
        return CopyKey(
            root=root,
            group=group,
            hash=block_hash,
            codec=name,
            exact=exact,
            heads=(0, kv_group.kv_heads),
            layers=(0, len(kv_group.layers)),
            parameters=parameters,
        )

    def window_first(self, group: int, token_count: int) -> int:
        """First block that a token at position `token_count` may attend to in a sliding group."""
        return window_first_block(token_count, self._geometry.groups[group].window_tokens or 0, self._block_tokens)

    def plan(self, root: bytes, hashes: Sequence[bytes], exact: bool) -> HitPlan:
        """The longest hit over `hashes` (hash of the block at each position) that every group can serve."""
        truth("exact", exact)  # here, since every way to look something up comes by
        found: dict[int, GroupPlan] = {}
        blocks = len(hashes)
        pending = False
        for group in self._prefix_groups:
            found[group] = self._leading_run(root, group, hashes[:blocks], exact)
            if len(found[group].ids) < blocks:
                blocks, pending = len(found[group].ids), found[group].pending
        prefix_blocks = blocks
        while blocks:
            before = blocks
            for group in self._window_groups:
                blocks, found[group] = self._window_run(root, group, hashes, blocks, exact)
                pending = pending or found[group].pending
            if blocks == before:
                break
        for plan in found.values():  # a window group may have been planned for a longer hit than the last one allows
            plan.cut(blocks)
        plans = [found.get(group, GroupPlan(0, [])) for group in range(len(self._geometry.groups))]
        return HitPlan(blocks, plans, self._reason(root, hashes, exact, blocks, prefix_blocks), pending)

    def cut(self, plan: HitPlan, root: bytes, hashes: Sequence[bytes], exact: bool, blocks: int) -> HitPlan:
        """`plan` shortened to at most `blocks` blocks; sliding groups are planned again for the new end."""
        if blocks >= plan.blocks:
            return plan
        return self.plan(root, hashes[:blocks], exact)

    def on_device(self, plan: HitPlan, root: bytes, hashes: Sequence[bytes], exact: bool) -> HitPlan:
        """The longest hit within `plan` that needs nothing from below: a shorter end has another window to cover."""
        while plan.device_blocks < plan.blocks:
            plan = self.cut(plan, root, hashes, exact, plan.device_blocks)
        return plan

    @property
    def is_told(self) -> bool:
        """Whether a tier wants to know what became of lookups."""
        return bool(self._told_tiers)

    def note_lookup(
        self,
        plan: HitPlan,
        root: bytes,
        hashes: Sequence[bytes],
        *,
        asked_blocks: int,
        tokens: int,
    ) -> None:
        """A request of `tokens` goes by this plan: for tiers that say what use they are.

        hashes: of its whole blocks, of which the first `asked_blocks` could have been used again.
        """
        if not self._told_tiers or not hashes:
            return
        found = plan.found or plan
        key = self._prompt_key(root, hashes[0])
        for tier in self._told_tiers:
            copies = {
                position: copy.key
                for group in reversed(found.groups)
                for position, copy in group.copies.items()
                if copy.tier is tier
            }
            missed = range(found.blocks, max(found.blocks, min(asked_blocks, len(hashes))))
            first = found.first_read
            covered = range(first if first in copies else 0)
            tier.note_lookup(Lookup(key, hashes, copies, missed, tokens, covered))

    def note_reuse(self, root: bytes, hash: bytes, blocks_by_tier: Mapping[str, int]) -> None:
        """So many blocks of a prompt (`hash`: one of them) need not be computed for what was read from each tier."""
        for tier in self._told_tiers:
            if blocks := blocks_by_tier.get(tier.name, 0):
                tier.note_reuse(self._prompt_key(root, hash), blocks)

    def _prompt_key(self, root: bytes, hash: bytes) -> CopyKey:
        """How a prompt is named to tiers that are told of it."""
        return self.copy_key(root, self._prefix_groups[0] if self._prefix_groups else 0, hash, FULL, True)

    def _reason(
        self, root: bytes, hashes: Sequence[bytes], exact: bool, blocks: int, prefix_blocks: int
    ) -> HitReason | None:
        if blocks:
            return None
        if not hashes:
            return HitReason.BELOW_UNIT
        if prefix_blocks:
            return HitReason.WINDOW
        if exact and any(self._leading_run(root, group, hashes[:1], False).ids for group in self._prefix_groups[:1]):
            return HitReason.INEXACT
        return HitReason.ABSENT

    def _leading_run(self, root: bytes, group: int, hashes: Sequence[bytes], exact: bool) -> GroupPlan:
        plan = GroupPlan(0, [])
        index = self._pool.index(group)
        self._extend_on_device(plan, index, hashes, exact)
        probe_blocks = _PROBE_BLOCKS
        while len(plan.ids) < len(hashes) and self.tiers:
            position = len(plan.ids)
            probe = hashes[position : position + probe_blocks]
            taken = 0
            for copy in self._lower_copies(root, group, probe, exact):
                if copy is None or (taken and index.find(probe[taken], exact) is not None):
                    break
                plan.copies[position + taken] = copy
                plan.ids.append(-1)
                if copy.lossy:
                    plan.note_lossy(position + taken)
                taken += 1
            if not taken:
                break
            probe_blocks *= 2
            self._extend_on_device(plan, index, hashes, exact)
        end = len(plan.ids)
        plan.pending = end < len(hashes) and self._is_asked(root, group, hashes[end : end + 1], exact)
        return plan

    def _extend_on_device(self, plan: GroupPlan, index: PrefixIndex, hashes: Sequence[bytes], exact: bool) -> None:
        rest = hashes[len(plan.ids) :] if plan.ids else hashes
        plan.ids += index.match(rest, True)
        if not exact and len(plan.ids) < len(hashes):
            lossy = index.match(hashes[len(plan.ids) :], False)
            if lossy:
                plan.note_lossy(len(plan.ids))
                plan.ids += lossy

    def _window_run(
        self, root: bytes, group: int, hashes: Sequence[bytes], blocks: int, exact: bool
    ) -> tuple[int, GroupPlan]:
        """Largest n <= blocks such that all blocks covering the window before token n are there."""
        pending = False
        while blocks:
            first = self.window_first(group, blocks * self._block_tokens)
            plan = GroupPlan(first, [])
            missing = self._fill_window(root, plan, group, hashes[first:blocks], exact)
            if missing is None:
                plan.pending = pending
                return blocks, plan
            pending = pending or self._is_asked(root, group, hashes[first + missing : first + missing + 1], exact)
            blocks = first + missing
        return 0, GroupPlan(0, [], pending=pending)

    def _fill_window(
        self, root: bytes, plan: GroupPlan, group: int, hashes: Sequence[bytes], exact: bool
    ) -> int | None:
        """Fill `plan` for `hashes`; the index of the LAST block that is nowhere, or None when all are found."""
        lower = self._lower_copies(root, group, hashes, exact) if self.tiers else [None] * len(hashes)
        missing = None
        index = self._pool.index(group)
        for offset, block_hash in enumerate(hashes):
            block_id = index.find(block_hash, True)
            if block_id is None and not exact:
                block_id = index.find_lossy(block_hash)
                if block_id is not None:
                    plan.note_lossy(plan.first + offset)
            copy = lower[offset]
            if block_id is None and copy is not None:
                plan.copies[plan.first + offset] = copy
                if copy.lossy:
                    plan.note_lossy(plan.first + offset)
            elif block_id is None:
                missing = offset
            plan.ids.append(-1 if block_id is None else block_id)
        return missing

    def _is_asked(self, root: bytes, group: int, hashes: Sequence[bytes], exact: bool) -> bool:
        """Whether a tier is still looking for a readable copy of one of these blocks, found nowhere yet."""
        return any(
            tier.pending_count(self.copy_key(root, group, hashes[0], form, exactly).with_hashes(hashes))
            for tier in self._slow_tiers
            for form, exactly in self._kinds(exact)
        )

    def _kinds(self, exact: bool) -> list[tuple[int, bool]]:
        """Slot form and exactness of the copies that a reader may take, best first."""
        kinds = [(FULL, True)] if exact else [(FULL, True), (COLD, True), (FULL, False), (COLD, False)]
        return kinds if self._cold is not None else [kind for kind in kinds if kind[0] == FULL]

    def _lower_copies(self, root: bytes, group: int, hashes: Sequence[bytes], exact: bool) -> list[LowerCopy | None]:
        kinds = self._kinds(exact)
        best: list[LowerCopy | None] = [None] * len(hashes)
        if not hashes:
            return best
        for tier in self.tiers:
            for form, exactly in kinds:
                open_positions = [index for index, copy in enumerate(best) if copy is None]
                if not open_positions:
                    return best
                template = self.copy_key(root, group, hashes[0], form, exactly)
                keys = template.with_hashes(hashes[index] for index in open_positions)
                for index, key, present in zip(open_positions, keys, tier.contains(keys), strict=True):
                    if present:
                        best[index] = LowerCopy(key, tier, form)
        return best
