"""The tiers as the worker's side uses them: what is there, which epoch it is, and the two that move blocks.

Three threads come here: vLLM's worker (`save`, `load`, `take_finished`), the lookup server (`find`) and those that
move bytes. Tiers are asked through kvstore's Residency, whose device is vLLM's: a prefix of known length.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from engine_adapter.tiers_below import TiersBelow
from engine_adapter.vllm_connector.book import Found, Note
from engine_adapter.vllm_connector.copier import NativeCopier
from engine_adapter.vllm_connector.forms import Forms
from engine_adapter.vllm_connector.loading import Loader, LoadResult
from engine_adapter.vllm_connector.saving import Saver
from engine_adapter.vllm_connector.shards import EngineBlocks, ShardResidency, keys_of, shard_of
from kvstore.executor import ThreadExecutor

if TYPE_CHECKING:
    from allocator import KVGeometry
    from engine_adapter.vllm_connector.copier import Copier
    from engine_adapter.vllm_connector.layout import PagesShape
    from engine_adapter.vllm_connector.orders import LoadOrder, SaveOrder
    from kvstore.residency import HitPlan
    from kvstore.tier import CopyKey, Tier
    from quant import BlockCodec

_CLOSE_SECONDS = 10.0
_MOST_NOTES = 64


class Shelf:
    """tiers: fast to slow, closed with the shelf. codec: of cold copies, None where all are raw.

    rank: this worker's place and how many ranks share the heads. staging_bytes: most that waits to be written.
    deadline_seconds: a load that takes longer is given up. copier: for where vLLM's pages lie; None: host memory.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        tiers: Sequence[Tier],
        *,
        codec: BlockCodec | None = None,
        rank: tuple[int, int] = (0, 1),
        staging_bytes: int = 256 << 20,
        deadline_seconds: float = 1.0,
        copier: Copier | None = None,
    ) -> None:
        shards = [shard_of(group.kv_heads, *rank) for group in geometry.groups]
        self.below = TiersBelow(tiers)
        forms = Forms(geometry, codec, [one.heads for one in shards])
        self._reads_lossy = codec is not None
        self._engine = EngineBlocks()
        self._residency = ShardResidency(geometry, self._engine, self.below.tiers, forms.cold, shards)
        self._noting = ThreadExecutor("kvstore-vllm-note")  # apart: lookups wait for nothing that is only counted
        self._notes_taken = self._notes_done = 0
        self._groups: tuple[PagesShape, ...] = ()
        self._copier = copier or NativeCopier()
        moved = (self.below, self._residency, forms)
        self._saver = Saver(*moved, staging_bytes, self._copier)
        self._loader = Loader(geometry, *moved, self._plan_of, deadline_seconds, self._copier)

    def attach(self, groups: Sequence[PagesShape]) -> None:
        """vLLM's memory is there: one per cache group of the geometry, of the kind that the copier takes."""
        self._groups = tuple(groups)
        self._residency.blocks_per_page = groups[0].blocks_per_page

    # lookups ---------------------------------------------------------------------------------------------------------

    def find(self, epoch: int, root: bytes, hashes: Sequence[bytes], local_blocks: int) -> Found:
        """The leading blocks that can be had, vLLM's own `local_blocks` among them."""
        with self.below.lock:
            now = self.below.fresh_epoch(0.0)
            if epoch != self.below.epoch:
                return Found(0, False, self.below.epoch)
            if now is None:
                return Found(0, True, epoch)
            plan = self._plan(root, hashes, local_blocks, not self._reads_lossy)
            self._note_use(plan)
            return Found(plan.blocks, plan.pending and plan.blocks < len(hashes), epoch, plan.lossy_at)

    def note_lookup(self, epoch: int, root: bytes, hashes: Sequence[bytes], local_blocks: int, note: Note) -> None:
        """A request goes by what was found: for tiers that say what use they are, on a thread of its own."""
        if not self._residency.is_told:
            return
        if self._notes_taken - self._notes_done >= _MOST_NOTES:
            self.below.count("notes_dropped")
            return
        self._notes_taken += 1
        self._noting.submit(partial(self._note_lookup, epoch, root, hashes, local_blocks, note))

    def _note_lookup(self, epoch: int, root: bytes, hashes: Sequence[bytes], local_blocks: int, note: Note) -> None:
        self._notes_done += 1
        with self.below.lock:
            if epoch != self.below.epoch:
                return
            plan = self._plan(root, hashes[: note.asked_blocks], local_blocks, not self._reads_lossy)
        self._residency.note_lookup(plan, root, hashes, asked_blocks=note.asked_blocks, tokens=note.tokens)
        if note.prefill_tokens_per_second:
            for tier in self.below.tiers:
                tier.note_prefill_speed(note.prefill_tokens_per_second)

    def _note_use(self, plan: HitPlan) -> None:
        """A load is about to read these copies: what is stored meanwhile takes the place of others first.

        Nothing holds them, so that nothing can leak; one that goes all the same is a load that fails, and is computed.
        """
        found: dict[str, list[CopyKey]] = {}
        for group in plan.groups:
            for copy in group.copies.values():
                found.setdefault(copy.tier.name, []).extend(keys_of(copy))
        for tier in self.below.tiers:
            if keys := found.get(tier.name):
                tier.touch(keys)

    def _plan(self, root: bytes, hashes: Sequence[bytes], local_blocks: int, exact: bool) -> HitPlan:
        self._engine.hashes = frozenset(hashes[:local_blocks])
        return self._residency.plan(root, hashes, exact)

    def _plan_of(self, order: LoadOrder) -> HitPlan:
        return self._plan(order.root, order.hashes, order.start, order.lossy_at is None)

    # movement --------------------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Nothing is on its way to a tier."""
        return self._saver.is_idle

    def save(self, orders: Sequence[SaveOrder]) -> None:
        """Copy blocks out of vLLM's pages now, and write them to the tiers behind it."""
        self._saver.save(orders, self._groups)

    def before_step(self) -> None:
        """vLLM is about to write to its pages."""
        self._saver.before_step()

    def load(self, order: LoadOrder) -> None:
        """Begin to load; the end comes by `take_finished`."""
        self._loader.load(order, self._groups)

    def take_finished(self) -> list[LoadResult]:
        return self._loader.take_finished()

    def close(self) -> None:
        """What is on its way is written, for a bounded time; then the tiers close."""
        until = time.monotonic() + _CLOSE_SECONDS
        while not self.is_idle and time.monotonic() < until:
            self.below.drain()
            time.sleep(0.005)
        self._saver.close()
        self._loader.close()
        self._noting.close()
        self._copier.close()
        self.below.close()
