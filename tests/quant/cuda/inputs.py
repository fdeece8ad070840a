"""Inputs on which two encoders are most likely to disagree, named. Used by the shim's tests and on real cards."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

Source: TypeAlias = torch.Generator
DIMS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256), (512, 512), (576, 0))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _normal(shape: tuple[int, ...], source: Source) -> torch.Tensor:
    return torch.randn(shape, generator=source)


def _channels(shape: tuple[int, ...], source: Source) -> torch.Tensor:
    scale = torch.exp2(torch.randint(-40, 40, shape[-1:], generator=source).float())
    return _normal(shape, source) * scale + torch.randn(shape[-1:], generator=source) * 50


def _tokens(shape: tuple[int, ...], source: Source) -> torch.Tensor:
    return _normal(shape, source) * torch.exp2(torch.randint(-40, 40, (*shape[:-1], 1), generator=source).float())


def _grid(shape: tuple[int, ...], source: Source) -> torch.Tensor:
    return torch.randint(-30, 31, shape, generator=source) * 0.5  # many exact ties


def _sparse(shape: tuple[int, ...], source: Source) -> torch.Tensor:
    return _normal(shape, source) * (torch.rand(shape, generator=source) < 0.05)


def _bits(shape: tuple[int, ...], source: Source) -> torch.Tensor:
    words = torch.randint(-(2**31), 2**31, shape, generator=source).to(torch.int32).view(torch.float32)
    return torch.where(words.abs() < 2.0**112, words, torch.zeros(()))


def _constant(shape: tuple[int, ...], source: Source) -> torch.Tensor:
    return torch.full(shape, -1.0) * (1 + torch.arange(shape[0]).view(-1, *[1] * (len(shape) - 1)) * 0.37)


def _subnormal(shape: tuple[int, ...], source: Source) -> torch.Tensor:
    return _normal(shape, source) * 2.0**-130


def _tiny(shape: tuple[int, ...], source: Source) -> torch.Tensor:
    return _normal(shape, source) * torch.exp2(torch.randint(-126, -90, (*shape[:-1], 1), generator=source).float())


def _large(shape: tuple[int, ...], source: Source) -> torch.Tensor:
    return _normal(shape, source).clamp(-4, 4) * 2.0**109


def _offset(shape: tuple[int, ...], source: Source) -> torch.Tensor:
    """Far from zero and nearly constant: zero points at the ends of int8, codes of scales one up."""
    return _normal(shape, source) * 1e-3 + torch.randn(shape[-1:], generator=source) * 100


def _zeros(shape: tuple[int, ...], source: Source) -> torch.Tensor:
    return torch.where(torch.rand(shape, generator=source) < 0.5, torch.zeros(()), -torch.zeros(()))


def _poisoned(shape: tuple[int, ...], source: Source) -> torch.Tensor:
    """NaN, infinities and magnitudes at the limit, one a block, in all but the last block."""
    found = _normal(shape, source)
    bad = (torch.nan, torch.inf, -torch.inf, 2.0**112, -(2.0**112), 1.9999 * 2.0**111)
    for block in range(shape[0] - 1):
        found[block].view(-1)[(block * 7919 + 5) % found[block].numel()] = bad[block % len(bad)]
    return found


KINDS: dict[str, Callable[[tuple[int, ...], Source], torch.Tensor]] = {
    **{"normal": _normal, "channels": _channels, "tokens": _tokens, "grid": _grid, "sparse": _sparse, "bits": _bits},
    **{"constant": _constant, "subnormal": _subnormal, "tiny": _tiny, "large": _large, "offset": _offset},
    **{"zeros": _zeros, "poisoned": _poisoned},
}


def blocks(
    name: str, dims: tuple[int, int], dtype: torch.dtype, lead: tuple[int, ...] = (7, 1, 1, 16)
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """keys [N, L, H, T, Dk], values [N, L, H, T, Dv] or None of a named kind, on the CPU."""
    source = torch.Generator().manual_seed(sum(name.encode()) + dims[0])
    keys = KINDS[name]((*lead, dims[0]), source)
    values = KINDS[name]((*lead, dims[1]), source) if dims[1] else None
    return keys.to(dtype), None if values is None else values.to(dtype)
