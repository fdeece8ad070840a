"""The triton AttentionBackend: decode and verify slices by Triton kernels, everything else by the torch backend.

Covered: float32, bfloat16 and float16 slabs, full blocks and int4 records at 4 bits, with V or latent, windows, sinks,
softcap, any head dims that are multiples of 8. Prefill pieces, other codecs and other tables of bits go to torch.
Triton is imported when it is first needed, never by importing this module; `status` says whether and why not.

A backend object is used by the thread that runs the model and keeps nothing between steps.
"""

from __future__ import annotations

import re
from contextlib import nullcontext
from functools import lru_cache

import numpy as np
import torch

from allocator import UsageError
from engine_adapter.attention import AttentionSettings
from engine_adapter.attention.split_plan import DecodeSlice
from engine_adapter.attention.step_plan import BATCHED_QUERIES_MAX
from engine_adapter.attention.torch_paged import TorchPagedAttention
from engine_adapter.attention.triton_launch import (
    DTYPES,
    TritonPlan,
    covers,
    interpreted,
    kernel_calls,
    plan_decode,
)
from engine_adapter.batch import StepBatch
from engine_adapter.paged_cache import PagedCache

MIN_TRITON = (3, 9)
"""Oldest Triton that the kernels have been compiled with: they hand tuples to each other."""
MIN_CAPABILITY = (8, 0)
ITEM_TOKENS_MIN = 128
"""A shorter item would spend much of its time on writing partial results."""
PROGRAMS_PER_PROCESSOR = 4
CHECK_ERROR = 2e-3
"""Relative error that the self-test, in float16, may have."""


@lru_cache(maxsize=1)
def status() -> tuple[bool, str]:
    """Whether the kernels run in this process, and which way or why not. Never raises.

    The first call on a device compiles and runs a small case of both forms and compares it with torch.
    """
    try:
        found, reason = _environment()
        if found and not interpreted():
            from engine_adapter.attention.triton_check import device_error

            error = device_error()
            if not error < CHECK_ERROR:
                return False, f"{reason}: wrong result in the self-test, error {error:.1e}"
        return found, reason
    except Exception as error:  # whatever is broken here, torch still works
        return False, f"triton does not work here: {type(error).__name__}: {error}"


def _environment() -> tuple[bool, str]:
    import triton

    found = re.match(r"(\d+)\.(\d+)", triton.__version__)
    if found is None or (int(found[1]), int(found[2])) < MIN_TRITON:
        return False, f"triton {triton.__version__} is older than {MIN_TRITON[0]}.{MIN_TRITON[1]}"
    if interpreted():
        return True, f"triton {triton.__version__}, interpreted on the CPU"
    if torch.version.cuda is None or not torch.cuda.is_available():
        return False, f"triton {triton.__version__} is installed, but torch {torch.__version__} sees no CUDA device"
    capability = torch.cuda.get_device_capability()
    if capability < MIN_CAPABILITY:
        return False, f"compute capability {capability[0]}.{capability[1]} is below 8.0"
    return True, f"triton {triton.__version__} on {torch.cuda.get_device_name()}"


def supports(device: torch.device | str) -> bool:
    """Whether the kernels can read a slab on this device."""
    wanted = torch.device(device).type
    return status()[0] and wanted == ("cpu" if interpreted() else "cuda")


class TritonPagedAttention:
    """The triton AttentionBackend.

    programs: programs that a launch should have at least (None: enough for the device). item_tokens_min: see above.
    """

    name = "triton"

    def __init__(self, programs: int | None = None, item_tokens_min: int = ITEM_TOKENS_MIN) -> None:
        self._programs = programs
        self._item_tokens_min = item_tokens_min
        self._torch = TorchPagedAttention()

    def plan(self, cache: PagedCache, group: int, batch: StepBatch) -> TritonPlan:
        """See AttentionBackend.plan."""
        if not supports(cache.device) or not covers(cache, group):
            return TritonPlan(cache, group, None, self._torch.plan(cache, group, batch), None)
        return self.plan_covered(cache, group, batch)

    def plan_covered(self, cache: PagedCache, group: int, batch: StepBatch) -> TritonPlan:
        """plan() where support is known: the kernels take all slices of few tokens, torch the rest."""
        block_tokens, window = cache.geometry.block_tokens, cache.geometry.groups[group].window_tokens
        slices, rest, rest_rows, row = [], [], [], 0
        for part in batch:
            if part.token_count > BATCHED_QUERIES_MAX:
                rest.append(part)
                rest_rows.append(np.arange(row, row + part.token_count))
            else:
                slices.append(DecodeSlice.of(row, part, group, block_tokens, window))
            row += part.token_count
        torch_plan = self._torch.plan(cache, group, StepBatch(tuple(rest))) if rest else None
        if not slices:
            return TritonPlan(cache, group, None, torch_plan, None)
        rows = cache.tensor(np.concatenate(rest_rows)) if rest else None
        programs = self._programs or _programs_of(cache.device)
        decode = plan_decode(cache, group, slices, programs, self._item_tokens_min)
        return TritonPlan(cache, group, decode, torch_plan, rows)

    def attend(
        self,
        plan: TritonPlan,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor | None,
        settings: AttentionSettings,
    ) -> torch.Tensor:
        """See AttentionBackend.attend."""
        if plan.decode is None:
            assert plan.rest is not None
            return self._torch.attend(plan.rest, layer, query, keys, values, settings)
        if query.dtype not in DTYPES:
            raise UsageError(f"the triton backend takes queries of {[str(one) for one in DTYPES]}, got {query.dtype}")
        value_dim = plan.cache.geometry.groups[plan.group].value_dim or settings.latent_value_dim
        if value_dim is None:
            raise UsageError("a layer without V needs settings.latent_value_dim")
        out = query.new_empty((query.shape[0], query.shape[1], value_dim))
        if plan.rest is not None:
            rows = plan.rest_rows
            given = None if values is None else values[rows]
            out[rows] = self._torch.attend(plan.rest, layer, query[rows], keys[rows], given, settings)
        device = plan.cache.device
        # Triton launches on the current device, whatever its arguments lie on.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            for call in kernel_calls(plan, layer, query, settings, out):
                call.kernel[call.grid](*call.arguments, **call.constants)
        return out


def _programs_of(device: torch.device) -> int:
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return PROGRAMS_PER_PROCESSOR * processors
