"""What INT4 cold blocks cost real models, beside FP8 and a rotated q4_0 read in the same run, and two latents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from benchmarks.rows import Options, Row, spread

MODELS = ("smollm2", "gemma3")
"""Names that --model takes."""
WINDOWS = 8
WINDOW_TOKENS = 2_048
STRESSES = {"smollm2": (30.0,), "gemma3": (30.0, 150.0)}
"""By how much two key channels of every head are pushed out. 30 is 1.4 times SmolLM2's largest key (20.8) but well
inside Gemma's (100.6), where it hurts no codec: 150 is as far out there."""
KL_BARS = {"smollm2": 0.003, "gemma3": 0.0035}
"""Most nats of mean KL to full precision."""
TOP1_BAR = 0.97
OURS = "int4"
ROUNDED = "int4 read through bf16"
ROUNDED_WINDOWS = 2
FP8 = "fp8 e4m3"
Q4_0 = "rotated q4_0"


def rows(options: Options) -> Iterator[Row]:
    """Rows of every model that is installed, then of the latents."""
    import torch

    from benchmarks.quality import latent

    torch.set_num_threads(1)
    wanted = options.models or MODELS
    for short_name in wanted:
        model, tokenizer = _loaded(short_name, options)
        if model is not None:
            yield from _model_rows(short_name, model, tokenizer, options)
            if short_name == "smollm2":
                yield from latent.rewritten_model_rows(model, tokenizer, options)
            del model
    yield from latent.random_latent_rows(options)


def _loaded(short_name: str, options: Options) -> tuple[Any, Any]:
    import torch

    from engine_adapter.model_source import GEMMA3, SMOLLM2, load_model

    try:
        loaded = load_model({"smollm2": SMOLLM2, "gemma3": GEMMA3}[short_name], torch.float32)
    except FileNotFoundError as missing:
        if options.models:
            raise
        options.log(f"fidelity: {short_name} left out: {missing}")
        return None, None
    return loaded.model, loaded.tokenizer


def _model_rows(short_name: str, model: Any, tokenizer: Any, options: Options) -> Iterator[Row]:
    import torch

    from benchmarks.quality import texts
    from benchmarks.quality.cold_forms import ColdForm, Fp8Form, Int4Form, RotatedQ40Form
    from benchmarks.quality.paged_reading import Fidelity, PagedReading, compare

    count, length = (1, 512) if options.quick else (WINDOWS, WINDOW_TOKENS)
    windows = texts.windows(
        texts.tokenizer_of(tokenizer), count, length, first_token=tokenizer.bos_token_id, skip=options.seed * count
    )
    options.log(f"fidelity: {short_name}: {count} windows of {length} tokens ({texts.digest(windows)})")
    forms: list[ColdForm] = [Int4Form(OURS), Fp8Form(), RotatedQ40Form(), Int4Form(ROUNDED, torch.bfloat16)]
    plain: dict[str, Fidelity] = {}
    stressed: dict[float, dict[str, Fidelity]] = {stress: {} for stress in STRESSES[short_name]}
    for number, window in enumerate(windows):
        compare(PagedReading(model), window, forms if number < ROUNDED_WINDOWS else forms[:3], plain)
        for stress, found in stressed.items():
            compare(PagedReading(model, stress=stress), window, forms[:2], found)
        options.log(
            f"  window {number}: "
            + ", ".join(
                f"{name} KL {found.kl[-1]:.5f} top-1 {found.agreement[-1]:.4f}" for name, found in plain.items()
            )
            + "".join(
                f"; {name} pushed out by {stress:.0f} KL {one.kl[-1]:.5f}"
                for stress, found in stressed.items()
                for name, one in found.items()
            )
        )
    kept, blocks = plain[OURS].tally.raw_blocks, plain[OURS].tally.blocks
    note = (
        f"{short_name}: {count} windows of {length} tokens of the Python documentation and standard library "
        f"(digest {texts.digest(windows)}); newest 128 tokens in bf16, ours with the first block in bf16 too; blocks "
        f"read as in place, in float32; rivals emulated from their published formats; {kept} of {blocks} blocks "
        f"kept raw by the error bound ({', '.join(str(one[OURS].tally.raw_blocks) for one in stressed.values())} under "
        "stress)."
    )
    yield from _figures(short_name, plain, count, note)
    for stress, found in stressed.items():
        yield _kl_row(f"{short_name}_stress{stress:.0f}_mean_kl", found[OURS], FP8, found[FP8], note)


def _figures(short_name: str, found: dict[str, Any], count: int, note: str) -> Iterator[Row]:
    ours, fp8 = found[OURS], found[FP8]
    for suffix, bits in (("", ours.tally.bits_a_value()), ("_padded", ours.tally.padded_bits_a_value())):
        yield Row(
            suite="fidelity",
            case=f"{short_name}_bits_a_value{suffix}",
            unit="bits",
            value=bits,
            baseline="bf16",
            baseline_value=16.0,
            ratio=16.0 / bits,
            rounds=count,
            note=note,
        )
    yield Row(
        suite="fidelity",
        case=f"{short_name}_mean_kl_vs_bar",
        unit="nats",
        value=ours.mean_kl,
        baseline="the most that is asked for",
        baseline_value=KL_BARS[short_name],
        ratio=KL_BARS[short_name] / ours.mean_kl if ours.mean_kl else None,
        rounds=count,
        note=note,
    )
    for beside, suffix in ((FP8, "vs_fp8"), (Q4_0, "vs_q4_0")):
        yield _kl_row(f"{short_name}_mean_kl_{suffix}", ours, beside, found[beside], note)
    same_windows = replace(ours, kl=ours.kl[:ROUNDED_WINDOWS])
    yield _kl_row(f"{short_name}_mean_kl_vs_read_through_bf16", same_windows, ROUNDED, found[ROUNDED], note)
    yield Row(
        suite="fidelity",
        case=f"{short_name}_top1_agreement",
        unit="share",
        value=ours.top1,
        baseline=FP8,
        baseline_value=fp8.top1,
        ratio=ours.top1 / fp8.top1,
        rounds=count,
        note=note,
    )
    yield Row(
        suite="fidelity",
        case=f"{short_name}_top1_vs_bar",
        unit="share",
        value=ours.top1,
        baseline="the least that is asked for",
        baseline_value=TOP1_BAR,
        ratio=ours.top1 / TOP1_BAR,
        rounds=count,
        note=note,
    )
    yield Row(
        suite="fidelity",
        case=f"{short_name}_p99_kl",
        unit="nats",
        value=_mean(ours.kl_p99),
        baseline=FP8,
        baseline_value=_mean(fp8.kl_p99),
        ratio=_mean(fp8.kl_p99) / _mean(ours.kl_p99),
        rounds=count,
        note=note,
    )
    yield Row(
        suite="fidelity",
        case=f"{short_name}_perplexity_change",
        unit="%",
        value=100 * ours.perplexity_change,
        baseline=FP8,
        baseline_value=100 * fp8.perplexity_change,
        rounds=count,
        note=note,
    )


def _kl_row(case: str, ours: Any, baseline: str, theirs: Any, note: str) -> Row:
    return Row(
        suite="fidelity",
        case=case,
        unit="nats",
        value=ours.mean_kl,
        baseline=baseline,
        baseline_value=theirs.mean_kl,
        ratio=theirs.mean_kl / ours.mean_kl if ours.mean_kl else None,
        rounds=len(ours.kl),
        spread=spread(ours.kl),
        note=note,
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
