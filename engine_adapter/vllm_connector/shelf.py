"""The tiers as the worker's side uses them: what is there, which epoch it is, and the two that move blocks.

Three threads come here: vLLM's worker (`save`, `load`, `take_finished`), the lookup server (`find`) and those that
move bytes. Tiers are asked through kvstore's Residency, whose device is vLLM's: a prefix of known length.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine_adapter.tiers_below import TiersBelow
from engine_adapter.vllm_connector.book import Found
from engine_adapter.vllm_connector.forms import Forms
from engine_adapter.vllm_connector.loading import Loader, LoadResult
from engine_adapter.vllm_connector.saving import Saver
from engine_adapter.vllm_connector.shards import EngineBlocks, ShardResidency, shard_of

if TYPE_CHECKING:
    from allocator import KVGeometry
    from engine_adapter.vllm_connector.layout import GroupPages
    from engine_adapter.vllm_connector.orders import LoadOrder, SaveOrder
    from kvstore.residency import HitPlan
    from kvstore.tier import Tier
    from quant import BlockCodec

_CLOSE_SECONDS = 10.0


class Shelf:
    """tiers: fast to slow, closed with the shelf. codec: of cold copies, None where all are raw.

    rank: this worker's place and how many ranks share the heads. staging_bytes: most that waits to be written.
    deadline_seconds: a load that takes longer is given up.
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
    ) -> None:
        shards = [shard_of(group.kv_heads, *rank) for group in geometry.groups]
        self.below = TiersBelow(tiers)
        forms = Forms(geometry, codec, [one.heads for one in shards])
        self._reads_lossy = codec is not None
        self._engine = EngineBlocks()
        self._residency = ShardResidency(geometry, self._engine, self.below.tiers, forms.cold, shards)
        self._groups: tuple[GroupPages, ...] = ()
        self._saver = Saver(self.below, self._residency, forms, staging_bytes)
        self._loader = Loader(geometry, self.below, self._residency, forms, self._plan_of, deadline_seconds)

    def attach(self, groups: Sequence[GroupPages]) -> None:
        """vLLM's memory is there: one GroupPages per cache group of the geometry."""
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
            return Found(plan.blocks, plan.pending and plan.blocks < len(hashes), epoch, plan.lossy_at)

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
        self.below.close()
