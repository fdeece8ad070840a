"""The daemon: `kvstore serve` in a process of its own, beside one memcpy of the same bytes, and beside its limits."""

from __future__ import annotations

import ctypes
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from benchmarks.rows import Options, Row, Stopwatch, compared, interleaved
from benchmarks.suites import daemon_lmcache, daemon_load
from benchmarks.suites.daemon_flood import flood_rows
from benchmarks.suites.daemon_served import ROOT, Served, cut, moved
from kvstore.daemon import DaemonTier
from kvstore.host_tier.tier import HostTier
from kvstore.identity import HashChain
from kvstore.testing.transfer_contract import key_of
from kvstore.tier import CopyKey, GetItem, PutItem, ResultCode

_MOVED_BYTES = 64 << 20
_BLOCK_BYTES = 2 << 20  # 16 tokens of an 8B model in bf16
_LAYERS, _HEADS, _BLOCK_TOKENS, _DIM = 32, 8, 16, 128
_PROMPT_TOKENS = 32_768
_CLIENTS = 8
_ENOUGH_PER_SECOND = 25_000
_LOOKUP_SECONDS, _PROMPT_SECONDS, _PROMPT_SECONDS_OWN = 20e-6, 600e-6, 350e-6
_QUICK = 8

_MOVE_NOTE = (
    "64 MiB in 32 copies, one transfer, wall time: daemon and client are two processes, frames are written with a "
    "checksum and every read checks what arrived. The baseline is one memmove of the 64 MiB."
)
_UNCHECKED_NOTE = (
    "As store_raw_64MiB and retrieve_raw_64MiB, by a daemon with `checksums = false`: headers are checked, payload is "
    "not. Never the default."
)
_INT4_NOTE = (
    "INT4 copies of 512 tokens of an 8B model (64 MiB of bf16) read from the daemon, checked and decoded to bf16. The "
    "baseline is one memmove of the bf16 bytes."
)
_LOOKUP_NOTE = (
    "Round trip of a lookup of 16 hashes that are all there, median, client and daemon on one core. The baseline is "
    "the limit of 20 us. (`lookup16_anywhere`: on any core; waking another core of a virtual machine costs more than "
    "the lookup.)"
)
_RATE_NOTE = "8 client processes on all cores, lookups of 16 hashes; the baseline is 25,000 a second."
_PROMPT_NOTE = (
    "A prompt of 32,768 tokens in 2,048 blocks, all there: hash chain from token ids and leading run. The baseline is "
    "the limit."
)


def rows(options: Options) -> Iterator[Row]:
    """Moves, lookups, prompts; then LMCache's daemon beside ours, where it is installed."""
    with Served(512 << 20) as served:
        tier = DaemonTier(served.path, timeout_seconds=10)
        yield from _move_rows(options, tier)
        yield from _int4_rows(options, tier)
        _store_small(tier)
        yield from _lookup_rows(options, served, tier)
        yield _rate_row(options, served)
        yield from _prompt_rows(options, tier)
        small = [key_of(number, codec="small") for number in range(daemon_load.HASHES)]
        yield from flood_rows(options, served.path, tier, small)
        tier.close()
    with Served(512 << 20, checksums="false") as served:
        tier = DaemonTier(served.path, timeout_seconds=10)
        yield from _move_rows(options, tier, "_unchecked", _UNCHECKED_NOTE)
        tier.close()
    yield from daemon_lmcache.rows(options)


def _move_rows(options: Options, tier: DaemonTier, ending: str = "", note: str = _MOVE_NOTE) -> Iterator[Row]:
    total = _MOVED_BYTES // (_QUICK if options.quick else 1)
    source = np.random.default_rng(options.seed).integers(0, 256, total, dtype=np.uint8)
    target = np.zeros_like(source)
    keys = [key_of(number) for number in range(total // _BLOCK_BYTES)]
    puts = [PutItem(key, [piece]) for key, piece in zip(keys, cut(source, _BLOCK_BYTES), strict=True)]
    gets = [GetItem(key, piece) for key, piece in zip(keys, cut(target, _BLOCK_BYTES), strict=True)]

    def store(_: int) -> float:
        tier.delete(keys)
        return moved(tier, puts)

    def retrieve(_: int) -> float:
        return moved(tier, gets)

    def theirs(_: int) -> float:
        watch = Stopwatch()
        with watch:
            ctypes.memmove(target.ctypes.data, source.ctypes.data, total)
        return watch.seconds

    for name, ours in (("store_raw_64MiB", store), ("retrieve_raw_64MiB", retrieve)):
        yield _rate_compared(name + ending, options, ours, theirs, total, note)
    if not np.array_equal(source, target):
        raise RuntimeError("what came back is not what was stored")
    tier.delete(keys)


def _rate_compared(
    case: str, options: Options, ours: Callable[[int], float], theirs: Callable[[int], float], total: int, note: str
) -> Row:
    mine, other = interleaved(ours, theirs, max(options.rounds, 1 if options.quick else 15))
    speeds = [[total / seconds / 1e9 for seconds in side] for side in (mine, other)]
    return compared("daemon", case, "GB/s", speeds[0], better="larger", baseline="memmove", theirs=speeds[1], note=note)


def _int4_rows(options: Options, tier: DaemonTier) -> Iterator[Row]:
    import torch

    from quant import BlockShape, get_codec

    count = _MOVED_BYTES // _BLOCK_BYTES // (_QUICK if options.quick else 1)
    torch.manual_seed(options.seed)
    codec, shape = get_codec("int4", error_bound=1.0), BlockShape(_LAYERS, _HEADS, _BLOCK_TOKENS, _DIM, _DIM)
    full = torch.randn(2, count, *shape.keys_shape).to(torch.bfloat16)
    restored = torch.zeros_like(full)
    packed = torch.empty(count, codec.encoded_bytes(shape, "bfloat16"), dtype=torch.uint8)
    codec.encode_batch(full[0], full[1], packed)
    arrived = torch.zeros_like(packed)
    keys = [key_of(number, codec="int4", parameters=codec.parameters()) for number in range(count)]
    moved(tier, [PutItem(key, [packed[n].numpy()]) for n, key in enumerate(keys)])
    batch = 16

    def ours(_: int) -> float:
        watch = Stopwatch()
        for at in range(0, count, batch):
            part = slice(at, min(at + batch, count))
            items = [GetItem(key, row.numpy()) for key, row in zip(keys[part], arrived[part], strict=True)]
            with watch:
                tier.submit_get(items)
                (done,) = tier.poll()
                codec.decode_into(arrived[part], restored[0][part], restored[1][part])
            if set(done.results) != {ResultCode.OK}:
                raise RuntimeError(f"a transfer ended as {sorted(set(done.results))}")
        return watch.seconds

    def theirs(_: int) -> float:
        watch = Stopwatch()
        with watch:
            ctypes.memmove(restored.data_ptr(), full.data_ptr(), full.nbytes)
        return watch.seconds

    yield _rate_compared("retrieve_int4_64MiB", options, ours, theirs, full.nbytes, _INT4_NOTE)
    tier.delete(keys)


def _store_small(tier: DaemonTier) -> None:
    """Copies that are only looked up."""
    keys = [key_of(number, codec="small") for number in range(daemon_load.HASHES)]
    moved(tier, [PutItem(key, [bytes(64)]) for key in keys])


def _lookup_rows(options: Options, served: Served, tier: DaemonTier) -> Iterator[Row]:
    keys = [key_of(number, codec="small") for number in range(daemon_load.HASHES)]
    hashes = [key.hash for key in keys]

    def median_seconds(_: int) -> float:
        took = []
        for _ in range(100 if options.quick else 1000):
            started = time.perf_counter()
            found = tier.leading_run(keys[0], hashes)
            took.append(time.perf_counter() - started)
            if found != daemon_load.HASHES:
                raise RuntimeError(f"a lookup found {found} of {daemon_load.HASHES}: {tier.counters()}")
        return statistics.median(took)

    own = os.sched_getaffinity(0)
    samples: dict[str, list[float]] = {"here": [], "anywhere": []}
    for _ in range(options.rounds):
        served.on_core(min(own))
        os.sched_setaffinity(0, {min(own)})
        samples["here"].append(median_seconds(0))
        os.sched_setaffinity(0, own)
        served.on_core(None)
        samples["anywhere"].append(median_seconds(0))
    yield _limit_row("lookup16_20us_over_p50", samples["here"], _LOOKUP_SECONDS, _LOOKUP_NOTE)
    yield _limit_row("lookup16_anywhere", samples["anywhere"], _LOOKUP_SECONDS, _LOOKUP_NOTE)


def _limit_row(case: str, seconds: Sequence[float], limit: float, note: str) -> Row:
    ours = [one * 1e6 for one in seconds]
    limits = [limit * 1e6] * len(ours)
    return compared("daemon", case, "us", ours, better="smaller", baseline="limit", theirs=limits, note=note)


def _rate_row(options: Options, served: Served) -> Row:
    seconds = 0.2 if options.quick else 1.0
    command = [sys.executable, "-m", "benchmarks.suites.daemon_load", served.path, str(seconds)]
    rates = []
    for _ in range(min(3, options.rounds)):
        clients = [
            subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(_CLIENTS)
        ]
        for one in clients:
            assert one.stdout is not None
            if one.stdout.readline() != "ready\n":
                raise RuntimeError("a client did not start; its error is above")
        for one in clients:
            assert one.stdin is not None
            one.stdin.write("go\n")
            one.stdin.flush()
        rates.append(sum(int(one.communicate()[0]) for one in clients) / seconds)
    limits = [float(_ENOUGH_PER_SECOND)] * len(rates)
    return compared(
        "daemon", "lookups_per_second_per_25000", "lookups/s", rates, better="larger", baseline="limit", theirs=limits,
        note=_RATE_NOTE,
    )  # fmt: skip


def _prompt_rows(options: Options, tier: DaemonTier) -> Iterator[Row]:
    tokens = np.random.default_rng(options.seed).integers(0, 128_000, _PROMPT_TOKENS, dtype=np.uint32)
    root = b"\x05" * 32
    hashes = HashChain(root, _BLOCK_TOKENS).extend(tokens)
    template = CopyKey(root, 0, hashes[0], "int4", False, (0, 8), (0, 32))
    host = HostTier(64 << 20, slot_bytes=(4096,))
    for one in (tier, host):
        keys = template.with_hashes(hashes)
        for at in range(0, len(keys), 256):
            moved(one, [PutItem(key, [bytes(64)]) for key in keys[at : at + 256]])
    cases = (
        ("lookup_32k_600us_over_p50", tier, _PROMPT_SECONDS),
        ("lookup_32k_in_process_350us_over_p50", host, _PROMPT_SECONDS_OWN),
    )
    for case, where, limit in cases:
        took = []
        for _ in range(5 if options.quick else 60 * options.rounds):
            started = time.perf_counter()
            chain = HashChain(root, _BLOCK_TOKENS)
            chain.extend(tokens)
            found = where.leading_run(template, chain.hashes)
            took.append(time.perf_counter() - started)
            if found != len(hashes):
                raise RuntimeError(f"a lookup found {found} of {len(hashes)}")
        yield _limit_row(case, [statistics.median(took)], limit, _PROMPT_NOTE)
    host.close()
