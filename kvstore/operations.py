"""What kvstore itself offers to the dispatch, and the decisions as gauges of a store's metrics.

Imported by the store and by `kvstore doctor`; imports no torch. The hash chain asks quant.dispatch what runs it.
"""

from __future__ import annotations

import hashlib
import time
from array import array
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

from quant import dispatch

if TYPE_CHECKING:
    from kvstore.metrics import StoreMetrics

HASH_CHAIN = "hash_chain"
_PROMPT_TOKENS = 32768
_BLOCK_TOKENS = 16
_ROUNDS = 5


def state_kernel_paths(metrics: StoreMetrics, device: str) -> None:
    """Set kernel_path to what runs every known operation on a torch device ("cpu", "cuda:0") and on the CPU beside.

    Operations of upper layers are among them once these are imported.
    """
    kind = device.partition(":")[0]
    known = [*dispatch.decisions("cpu"), *(dispatch.decisions(kind) if kind != "cpu" else ())]
    metrics.restate(
        "kernel_path", [({"operation": one.operation, "device": one.device, "path": one.path}, 1) for one in known]
    )


def hash_chain_speed() -> dispatch.Speed:
    """Tokens of a 32k prompt named a second, beside one sha256 over its bytes."""
    from kvstore.identity import HashChain

    tokens = list(range(_PROMPT_TOKENS))
    flat = array("I", tokens).tobytes()
    ours, plain = [], []
    for _ in range(_ROUNDS):
        chain = HashChain(b"\x00" * 32, _BLOCK_TOKENS)
        start = time.perf_counter()
        chain.extend(tokens)
        middle = time.perf_counter()
        hashlib.sha256(flat).digest()
        ours.append(middle - start)
        plain.append(time.perf_counter() - middle)
    best = min(ours)
    return dispatch.Speed(_PROMPT_TOKENS / best / 1e6, "M tokens/s", min(plain) / best, "one sha256 of their bytes")


class NativeHashing(NamedTuple):
    """The two C functions that a hash chain needs.

    hash_chain   (parent bytes[32], tokens uint32[blocks * block_tokens], block_tokens) -> hashes of a run of blocks
                 without media, bytes[32] each
    token_bytes  a list or tuple of token ids as uint32 in the machine's order; None unless all are plain ints in
                 [0, 2**32)
    """

    hash_chain: Callable[[bytes, memoryview, int], list[bytes]]
    token_bytes: Callable[[Sequence[object]], bytes | None]


def native_hashing() -> NativeHashing | None:
    """What hashes in C here; None where hashlib has to."""
    return _loaded() if dispatch.implementation_of(HASH_CHAIN, "cpu") == "native" else None


@cache
def _loaded() -> NativeHashing:
    from quant import native

    return NativeHashing(native.kernels.hash_chain, native.kernels.token_bytes)


def offer_hash_chain() -> None:
    """The chain is made on the CPU wherever the blocks lie."""
    absence = partial(dispatch.native_absence, "hash_chain", "token_bytes")
    native = dispatch.Implementation("native", absence, _native_variant)
    dispatch.offer(HASH_CHAIN, "cpu", [native, dispatch.Implementation("hashlib")], measure=hash_chain_speed)


def _native_variant() -> str:
    from quant import native

    return str(native.kernels.sha_best())


offer_hash_chain()
