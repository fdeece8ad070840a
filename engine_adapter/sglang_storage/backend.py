"""SGLang's side of the storage: its `HiCacheStorage`, v1 and v2 batch methods, over our tiers.

Made by SGLang's StorageBackendFactory in every scheduler process. Its threads come here at once: lookups, reads and
writes of the cache controller, `get_stats` and `clear` of the scheduler. The first three are not the scheduler's own
thread, and each returns by its deadline; `clear` and `close` are bounded, `get_stats` never waits.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version as version_of
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolTransferResult

from allocator import ConfigError
from engine_adapter.releases import SGLANG
from engine_adapter.sglang_storage.forms import KV_POOL, Names, PoolForm, Rank, check_pool, frame_geometry, page_hash
from engine_adapter.sglang_storage.hits import PoolPages, leading_run, restorable
from engine_adapter.sglang_storage.pages import Page, page_rows
from engine_adapter.sglang_storage.recording import Recording, started
from engine_adapter.sglang_storage.settings import make_tiers, model_weights, read_settings
from engine_adapter.sglang_storage.shelf import Shelf

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, HiCacheStorageExtraInfo, PoolTransfer

    from kvstore.copy_key import CopyKey
    from kvstore.tier import ByteRow

_LOG = logging.getLogger(__name__)
_FACTS = ("dtype", "kv_cache_dtype", "quantization", "quantization_param_path", "json_model_override_args")
_STATS_KEPT = 4096


class KVStoreHiCache(HiCacheStorage):  # type: ignore[misc]
    """`--hicache-storage-backend dynamic`. ConfigError at start for settings that cannot work, with what to change.

    Tiers are opened when SGLang names its host pool, since only that says what a page is.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        SGLANG.check(version_of("sglang"))
        self._settings = read_settings(storage_config.extra_config, os.environ)
        self._rank = Rank.of(storage_config)
        self._model = self._settings.model or storage_config.model_name or ""
        self._engine = _engine_settings()
        self._names = self._make_names()
        self._forms: dict[str, PoolForm] = {}
        self._pools: dict[str, Any] = {}
        self._shelf: Shelf | None = None
        self._recording: Recording | None = None
        self._measuring = threading.Lock()
        self._measured: dict[str, list[float]] = {name: [] for name in _STATS}
        self._wants_stats = storage_config.enable_storage_metrics

    def _make_names(self) -> Names:
        engine = self._engine
        weights = model_weights(
            self._settings, str(getattr(engine, "model_path", "") or ""), getattr(engine, "revision", None)
        )
        if not self._model:
            raise ConfigError("model: got no name; expected --served-model-name, or model in the extra config")
        facts = tuple((name, str(getattr(engine, name, ""))) for name in _FACTS)
        return Names(self._model, weights, self._settings.tenant, facts)

    # host pools ------------------------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._add_pool(mem_pool_host, KV_POOL)
        if self._shelf is None:
            geometry = frame_geometry(mem_pool_host, self._rank, self._kv_dtype(mem_pool_host))
            settings = self._settings
            self._shelf = Shelf(
                make_tiers(settings, geometry, self._rank),
                staging_bytes=settings.staging_bytes,
                deadline_seconds=settings.store.fetch_deadline_seconds,
                prefill_tokens_per_second=settings.prefill_tokens_per_second,
                tells=self._rank.is_first,
            )
            page_tokens = getattr(mem_pool_host, "logical_page_size", mem_pool_host.page_size)
            self._recording = started(
                self._rank, page_tokens, self._model, in_place=not settings.flat, server=_prefix_settings()
            )

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._add_pool(host_pool, _name(host_pool_name))

    def _add_pool(self, pool: Any, name: str) -> None:
        check_pool(pool, name)
        probe = self._rank.split if name == KV_POOL and hasattr(pool, "head_num") else 1
        indices = torch.arange(getattr(pool, "logical_page_size", pool.page_size))
        try:
            pieces = [row.nbytes for row in page_rows(pool, indices, 1, probe)[0]]
        except (ValueError, NotImplementedError, AttributeError) as error:
            raise ConfigError(
                f"pool {name!r} gives no place of a page ({error}); expected another mem layout"
            ) from error
        whole = getattr(pool, "size_per_token", 0) * pool.page_size
        if name == KV_POOL and sum(pieces) * probe != whole:
            raise ConfigError(f"pool {name!r}: a page's pieces are {sum(pieces) * probe} bytes; expected {whole}")
        form = PoolForm.of(pool, name, self._rank, pieces, self._kv_dtype(pool) + self._draft(pool, name))
        if self._settings.flat:
            form = PoolForm(name, form.heads, page_hash(f"flat {form.digest.hex()}"), form.is_shared)
        self._pools[name], self._forms[name] = pool, form

    def _kv_dtype(self, pool: Any) -> str:
        """What the bytes of a uint8 cache are: SGLang keeps both FP8 forms in one dtype."""
        dtype = str(pool.dtype).removeprefix("torch.")
        known = self._settings.kv_cache_dtype or str(getattr(self._engine, "kv_cache_dtype", "") or "")
        if dtype == "uint8" and known in ("", "auto"):
            raise ConfigError(
                f"kv_cache_dtype: the cache holds uint8 and SGLang says {known or 'nothing'!r}; expected "
                "--kv-cache-dtype, or kv_cache_dtype in the extra config: FP8 forms must not be taken for each other"
            )
        return known

    def _draft(self, pool: Any, name: str) -> str:
        """A draft model's weights, where a pool holds its KV."""
        layers = getattr(pool, "layer_num", 0)
        if not name.startswith("draft") and getattr(pool, "target_layer_num", layers) == layers:
            return ""
        path = str(getattr(self._engine, "speculative_draft_model_path", "") or "")
        if path and not Path(path).is_dir():
            return f" draft {path}@{getattr(self._engine, 'speculative_draft_model_revision', None)}"
        return f" draft {model_weights(self._settings, path, None)}"

    # v1 --------------------------------------------------------------------------------------------------------------

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        self._asked(keys, extra_info)
        run = leading_run(self._flags(keys, KV_POOL, self._open_shelf().until()))
        self._note_lookup(keys, run, extra_info)
        return run

    def exists(self, key: str) -> bool:
        return all(self._flags([key], KV_POOL, self._open_shelf().until()))

    def _asked(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None) -> None:
        if self._recording is not None:
            self._recording.asked(extra_info.prefix_keys if extra_info is not None else None, keys)

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """host_indices: int64 [keys * page tokens]. False: the page was not loaded and nothing may be made of it."""
        return self._move_in(keys, KV_POOL, self._rows(keys, KV_POOL, host_indices))

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        if self._recording is not None:
            self._recording.wrote(extra_info.prefix_keys if extra_info is not None else None, keys)
        before = _page_before(extra_info)
        return self._move_out(keys, KV_POOL, lambda: self._rows(keys, KV_POOL, host_indices), before)

    # v2 --------------------------------------------------------------------------------------------------------------

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        until = self._open_shelf().until()
        self._asked(keys, extra_info)
        pools = []
        for transfer in pool_transfers or ():
            trailing = 0
            if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                trailing = max(1, len(transfer.keys or ()))
            elif transfer.hit_policy != PoolHitPolicy.ALL_PAGES:
                continue  # a second form of the same pages, which never decides; no verdict on what it has
            name = _name(transfer.name)
            pools.append(PoolPages(name, self._flags(keys, name, until), trailing))
        hits, lengths = restorable(self._flags(keys, KV_POOL, until), pools)
        run = lengths[-1] if lengths else 0
        self._note_lookup(keys, run, extra_info)
        return PoolTransferResult(run, hits, lengths)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        results = {}
        for transfer in transfers:
            keys, name = transfer.keys or [], _name(transfer.name)
            results[transfer.name] = self._move_in(keys, name, self._rows(keys, name, transfer.host_indices))
        return results

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        results, before = {}, _page_before(extra_info)
        for transfer in transfers:
            keys, name, indices = transfer.keys or [], _name(transfer.name), transfer.host_indices
            rows = self._row_maker(keys, name, indices)
            trailing = transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES
            results[transfer.name] = self._move_out(keys, name, rows, None if trailing else before)
        return results

    # pages as tensors of SGLang's own, without interface_v1 -----------------------------------------------------------

    def get(
        self, key: str, target_location: torch.Tensor | None = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: list[Any] | None = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        targets = list(target_locations or [])
        self._check_flat(targets, len(keys))
        flags = self._move_in(keys, KV_POOL, [[[_bytes_of(one)]] for one in targets])
        return [one if flag else None for one, flag in zip(targets, flags, strict=True)]

    def set(
        self, key: str, value: torch.Tensor | None = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: list[Any] | None = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        given = list(values or [])
        self._check_flat(given, len(keys))
        return all(self._move_out(keys, KV_POOL, lambda: [[[_bytes_of(one.contiguous())]] for one in given], None))

    def _check_flat(self, tensors: Sequence[Any], count: int) -> None:
        if not self._settings.flat or self._rank.split > 1:
            raise ConfigError("interface_v1: pages were asked for as copies; expected batch_get_v1 and batch_set_v1")
        if len(tensors) != count or any(one is None for one in tensors):
            raise ValueError(f"storage: got {len(tensors)} tensors for {count} keys; expected one each")

    # moving ----------------------------------------------------------------------------------------------------------

    def _open_shelf(self) -> Shelf:
        if self._shelf is None:
            raise RuntimeError("storage: used before SGLang has registered its host pool")
        return self._shelf

    def _keys(self, name: str, until: float) -> list[CopyKey] | None:
        epoch = self._open_shelf().below.fresh_epoch(until)
        return None if epoch is None else self._names.of(self._forms[name], epoch, _weight_version())

    def _flags(self, keys: Sequence[str], name: str, until: float) -> list[bool]:
        """Which pages are there, in all their parts."""
        forms = self._keys(name, until) if keys else None
        if forms is None:
            return [False] * len(keys)
        hashes = [page_hash(key) for key in keys]
        flags = [True] * len(keys)
        for form in forms:
            found = self._open_shelf().find(form.with_hashes(hashes), until)
            flags = [one and tier is not None for one, tier in zip(flags, found, strict=True)]
        return flags

    def _note_lookup(self, keys: Sequence[str], run: int, extra_info: HiCacheStorageExtraInfo | None) -> None:
        """Once for all ranks, which are asked the same."""
        forms = self._keys(KV_POOL, 0.0) if self._rank.is_first else None
        if forms is not None:
            before = [page_hash(key) for key in getattr(extra_info, "prefix_keys", None) or ()]
            self._open_shelf().note_lookup(forms[0], before, [page_hash(key) for key in keys], run)

    def _rows(self, keys: Sequence[str], name: str, host_indices: Any) -> list[list[list[ByteRow]]] | None:
        """Per page and part, the pieces. None, logged, where the indices do not fit the keys."""
        pool, parts = self._pools[name], len(self._forms[name].heads)
        expected = len(keys) * getattr(pool, "logical_page_size", pool.page_size)
        if host_indices is None or host_indices.numel() != expected:
            given = 0 if host_indices is None else host_indices.numel()
            _LOG.error(
                "kvstore: pool %s: got %s host indices for %s pages; expected %s", name, given, len(keys), expected
            )
            return None
        rows = page_rows(pool, host_indices, len(keys), parts)
        return [rows[at : at + parts] for at in range(0, len(rows), parts)]

    def _row_maker(self, keys: list[str], name: str, indices: Any) -> Callable[[], list[list[list[ByteRow]]] | None]:
        return lambda: self._rows(keys, name, indices)

    def _pages(
        self, keys: Sequence[str], forms: Sequence[CopyKey], rows: list[list[list[ByteRow]]], parent: bytes | None
    ) -> list[Page]:
        pages = []
        for key, parts in zip(keys, rows, strict=True):
            own = page_hash(key)
            parent = None if parent == own else parent
            pages += [Page(form.with_hash(own), part, parent) for form, part in zip(forms, parts, strict=True)]
            parent = own
        return pages

    def _move_in(self, keys: Sequence[str], name: str, rows: list[list[list[ByteRow]]] | None) -> list[bool]:
        shelf, began = self._open_shelf(), time.monotonic()
        until = shelf.until()
        forms = self._keys(name, until) if keys and rows is not None else None
        if forms is None or rows is None:
            return [False] * len(keys)
        pages = self._pages(keys, forms, rows, None)
        flags = _whole(shelf.load(pages, until), len(forms))
        self._measure("prefetch", pages, flags, began)
        return flags

    def _move_out(
        self,
        keys: Sequence[str],
        name: str,
        make_rows: Callable[[], list[list[list[ByteRow]]] | None],
        before: bytes | None,
    ) -> list[bool]:
        """before: the hash of the page before the first one, where SGLang has said it."""
        if self._forms[name].is_shared and self._rank.tp_rank:
            return [True] * len(keys)  # rank 0 writes the same bytes
        shelf, began = self._open_shelf(), time.monotonic()
        forms, rows = self._keys(name, shelf.until()) if keys else None, make_rows()
        if forms is None or rows is None:
            return [False] * len(keys)
        pages = self._pages(keys, forms, rows, before)
        flags = _whole(shelf.save(pages), len(forms))
        self._measure("backup", pages, flags, began)
        return flags

    # the rest --------------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """A new epoch in every tier, for all who share them, and the old copies go. TierError where one was missed."""
        self._open_shelf().reset()

    def counters(self) -> dict[str, int]:
        return self._open_shelf().below.counters()

    def get_stats(self) -> Any:
        """SGLang's StorageMetrics since the last call, None where it keeps none."""
        if not self._wants_stats:
            return None
        from sglang.srt.observability.metrics_collector import StorageMetrics

        with self._measuring:
            found, self._measured = self._measured, {name: [] for name in _STATS}
        return StorageMetrics(**found)

    def _measure(self, work: str, pages: Sequence[Page], flags: Sequence[bool], began: float) -> None:
        if not self._wants_stats or not any(flags):
            return
        parts = len(pages) // len(flags)
        moved = sum(page.size_bytes for place, page in enumerate(pages) if flags[place // parts])
        rate = moved / (1 << 30) / max(1e-9, time.monotonic() - began)
        with self._measuring:
            for name, value in ((f"{work}_pgs", sum(flags)), (f"{work}_bandwidth", rate)):
                if len(self._measured[name]) < _STATS_KEPT:
                    self._measured[name].append(value)

    def close(self) -> None:
        if self._recording is not None:
            self._recording.close()
        if self._shelf is not None:
            self._shelf.close()


_STATS = ("prefetch_pgs", "backup_pgs", "prefetch_bandwidth", "backup_bandwidth")


def _name(pool: Any) -> str:
    return str(getattr(pool, "value", pool))


def _page_before(extra_info: HiCacheStorageExtraInfo | None) -> bytes | None:
    """The hash of the page before the call's first one, where SGLang says it (hicache_storage_pass_prefix_keys)."""
    keys = extra_info.prefix_keys if extra_info is not None else None
    return page_hash(keys[-1]) if keys else None


def _whole(parts: Sequence[bool], count: int) -> list[bool]:
    """A page is there when all its parts are."""
    return [all(parts[at : at + count]) for at in range(0, len(parts), count)]


def _bytes_of(tensor: torch.Tensor) -> ByteRow:
    """uint8 view of a contiguous CPU tensor."""
    return tensor.view(torch.uint8).reshape(-1).numpy()


def _engine_settings() -> Any:
    """SGLang's ServerArgs, or None where this is not a server's process."""
    try:
        from sglang.srt.runtime_context import get_server_args

        return get_server_args()
    except ValueError:
        return None


def _prefix_settings() -> tuple[bool, int] | None:
    """Whether SGLang passes prefix keys, and from how many new tokens on it asks; None where no server says."""
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
    from sglang.srt.runtime_context import get_memory

    try:
        given = get_memory().hicache_storage_backend_extra_config
    except ValueError:
        return None
    if not given:
        return None  # attached while it runs, by settings that are not kept; what is written will show
    _, threshold_tokens, _, _, passes = HybridCacheController.parse_storage_backend_extra_config(given)
    return passes, threshold_tokens


def _weight_version() -> str:
    """Which weights are set, where somebody updates them in place and says so."""
    try:
        from sglang.srt.runtime_context import get_serving

        return str(get_serving().weight_version)
    except ValueError:
        return ""
