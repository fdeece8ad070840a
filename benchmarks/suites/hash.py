"""The names of a 32k prompt's blocks, from the list of its token ids, beside hashlib and beside vLLM."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace

from benchmarks.peers import PeerProcess
from benchmarks.rows import Options, Row, Stopwatch, compared, interleaved
from benchmarks.suites import pool_workload as work
from benchmarks.suites.own_pool import OwnSide
from benchmarks.suites.pool import PEER, vllm_python
from kvstore import HashChain
from kvstore.operations import HASH_CHAIN, native_hashing
from quant import dispatch

_ROOT = bytes(range(32))
_NOTE = (
    "2,048 blocks of 16 tokens, SHA-256 each, from a list of Python ints (checked and converted within the time) "
    "unless the case says otherwise. CPU seconds of the one thread."
)
_VLLM_NOTE = "vLLM's own sha256 block hasher over the same list, its fastest that resists collisions."


def rows(options: Options) -> Iterator[Row]:
    """Rows beside hashlib everywhere; beside vLLM where it is."""
    yield _beside(options, "hash_32k_vs_hashlib", _whole, _by_hashlib, "hashlib, the same code")
    if native_hashing() is not None:
        from quant.native import kernels

        for way, runs_here in kernels.sha_ways():
            if runs_here:
                yield _beside(options, f"hash_32k_ready_{way}_vs_hashlib", _ready(way), _ready_hashlib, "hashlib")
    python = None if options.quick else vllm_python()
    if python is None:
        options.log("hash: vLLM is not here, so nothing of it stands beside")
        return
    peer = PeerProcess(python, PEER)
    try:
        own = OwnSide()
        row = _beside(
            options,
            "hash_32k_vs_vllm",
            own.hash_prompt,
            lambda number: peer.seconds("hash_prompt", number),
            f"vllm {peer.version}",
        )
        yield replace(row, note=f"{_NOTE} {_VLLM_NOTE}")
    finally:
        peer.close()


def _beside(
    options: Options, case: str, ours: Callable[[int], float], theirs: Callable[[int], float], baseline: str
) -> Row:
    mine, other = interleaved(ours, theirs, options.rounds)
    return compared(
        "hash",
        case,
        "us",
        [1e6 * seconds for seconds in mine],
        better="smaller",
        baseline=baseline,
        theirs=[1e6 * seconds for seconds in other],
        note=_NOTE,
    )


def _whole(round_number: int) -> float:
    tokens = work.prompt(round_number)
    chain = HashChain(_ROOT, work.BLOCK_TOKENS)
    watch = Stopwatch(time.thread_time)
    with watch:
        chain.extend(tokens)
    return watch.seconds


def _by_hashlib(round_number: int) -> float:
    with dispatch.forced(HASH_CHAIN, "cpu", "hashlib"):
        return _whole(round_number)


def _ready(way: str) -> Callable[[int], float]:
    """The chain alone, over tokens that are uint32 already, by one way to compute SHA-256."""
    from quant.native import kernels

    def run(round_number: int) -> float:
        tokens = array("I", work.prompt(round_number))
        watch = Stopwatch(time.thread_time)
        with watch:
            kernels.hash_chain(_ROOT, tokens, work.BLOCK_TOKENS, way)
        return watch.seconds

    return run


def _ready_hashlib(round_number: int) -> float:
    chain = HashChain(_ROOT, work.BLOCK_TOKENS)
    chain._tokens = array("I", work.prompt(round_number))
    watch = Stopwatch(time.thread_time)
    with watch:
        chain._hash_plain(_ROOT, 0, work.PROMPT_TOKENS)
    return watch.seconds
