"""Our tiers below vLLM's own host tier: a `SecondaryTierManager` for its TieringOffloadingSpec.

There vLLM names the blocks, with its own chain of SHA-256, and we see chunks of bytes: nothing is encoded, nothing is
shared with other engines' adapters, and vLLM tells nobody below of a reset (new weights need another `weights`).
Called by vLLM's scheduler, on one thread; bytes move on the tiers' threads.

    "secondary_tiers": [{"type": "KVStoreTier", "module_path": "engine_adapter.vllm_connector.secondary_tier",
                         "weights": "sha256 or revision", "disk_path": "/var/cache/kvstore"}]
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import vllm
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    RequestOffloadingContext,
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from allocator import ConfigError, KVGeometry
from engine_adapter.releases import VLLM
from engine_adapter.tiers_below import TiersBelow
from engine_adapter.vllm_connector.settings import make_tiers, read_settings
from kvstore import Identity
from kvstore.tier import CopyKey, Lookup, ResultCode

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec, OffloadKey, ReqContext
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
    from vllm.v1.kv_offload.tiering.base import TransferJob

    from kvstore.tier import Tier

_HASH_BYTES = 32  # of vLLM's sha256; its xxhash resists nobody
_ASKED_MOST = 1 << 16


@dataclass(slots=True)
class _Looked:
    """What a request has found here so far: name -> tier. is_told: the tiers know; vLLM asks again and again."""

    found: dict[CopyKey, Tier] = field(default_factory=dict)
    is_told: bool = False


class KVStoreTier(SecondaryTierManager):  # type: ignore[misc]
    """Made by vLLM. settings: those of `kv_connector_extra_config`, of which `weights` must be there."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        VLLM.check(vllm.__version__)
        chosen = read_settings(settings, os.environ)
        if chosen.store.codec != "raw":
            raise ConfigError(
                f"codec: got {chosen.store.codec!r}; expected raw: vLLM's chunks are bytes of its own order"
            )
        if not chosen.weights:
            raise ConfigError(
                "weights: missing; expected a digest or revision of the weights, since vLLM's block hashes do not say "
                "of which they are"
            )
        self._chunks = np.asarray(primary_kv_view).view(np.uint8).reshape(len(primary_kv_view), -1)
        self._root = _identity(offloading_spec, chosen.model, chosen.weights, chosen.tenant).root()
        chunk_bytes = self._chunks.shape[1]
        config = offloading_spec.config
        self._chunk_tokens = config.groups[0].tokens_per_block * config.cache.blocks_per_chunk  # of the group counted
        as_bytes = KVGeometry.latent(
            layers=1, latent_dim=chunk_bytes - 1, rope_dim=1, dtype="float8_e4m3fn", block_tokens=1
        )
        self._below = TiersBelow(make_tiers(chosen, as_bytes))
        self._deadline_seconds = chosen.store.fetch_deadline_seconds
        self._asked: dict[OffloadKey, float] = {}
        self._open: dict[int, int] = {}  # transfers of a job that have not ended
        self._wanted: dict[int, int] = {}
        self._good: dict[int, list[OffloadKey]] = {}
        self._finished: list[JobResult] = []

    # lookups ---------------------------------------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """RETRY while a tier is looking, until the deadline."""
        name = self._name(key)
        if name is None:
            return LookupResult.MISS
        with self._below.lock:
            if (tier := self._tier_with(name)) is not None:
                self._asked.pop(key, None)
                if (looked := req_context.get_state(_Looked)) is not None:
                    looked.found[name] = tier
                return LookupResult.HIT
            is_asked = any(tier.pending_count([name]) for tier in self._below.tiers)
        since = self._asked.setdefault(key, time.monotonic()) if is_asked else 0.0
        if is_asked and time.monotonic() - since < self._deadline_seconds and len(self._asked) < _ASKED_MOST:
            return LookupResult.RETRY
        self._asked.pop(key, None)
        self._tell(req_context, [name])
        return LookupResult.MISS

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        req_context.set_state(_Looked())
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._tell(req_context, [])

    def _tell(self, req_context: ReqContext, missed: list[CopyKey]) -> None:
        """Once a request: its first miss ends the lookup, or, where all was found, its end."""
        looked = req_context.get_state(_Looked)
        names = missed if looked is None else [*looked.found, *missed]
        if looked is None or looked.is_told or not names:
            return
        looked.is_told, count = True, len(looked.found)
        with self._below.lock:
            for tier in self._below.tiers:
                copies = {place: name for place, (name, one) in enumerate(looked.found.items()) if one is tier}
                hashes = [name.hash for name in names]
                tier.note_lookup(Lookup(names[0], hashes, copies, range(count, len(names)), 0))

    def _name(self, key: OffloadKey) -> CopyKey | None:
        block_hash = get_offload_block_hash(key)
        if len(block_hash) != _HASH_BYTES:
            self._below.count("hash_of_another_kind")
            return None
        return CopyKey(self._root, get_offload_group_idx(key), block_hash, "raw", True, (0, 1), (0, 1))

    def _tier_with(self, name: CopyKey) -> Tier | None:
        return next((tier for tier in self._below.tiers if tier.contains([name])[0]), None)

    # jobs ------------------------------------------------------------------------------------------------------------

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Into every tier. A chunk is good when one of them has it."""
        named = self._begin(job_metadata)
        items = [(name, [self._chunks[chunk]]) for _, name, chunk in named]
        with self._below.lock:
            for tier in self._below.tiers if items else ():
                self._open[job_metadata.job_id] += 1
                keys = [key for key, *_ in named]
                self._below.begin(partial(tier.submit_put, items), partial(self._end, job_metadata.job_id, keys))
            self._end(job_metadata.job_id, [], [])

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Each chunk out of the first tier that has it."""
        named = self._begin(job_metadata)
        with self._below.lock:
            places = [(self._tier_with(name), key, name, chunk) for key, name, chunk in named]
            for tier in self._below.tiers:
                mine = [one for one in places if one[0] is tier]
                if mine:
                    self._open[job_metadata.job_id] += 1
                    items = [(name, self._chunks[chunk]) for *_, name, chunk in mine]
                    keys = [one[1] for one in mine]
                    end = partial(self._end_load, job_metadata.job_id, keys, tier, mine[0][2])
                    self._below.begin(partial(tier.submit_get, items), end)
            self._end(job_metadata.job_id, [], [])

    def _begin(self, job: TransferJob) -> list[tuple[OffloadKey, CopyKey, int]]:
        """The job's chunks that have a name: key, name, place in vLLM's host memory."""
        with self._below.lock:
            self._open[job.job_id], self._good[job.job_id], self._wanted[job.job_id] = 1, [], len(job.keys)
        named = ((key, self._name(key), int(chunk)) for key, chunk in zip(job.keys, job.chunk_ids, strict=True))
        return [(key, name, chunk) for key, name, chunk in named if name is not None]

    def _end_load(
        self, job_id: int, keys: Sequence[OffloadKey], tier: Tier, name: CopyKey, results: Sequence[ResultCode]
    ) -> None:
        self._end(job_id, keys, results)
        pairs = zip(keys, results, strict=True)
        chunks = sum(code is ResultCode.OK and get_offload_group_idx(key) == 0 for key, code in pairs)
        if chunks:  # a block is one token in the tiers' geometry
            tier.note_reuse(name, chunks * self._chunk_tokens)

    def _end(self, job_id: int, keys: Sequence[OffloadKey], results: Sequence[ResultCode]) -> None:
        """One transfer of the job has ended; under the tiers' lock."""
        good = self._good[job_id]
        good += [key for key, result in zip(keys, results, strict=True) if result is ResultCode.OK]
        self._open[job_id] -= 1
        if not self._open[job_id]:
            del self._open[job_id], self._good[job_id]
            found = tuple(dict.fromkeys(good))
            self._finished.append(JobResult(job_id, len(found) == self._wanted.pop(job_id), found))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._below.drain()
        with self._below.lock:
            finished, self._finished = self._finished, []
        return finished

    def has_pending_work(self) -> bool:
        return bool(self._open)

    def drain_jobs(self) -> None:
        while self._open:
            self._below.drain()
            time.sleep(0.001)

    def shutdown(self) -> None:
        self._below.close()


def _identity(spec: OffloadingSpec, model: str, weights: str, tenant: str | None) -> Identity:
    """Chunks are vLLM's own bytes: everything that decides their order is part of who they are."""
    config = spec.config
    groups = [(one.tokens_per_block, list(one.layer_names)) for one in config.groups]
    parallel = config.parallel
    ranks = () if parallel.is_parallelism_agnostic else (parallel.tp_size, parallel.pp_size, parallel.world_size)
    layout = (
        config.kv_cache_layout,
        config.canonical_layout,
        config.replicated_layout,
        config.worker_kv_bytes_per_block,
    )
    cache = (config.cache.tokens_per_hash, config.cache.blocks_per_chunk)
    extra = ("vllm chunks", vllm.__version__, config.model.dtype, groups, cache, layout, ranks)
    return Identity(model=model or config.model.name, weights=weights, geometry=b"", tenant=tenant, extra=extra)
