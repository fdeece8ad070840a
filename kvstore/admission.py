"""Bringing a prompt in: find the longest hit, take references, allocate, and fetch what lies lower.

Called by `KVStore` under its lock. Admission is all or nothing: when anything is refused, no reference, block,
lease or transfer is left behind.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from allocator import FULL, BlockTable, CapacityError, GroupKind
from kvstore.costs import Stretch
from kvstore.fitting import bytes_for, full_blocks_ever, least_extents, most_tokens, prompt_blocks
from kvstore.sequence import Admission, Hit, PendingCopy, Sequence, SequenceState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from collections.abc import Sequence as Items

    from allocator import BlockPool, KVGeometry
    from kvstore.costs import CostModel
    from kvstore.identity import HashChain
    from kvstore.metrics import StoreMetrics
    from kvstore.mover import Mover
    from kvstore.quotas import Quotas
    from kvstore.residency import GroupPlan, HitPlan, LowerCopy, Residency


class Admitter:
    def __init__(
        self,
        geometry: KVGeometry,
        pool: BlockPool,
        residency: Residency,
        mover: Mover,
        costs: CostModel,
        metrics: StoreMetrics,
        quotas: Quotas,
    ) -> None:
        self._geometry = geometry
        self._pool = pool
        self._residency = residency
        self._mover = mover
        self._costs = costs
        self._metrics = metrics
        self._quotas = quotas

    def usable_hashes(self, hashes: Items[bytes], token_count: int, private_from: int | None) -> Items[bytes]:
        """Hashes of the blocks a prompt may reuse: at least one token stays to be computed."""
        last = token_count - 1 if private_from is None else min(token_count - 1, private_from)
        limit = last // self._geometry.block_tokens
        return hashes if len(hashes) <= limit else hashes[:limit]

    def find(self, root: bytes, hashes: Items[bytes], exact: bool) -> HitPlan:
        """The longest hit worth having: from where on copies are slower to load than to recompute, it ends."""
        plan = found = self._residency.plan(root, hashes, exact)
        start = plan.device_blocks
        if start == plan.blocks or self._costs.always_load:
            return plan
        stretches = self._stretches(plan, start)
        queued_bytes = {stretch.tier: self._mover.queued_bytes(stretch.tier) for stretch in stretches}
        count = self._costs.leading_stretches(stretches, queued_bytes)
        pending = plan.pending
        if count < len(stretches):
            tokens = sum(stretch.tokens for stretch in stretches[:count])
            plan = self._residency.cut(plan, root, hashes, exact, start + tokens // self._geometry.block_tokens)
            if not count:
                plan = self._residency.on_device(plan, root, hashes, exact)
        plan.pending, plan.stretches, plan.loaded_stretches = pending, stretches, count
        plan.found = found if plan is not found else None
        return plan

    def note_choice(self, sequence: Sequence, plan: HitPlan, asked_blocks: int) -> None:
        """A sequence goes by this plan, which was made for so many of its blocks."""
        chain = sequence.chain
        tokens = chain.token_count
        self._residency.note_lookup(plan, chain.root, chain.hashes, asked_blocks=asked_blocks, tokens=tokens)
        if plan.stretches:
            self._costs.note_choice(plan.stretches, plan.loaded_stretches)
            left = sum(stretch.tokens for stretch in plan.stretches[plan.loaded_stretches :])
            self._metrics.recomputed(left, cause="cheaper")

    def note_reuse(self, sequence: Sequence, blocks_by_tier: Mapping[str, int]) -> None:
        """What a sequence waited for has come."""
        self._residency.note_reuse(sequence.chain.root, sequence.chain.hashes[0], blocks_by_tier)

    def _stretches(self, plan: HitPlan, start: int) -> list[Stretch]:
        """The blocks of a plan from `start` on, by the slowest tier that each needs; one on the device goes along."""
        order = {tier.name: place for place, tier in enumerate(self._residency.tiers)}
        byte_counts: Counter[int] = Counter()
        slowest: dict[int, str] = {}
        for group in plan.groups:
            for position, copy in group.copies.items():
                name = copy.tier.name
                byte_counts[position] += self._pool.layout.raw_slot_bytes[2 * copy.key.group + copy.form]
                slowest[position] = max(slowest.get(position, name), name, key=order.__getitem__)
        block_tokens = self._geometry.block_tokens
        stretches: list[Stretch] = []
        for position in range(start, plan.blocks):
            tier = slowest.get(position) or stretches[-1].tier
            tokens, byte_count = block_tokens, byte_counts[position]
            if stretches and stretches[-1].tier == tier:
                last = stretches.pop()
                tokens, byte_count = tokens + last.tokens, byte_count + last.byte_count
            stretches.append(Stretch(tier, tokens, byte_count))
        return stretches

    def find_leading(self, root: bytes, hashes: Items[bytes], exact: bool, limit: int) -> HitPlan:
        """The longest hit that needs at most `limit` blocks beyond what is on the device, whatever loading costs."""
        plan = self._residency.plan(root, hashes, exact)
        return self._residency.cut(plan, root, hashes, exact, min(plan.blocks, plan.device_blocks + limit))

    def on_device(self, chain: HashChain, exact: bool) -> tuple[tuple[tuple[int, ...], ...], int]:
        """The blocks, by group, of the longest hit that needs nothing from below, and its tokens."""
        usable = self.usable_hashes(chain.hashes, chain.token_count, None)
        plan = self._residency.plan(chain.root, usable, exact)
        plan = self._residency.on_device(plan, chain.root, usable, exact)
        blocks = tuple(tuple(block for block in group.ids if block >= 0) for group in plan.groups)
        return blocks, plan.blocks * self._geometry.block_tokens

    def hit(self, plan: HitPlan, pending: bool = False) -> Hit:
        block_tokens = self._geometry.block_tokens
        return Hit(
            tokens=plan.blocks * block_tokens,
            device_tokens=plan.device_blocks * block_tokens,
            by_tier=self._tokens_by_tier(plan),
            reason=plan.reason,
            needed_tokens=block_tokens + 1,
            pending=pending,
        )

    def _tokens_by_tier(self, plan: HitPlan) -> dict[str, int]:
        """Tokens by the tier they come from, each position counted once: by the lowest tier any group needs."""
        tiers: dict[int, str] = {}
        for group in plan.groups:
            for position, copy in group.copies.items():
                tiers.setdefault(position, copy.tier.name)
        if (first := plan.first_read) in tiers:
            tiers |= dict.fromkeys(
                range(first), tiers[first]
            )  # that nothing reads them is owed to what is read instead
        counts: dict[str, int] = {}
        ready = plan.blocks - len(tiers)
        if ready:
            counts["device"] = ready * self._geometry.block_tokens
        for name in tiers.values():
            counts[name] = counts.get(name, 0) + self._geometry.block_tokens
        return counts

    def check_fits(self, token_count: int, answer_tokens: int = 0, *, exact: bool = False) -> None:
        """CapacityError (permanent) when a prompt, or it and its answer, can never be on the device at once."""
        geometry, layout = self._geometry, self._pool.layout
        for index, group in enumerate(geometry.groups):
            needed, ever = prompt_blocks(geometry, index, token_count), full_blocks_ever(layout, index)
            if needed > ever:
                enough = bytes_for(geometry, layout, token_count, token_count + answer_tokens, cools=not exact)
                raise CapacityError(
                    needed,
                    ever,
                    f"blocks of group {group.name!r} for a prompt of {token_count} tokens, more than the slab can ever "
                    "hold (a prompt must fit in full precision when it is admitted, INT4 or not; device_bytes of "
                    f"{enough} would do{' for that' if not exact and layout.spare_count else ''}, or a shorter prompt)",
                    permanent=True,
                )
        total, cools = token_count + answer_tokens, not exact
        if answer_tokens and least_extents(geometry, layout, total, cools=cools) > layout.extent_count:
            cooled = "with every block cooled that may cool" if cools and layout.spare_count else "in full precision"
            raise CapacityError(
                bytes_for(geometry, layout, token_count, total, cools=cools),
                layout.total_bytes,
                f"bytes of device_bytes for {token_count} prompt tokens and {answer_tokens} new ones, {cooled} (one "
                f"sequence has at most {most_tokens(geometry, layout, cools=cools)} tokens there)",
                permanent=True,
            )

    # -- admit --------------------------------------------------------------------------------------------------

    def empty_tables(self) -> list[BlockTable]:
        """One table a cache group."""
        geometry = self._geometry
        return [
            BlockTable(self._pool, index, geometry.block_tokens, group.window_tokens)
            for index, group in enumerate(geometry.groups)
        ]

    def new_sequence(
        self,
        sequence_id: str,
        chain: HashChain,
        *,
        exact: bool = False,
        prompt_tokens: int | None = None,
        private_from: int | None = None,
    ) -> Sequence:
        """A sequence over `chain` that holds nothing yet."""
        return Sequence(
            sequence_id=sequence_id,
            chain=chain,
            root=chain.root,
            tables=self.empty_tables(),
            exact=exact,
            prompt_tokens=chain.token_count if prompt_tokens is None else prompt_tokens,
            private_from=private_from,
        )

    def admission(self, sequence: Sequence, plan: HitPlan) -> Admission:
        """What the caller of `admit` is told."""
        if sequence.state is SequenceState.RUNNING:  # also when no tier took the request
            ready = sequence.committed
            return Admission(sequence.sequence_id, ready, 0, {"device": ready} if ready else {})
        hit = self.hit(plan)
        return Admission(sequence.sequence_id, hit.device_tokens, hit.tokens - hit.device_tokens, hit.by_tier)

    def build_tables(self, sequence: Sequence, plan: HitPlan, token_count: int, spare_blocks: Items[int] = ()) -> None:
        """Fill `sequence.tables` for `plan`, taking references and fresh blocks for what must be fetched.

        Raises CapacityError, with nothing taken, when room for `token_count` tokens in all, and `spare_blocks` (by
        group) besides, is not to be had; `transient` when transfers in flight may free memory.
        """
        pool = self._pool
        needed_tokens = token_count - plan.blocks * self._geometry.block_tokens
        shared: list[list[int]] = []
        fetched: list[list[int]] = []
        try:
            for group_plan in plan.groups:
                present = [block_id for block_id in group_plan.ids if block_id >= 0]
                present += [known.block_id for copy in group_plan.copies.values() if (known := self._incoming(copy))]
                pool.share(present)
                shared.append(present)
            if len(self._quotas):
                self._quotas.require(sequence.tenant, shared, self._fresh_bytes(plan, needed_tokens))
            for group, group_plan in enumerate(plan.groups):
                fetched.append([])
                forms = [copy.form for copy in group_plan.copies.values() if not self._incoming(copy)]
                for form in sorted(set(forms)):
                    fetched[group] += pool.allocate(group, forms.count(form), form).tolist()
                self._require_room(group, needed_tokens, spare_blocks[group] if spare_blocks else 0)
        except CapacityError as error:
            error.transient = self._mover.in_flight_blocks > 0
            for ids in fetched:
                pool.release(ids[::-1])
            for ids in shared:
                pool.release(ids[::-1])
            raise
        for group, group_plan in enumerate(plan.groups):
            self._fill_table(sequence, group, group_plan, fetched[group])
        block_tokens = self._geometry.block_tokens
        sequence.written = sequence.loading_tokens = plan.blocks * block_tokens
        sequence.known_blocks = plan.device_blocks
        if plan.lossy_at is not None:
            sequence.lossy_from = plan.lossy_at * block_tokens

    def _fresh_bytes(self, plan: HitPlan, needed_tokens: int) -> int:
        """What a sequence takes beside the blocks that it shares: copies to be fetched, and the rest of its prompt."""
        layout = self._pool.layout
        copies = [copy for group in plan.groups for copy in group.copies.values() if not self._incoming(copy)]
        fetched = sum(layout.raw_slot_bytes[2 * copy.key.group + copy.form] for copy in copies)
        return fetched + sum(
            self._blocks_to_compute(group, needed_tokens) * layout.raw_slot_bytes[2 * group + FULL]
            for group in range(len(plan.groups))
        )

    def _require_room(self, group: int, needed_tokens: int, spare_blocks: int) -> None:
        needed = self._blocks_to_compute(group, needed_tokens) + spare_blocks
        available = self._pool.available(group, FULL)
        if needed > available:
            name = self._geometry.groups[group].name
            raise CapacityError(needed, available, f"more blocks of group {name!r} to admit the prompt")

    def _blocks_to_compute(self, group: int, needed_tokens: int) -> int:
        """Blocks of a group that hold the rest of a prompt at once."""
        block_tokens, kv_group = self._geometry.block_tokens, self._geometry.groups[group]
        if kv_group.kind is GroupKind.SLIDING and kv_group.window_tokens is not None:
            needed_tokens = min(needed_tokens, kv_group.window_tokens + block_tokens)
        return -(-needed_tokens // block_tokens)

    def _incoming(self, copy: LowerCopy) -> PendingCopy | None:
        """That copy on its way for somebody else: one transfer serves both."""
        return self._mover.fetcher.incoming(copy.key)

    def _fill_table(self, sequence: Sequence, group: int, plan: GroupPlan, fresh: list[int]) -> None:
        table = sequence.tables[group]
        ids, rest = list(plan.ids), iter(fresh)  # fresh: by form, as `build_tables` asked for them
        for position, copy in sorted(plan.copies.items(), key=lambda item: (item[1].form, item[0])):
            pending = self._incoming(copy)
            if pending is None:
                pending = PendingCopy(group, position, next(rest), copy.key.hash, copy.key, copy.form, copy.tier.name)
            ids[position - plan.first] = pending.block_id
            sequence.pending.append(pending)
        table.append([-1] * plan.first + ids)
        table.advance((plan.first + len(ids)) * self._geometry.block_tokens)
        if sequence.exact:
            self._pool.hold_exact(ids)

    def start_fetch(
        self,
        sequence: Sequence,
        plan: HitPlan,
        on_done: Callable[[Sequence], None],
        now: float,
        *,
        by_layer: bool = False,
    ) -> None:
        """Have the sequence's pending copies fetched; `on_done` once it has all that it can get.

        by_layer: in the order of layers, from tiers that can, so that it may compute meanwhile.
        """
        sequence.state, sequence.by_layer = SequenceState.LOADING, by_layer
        tiers = {copy.tier.name: copy.tier for group in plan.groups for copy in group.copies.values()}
        self._mover.fetcher.start(sequence, tiers, on_done, now)

    # -- after the fetch ----------------------------------------------------------------------------------------

    def settle(self, sequence: Sequence) -> tuple[int, list[PendingCopy]]:
        """Adopt what arrived and find the first block that did not. Returns the ready blocks, and those newly named.

        A copy that is missing, late, torn or foreign is a miss: it and all after it are computed again.
        """
        # After a reset that came between, what was stored before it counts for nothing.
        arrived = [copy for copy in sequence.pending if copy.outcome and sequence.shared]
        missing = {(copy.group, copy.position) for copy in sequence.pending}
        missing.difference_update((copy.group, copy.position) for copy in arrived)
        sliding = [index for index, group in enumerate(self._geometry.groups) if group.kind is GroupKind.SLIDING]
        gaps = [position for group, position in missing if group not in sliding]
        blocks = min([sequence.loading_tokens // self._geometry.block_tokens, *gaps])
        while blocks and not all(self._has_window(sequence, group, blocks, missing) for group in sliding):
            blocks -= 1
        fresh = []
        for copy in arrived:
            if copy.position < blocks:
                is_named = self._pool.hash_of(copy.block_id) is not None  # by another one that waited for it too
                kept = self._pool.adopt(copy.block_id, copy.block_hash, copy.key.exact, copy.form)
                if kept != copy.block_id:
                    sequence.tables[copy.group].replace(copy.position, kept)
                elif not is_named:
                    fresh.append(copy)
        sequence.pending = []
        sequence.state = SequenceState.RUNNING
        return blocks, fresh

    def _has_window(self, sequence: Sequence, group: int, blocks: int, missing: set[tuple[int, int]]) -> bool:
        """True when a sliding group has every block that a token after `blocks` blocks may attend to."""
        first = self._residency.window_first(group, blocks * self._geometry.block_tokens)
        ids = sequence.tables[group].ids()
        return all(ids[position] >= 0 and (group, position) not in missing for position in range(first, blocks))
