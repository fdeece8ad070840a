"""The decode loop with and without: speculative decoding, chunked prefill; and fidelity after a prefix hit.

One real model (SmolLM2), one thread, rounds of both sides in turn; a fresh store for every round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.rows import Options, Row, Stopwatch, compared, interleaved

if TYPE_CHECKING:
    from engine_adapter.decode_loop import DecodeLoop

DEVICE_BYTES = 512 << 20
CHUNK_TOKENS = 128
LONG_PROMPT_TOKENS = 2_048
RUNNING_REQUESTS = 4


@dataclass(slots=True)
class _Bench:
    """The model and its runner; makes a fresh store and loop for every round."""

    loaded: Any
    runner: Any

    def loop(self, **settings: Any) -> DecodeLoop:
        from engine_adapter.decode_loop import DecodeLoop
        from kvstore import Identity, KVStore, KVStoreConfig

        identity = Identity(model=self.loaded.name, weights=self.loaded.weights, geometry=self.runner.geometry)
        store = KVStore(self.runner.geometry, identity, KVStoreConfig(device_bytes=DEVICE_BYTES, codec="raw"))
        self.runner.attach(store.slab, store.cold_codec)
        return DecodeLoop(self.runner, store, **settings)

    def text(self, start: int, count: int) -> list[int]:
        from benchmarks.quality import texts

        tokens = texts.tokenizer_of(self.loaded.tokenizer)(next(iter(texts.sources().values())))
        return tokens[start : start + count]

    def chat(self, request: str) -> list[int]:
        turns = [{"role": "user", "content": request}]
        ids: list[int] = self.loaded.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        return ids


def rows(options: Options) -> Iterator[Row]:
    """Speculation, chunked prefill, fidelity after a hit; then what a tight budget serves."""
    import torch

    from benchmarks.quality import after_hit
    from benchmarks.suites import loop_tight
    from engine_adapter.model_source import SMOLLM2, load_model
    from engine_adapter.runner import HFRunner

    torch.set_num_threads(1)
    loaded = load_model(SMOLLM2, torch.float32)
    runner = HFRunner(loaded.model)
    try:
        bench = _Bench(loaded, runner)
        yield from _speculation(bench, options)
        yield from _chunked_prefill(bench, options)
        yield from after_hit.rows(loaded, runner, options)
    finally:
        runner.release()
    yield from loop_tight.rows(options)


def _speculation(bench: _Bench, options: Options) -> Iterator[Row]:
    """Wall time of one request with a prompt-lookup drafter, beside the same request without."""
    from engine_adapter.drafter import PromptLookupDrafter
    from engine_adapter.request import Request

    new_tokens = 16 if options.quick else 96
    passage = bench.loaded.tokenizer.decode(bench.text(4_000, 160))
    prompts = {
        "copying": bench.chat(f"Repeat the following text word by word.\n\n{passage}"),
        "free": bench.chat("Write a short story about a lighthouse keeper and a storm."),
    }
    for kind, prompt in prompts.items():
        outcomes: dict[bool, Any] = {}

        def run(
            speculates: bool, number: int, prompt: list[int] = prompt, outcomes: dict[bool, Any] = outcomes
        ) -> float:
            loop = bench.loop(drafter=PromptLookupDrafter(draft_tokens=4) if speculates else None)
            loop.submit(Request(f"r{number}", prompt, max_new_tokens=new_tokens))
            watch = Stopwatch()
            with watch:
                (outcomes[speculates],) = loop.run().values()
            return len(outcomes[speculates].token_ids) / watch.seconds

        with_, without = interleaved(partial(run, True), partial(run, False), 1 if options.quick else options.rounds)
        drafted, accepted = outcomes[True].drafted_tokens, outcomes[True].accepted_tokens
        equal = "the same" if outcomes[True].token_ids == outcomes[False].token_ids else "OTHER"
        yield compared(
            "loop",
            f"speculative_{kind}",
            "tokens/s",
            with_,
            better="larger",
            baseline="without drafts",
            theirs=without,
            note=f"speculative_{kind}: one request, prefill included; {accepted} of {drafted} drafted tokens accepted, "
            f"{equal} {len(outcomes[True].token_ids)} tokens put out as without.",
        )


def _chunked_prefill(bench: _Bench, options: Options) -> Iterator[Row]:
    """Gaps between the tokens of running requests while a long prompt arrives: in chunks, beside all at once."""
    from engine_adapter.latency import percentile

    length = 256 if options.quick else LONG_PROMPT_TOKENS
    runs: dict[bool, list[_Mixed]] = {True: [], False: []}

    def run(chunked: bool, number: int) -> float:
        mixed = _mixed_load(bench, CHUNK_TOKENS if chunked else 2 * length, length, options.quick)
        if number >= 0:
            runs[chunked].append(mixed)
        return mixed.wall_seconds

    interleaved(partial(run, True), partial(run, False), 1 if options.quick else options.rounds)
    note = (
        f"chunked_prefill: {RUNNING_REQUESTS} requests decode while one with {length} tokens of prompt arrives; in "
        f"chunks of {CHUNK_TOKENS} tokens a step, beside the whole prompt in one step. Gaps are the running requests'."
    )
    figures: dict[str, Callable[[_Mixed], float]] = {
        "itl_p99": lambda mixed: percentile(mixed.gaps, 99) or 0.0,
        "itl_max": lambda mixed: max(mixed.gaps),
        "itl_p50": lambda mixed: percentile(mixed.gaps, 50) or 0.0,
        "long_ttft": lambda mixed: mixed.long_ttft_seconds,
        "wall": lambda mixed: mixed.wall_seconds,
    }
    for name, figure in figures.items():
        yield compared(
            "loop",
            f"chunked_prefill_{name}",
            "ms",
            [1e3 * figure(mixed) for mixed in runs[True]],
            better="smaller",
            baseline="whole prompt",
            theirs=[1e3 * figure(mixed) for mixed in runs[False]],
            note=note,
        )


@dataclass(frozen=True, slots=True)
class _Mixed:
    """What one mixed load gave; seconds."""

    gaps: list[float]
    long_ttft_seconds: float
    wall_seconds: float


def _mixed_load(bench: _Bench, step_tokens: int, length: int, quick: bool) -> _Mixed:
    from engine_adapter.request import Request

    loop = bench.loop(max_batch_sequences=RUNNING_REQUESTS + 1, step_tokens=step_tokens)
    new_tokens = 8 if quick else 48
    for number in range(RUNNING_REQUESTS):
        loop.submit(Request(f"running{number}", bench.text(64 * number, 64), max_new_tokens=new_tokens))
    watch = Stopwatch()
    with watch:
        while loop.step().output_tokens < RUNNING_REQUESTS:  # until all of them decode
            pass
        loop.submit(Request("long", bench.text(8_192, length), max_new_tokens=4))
        results = loop.run()
    long = results.pop("long")
    assert long.ttft_seconds is not None
    return _Mixed([gap for result in results.values() for gap in result.itl_seconds], long.ttft_seconds, watch.seconds)
