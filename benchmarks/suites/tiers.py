"""Tiers beside one memmove of the same bytes: raw payloads, and KV restored from INT4 copies with decoding included."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.rows import Options, Row, Stopwatch, compared, interleaved
from kvstore.disk_tier.tier import DiskTier
from kvstore.host_tier.tier import HostTier
from kvstore.testing.transfer_contract import key_of
from kvstore.tier import CopyKey, GetItem, PutItem, ResultCode, Tier

_SIZES = {"1MiB": 1 << 20, "4MiB": 4 << 20}
_MOVED_BYTES = 64 << 20
_BATCH = 16
_LINE_BYTES = 64
_QUICK = 16  # times less in a quick run
_LAYERS, _HEADS, _DIM = 32, 8, 128  # an 8B model
_BLOCK_TOKENS = {"": 64, "_16_tokens": 16}  # 2.3 MiB and 0.6 MiB of INT4
_RESTORED_TOKENS = 512
_NOTE = (
    "64 MiB in payloads of this size, 16 a transfer, CPU seconds of the one thread; the tier's files are in the page "
    "cache, its frames carry checksums that every read checks. The baseline is one memmove a payload."
)
_RESTORE_NOTE = (
    "INT4 copies of 512 tokens of an 8B model (blocks of 64 tokens, or of 16) read from the tier and decoded to bf16, "
    "one block after the other; GB of bf16 a second. The baseline is a memmove of the bf16 bytes."
)

Bytes = npt.NDArray[np.uint8]


def rows(options: Options) -> Iterator[Row]:
    """Disk and host, put and get at each size, then restoring; then the remote tier's rows where its suite is there."""
    with_directory = tempfile.mkdtemp(prefix="kvstore-bench-")
    try:
        yield from _raw_rows(options, Path(with_directory))
        for name, block_tokens in _BLOCK_TOKENS.items():
            yield from _restore_rows(options, Path(with_directory), name, block_tokens)
    finally:
        shutil.rmtree(with_directory, ignore_errors=True)
    for beside in ("tiers_redis", "tiers_step", "tiers_layers"):
        if importlib.util.find_spec(f"benchmarks.suites.{beside}") is not None:
            yield from importlib.import_module(f"benchmarks.suites.{beside}").rows(options)


def _tiers(directory: Path, budget_bytes: int, size_bytes: int) -> Iterator[tuple[str, Tier]]:
    host = HostTier(budget_bytes, slot_bytes=(size_bytes,), prefault=True)
    host.wait_prefaulted(60)
    yield "host", host
    host.close()
    disk = DiskTier(tempfile.mkdtemp(dir=directory), budget_bytes + budget_bytes // 4 + (8 << 20))
    yield "disk", disk
    disk.close()


def _raw_rows(options: Options, directory: Path) -> Iterator[Row]:
    moved_bytes = _MOVED_BYTES // (_QUICK if options.quick else 1)
    for size_name, size in _SIZES.items():
        count = max(1, moved_bytes // size)
        source, target = _filled(count * size, options.seed), _filled(count * size, options.seed + 1)
        for name, tier in _tiers(directory, 2 * count * size, size):
            verbs = ("write", "read") if name == "disk" else ("put", "get")
            for verb, run in zip(verbs, (_put_round, _get_round), strict=True):
                yield _measured(options, f"{name}_{verb}_{size_name}", tier, run, (source, target, size))


def _put_round(tier: Tier, source: Bytes, target: Bytes, size: int, watch: Stopwatch) -> None:
    """What lies there goes first, unmeasured: its slots are used again, as in a tier that has been full before."""
    keys = _keys(source.nbytes // size)
    tier.delete(keys)
    for at in range(0, len(keys), _BATCH):
        items = [PutItem(key, [source[n * size : n * size + size]]) for n, key in _numbered(keys, at)]
        with watch:
            tier.submit_put(items)
        _check(tier)


def _get_round(tier: Tier, source: Bytes, target: Bytes, size: int, watch: Stopwatch) -> None:
    keys = _keys(source.nbytes // size)
    for at in range(0, len(keys), _BATCH):
        items = [GetItem(key, target[n * size : n * size + size]) for n, key in _numbered(keys, at)]
        with watch:
            tier.submit_get(items)
        _check(tier)


def _measured(
    options: Options,
    case: str,
    tier: Tier,
    run: Callable[[Tier, Bytes, Bytes, int, Stopwatch], None],
    where: tuple[Bytes, Bytes, int],
) -> Row:
    source, target, size = where

    def ours(_: int) -> float:
        watch = Stopwatch(time.thread_time)
        run(tier, source, target, size, watch)
        return watch.seconds

    def theirs(_: int) -> float:
        watch = Stopwatch(time.thread_time)
        for at in range(0, source.nbytes, size):
            with watch:
                ctypes.memmove(target.ctypes.data + at, source.ctypes.data + at, size)
        return watch.seconds

    mine, other = interleaved(ours, theirs, options.rounds)
    speeds = [[source.nbytes / seconds / 1e9 for seconds in side] for side in (mine, other)]
    return compared("tiers", case, "GB/s", speeds[0], better="larger", baseline="memmove", theirs=speeds[1], note=_NOTE)


def _restore_rows(options: Options, directory: Path, suffix: str, block_tokens: int) -> Iterator[Row]:
    import torch

    from quant import BlockShape, get_codec

    count = max(1, _RESTORED_TOKENS // block_tokens // (_QUICK if options.quick else 1))
    torch.manual_seed(options.seed)
    codec, shape = get_codec("int4", error_bound=1.0), BlockShape(_LAYERS, _HEADS, block_tokens, _DIM, _DIM)
    full = torch.randn(2, count, *shape.keys_shape).to(torch.bfloat16)
    restored = torch.zeros_like(full)
    payload_bytes = codec.encoded_bytes(shape, "bfloat16")
    packed = torch.empty(count, payload_bytes, dtype=torch.uint8)
    codec.encode_batch(full[0], full[1], packed)
    arrived = torch.zeros_like(packed)
    keys = _keys(count, codec="int4", parameters=codec.parameters())
    for name, tier in _tiers(directory, 2 * packed.nbytes, payload_bytes):
        tier.submit_put([PutItem(key, [packed[n].numpy()]) for n, key in enumerate(keys)])
        _check(tier)

        def ours(_: int, tier: Tier = tier) -> float:
            watch = Stopwatch(time.thread_time)
            for n, key in enumerate(keys):
                with watch:
                    tier.submit_get([GetItem(key, arrived[n].numpy())])
                    _check(tier)
                    codec.decode_into(arrived[n], restored[0][n], restored[1][n])
            return watch.seconds

        def theirs(_: int) -> float:
            watch = Stopwatch(time.thread_time)
            for half in range(2):
                for n in range(count):
                    with watch:
                        ctypes.memmove(restored[half][n].data_ptr(), full[half][n].data_ptr(), full[half][n].nbytes)
            return watch.seconds

        mine, other = interleaved(ours, theirs, options.rounds)
        speeds = [[full.nbytes / seconds / 1e9 for seconds in side] for side in (mine, other)]
        yield compared(
            "tiers",
            f"restore_{name}_int4{suffix}",
            "GB/s",
            speeds[0],
            better="larger",
            baseline="memmove",
            theirs=speeds[1],
            note=_RESTORE_NOTE,
        )


def _keys(count: int, **changes: object) -> list[CopyKey]:
    return [key_of(number, **changes) for number in range(count)]


def _numbered(keys: list[CopyKey], at: int) -> list[tuple[int, CopyKey]]:
    return list(enumerate(keys))[at : at + _BATCH]


def _check(tier: Tier) -> None:
    """What was measured must have worked. The executor is inline: the completion is there."""
    for done in tier.poll():
        if set(done.results) != {ResultCode.OK}:
            raise RuntimeError(f"tier {tier.name}: {done}")


def _filled(size: int, seed: int) -> Bytes:
    """Bytes that begin on a cache line, as slabs and torch's tensors do: numpy's own begin 16 bytes behind one."""
    room = np.random.default_rng(seed).integers(0, 256, size + _LINE_BYTES, dtype=np.uint8)
    start = -room.ctypes.data % _LINE_BYTES
    return room[start : start + size]
