"""Attention in place in C: blocks are read where they lie, full and INT4, and nothing is gathered.

A plan is a handful of int64 arrays, good for every layer of its group; attending is one call, whether a slice is a
decode token, drafts to verify or a piece of a prompt. What the kernels do not know (codecs other than int4, other
devices, dims over 1,024) goes through the torch backend as a whole.

Results depend neither on the number of threads nor on the other sequences of a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from allocator import ConfigError, UsageError
from engine_adapter.attention import AttentionSettings
from engine_adapter.attention.step_plan import checked_table, first_visible
from engine_adapter.attention.torch_paged import TorchPagedAttention, TorchPlan
from engine_adapter.batch import Int64Array, StepBatch
from engine_adapter.native_layout import DIM_MAX, DTYPE_CODES, ENTRIES, SLICE_COUNT, SLICES
from engine_adapter.paged_cache import PagedCache
from quant import native

_CODES = {getattr(torch, name): code for name, code in DTYPE_CODES.items()}


@dataclass(frozen=True, slots=True)
class NativePlan:
    """A step for one cache group. `arrays` keeps the memory alive that `fields` points into.

    fields: int64[kv_plan], address its place in memory. torch_plan: the whole step, when the kernels cannot take it;
    the rest is then empty.
    """

    cache: PagedCache
    group: int
    fields: Int64Array
    address: int
    arrays: tuple[Int64Array, ...]
    token_count: int
    torch_plan: TorchPlan | None = None


class NativePagedAttention:
    """The native AttentionBackend. Raises ConfigError where there are no C kernels."""

    name = "native"

    def __init__(self) -> None:
        if native.kernels is None:
            raise ConfigError(f"attention backend 'native' needs the C kernels: {native.reason}")
        self._torch = TorchPagedAttention()

    def plan(self, cache: PagedCache, group: int, batch: StepBatch) -> NativePlan:
        """See AttentionBackend.plan."""
        layout = cache.native_layout(group)
        if layout is None:
            return self._torch_plan(cache, group, batch)
        found, block_tokens = cache.geometry.groups[group], cache.geometry.block_tokens
        slices: list[tuple[int, ...]] = []
        tables: list[Int64Array] = []
        row = placed = 0
        for part in batch:
            table = checked_table(part, group, block_tokens, found.window_tokens)
            first = first_visible(part.start, found.window_tokens) // block_tokens
            slices.append((row, part.token_count, part.start, first, placed, len(table) - first))
            tables.append(table[first:])
            placed += len(table) - first
            row += part.token_count
        entries = np.concatenate(tables)
        if (entries & 1).any() and layout.cold_heads is None:
            return self._torch_plan(cache, group, batch)
        _check_slots(cache, group, entries)
        rows = np.array(slices, np.int64)
        fields = layout.fields.copy()
        fields[SLICES], fields[SLICE_COUNT], fields[ENTRIES] = rows.ctypes.data, len(slices), entries.ctypes.data
        return NativePlan(cache, group, fields, fields.ctypes.data, (rows, entries), row)

    def attend(
        self,
        plan: NativePlan,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor | None,
        settings: AttentionSettings,
    ) -> torch.Tensor:
        """See AttentionBackend.attend."""
        if plan.torch_plan is not None:
            return self._torch.attend(plan.torch_plan, layer, query, keys, values, settings)
        code = _CODES.get(query.dtype)
        if code is None:
            return self.attend(plan, layer, query.float(), keys, values, settings).to(query.dtype)
        tokens, heads, _ = query.shape
        group, position = plan.cache.place(layer)
        value_dim = _value_dim(plan, group, query, settings)
        if query.stride(2) != 1:
            query = query.contiguous()
        out = torch.empty((tokens, heads, value_dim), dtype=query.dtype)
        sinks = _sinks(settings, heads)
        native.kernels.attend(
            plan.address, position, query.data_ptr(), query.stride(0), query.stride(1), heads, code,
            out.data_ptr(), value_dim, 0 if sinks is None else sinks.data_ptr(), torch.get_num_threads(),
            settings.scaling, abs(settings.softcap or 0.0),
        )  # fmt: skip
        return out

    def _torch_plan(self, cache: PagedCache, group: int, batch: StepBatch) -> NativePlan:
        empty = np.empty(0, np.int64)
        return NativePlan(
            cache, group, empty, 0, (), batch.token_count, torch_plan=self._torch.plan(cache, group, batch)
        )


def _check_slots(cache: PagedCache, group: int, entries: Int64Array) -> None:
    """UsageError for an entry whose slot does not exist: the kernels read what they are told to."""
    if not len(entries):
        return
    layout = cache.slab.layout
    limits = np.array([layout.slot_count(2 * group), layout.slot_count(2 * group + 1)])
    wrong = (entries < 0) | (entries >> 1 >= limits[entries & 1])
    if wrong.any():
        raise UsageError(
            f"group {group}: table entry {int(entries[wrong.argmax()])} names a slot that does not exist; there are "
            f"{limits[0]} full and {limits[1]} INT4 slots"
        )


def _sinks(settings: AttentionSettings, heads: int) -> torch.Tensor | None:
    """float32[heads] or None; UsageError for anything else: the kernels read one number a head."""
    sinks = settings.sinks
    if sinks is None:
        return None
    if sinks.numel() != heads or sinks.device.type != "cpu":
        raise UsageError(f"sinks {list(sinks.shape)} on {sinks.device} do not fit {heads} query heads on the CPU")
    return sinks.to(torch.float32).contiguous()


def _value_dim(plan: NativePlan, group: int, query: torch.Tensor, settings: AttentionSettings) -> int:
    """Dim of the output; UsageError for tensors that do not fit the group."""
    found = plan.cache.geometry.groups[group]
    tokens, heads, key_dim = query.shape
    value_dim = found.value_dim or settings.latent_value_dim
    if value_dim is None:
        raise UsageError("a layer without V needs settings.latent_value_dim")
    fits = group == plan.group and tokens == plan.token_count and key_dim == found.key_dim
    fits = fits and heads > 0 and heads % found.kv_heads == 0 and 0 < value_dim <= DIM_MAX
    if not fits or (found.value_dim == 0 and value_dim > key_dim) or query.device.type != "cpu":
        raise UsageError(
            f"query {list(query.shape)} on {query.device} with V of {value_dim} does not fit plan group {plan.group} "
            f"of {plan.token_count} tokens, layer group {group}: {found.kv_heads} KV heads of {found.key_dim} and "
            f"{found.value_dim}"
        )
    return value_dim
