"""Fidelity after a prefix hit, through the real loop, runner, store and codec.

A first request leaves a prefix behind whose blocks have cooled. A second begins with that prefix, hits it, and is fed
the true continuation: its logits at the next 128 places are held against those of a store that never cools.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.quality import texts
from benchmarks.rows import Options, Row, spread

if TYPE_CHECKING:
    from kvstore import KVStore

PREFIX_TOKENS = 1_152
"""What the second request finds; a multiple of the block."""
RESIDUAL_TOKENS = 128
SCORED_TOKENS = 128
BAR = 0.003
"""The fidelity bar for a mean over all positions; after a hit at most twice as much is asked for."""


def rows(loaded: Any, runner: Any, options: Options) -> Iterator[Row]:
    """Mean KL and top-1 agreement over the first tokens after a hit on cold blocks."""
    count, prefix = (2, 256) if options.quick else (8, PREFIX_TOKENS)
    tokenizer = loaded.tokenizer
    windows = [
        window[0].tolist()
        for window in texts.windows(
            texts.tokenizer_of(tokenizer), count, prefix + 2 * RESIDUAL_TOKENS, first_token=tokenizer.bos_token_id
        )
    ]
    expected, _ = _second_requests(loaded, runner, windows, prefix, codec="raw")
    found, cold_share = _second_requests(loaded, runner, windows, prefix, codec="int4")
    divergences, agreements = [], []
    for reference, ours in zip(expected, found, strict=True):
        at = torch.log_softmax(reference.float(), -1)
        of = torch.log_softmax(ours.float(), -1)
        divergences.append((at.exp() * (at - of)).sum(-1).mean().item())
        agreements.append((at.argmax(-1) == of.argmax(-1)).float().mean().item())
    mean = sum(divergences) / count
    note = (
        f"after_hit: {count} prefixes of {prefix} tokens, {100 * cold_share:.0f} % of their blocks read as INT4; the "
        f"first {SCORED_TOKENS} tokens after the hit, true continuation fed, against a store that never cools. The "
        "baseline is twice the bar of 0.003, not a measurement."
    )
    yield Row(
        suite="loop",
        case="after_hit_mean_kl",
        unit="nats",
        value=mean,
        baseline="twice the bar",
        baseline_value=2 * BAR,
        ratio=2 * BAR / mean if mean else None,
        rounds=count,
        spread=spread(divergences),
        note=note,
    )
    yield Row(suite="loop", case="after_hit_top1", unit="share", value=sum(agreements) / count, rounds=count, note=note)


def _second_requests(
    loaded: Any, runner: Any, windows: list[list[int]], prefix: int, codec: str
) -> tuple[list[torch.Tensor], float]:
    """Per window Tensor[scored, vocab] float32, and the share of prefix blocks that were read in INT4."""
    from engine_adapter.decode_loop import DecodeLoop
    from engine_adapter.request import Request
    from kvstore import Identity, KVStore, KVStoreConfig

    identity = Identity(model=loaded.name, weights=loaded.weights, geometry=runner.geometry)
    needed = sum(map(len, windows)) * 2 * runner.geometry.token_bytes
    store = KVStore(runner.geometry, identity, KVStoreConfig(device_bytes=needed + (64 << 20), codec=codec))
    runner.attach(store.slab, store.cold_codec)
    loop = DecodeLoop(runner, store, max_batch_sequences=len(windows), step_tokens=512)
    if codec != "raw":
        for number, window in enumerate(windows):
            first = window[: prefix + RESIDUAL_TOKENS]
            loop.submit(Request(f"first{number}", first, max_new_tokens=2, forced_token_ids=window[len(first) :]))
        loop.run()
        _let_cool(store)
    logits: list[list[torch.Tensor]] = [[] for _ in windows]
    for number, window in enumerate(windows):
        loop.submit(
            Request(
                f"second{number}",
                window[: prefix + 1],
                max_new_tokens=SCORED_TOKENS,
                forced_token_ids=window[prefix + 1 : prefix + 1 + SCORED_TOKENS],
                keep_logits=partial(_keep, logits[number]),
            )
        )
    loop.step()
    cold_share = _cold_share(store, prefix // runner.geometry.block_tokens)
    results = loop.run()
    if codec != "raw" and any(sum(result.reused_tokens.values()) < prefix for result in results.values()):
        raise RuntimeError(f"a second request reused less than {prefix} tokens")
    store.close()
    return [torch.stack(rows) for rows in logits], cold_share


def _keep(kept: list[torch.Tensor], _branch: int, _position: int, logits: torch.Tensor) -> None:
    kept.append(logits.float().clone())


def _let_cool(store: KVStore) -> None:
    """Give the store the steps that it would have between two turns of a chat."""
    quiet = 0
    while quiet < 3:
        quiet = 0 if store.step().cooled_blocks else quiet + 1
        store.wait(0.02)


def _cold_share(store: KVStore, blocks: int) -> float:
    entries = [store.tables(sequence)[0][:blocks] for sequence in store.sequence_ids()]
    return sum(int((table & 1).sum()) for table in entries) / max(1, sum(map(len, entries)))
