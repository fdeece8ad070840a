"""Latents (MLA): what the K rule alone costs where one vector a token stands for keys and values.

Two figures, neither of a trained MLA model:

- a real model rewritten: SmolLM2's keys before rope and its values, side by side, are a latent of 384 numbers a token
  and layer. It is turned to principal axes of other text, as a down-projection would spread it, and turned back, which
  loses nothing, so the KL is what coding the latent costs. Its rotary part is not cached apart, as MLA's is.
- random latents with outlier channels: the relative error of attention's output, without any model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.quality import texts
from benchmarks.quality.cold_forms import BLOCK_TOKENS, Int4Form, Pair, Tally, as_blocks, as_rows, count_bits, fp8_read
from benchmarks.quality.paged_reading import Fidelity, PagedReading, compare
from benchmarks.rows import Options, Row, spread

_FP8 = "fp8 e4m3"


class PrincipalAxes:
    """A form that changes nothing and learns, per layer, the axes of keys before rope and values, side by side."""

    name = "axes"
    protects_first_block = True

    def __init__(self, rope_theta: float) -> None:
        self.rope_theta = rope_theta
        self.turns: dict[int, torch.Tensor] = {}
        """Per layer, Tensor[width, width] orthonormal: latent = [keys | values] @ turn."""

    def cooled(self, layer: int, keys: torch.Tensor, values: torch.Tensor, tally: Tally) -> Pair:
        joined = self.joined(keys, values)
        self.turns[layer] = torch.linalg.eigh(joined.T @ joined / len(joined)).eigenvectors
        return keys, values

    def joined(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Tensor[tokens, heads * (key_dim + value_dim)]; keys are turned back to before rope."""
        return torch.cat([self._turned(keys, -1.0), values], -1).transpose(0, 1).flatten(1)

    def parted(self, joined: torch.Tensor, heads: int, key_dim: int) -> Pair:
        """The inverse of `joined`."""
        rows = joined.unflatten(1, (heads, -1)).transpose(0, 1)
        return self._turned(rows[..., :key_dim], 1.0), rows[..., key_dim:]

    def _turned(self, keys: torch.Tensor, direction: float) -> torch.Tensor:
        dim = keys.shape[-1]
        positions = BLOCK_TOKENS + torch.arange(keys.shape[1]).float()  # the first block is never given to a form
        angles = positions[:, None] / self.rope_theta ** (torch.arange(0, dim, 2).float() / dim)
        cosine, sine = angles.cos().repeat(1, 2), direction * angles.sin().repeat(1, 2)
        half = torch.cat([-keys[..., dim // 2 :], keys[..., : dim // 2]], -1)
        return keys * cosine + half * sine


class LatentForm:
    """The latent of `axes` in INT4, or in FP8. Both keep the first block, so that only the number format differs."""

    protects_first_block = True

    def __init__(self, name: str, axes: PrincipalAxes) -> None:
        self.name = name
        self._axes = axes
        self._int4 = Int4Form()

    def cooled(self, layer: int, keys: torch.Tensor, values: torch.Tensor, tally: Tally) -> Pair:
        turn = self._axes.turns[layer]
        latent = (self._axes.joined(keys, values) @ turn)[None]
        if self.name == _FP8:
            count_bits(tally, latent, latent[:, :0], bits=8.0)
            read = fp8_read(latent)
        else:
            blocks, _ = self._int4.read(as_blocks(latent).bfloat16(), None, tally)
            read = as_rows(blocks).float()
        k, v = self._axes.parted(read[0] @ turn.T, keys.shape[0], keys.shape[-1])
        return k.bfloat16().float(), v.bfloat16().float()


def rewritten_model_rows(model: Any, tokenizer: Any, options: Options) -> Iterator[Row]:
    """KL of the model whose cache is a latent."""
    count, length = (1, 512) if options.quick else (4, 2_048)
    encode = texts.tokenizer_of(tokenizer)
    calibration, *measured = texts.windows(encode, count + 1, length, first_token=tokenizer.bos_token_id)
    axes = PrincipalAxes(model.config.rope_parameters["rope_theta"])
    reading = PagedReading(model)
    reading.hidden(calibration, torch.tensor([length - 1]), axes, Tally())
    found: dict[str, Fidelity] = {}
    for window in measured:
        compare(reading, window, [LatentForm("int4", axes), LatentForm(_FP8, axes)], found)
    ours, fp8 = found["int4"], found[_FP8]
    note = (
        f"latent_rewritten: not a trained MLA model. SmolLM2's keys before rope and values as one latent of "
        f"{len(axes.turns[0])} numbers, in principal axes of another window; {count} windows of {length} tokens; top-1 "
        f"{100 * ours.top1:.1f} % (fp8 {100 * fp8.top1:.1f} %), {ours.tally.bits_a_value():.2f} bits; "
        f"{ours.tally.raw_blocks} of {ours.tally.blocks} blocks kept raw. Both keep the first block."
    )
    yield Row(
        suite="fidelity",
        case="latent_rewritten_mean_kl",
        unit="nats",
        value=ours.mean_kl,
        baseline=_FP8,
        baseline_value=fp8.mean_kl,
        ratio=fp8.mean_kl / ours.mean_kl,
        rounds=count,
        spread=spread(ours.kl),
        note=note,
    )


def random_latent_rows(options: Options) -> Iterator[Row]:
    """Relative error of attention over coded random latents, for growing outlier channels."""
    note = (
        "latent_random: no model. 16 query heads over 2,048 random latents of 576 numbers, values the first 512, 8 "
        "channels scaled and shifted by the factor named; RMS of the error over that of the output."
    )
    for outlier in (1, 10, 30):
        samples: dict[str, list[float]] = {"int4": [], _FP8: []}
        for seed in range(2 if options.quick else 7):
            for name, error in _random_latent_errors(outlier, options.seed + seed).items():
                samples[name].append(error)
        ours, fp8 = (sorted(samples[name])[len(samples[name]) // 2] for name in ("int4", _FP8))
        yield Row(
            suite="fidelity",
            case=f"latent_random_outlier{outlier}_attention_error",
            unit="relative",
            value=ours,
            baseline=_FP8,
            baseline_value=fp8,
            ratio=fp8 / ours,
            rounds=len(samples["int4"]),
            spread=spread(samples["int4"]),
            note=note,
        )


def _random_latent_errors(outlier: float, seed: int) -> dict[str, float]:
    generator = torch.Generator().manual_seed(seed)
    latent = torch.randn(1, 2_048, 576, generator=generator)
    channels = torch.randperm(576, generator=generator)[:8]
    if outlier > 1:
        latent[..., channels] = latent[..., channels] * outlier + outlier
    latent = latent.bfloat16().float()
    query = torch.randn(16, 576, generator=generator)
    query[:, channels] /= outlier  # a trained query does not attend to one channel only
    blocks, _ = Int4Form().read(as_blocks(latent).bfloat16(), None, Tally())
    expected = _attended(query, latent[0])
    return {
        name: ((_attended(query, read[0]) - expected).norm() / expected.norm()).item()
        for name, read in (("int4", as_rows(blocks).float()), (_FP8, fp8_read(latent)))
    }


def _attended(query: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
    """query Tensor[heads, dim], latent Tensor[tokens, dim]; keys are all of a latent, values its first 512 numbers."""
    scores = query @ latent.T / math.sqrt(query.shape[-1])
    return scores.softmax(-1) @ latent[:, :512]
