"""Blocks encoded and decoded as the store keeps them, beside one memmove of their full precision bytes."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.rows import Options, Row, Stopwatch, compared, interleaved
from quant import BlockShape, dispatch, get_codec, native

_MOVED_BYTES = 64 << 20
_HUGE_PAGE_BYTES = 2 << 20
_SMALL = 16  # times less for what runs on torch, and in a quick run
_LAYERS = 4
_NOTE = (
    "64 MiB of blocks of 16 tokens as slots of a slab hold them (4 MiB where torch runs), through the public codec, "
    "range and error checks included. GB/s of the full precision side. The baseline is one memmove of as many bytes "
    "in the same round. All in huge pages. CPU seconds of the one thread, wall time for two."
)


@dataclass(frozen=True, slots=True)
class _Case:
    """`form` names what is other than usual; `on`: the dispatched implementation or C path that is forced."""

    shape: str
    form: str = ""
    codec: str = "int4"
    dtype: torch.dtype = torch.bfloat16
    threads: int = 1
    on: str = ""

    @property
    def slow(self) -> bool:
        """Whether torch does the work."""
        return self.codec != "int4" or self.on == "torch" or dispatch.implementation_of("int4_encode", "cpu") == "torch"

    def forced(self) -> AbstractContextManager[None]:
        """What must hold while the case runs."""
        if self.on == "torch":
            return _on_torch()
        return native.forced_path(self.on) if self.on else nullcontext()


# KV heads, key dim, value dim
_SHAPES = {
    "d64": (8, 64, 64),
    "d128": (8, 128, 128),
    "latent576": (1, 576, 0),
    "d96": (8, 96, 96),
    "d256": (4, 256, 256),
}


class _Slots:
    """Two slabs of full slots and a payload a block, for one case. Values differ in size and offset by channel."""

    def __init__(self, case: _Case, scale: int, seed: int) -> None:
        heads, key_dim, value_dim = _SHAPES[case.shape]
        item = case.dtype.itemsize
        self.codec = get_codec(case.codec)
        shape = BlockShape(_LAYERS, heads, 16, key_dim, value_dim)
        count = max(1, _MOVED_BYTES // scale // (shape.element_count * item))
        self.moved_bytes = count * shape.element_count * item
        self.source, self.target = _written(self.moved_bytes), _written(self.moved_bytes)
        self.keys, self.values = _views(self.source, shape, case.dtype)
        self.decoded = _views(self.target, shape, case.dtype)
        size = self.codec.encoded_bytes(shape, case.dtype)
        self.payload = _written(count * size).view(count, size)
        draw = torch.Generator().manual_seed(seed)
        for part in (self.keys, self.values):
            if part is not None:
                dim = part.shape[-1]
                spread, offset = torch.randn(dim, generator=draw).exp(), torch.randn(dim, generator=draw)
                part.copy_(torch.randn(part.shape, generator=draw) * spread + offset)
        if not bool(self.encode().all()):
            raise RuntimeError(f"codec {case.codec} refuses blocks of the benchmark ({case.shape})")

    def encode(self) -> torch.Tensor:
        """All blocks into the payloads."""
        return self.codec.encode_batch(self.keys, self.values, self.payload)

    def decode(self) -> None:
        """The payloads into the second slab."""
        self.codec.decode_into(self.payload, *self.decoded)

    def memmove(self) -> None:
        """The baseline."""
        ctypes.memmove(self.target.data_ptr(), self.source.data_ptr(), self.moved_bytes)


def _written(size: int) -> torch.Tensor:
    """uint8 [size] that has been touched, in whole huge pages: numpy asks for them at this size."""
    room = np.empty(size + _HUGE_PAGE_BYTES, dtype=np.uint8)
    start = -room.ctypes.data % _HUGE_PAGE_BYTES
    room[start : start + size] = 1
    return torch.from_numpy(room[start : start + size])


def _views(memory: torch.Tensor, shape: BlockShape, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """K [N, layers, heads, 16, key_dim] and V in a slab whose rows hold K of all tokens, then V of all tokens."""
    cut, rest = 16 * shape.key_dim, 16 * shape.value_dim
    rows = memory.view(dtype).view(-1, shape.layers, shape.kv_heads, cut + rest)
    values = rows[..., cut:].unflatten(-1, (16, shape.value_dim)) if rest else None
    return rows[..., :cut].unflatten(-1, (16, shape.key_dim)), values


@contextmanager
def _on_torch() -> Iterator[None]:
    """Both directions on the reference."""
    with dispatch.forced("int4_encode", "cpu", "torch"), dispatch.forced("int4_decode", "cpu", "torch"):
        yield


def _cases() -> list[_Case]:
    """The targets first, then other inputs, threads, C paths and the reference."""
    wanted = ("d64", "d128", "latent576")
    cases = [_Case(shape) for shape in _SHAPES]
    cases += [_Case(shape, "_fp32", dtype=torch.float32) for shape in wanted]
    cases += [_Case("d128", "_fp16", dtype=torch.float16)]
    cases += [_Case(shape, "_2_threads", threads=2) for shape in wanted]
    cases += [_Case("d128", f"_{path}", on=path) for path in native.available_paths()]
    cases += [_Case("d128", codec="int8k")]
    if native.kernels is not None:
        cases.append(_Case("d128", "_torch", on="torch"))
    return cases


def rows(options: Options) -> Iterator[Row]:
    """Encode and decode of every case."""
    before = torch.get_num_threads()
    try:
        for case in _cases():
            torch.set_num_threads(case.threads)
            with case.forced():
                here = _Slots(case, _SMALL if options.quick or case.slow else 1, options.seed)
                for verb, work in (("encode", here.encode), ("decode", here.decode)):
                    yield _measured(options, f"{verb}_{case.codec}_{case.shape}{case.form}", here, work, case.threads)
    finally:
        torch.set_num_threads(before)


def _measured(options: Options, name: str, here: _Slots, work: Callable[[], object], threads: int) -> Row:
    clock = time.perf_counter if threads > 1 else time.thread_time

    def sample(run: Callable[[], object]) -> Callable[[int], float]:
        def timed(_: int) -> float:
            watch = Stopwatch(clock)
            with watch:
                run()
            return watch.seconds

        return timed

    mine, other = interleaved(sample(work), sample(here.memmove), options.rounds)
    return compared(
        "codec",
        name,
        "GB/s",
        [here.moved_bytes / seconds / 1e9 for seconds in mine],
        better="larger",
        baseline="memmove",
        theirs=[here.moved_bytes / seconds / 1e9 for seconds in other],
        note=_NOTE,
    )
