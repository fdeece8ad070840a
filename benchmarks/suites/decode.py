"""Wall time of a decode step, end to end: our loop with INT4 cold blocks, in bf16, and transformers' caches beside.

One thread, rounds of all sides in turn. Every sequence has blocks of its own. The attention backend is whatever
`engine_adapter.attention.get_backend` gives; notes name it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.rows import Options, Row, compared, rotated, spread

if TYPE_CHECKING:
    import torch

    from benchmarks.decoding.recording import Recording

FIDELITY_BAR = 0.006
"""Mean KL of the first tokens after a context of cold blocks: twice what the codec may cost over whole windows."""
FIDELITY_STEPS = 96
TEXTS = 8
STEPS_A_SAMPLE = 2
PEER_ROUNDS = 3
NEW_TOKENS = 200
QUICK_CONTEXT_TOKENS = 256
MODELS = ("smollm2", "llama8b_layers")
"""Models that `--model` may name."""
INT4, BF16, DYNAMIC = "int4", "bf16", "dynamic cache"


@dataclass(frozen=True, slots=True)
class Case:
    """A model, a context and a batch. `context_name` is how the rows call it."""

    model: str
    context_name: str
    context_tokens: int
    batch: int

    @property
    def name(self) -> str:
        return f"{self.model}_{self.context_name}"


MAIN = Case("smollm2", "4k_b8", 4_096, 8)
SPEED_CASES = (
    Case("smollm2", "2k_b8", 2_048, 8),
    Case("smollm2", "8k_b8", 8_192 - NEW_TOKENS - 32, 8),  # the model has 8,192 positions
    Case("llama8b_layers", "2k", 2_048, 8),
    Case("llama8b_layers", "8k", 8_192, 8),
    Case("llama8b_layers", "32k", 32_768, 2),
)
_STACK_LAYERS = 2
_STACK_NOTE = (
    f"llama8b_layers: {_STACK_LAYERS} layers of Llama-8B's shape (hidden 4096, 32 query and 8 KV heads of 128) with "
    "random weights and a small vocabulary: layers only, for speed; batch 8, at 32k batch 2."
)
_SPEED_NOTE = (
    "Contexts of all cases but smollm2_4k are random keys and values, written into the caches: for speed only."
)


@dataclass(slots=True)
class Logits:
    """Kept rows by sequence, in the order of the steps."""

    rows: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    sequences: int = TEXTS

    def keep(self, sequence: int, logits: torch.Tensor) -> None:
        if sequence < self.sequences:
            self.rows.setdefault(sequence, []).append(logits.clone())


def rows(options: Options) -> Iterator[Row]:
    """The main case with fidelity, the loop's share and the peers; then the other contexts and the layer stack."""
    import torch

    torch.set_num_threads(1)
    wanted = options.models or MODELS
    if MAIN.model in wanted:
        model, name = _model(MAIN.model, options)
        yield from _main_rows(model, name, _texts(model, name, options), options)
    for which in wanted:
        model, name = _model(which, options)
        for case in SPEED_CASES:
            if case.model == which:
                yield from _speed_rows(case, model, name, options)


# -- models and contexts ----------------------------------------------------------------------------------------------


def _model(which: str, options: Options) -> tuple[Any, str]:
    """(model in bf16, its name). A quick run has a tiny stack in place of every model."""
    import torch

    from benchmarks.decoding import stack
    from engine_adapter.model_source import SMOLLM2, load_model

    if options.quick:
        return stack.random_stack(stack.TINY, 2, 4_096, options.seed), "tiny"
    if which == "smollm2":
        loaded = load_model(SMOLLM2, torch.bfloat16)
        return loaded.model, loaded.name
    return stack.random_stack(stack.LLAMA_8B, _STACK_LAYERS, 65_536, options.seed), which


def _texts(model: Any, name: str, options: Options) -> list[Recording]:
    """The main case's contexts: texts, prefilled by the model itself once, each for several sequences."""
    from transformers import AutoTokenizer

    from benchmarks.decoding.recording import drawn, recorded
    from benchmarks.quality import texts
    from engine_adapter.model_geometry import geometry_from_config
    from engine_adapter.model_source import packaged_model_dir

    if options.quick:
        geometry = geometry_from_config(model.config, model.dtype, 16)
        return [drawn(geometry, QUICK_CONTEXT_TOKENS, NEW_TOKENS + 1, 1_000, options.seed)]
    tokenizer = AutoTokenizer.from_pretrained(packaged_model_dir(), local_files_only=True)
    windows = texts.windows(
        texts.tokenizer_of(tokenizer), TEXTS, MAIN.context_tokens + NEW_TOKENS + 1, first_token=tokenizer.bos_token_id
    )
    options.log(f"decode: prefilling {TEXTS} texts of {MAIN.context_tokens} tokens with {name}")
    return [recorded(model, window[0].tolist(), MAIN.context_tokens) for window in windows]


def _twin(model: Any) -> Any:
    """A model with the same weights in memory and a configuration of its own."""
    import copy

    shared = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    return copy.deepcopy(model, shared)


# -- the main case ----------------------------------------------------------------------------------------------------


def _main_rows(model: Any, name: str, contexts: Sequence[Recording], options: Options) -> Iterator[Row]:
    from benchmarks.decoding import peer_rows

    batch = 2 if options.quick else MAIN.batch
    sequences = [contexts[number % len(contexts)] for number in range(batch)]
    sides = _Sides(model, name, sequences, options)
    kept = {side: Logits() for side in (INT4, BF16, DYNAMIC)}
    try:
        for side, logits in kept.items():
            sides.keep(side, logits.keep)
        samples = sides.samples(1 if options.quick else options.rounds)
        yield from sides.rows(MAIN, samples, _main_note(contexts, sides))
        yield _share_row(sides)
        done = len(kept[INT4].rows[0])
        for loop in (sides.int4, sides.bf16):
            loop.decode(max(1, (4 if options.quick else FIDELITY_STEPS) - done))
        sides.drop_cache()
        yield from _fidelity_rows(kept, sides)
        sides.keep(INT4, None)
        if not options.quick:
            yield from peer_rows.rows(sides.int4, name, sequences, PEER_ROUNDS, options)
    finally:
        sides.close()


def _main_note(contexts: Sequence[Recording], sides: _Sides) -> str:
    first = contexts[0]
    return (
        f"{MAIN.name}: {len(contexts)} texts of {first.token_count} tokens, prefilled once by the model and copied "
        f"into the blocks of {sides.int4.sequence_count} sequences that share none; the texts' own continuation is fed "
        f"(greedy sampling still runs); attention backend {sides.int4.backend.name}; "
        f"{100 * sides.cold_share:.0f} % of the blocks in INT4; means of {STEPS_A_SAMPLE} steps a round; both of our "
        "loops read their blocks in place; transformers' cache runs with the faster form of its own SDPA code."
    )


def _share_row(sides: _Sides) -> Row:
    own, whole = statistics.median(sides.own_seconds), statistics.median(sides.step_seconds)
    return Row(
        suite="decode",
        case="loop_overhead_share_inverse",
        unit="ms",
        value=1e3 * own,
        baseline="the whole step",
        baseline_value=1e3 * whole,
        ratio=statistics.median(step / mine for step, mine in zip(sides.step_seconds, sides.own_seconds, strict=True)),
        rounds=len(sides.own_seconds),
        spread=spread(sides.own_seconds),
        note=(
            f"loop_overhead_share_inverse: {MAIN.name} with INT4; the step less transformers' forward and the "
            "attention backend's attend: scheduling, tables, plans, KV writes, sampling, commits, the store's step."
        ),
    )


def _fidelity_rows(kept: dict[str, Logits], sides: _Sides) -> Iterator[Row]:
    note = (
        f"{MAIN.name}_mean_kl, _top1: the same loop and backend, INT4 against bf16, at every step that was fed; "
        "_rounding_kl: transformers' DynamicCache against our bf16, which is what rounding alone does. The bar, not a "
        "measurement, is that of the first tokens after a context of cold blocks; a few texts carry most of the mean."
    )
    kl, top1 = divergence(kept[BF16].rows, kept[INT4].rows)
    yield Row(
        suite="decode",
        case=f"{MAIN.name}_mean_kl",
        unit="nats",
        value=kl,
        baseline="the bar",
        baseline_value=FIDELITY_BAR,
        ratio=FIDELITY_BAR / kl if kl > 0 else None,
        rounds=sum(map(len, kept[INT4].rows.values())),
        note=note,
    )
    positions = sum(map(len, kept[INT4].rows.values()))
    yield Row(suite="decode", case=f"{MAIN.name}_top1", unit="share", value=top1, rounds=positions, note=note)
    rounding, _ = divergence(kept[BF16].rows, kept[DYNAMIC].rows)
    yield Row(
        suite="decode",
        case=f"{MAIN.name}_rounding_kl",
        unit="nats",
        value=rounding,
        rounds=sum(map(len, kept[DYNAMIC].rows.values())),
        note=note,
    )


def divergence(reference: dict[int, list[torch.Tensor]], found: dict[int, list[torch.Tensor]]) -> tuple[float, float]:
    """(mean KL of `found` from `reference`, share of equal first choices) over the positions that both have."""
    import torch

    divergences: list[torch.Tensor] = []
    equal: list[torch.Tensor] = []
    for sequence, theirs in reference.items():
        count = min(len(theirs), len(found[sequence]))
        at = torch.log_softmax(torch.stack(theirs[:count]).float(), -1)
        of = torch.log_softmax(torch.stack(found[sequence][:count]).float(), -1)
        divergences.append((at.exp() * (at - of)).sum(-1))
        equal.append((at.argmax(-1) == of.argmax(-1)).float())
    return torch.cat(divergences).mean().item(), torch.cat(equal).mean().item()


# -- the other cases --------------------------------------------------------------------------------------------------


def _speed_rows(case: Case, model: Any, name: str, options: Options) -> Iterator[Row]:
    from benchmarks.decoding.cache_side import TRIAL_STEPS
    from benchmarks.decoding.recording import drawn
    from engine_adapter.model_geometry import geometry_from_config

    geometry = geometry_from_config(model.config, model.dtype, 16)
    context = QUICK_CONTEXT_TOKENS if options.quick else case.context_tokens
    rounds = 1 if options.quick else options.rounds
    new_tokens = (rounds + 2) * STEPS_A_SAMPLE + TRIAL_STEPS
    recording = drawn(geometry, context, new_tokens, 1_000, options.seed)
    sides = _Sides(model, name, [recording] * (2 if options.quick else case.batch), options)
    try:
        samples = sides.samples(rounds)
        backend = f" Attention backend {sides.int4.backend.name}."
        note = (_SPEED_NOTE if case.model == "smollm2" else f"{_STACK_NOTE} {_SPEED_NOTE}") + backend
        yield from sides.rows(case, samples, note)
    finally:
        sides.close()


class _Sides:
    """Our loop twice, with INT4 and with bf16 blocks, and transformers' `DynamicCache`, all over the same contexts."""

    def __init__(self, model: Any, name: str, sequences: Sequence[Recording], options: Options) -> None:
        from transformers import DynamicCache

        from benchmarks.decoding.cache_side import CacheSide
        from benchmarks.decoding.own_side import OwnSide

        new_tokens = len(sequences[0].continuation) - 1
        twin = _twin(model)
        self.int4 = OwnSide(model, name, "int4", sequences, new_tokens)
        self.bf16 = OwnSide(model, name, "raw", sequences, new_tokens)
        self.cache: CacheSide | None = CacheSide(twin, DynamicCache(config=twin.config), sequences)
        self.cold_share = self.int4.cold_share()
        if self.cold_share < 0.5 - (0.3 if options.quick else 0.0):
            raise RuntimeError(
                f"only {self.cold_share:.0%} of the blocks are in INT4: the case would not be what it says"
            )
        self.step_seconds: list[float] = []
        self.own_seconds: list[float] = []

    def keep(self, side: str, keep: Callable[[int, torch.Tensor], None] | None) -> None:
        sides: dict[str, Any] = {INT4: self.int4, BF16: self.bf16, DYNAMIC: self.cache}
        sides[side].keep = keep

    def samples(self, rounds: int) -> dict[str, list[float]]:
        """Seconds of a decode step by side, one sample a round."""
        cache = self.cache
        assert cache is not None

        def int4(number: int) -> float:
            step, own = self.int4.decode_split(STEPS_A_SAMPLE)
            if number >= 0:
                self.step_seconds.append(step)
                self.own_seconds.append(own)
            return step

        return rotated(
            {
                INT4: int4,
                BF16: lambda _: self.bf16.decode(STEPS_A_SAMPLE),
                DYNAMIC: lambda _: cache.decode(STEPS_A_SAMPLE),
            },
            rounds,
        )

    def rows(self, case: Case, samples: dict[str, list[float]], note: str) -> Iterator[Row]:
        beside = (("own_bf16", BF16, "our loop in bf16"), ("dynamic_cache", DYNAMIC, "transformers' DynamicCache"))
        for suffix, side, baseline in beside:
            yield compared(
                "decode",
                f"{case.name}_int4_vs_{suffix}",
                "ms",
                [1e3 * seconds for seconds in samples[INT4]],
                better="smaller",
                baseline=baseline,
                theirs=[1e3 * seconds for seconds in samples[side]],
                note=note,
            )
        yield compared(
            "decode",
            f"{case.name}_bf16_vs_dynamic_cache",
            "ms",
            [1e3 * seconds for seconds in samples[BF16]],
            better="smaller",
            baseline="transformers' DynamicCache",
            theirs=[1e3 * seconds for seconds in samples[DYNAMIC]],
            note=note,
        )

    def drop_cache(self) -> None:
        """Free transformers' cache: peers need room."""
        self.cache = None

    def close(self) -> None:
        """Give the model and the memory back."""
        self.cache = None
        self.int4.close()
        self.bf16.close()
