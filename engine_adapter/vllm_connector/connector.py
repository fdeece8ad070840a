"""vLLM's connector class: its two roles, and nothing that could be elsewhere. It, pages.py and stats.py import vLLM.

The scheduler's side names blocks (book.py) and asks what is stored (lookup.py); the worker's side owns tiers (shelf.py)
and reads and writes vLLM's pages. Loads run between steps while the request waits; one that fails is reported and the
request computes instead, so that no step ever reads pages that were not loaded.
"""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from allocator import ConfigError, GroupKind, TierError
from engine_adapter.releases import VLLM
from engine_adapter.vllm_connector.book import Book
from engine_adapter.vllm_connector.copier import copier_for
from engine_adapter.vllm_connector.cores import beside_the_computing
from engine_adapter.vllm_connector.device_tier import check_room
from engine_adapter.vllm_connector.geometry import engine_geometry, stored_dtype
from engine_adapter.vllm_connector.layout import blocks_per_page
from engine_adapter.vllm_connector.loading import LoadResult
from engine_adapter.vllm_connector.lookup import Answer, LookupClient, LookupServer, Question
from engine_adapter.vllm_connector.orders import Orders
from engine_adapter.vllm_connector.pages import group_pages, pages_device, scales_name
from engine_adapter.vllm_connector.prefill_speed import PrefillSpeed
from engine_adapter.vllm_connector.recording import ended_request
from engine_adapter.vllm_connector.settings import (
    make_codec,
    make_device_tier,
    make_tiers,
    model_and_weights,
    read_settings,
)
from engine_adapter.vllm_connector.shelf import Shelf
from engine_adapter.vllm_connector.stats import ConnectorPromMetrics, ConnectorStats
from kvstore import Identity
from kvstore.trace_recorder import TraceRecorder

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput

_LOG = logging.getLogger(__name__)


class StepOrders(KVConnectorMetadata):  # type: ignore[misc]
    """Orders of one step, as vLLM carries them to the worker."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders


class KVStoreConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Made by vLLM, once a role. ConfigError at start for settings that cannot work, with what to change."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        VLLM.check(vllm.__version__)
        transfer = vllm_config.kv_transfer_config
        self._settings = read_settings(transfer.kv_connector_extra_config, os.environ)
        self._ranks = vllm_config.parallel_config.tensor_parallel_size
        self._check_engine(vllm_config)
        scheduler = role is KVConnectorRole.SCHEDULER
        self._is_fp8 = stored_dtype(vllm_config).startswith("float8")
        deadline = self._settings.store.fetch_deadline_seconds
        self._lookups = LookupClient(transfer.engine_id, self._ranks, deadline)
        scales = self._scales() if scheduler and self._is_fp8 else ""
        self._geometry = engine_geometry(vllm_config, kv_cache_config, self._settings.block_tokens, scales)
        self._codec = make_codec(self._settings, self._geometry, self._ranks)
        self._is_plain = len(kv_cache_config.kv_cache_groups) == 1 and all(
            group.kind is not GroupKind.SLIDING for group in self._geometry.groups
        )
        self._engine_block_tokens = [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]
        for tokens in self._engine_block_tokens:
            blocks_per_page(tokens, self._settings.block_tokens)
        if scheduler:
            self._begin_scheduler(vllm_config)
        else:
            self._begin_worker(transfer.engine_id)

    def _check_engine(self, vllm_config: VllmConfig) -> None:
        parallel = vllm_config.parallel_config
        if parallel.pipeline_parallel_size != 1:
            raise ConfigError(
                f"pipeline_parallel_size: got {parallel.pipeline_parallel_size}; expected 1: stages are not joined yet"
            )
        if vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
            raise ConfigError(
                "kv_load_failure_policy: got fail; expected recompute in the kv_transfer_config: a copy that cannot "
                "be loaded is computed instead"
            )

    def _scales(self) -> str:
        """What the workers call the scales of their FP8 cache: only they have the model."""
        try:
            return self._lookups.scales()
        except ConnectionError as error:
            raise ConfigError(
                f"kv_cache_dtype: the scales of an FP8 cache are not known ({error}); expected a worker of this engine "
                "on this machine, or --kv-cache-dtype auto"
            ) from error

    # scheduler -------------------------------------------------------------------------------------------------------

    def _begin_scheduler(self, vllm_config: VllmConfig) -> None:
        model = vllm_config.model_config
        name, weights = model_and_weights(self._settings, model.model, model.revision)
        identity = Identity(model=name, weights=weights, geometry=self._geometry, tenant=self._settings.tenant)
        store = self._settings.store
        self._book = Book(
            identity,
            self._settings.block_tokens,
            self._lookups,
            deadline_seconds=store.fetch_deadline_seconds,
            raw_tail_tokens=store.residual_tokens if self._codec is not None else 0,
            tells=bool(self._settings.daemon or store.daemon_socket),
        )
        self._speed = PrefillSpeed()
        self._stores = vllm_config.kv_transfer_config.is_kv_producer  # kv_both is one, kv_consumer only loads
        self._recorder = TraceRecorder.from_environment(identity.root(), self._settings.block_tokens, name)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        found = self._book.matched_tokens(request, num_computed_tokens)
        return found, bool(found)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        tables = blocks.get_block_ids() if num_external_tokens else ()
        self._book.allocated(request, tables, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        state = scheduler_output.kv_connector_block_state
        cached = scheduler_output.scheduled_cached_reqs
        computed = {one.req_id: one.num_computed_tokens for one in scheduler_output.scheduled_new_reqs}
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        scheduled = [
            (request_id, computed[request_id] + count)
            for request_id, count in scheduler_output.num_scheduled_tokens.items()
        ]
        self._speed.step(scheduler_output.num_scheduled_tokens)
        self._book.prefill_tokens_per_second = self._speed.tokens_per_second
        orders = self._book.step(scheduled, state.get_block_ids)
        if not self._stores:
            orders.saves.clear()
            orders.ended.clear()
        return StepOrders(orders)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._book.load_failed(connector_output.failed_recving or ())
        self._book.load_failed(self._book.loading_into(connector_output.invalid_block_ids or ()))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Nothing to wait for: blocks were copied out of the pages in the step that filled them, and what is wanted
        again, raw, is copied before the next step writes."""
        if self._recorder is not None and (chain := self._book.chain_of(request)) is not None:
            tokens, tenant = self._settings.block_tokens, self._settings.tenant
            self._recorder.record(ended_request(request, chain, tokens, tenant))
        self._book.finished(request.request_id, block_ids)
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
        rank = get_tensor_model_parallel_rank()
        self._scale_name = ""
        with beside_the_computing(), ExitStack() as opened:
            copier = copier_for(pages_device(self._vllm_config.device_config.device_type))
            parts = (settings, self._geometry, self._codec, self._ranks)
            if settings.device_int4_bytes and copier.device.type == "cuda":
                engine_bytes = max(one.size for one in self._kv_cache_config.kv_cache_tensors)
                check_room(settings.device_int4_bytes, engine_bytes, *torch.cuda.mem_get_info(copier.device))
            opened.callback(copier.close)
            tiers = [opened.enter_context(closing(tier)) for tier in make_device_tier(*parts, copier)]
            tiers += [opened.enter_context(closing(tier)) for tier in make_tiers(*parts)]
            self._shelf = Shelf(
                self._geometry,
                tiers,
                codec=self._codec,
                rank=(rank, self._ranks),
                staging_bytes=settings.staging_bytes,
                deadline_seconds=settings.store.fetch_deadline_seconds,
                copier=copier,
            )
            opened.pop_all()
            opened.callback(self._shelf.close)
            self._server = LookupServer(engine_id, self._answer, rank, self._note)
            opened.pop_all()
        self._loading: dict[str, Any] = {}
        self._invalid: set[int] = set()
        self._reported: dict[str, int] = {}

    def _answer(self, question: Question, hashes: list[bytes]) -> Answer:
        if question.is_reset:
            try:
                return Answer(0, False, self._shelf.below.reset())
            except TierError as error:
                return Answer(0, False, self._shelf.below.epoch, problem=str(error))
        if not hashes:
            return Answer(0, False, self._shelf.below.epoch, scales=self._scale_name)
        found = self._shelf.find(question.epoch, question.root, hashes, question.local_blocks)
        return Answer(found.blocks, found.pending, found.epoch, found.lossy_at)

    def _note(self, question: Question, hashes: list[bytes]) -> None:
        assert question.note is not None
        self._shelf.note_lookup(question.epoch, question.root, hashes, question.local_blocks, question.note)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        dtype, rank = self._vllm_config.model_config.dtype, (get_tensor_model_parallel_rank(), self._ranks)
        layers = self._vllm_config.compilation_config.static_forward_context
        self._shelf.attach(group_pages(self._geometry, self._kv_cache_config, kv_caches, dtype, rank, layers))
        if self._is_fp8:
            self._scale_name = scales_name({name: layers[name] for name in kv_caches})

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Before the step: what the requests have left that are over, since it may write to their pages."""
        super().bind_connector_metadata(connector_metadata)
        if connector_metadata.orders.ended:
            self._shelf.save(connector_metadata.orders.ended)
        self._shelf.before_step()

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
        now = self._shelf.below.counters()
        fresh = {name: count - self._reported.get(name, 0) for name, count in now.items()}
        self._reported = now
        return ConnectorStats({name: count for name, count in fresh.items() if count})

    @classmethod
    def build_kv_connector_stats(cls, counts: dict[str, Any] | None = None, **named: Any) -> KVConnectorStats | None:
        """vLLM gives the counts by place, its MultiConnector by name."""
        return ConnectorStats(dict(counts or named.get("data") or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ConnectorPromMetrics:
        return ConnectorPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self.role is KVConnectorRole.SCHEDULER:
            self._lookups.close()
            if self._recorder is not None:
                self._recorder.close()
        else:
            self._server.close()
            self._shelf.close()
