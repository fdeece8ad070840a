"""Decode attention in place, through the driver that the runner uses, beside torch's own attention.

The baseline is the fastest form of scaled_dot_product_attention on contiguous K and V: it pays for no gathering. Both
lie in huge pages where the system gives them. One call a sample, all sides in turn, so that each finds the caches as
the others left them; processor time of the one thread that works, so that being interrupted does not count. The rows
of two threads are wall time. Error rows compare with float64 over the values that the blocks decode to.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.rows import Options, Row, compared

if TYPE_CHECKING:
    import torch

    from engine_adapter.attention import AttentionSettings

ROUNDS_FACTOR = 3
"""A call lasts milliseconds: more rounds than asked for cost little and steady the median."""
RESIDUAL_TOKENS = 128
BASELINE = "torch SDPA, fastest form"
Timed = Callable[[], object]


@dataclass(frozen=True, slots=True)
class _Shape:
    """One layer's attention: value_dim is V's dim, taken out of K when latent."""

    query_heads: int = 32
    kv_heads: int = 8
    key_dim: int = 128
    value_dim: int = 128
    latent: bool = False


_LLAMA = _Shape()
_LATENT = _Shape(16, 1, 576, 512, latent=True)


class _Scene:
    """A context of bf16 KV in a slab: its first `context` tokens are there in full and as INT4 blocks."""

    def __init__(self, shape: _Shape, context: int, seed: int) -> None:
        import numpy as np
        import torch

        from allocator import CacheGroup, GroupKind, KVGeometry
        from engine_adapter.attention import AttentionSettings
        from engine_adapter.paged_cache import PagedCache
        from quant import get_codec

        stored = 0 if shape.latent else shape.value_dim
        kind = GroupKind.LATENT if shape.latent else GroupKind.FULL
        group = CacheGroup(kind=kind, layers=(0,), kv_heads=shape.kv_heads, key_dim=shape.key_dim, value_dim=stored)
        self.shape, self.context = shape, context
        self.geometry = KVGeometry(groups=(group,), dtype="bfloat16")
        self.blocks = context // 16
        self.codec = get_codec("int4")
        self.slab, self.full_slots, self.cold_slots = _slab(self.geometry, self.blocks + 1, self.codec, seed)
        self.cache = PagedCache(self.slab, self.geometry, self.codec)
        torch.manual_seed(seed)
        tokens = context + 1
        spread = torch.linspace(0.3, 2.0, shape.key_dim)  # channels of K differ in size, as a model's do
        self.keys = (torch.randn(tokens, shape.kv_heads, shape.key_dim) * spread).bfloat16()
        self.values = torch.randn(tokens, shape.kv_heads, stored).bfloat16()
        self.query = torch.randn(1, shape.query_heads, shape.key_dim).bfloat16()
        slots = np.array(self.full_slots, np.int64)
        self.mapping = slots[np.arange(tokens) // 16] * 16 + np.arange(tokens) % 16
        self.cache.write(0, self.mapping, self.keys, None if shape.latent else self.values)
        self.settings = AttentionSettings(
            shape.key_dim**-0.5, latent_value_dim=shape.value_dim if shape.latent else None
        )
        self._encode()

    def _encode(self) -> None:
        """Every block into an INT4 slot, and what it decodes to beside it."""
        import torch

        self.cold_keys, self.cold_values = self.keys.clone().float(), self.values.clone().float()
        for block in range(self.blocks):
            span = slice(16 * block, 16 * block + 16)
            keys, values = (part[span].transpose(0, 1)[None] for part in (self.keys, self.values))
            payload = bytearray(self.codec.encode(keys, None if self.shape.latent else values))
            place = self.slab.slot_bytes_view(1, self.cold_slots[block])
            place[: len(payload)] = torch.frombuffer(payload, dtype=torch.uint8)
            decoded = torch.empty(keys.shape), torch.empty(values.shape)
            self.codec.decode_into(place[: len(payload)], decoded[0], None if self.shape.latent else decoded[1])
            self.cold_keys[span], self.cold_values[span] = (part[0].transpose(0, 1) for part in decoded)

    def attend(self, cold: range | None, *, precisely: bool = False) -> Callable[[], torch.Tensor]:
        """Attention of the token behind `cold` INT4 blocks; with None all is full and the last token of the context.

        precisely: with a float32 query, so that the output is not rounded to bf16. The plan is made once, as a
        step makes it for all its layers.
        """
        import numpy as np

        from engine_adapter.attention import get_backend
        from engine_adapter.batch import SequenceSlice, StepBatch

        entries = [slot << 1 for slot in self.full_slots]
        for block in cold or ():
            entries[block] = self.cold_slots[block] << 1 | 1
        start = self.context - (cold is None)
        table = np.array(entries[: start // 16 + 1], np.int64)
        part = SequenceSlice("one", (1,), start, 0, (table,), (self.mapping[start : start + 1],))
        backend = get_backend("native")
        plan = backend.plan(self.cache, 0, StepBatch((part,)))
        keys, values = self.keys[-1:], None if self.shape.latent else self.values[-1:]
        query = self.query.float() if precisely else self.query
        return lambda: backend.attend(plan, 0, query, keys, values, self.settings)

    def relative_error(self, cold: range | None) -> float:
        """Of attention with a float32 query, against float64 over what the blocks decode to."""
        import torch

        found = self.attend(cold, precisely=True)()
        keys, values = self.keys.double(), self.values.double()
        count = self.context + (cold is not None)
        for block in cold or ():
            span = slice(16 * block, 16 * block + 16)
            keys[span], values[span] = self.cold_keys[span].double(), self.cold_values[span].double()
        keys, values = keys[:count].transpose(0, 1), values[:count].transpose(0, 1)
        if self.shape.latent:
            values = keys[..., : self.shape.value_dim]
        query = self.query[0].double().view(self.shape.kv_heads, -1, self.shape.key_dim)
        weights = torch.softmax(query @ keys.transpose(1, 2) * self.settings.scaling, -1)
        expected = (weights @ values).reshape(found[0].shape)
        return float((found[0].double() - expected).norm() / expected.norm())

    def baselines(self) -> dict[str, Timed]:
        """SDPA over the context, contiguous: bf16 and float32, query heads as rows or expanded."""
        forms: dict[str, Timed] = {}
        shape = self.shape
        keys, values = (part[: self.context].transpose(0, 1)[None].contiguous() for part in (self.keys, self.values))
        if shape.latent:
            values = keys[..., : shape.value_dim].contiguous()
        rows = self.query.view(1, shape.kv_heads, -1, shape.key_dim)
        heads = self.query.view(1, shape.query_heads, 1, shape.key_dim)
        for name, tensors in (("bf16", (rows, heads, keys, values)), ("float32", None)):
            packed, apart, k, v = tensors or (rows.float(), heads.float(), keys.float(), values.float())
            forms[f"{name}, heads as rows"] = _sdpa(packed, k, v, self.settings)
            forms[f"{name}, enable_gqa"] = _sdpa(apart, k, v, self.settings, enable_gqa=True)
        return forms


def _sdpa(query: Any, keys: Any, values: Any, settings: AttentionSettings, **rest: Any) -> Timed:
    from torch.nn.functional import scaled_dot_product_attention

    return lambda: scaled_dot_product_attention(query, keys, values, scale=settings.scaling, **rest)


def _slab(geometry: Any, blocks: int, codec: Any, seed: int) -> tuple[Any, list[int], list[int]]:
    """A slab with full and INT4 slots for `blocks` blocks each, and their numbers in random order."""
    from allocator import ExtentLayout, Slab
    from quant import BlockShape

    group = geometry.groups[0]
    full = geometry.full_slot_bytes(0)
    shape = BlockShape(1, group.kv_heads, geometry.block_tokens, group.key_dim, group.value_dim)
    extent_bytes = 8 * math.lcm(full, 64)
    extents = -(-blocks * full // extent_bytes) + 1
    records = (codec.encoded_bytes(shape, geometry.dtype),)
    slab = Slab(ExtentLayout(2 * extents * extent_bytes, (full,), records, extent_bytes), geometry)
    draw = random.Random(seed)
    full_slots = draw.sample(range(extents * slab.layout.per_extent[0]), blocks)
    first = extents * slab.layout.per_extent[1]
    cold_slots = draw.sample(range(first, first + extents * slab.layout.per_extent[1]), blocks)
    return slab, full_slots, cold_slots


def _on_path(path: str, run: Timed, threads: int = 1) -> Timed:
    """`run` on a kernel path and with so many threads."""
    import torch

    from quant import native

    def forced() -> object:
        before = native.active_path()
        native.kernels.activate(path)
        torch.set_num_threads(threads)
        found = run()
        torch.set_num_threads(1)
        native.kernels.activate(before)
        return found

    return forced


def _measure(
    sides: dict[str, Timed], forms: dict[str, Timed], rounds: int, clock: Callable[[], float] = time.thread_time
) -> dict[str, list[float]]:
    """Milliseconds of each side and of the forms that are near the fastest one, in turn; one round warms up."""
    once = {name: min(_timed(run, clock) for _ in range(2)) for name, run in forms.items()}
    forms = {name: run for name, run in forms.items() if once[name] < 1.5 * min(once.values())}
    runs = {**sides, **forms}
    found: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(-1, rounds):
        for name in list(runs)[:: 1 if number % 2 else -1]:
            sample = _timed(runs[name], clock)
            if number >= 0:
                found[name].append(sample)
    if forms:
        best = min(forms, key=lambda name: statistics.median(found[name]))
        found[BASELINE] = found[best]
    return found


def _timed(run: Timed, clock: Callable[[], float]) -> float:
    start = clock()
    run()
    return 1e3 * (clock() - start)


def rows(options: Options) -> Iterator[Row]:
    """The shapes one after another; RuntimeError without C kernels."""
    import torch

    from quant import native

    if native.kernels is None:
        raise RuntimeError(f"the attention suite needs the C kernels: {native.reason}")
    torch.set_num_threads(1)
    with torch.inference_mode():
        for name, context in (("8k", 8192), ("32k", 32768)):
            yield from _llama_rows(name, 512 if options.quick else context, options)
        yield from _thread_rows("2k", _Scene(_LLAMA, 512 if options.quick else 2048, options.seed), options)
        yield from _latent_rows(512 if options.quick else 8192, options)
        yield from _growth_rows(512 if options.quick else 8192, options)


def _growth_rows(context: int, options: Options) -> Iterator[Row]:
    """Time a token of context at four times the context: 1 is linear, 0.9 a tenth more than that."""
    near, far = (_Scene(_LLAMA, tokens, options.seed) for tokens in (context, 4 * context))
    for case, cold in (("int4", True), ("bf16", False)):
        sides: dict[str, Timed] = {
            "near": near.attend(range(near.blocks) if cold else None),
            "far": far.attend(range(far.blocks) if cold else None),
        }
        found = _measure(sides, {}, ROUNDS_FACTOR * options.rounds)
        yield compared(
            "attention", f"{case}_32k_a_token_vs_8k", "us a 1,000 tokens",
            [1e6 * one / (4 * context) for one in found["far"]],
            better="smaller", baseline="8k", theirs=[1e6 * one / context for one in found["near"]],
        )  # fmt: skip


def _llama_rows(name: str, context: int, options: Options) -> Iterator[Row]:
    from quant import native

    scene = _Scene(_LLAMA, context, options.seed)
    every = range(scene.blocks)
    int4, full = scene.attend(every), scene.attend(None)
    hot = range(1, (context - RESIDUAL_TOKENS) // 16)
    mixed = scene.attend(hot)
    paths = native.available_paths()
    best, plain = paths[0], next(path for path in paths if path != "amx")
    sides = {
        f"int4_{name}_vs_sdpa": _on_path(best, int4),
        f"bf16_{name}_vs_sdpa": _on_path(best, full),
        f"mixed_{name}_vs_sdpa": _on_path(best, mixed),
        f"int4_{name}_vs_sdpa_no_amx": _on_path(plain, int4),
    }
    if "avx2" in paths:
        sides |= {
            f"int4_{name}_avx2_vs_sdpa": _on_path("avx2", int4),
            f"bf16_{name}_avx2_vs_sdpa": _on_path("avx2", full),
        }
    found = _measure(sides, scene.baselines(), ROUNDS_FACTOR * options.rounds)
    note = f"best path here: {best}; without AMX: {plain}"
    for case in sides:
        yield compared(
            "attention", case, "ms", found[case], better="smaller", baseline=BASELINE, theirs=found[BASELINE], note=note
        )
    yield from _thread_rows(name, scene, options)
    for case, cold in (("int4", every), ("mixed", hot), ("bf16", None)):
        yield _error_row(f"{case}_{name}_error", scene, cold)


def _thread_rows(name: str, scene: _Scene, options: Options) -> Iterator[Row]:
    """Wall time with two threads beside one: on an idle machine, and as far as two cores read more than one."""
    from quant import native

    best = native.available_paths()[0]
    for case, cold in (("int4", range(scene.blocks)), ("bf16", None)):
        run = scene.attend(cold)
        both = {"one": _on_path(best, run), "two": _on_path(best, run, 2)}
        walls = _measure(both, {}, ROUNDS_FACTOR * options.rounds, time.perf_counter)
        yield compared(
            "attention", f"{case}_{name}_two_threads_vs_one", "ms", walls["two"],
            better="smaller", baseline="one thread", theirs=walls["one"],
        )  # fmt: skip


def _latent_rows(context: int, options: Options) -> Iterator[Row]:
    from quant import native

    scene = _Scene(_LATENT, context, options.seed)
    every = range(scene.blocks)
    int4, full = scene.attend(every), scene.attend(None)
    sides: dict[str, Timed] = {"latent_8k_vs_sdpa": int4, "latent_bf16_8k_vs_sdpa": full}
    found = _measure(sides, scene.baselines(), ROUNDS_FACTOR * options.rounds)
    for case in sides:
        yield compared(
            "attention", case, "ms", found[case], better="smaller", baseline=BASELINE, theirs=found[BASELINE],
            note=f"path {native.active_path()}",
        )  # fmt: skip
    yield _error_row("latent_8k_error", scene, every)


def _error_row(case: str, scene: _Scene, cold: range | None) -> Row:
    return Row(
        suite="attention", case=case, unit="relative", value=scene.relative_error(cold),
        note="errors: norm of the difference from float64 on the decoded values, with a float32 query",
    )  # fmt: skip
