"""Compile the triton kernels ahead of time for devices that are not here, and print what they take.

`python -m tests.engine_adapter.triton.compile_matrix [--targets 80,90] [--cases NAME,..] [--json FILE]`. Exit code 1
when a kernel does not compile, needs more shared memory than the target has, or spills more than SPILL_BYTES_MAX.
The very calls that the backend would launch are compiled, their arguments lying on the CPU.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from allocator import CacheGroup, GroupKind, KVGeometry
from engine_adapter.attention import AttentionSettings
from engine_adapter.attention.split_plan import DecodeSlice
from engine_adapter.attention.triton_launch import TritonPlan, kernel_calls, plan_decode
from engine_adapter.batch import SequenceSlice
from engine_adapter.paged_cache import PagedCache
from quant import Int4Codec
from tests.engine_adapter.paged_kit import make_slab

SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Targets (compute capability) and the shared memory that a block of theirs may have."""
SPILL_BYTES_MAX = 64


@dataclass(frozen=True)
class Shape:
    """What is compiled: dims, dtype, query and KV heads, tokens of a slice; value_dim 0: latent, V of latent_dim."""

    key_dim: int
    value_dim: int
    dtype: str = "bfloat16"
    heads: int = 32
    kv_heads: int = 8
    tokens: int = 1
    latent_dim: int | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    cold: bool = True


SHAPES = {
    "llama 128": Shape(128, 128),
    "llama 128, full only": Shape(128, 128, cold=False),
    "llama 128, verify 8": Shape(128, 128, tokens=8),
    "llama 128, float32": Shape(128, 128, "float32"),
    "smollm 64, float16": Shape(64, 64, "float16", 9, 3),
    "gpt-oss 64": Shape(64, 64, heads=64, window=128, sinks=True),
    "dim 80, MHA": Shape(80, 80, heads=32, kv_heads=32),
    "dim 96, MHA": Shape(96, 96, heads=32, kv_heads=32),
    "dims 192 and 128": Shape(192, 128, heads=16, kv_heads=16),
    "gemma 256": Shape(256, 256, heads=8, kv_heads=4, window=512, softcap=50.0),
    "dim 256, float32": Shape(256, 256, "float32", 8, 4),
    "dim 512": Shape(512, 512, heads=8, kv_heads=4),
    "latent 576": Shape(576, 0, heads=128, kv_heads=1, latent_dim=512),
}


@dataclass(frozen=True)
class Row:
    """A compiled kernel."""

    target: int
    case: str
    kernel: str
    registers: int
    spill_bytes: int
    shared_bytes: int

    @property
    def good(self) -> bool:
        return self.shared_bytes <= SHARED_BYTES[self.target] and self.spill_bytes <= SPILL_BYTES_MAX


class TargetDriver:
    """Stands where Triton's CUDA driver does and names a target; nothing can be launched with it."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return self.capability  # compiled kernels are kept by device

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)


def compile_shape(target: int, name: str, shape: Shape) -> list[Row]:
    """Both kernels of a case."""
    from triton.runtime import driver

    driver.set_active(TargetDriver(target))
    plan, query, settings, out = _prepared(shape)
    rows = []
    for call in kernel_calls(plan, 0, query, settings, out):
        compiled = call.kernel.warmup(*call.arguments, grid=call.grid, **call.constants)
        registers, spill_bytes = _usage(compiled.asm["cubin"])
        rows.append(Row(target, name, call.kernel.__name__, registers, spill_bytes, compiled.metadata.shared))
    return rows


def _prepared(shape: Shape) -> tuple[TritonPlan, torch.Tensor, AttentionSettings, torch.Tensor]:
    """A sequence of a full, an INT4 and an open block."""
    kind = GroupKind.FULL if shape.window is None else GroupKind.SLIDING
    group = CacheGroup(
        kind=kind if shape.value_dim else GroupKind.LATENT,
        layers=(0, 1),
        kv_heads=shape.kv_heads,
        key_dim=shape.key_dim,
        value_dim=shape.value_dim,
        window_tokens=shape.window,
    )
    geometry = KVGeometry(groups=(group,), block_tokens=16, dtype=shape.dtype)
    slab, (full, cold) = make_slab(geometry, 4, cold=True)
    cache = PagedCache(slab, geometry, Int4Codec())
    second = cold[0] << 1 | 1 if shape.cold else full[2] << 1
    table = np.array([full[0] << 1, second, full[1] << 1], np.int64)
    mapping = full[1] * 16 + np.arange(16 - shape.tokens, 16)
    part = SequenceSlice("s", (1,) * shape.tokens, 48 - shape.tokens, 0, (table,), (mapping,))
    decode = plan_decode(cache, 0, [DecodeSlice.of(0, part, 0, 16, shape.window)], 64, 16)
    query = torch.zeros((shape.tokens, shape.heads, shape.key_dim), dtype=cache.dtype)
    sinks = torch.zeros(shape.heads) if shape.sinks else None
    settings = AttentionSettings(0.1, shape.softcap, sinks, shape.latent_dim)
    out = query.new_empty((shape.tokens, shape.heads, shape.latent_dim or shape.value_dim))
    return TritonPlan(cache, 0, decode, None, None), query, settings, out


def _usage(cubin: bytes) -> tuple[int, int]:
    """(registers of a thread, bytes of stack of a thread, which is where spills go)."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", done.stdout)
    assert found is not None, done.stdout
    return int(found[1]), int(found[2])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default=",".join(map(str, SHARED_BYTES)))
    parser.add_argument("--cases", default=";".join(SHAPES), help="names separated by ;")
    parser.add_argument("--json", metavar="FILE")
    given = parser.parse_args(arguments)
    rows: list[Row] = []
    print(f"{'sm':>4}  {'case':24} {'kernel':16} {'registers':>9} {'spill':>6} {'shared':>7}")
    for target in map(int, given.targets.split(",")):
        for name in given.cases.split(";"):
            for row in compile_shape(target, name, SHAPES[name]):
                rows.append(row)
                figures = f"{row.registers:9} {row.spill_bytes:6} {row.shared_bytes:7}"
                print(f"{target:4}  {name:24} {row.kernel:16} {figures}{'' if row.good else '  TOO MUCH'}", flush=True)
    if given.json:
        Path(given.json).write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")
    return 0 if all(row.good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
