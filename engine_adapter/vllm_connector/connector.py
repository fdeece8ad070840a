"""vLLM's connector class: its two roles, and nothing that could be elsewhere. The only file that imports vLLM.

The scheduler's side names blocks (book.py) and asks what is stored (lookup.py); the worker's side owns tiers (shelf.py)
and reads and writes vLLM's pages. Loads run between steps while the request waits; one that fails is reported and the
request computes instead, so that no step ever reads pages that were not loaded.
"""

from __future__ import annotations

import logging
import os
import re
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm import _custom_ops as ops
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from allocator import ConfigError, GroupKind, KVGeometry, TierError
from engine_adapter.model_geometry import dtype_name
from engine_adapter.vllm_connector.book import Book
from engine_adapter.vllm_connector.geometry import engine_geometry
from engine_adapter.vllm_connector.layout import GroupPages, LayerPages, blocks_per_page
from engine_adapter.vllm_connector.lookup import Answer, LookupClient, LookupServer, Question
from engine_adapter.vllm_connector.orders import Orders
from engine_adapter.vllm_connector.settings import check_version, make_tiers, model_and_weights, read_settings
from engine_adapter.vllm_connector.shelf import LoadResult, Shelf
from kvstore import Identity

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput

_LOG = logging.getLogger(__name__)
_LAYER = re.compile(r"\.(\d+)\.")


class StepOrders(KVConnectorMetadata):  # type: ignore[misc]
    """Orders of one step, as vLLM carries them to the worker."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders


class ConnectorStats(KVConnectorStats):  # type: ignore[misc]
    """Counts since the last report, by name."""

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class KVStoreConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Made by vLLM, once a role. ConfigError at start for settings that cannot work, with what to change."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_version(vllm.__version__)
        transfer = vllm_config.kv_transfer_config
        self._settings = read_settings(transfer.kv_connector_extra_config, os.environ)
        self._check_engine(vllm_config)
        self._geometry = engine_geometry(vllm_config, kv_cache_config, self._settings.block_tokens)
        self._is_plain = len(kv_cache_config.kv_cache_groups) == 1 and all(
            group.kind is not GroupKind.SLIDING for group in self._geometry.groups
        )
        self._engine_block_tokens = [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]
        for tokens in self._engine_block_tokens:
            blocks_per_page(tokens, self._settings.block_tokens)
        if role is KVConnectorRole.SCHEDULER:
            self._begin_scheduler(vllm_config)
        else:
            self._begin_worker(transfer.engine_id)

    def _check_engine(self, vllm_config: VllmConfig) -> None:
        parallel = vllm_config.parallel_config
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            if getattr(parallel, name) != 1:
                raise ConfigError(f"{name}: got {getattr(parallel, name)}; expected 1: ranks are not joined yet")
        if vllm_config.device_config.device_type != "cpu":
            raise ConfigError(
                f"device: got {vllm_config.device_config.device_type}; expected cpu: copies from GPU pages are not "
                "there yet"
            )
        if vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
            raise ConfigError(
                "kv_load_failure_policy: got fail; expected recompute in the kv_transfer_config: a copy that cannot "
                "be loaded is computed instead"
            )

    # scheduler -------------------------------------------------------------------------------------------------------

    def _begin_scheduler(self, vllm_config: VllmConfig) -> None:
        model = vllm_config.model_config
        name, weights = model_and_weights(self._settings, model.model, model.revision)
        identity = Identity(model=name, weights=weights, geometry=self._geometry, tenant=self._settings.tenant)
        self._lookups = LookupClient(vllm_config.kv_transfer_config.engine_id)
        deadline = self._settings.store.fetch_deadline_seconds
        self._book = Book(identity, self._settings.block_tokens, self._lookups, deadline_seconds=deadline)
        self._asked: dict[str, int] = {}
        self._stores = vllm_config.kv_transfer_config.is_kv_producer  # kv_both is one, kv_consumer only loads

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        found = self._book.matched_tokens(request, num_computed_tokens)
        self._asked[request.request_id] = num_computed_tokens
        return found, bool(found)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            local_tokens = self._asked[request.request_id]
            self._book.load(request, blocks.get_block_ids(), local_tokens, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        state = scheduler_output.kv_connector_block_state
        cached = scheduler_output.scheduled_cached_reqs
        computed = {one.req_id: one.num_computed_tokens for one in scheduler_output.scheduled_new_reqs}
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        scheduled = [
            (request_id, computed[request_id] + count)
            for request_id, count in scheduler_output.num_scheduled_tokens.items()
        ]
        orders = self._book.step(scheduled, state.get_block_ids)
        if not self._stores:
            orders.saves.clear()
        return StepOrders(orders)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        failed = set(connector_output.failed_recving or ())
        if connector_output.invalid_block_ids:
            failed |= set(connector_output.finished_recving or ())
        self._book.load_failed(failed)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Nothing to wait for: blocks were copied out of the pages in the step that filled them."""
        self._asked.pop(request.request_id, None)
        self._book.finished(request.request_id)
        return False, None

    def reset_cache(self) -> bool | None:
        """A new epoch in every tier, as after a change of weights. False, logged, where one was not reached."""
        if self.role is not KVConnectorRole.SCHEDULER:
            return None
        try:
            self._book.begin_epoch(self._lookups.reset(self._book.epoch))
        except ConnectionError as error:
            _LOG.error("kvstore: %s", error)
            return False
        return True

    # worker ----------------------------------------------------------------------------------------------------------

    def _begin_worker(self, engine_id: str) -> None:
        settings = self._settings
        tiers = make_tiers(settings, self._geometry)
        deadline = settings.store.fetch_deadline_seconds
        self._shelf = Shelf(self._geometry, tiers, staging_bytes=settings.staging_bytes, deadline_seconds=deadline)
        self._server = LookupServer(engine_id, self._answer)
        self._loading: dict[str, Any] = {}
        self._invalid: set[int] = set()
        self._reported: dict[str, int] = {}

    def _answer(self, question: Question, hashes: list[bytes]) -> Answer:
        if question.is_reset:
            try:
                return Answer(0, False, self._shelf.reset())
            except TierError as error:
                return Answer(0, False, self._shelf.epoch, str(error))
        found = self._shelf.find(question.epoch, question.root, hashes, question.local_blocks)
        return Answer(found.blocks, found.pending, found.epoch)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._shelf.attach(group_pages(self._geometry, self._kv_cache_config, kv_caches))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for order in self._get_connector_metadata().orders.loads:
            self._loading[order.request_id] = order
            self._shelf.load(order)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request is scheduled when all of it is loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: blocks are copied when the step is over, see wait_for_save."""

    def wait_for_save(self) -> None:
        saves = self._get_connector_metadata().orders.saves
        if saves:
            self._shelf.save(saves)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = KVConnectorTransferResults()
        for result in self._shelf.take_finished():
            order = self._loading.pop(result.request_id)
            results.finished_recving.add(result.request_id)
            if result.failed and self._is_plain:
                self._invalid.add(self._failed_block(result, order))
            elif result.failed:
                results.failed_recving.add(result.request_id)
        return results

    def _failed_block(self, result: LoadResult, order: Any) -> int:
        """vLLM's block with the first store block that is missing: it computes from there on."""
        ratio = self._engine_block_tokens[0] // self._settings.block_tokens
        return int(order.tables[0][result.failed[0] // ratio])

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self._invalid = self._invalid, set()
        return invalid

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self.role is not KVConnectorRole.WORKER:
            return None
        now = self._shelf.counters()
        fresh = {name: count - self._reported.get(name, 0) for name, count in now.items()}
        self._reported = now
        return ConnectorStats({name: count for name, count in fresh.items() if count})

    @classmethod
    def build_kv_connector_stats(cls, counts: dict[str, Any] | None = None, **named: Any) -> KVConnectorStats | None:
        """vLLM gives the counts by place, its MultiConnector by name."""
        return ConnectorStats(dict(counts or named.get("data") or {}))

    def shutdown(self) -> None:
        if self.role is KVConnectorRole.SCHEDULER:
            self._lookups.close()
        else:
            self._server.close()
            self._shelf.close()


def group_pages(
    geometry: KVGeometry, kv_cache_config: KVCacheConfig, kv_caches: dict[str, torch.Tensor]
) -> list[GroupPages]:
    """Where the layers of each cache group lie.

    kv_caches: per layer name Tensor[blocks, heads, engine block tokens, 2 * dim], contiguous.
    """
    places: dict[int, tuple[int, torch.Tensor, int]] = {}
    for table, engine_group in enumerate(kv_cache_config.kv_cache_groups):
        for name in engine_group.layer_names:
            found = _LAYER.search(name)
            if found is not None and name in kv_caches:
                places[int(found[1])] = (table, kv_caches[name], engine_group.kv_cache_spec.block_size)
    groups = []
    for group in geometry.groups:
        layers, ratio = [], 1
        for layer in group.layers:
            if layer not in places:
                raise ConfigError(f"layer {layer} of {group.name!r} has no KV cache of its own in vLLM: not supported")
            table, tensor, engine_tokens = places[layer]
            ratio = blocks_per_page(engine_tokens, geometry.block_tokens)
            expected = (group.kv_heads, engine_tokens, 2 * group.key_dim)
            if not tensor.is_contiguous() or tuple(tensor.shape[1:]) != expected:
                raise ConfigError(
                    f"layer {layer}: vLLM's cache has shape {tuple(tensor.shape)}, strides {tensor.stride()}; expected "
                    f"contiguous blocks of {expected}"
                )
            if dtype_name(tensor.dtype) != geometry.dtype:
                raise ConfigError(f"layer {layer}: vLLM's cache is {tensor.dtype}; expected {geometry.dtype}")
            layers.append(LayerPages(tensor.view(torch.uint8).reshape(-1).numpy(), table))
        shape = (group.kv_heads, group.key_dim, geometry.block_tokens, ratio, geometry.dtype_bytes)
        check_layout(geometry, *shape[:4])
        groups.append(GroupPages(tuple(layers), *shape))
    return groups


def check_layout(geometry: KVGeometry, heads: int, dim: int, block_tokens: int, ratio: int) -> None:
    """ConfigError where vLLM's own writer does not lay K and V out as layout.py reads them: it depends on the CPU."""
    tokens, dtype = block_tokens * ratio, getattr(torch, geometry.dtype)
    keys = torch.arange(2 * tokens * heads * dim, dtype=torch.float32).reshape(2, tokens, heads, dim).remainder(251)
    keys, values = keys.to(dtype).unbind()
    cache = torch.zeros(2, heads, 2 * tokens, dim, dtype=dtype)
    isa = _get_attn_isa(dtype, tokens, dim)
    slots = torch.arange(tokens, 2 * tokens)
    ops.cpu_attn_reshape_and_cache(keys.contiguous(), values.contiguous(), *cache.chunk(2, dim=2), slots, isa)
    flat = LayerPages(cache.view(torch.uint8).reshape(-1).numpy(), 0)
    pages = GroupPages((flat,), heads, dim, block_tokens, ratio, geometry.dtype_bytes)
    row = torch.zeros(ratio * pages.block_bytes, dtype=torch.uint8)
    pages.gather([([[1]], position) for position in range(ratio)], row.numpy())
    found = row.view(dtype).reshape(ratio, heads, 2, block_tokens, dim).permute(2, 0, 3, 1, 4)
    if not torch.equal(found.reshape(2, tokens, heads, dim), torch.stack([keys, values])):
        raise ConfigError(
            f"dtype: vLLM packs {geometry.dtype} keys for this CPU ({isa!r}) in a way that is not supported; expected "
            "--dtype float32"
        )
