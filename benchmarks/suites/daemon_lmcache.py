"""LMCache's daemon beside ours in the same run: the same KV of 512 tokens, 64 MiB, stored and retrieved."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.peers import PeerProcess, peer_python
from benchmarks.rows import Options, Row, compared, interleaved
from benchmarks.suites.daemon_served import Served, cut, moved
from kvstore.daemon import DaemonTier
from kvstore.testing.transfer_contract import key_of
from kvstore.tier import GetItem, PutItem

_PEER = "benchmarks.suites.lmcache_daemon_peer"
_TOKENS = 512
_TOKEN_BYTES = 128 << 10
_BLOCK_TOKENS = 16
_NOTE = (
    "512 tokens of an 8B model in bf16, 64 MiB, wall time, each through its own daemon's shared memory; LMCache's "
    "lookup is not counted. It copies between vLLM's paged tensors and chunks of 256 tokens and checks nothing; ours "
    "are blocks of one run of bytes each, as a slab has them, and every read is checked."
)


def rows(options: Options) -> Iterator[Row]:
    """Store and retrieve; none, and a line that says why, where LMCache is not installed."""
    python = peer_python("KVSTORE_LMCACHE_PYTHON", ".venv-lmcache")
    if python is None:
        options.log("daemon: no LMCache here (make bench-peers): its daemon is not measured")
        return
    tokens = _TOKENS // (2 if options.quick else 1)
    peer = PeerProcess(python, _PEER, str(tokens))
    try:
        if not peer.seconds("mode"):
            raise RuntimeError("LMCache's worker does not use shared memory here")
        with Served(256 << 20) as served:
            tier = DaemonTier(served.path, timeout_seconds=10)
            yield from _rows(options, peer, tier, tokens)
            tier.close()
        peer.seconds("stop")
    finally:
        peer.close()


def _rows(options: Options, peer: PeerProcess, tier: DaemonTier, tokens: int) -> Iterator[Row]:
    total, size = tokens * _TOKEN_BYTES, _BLOCK_TOKENS * _TOKEN_BYTES
    source = np.random.default_rng(options.seed).integers(0, 256, total, dtype=np.uint8)
    target = np.zeros_like(source)
    keys = [key_of(number) for number in range(total // size)]
    puts = [PutItem(key, [piece]) for key, piece in zip(keys, cut(source, size), strict=True)]
    gets = [GetItem(key, piece) for key, piece in zip(keys, cut(target, size), strict=True)]

    def store(_: int) -> float:
        tier.delete(keys)
        return moved(tier, puts)

    def retrieve(_: int) -> float:
        return moved(tier, gets)

    for verb, ours in (("store", store), ("retrieve", retrieve)):
        mine, other = interleaved(ours, lambda _, verb=verb: peer.seconds(verb), options.rounds)  # type: ignore[misc]
        speeds = [[total / seconds / 1e9 for seconds in side] for side in (mine, other)]
        yield compared(
            "daemon", f"{verb}_vs_lmcache", "GB/s", speeds[0], better="larger", baseline=peer.version,
            theirs=speeds[1], note=_NOTE,
        )  # fmt: skip
    if not peer.seconds("check") or not np.array_equal(source, target):
        raise RuntimeError("what came back is not what was stored")
