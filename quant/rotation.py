"""The published rotation of values: fixed signs, then an orthonormal Hadamard over the head dim.

Forward (encoding) is normative to the last bit: signs, butterflies with h = 1, 2, 4, ... in fp32, no scaling here.
Backward is used in two ways: on small integers, where fp32 is exact whatever the order, and on attention outputs
(`rotate_back`), where the usual fp32 error applies. Any thread; the caches hold constants.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch

SIGN_SEED = 0x6B76696E7434  # ASCII "kvint4"
_MASK64 = (1 << 64) - 1


def _splitmix64(index: int) -> int:
    z = (SIGN_SEED + (index + 1) * 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


@lru_cache(maxsize=64)
def sign_list(dim: int) -> tuple[int, ...]:
    """+1 or -1 per channel; channel c has the same sign for every dim. -1 where bit 63 of splitmix64(c) is set."""
    return tuple(-1 if _splitmix64(channel) >> 63 else 1 for channel in range(dim))


def hadamard_size(dim: int) -> int:
    """Largest power of two that divides dim: the size of the diagonal Hadamard blocks."""
    return dim & -dim


def unit(dim: int) -> float:
    """What makes the Hadamard of `dim` orthonormal: 1 / sqrt(hadamard_size(dim)), to be rounded to fp32."""
    return float(math.sqrt(1.0 / hadamard_size(dim)))


@lru_cache(maxsize=64)
def signs(dim: int, device: torch.device) -> torch.Tensor:
    """Signs of `dim` channels, float32 [dim]."""
    return torch.tensor(sign_list(dim), dtype=torch.float32, device=device)


@lru_cache(maxsize=64)
def integer_signs(dim: int, device: torch.device) -> torch.Tensor:
    """Signs of `dim` channels, int16 [dim]."""
    return torch.tensor(sign_list(dim), dtype=torch.int16, device=device)


@lru_cache(maxsize=64)
def signed_hadamard(dim: int, device: torch.device) -> torch.Tensor:
    """float32 [dim, dim] of +-1 and 0: rotated integers @ this = signs * (H @ rotated integers), not scaled."""
    size = hadamard_size(dim)
    full = torch.zeros(dim, dim)
    for start in range(0, dim, size):
        full[start : start + size, start : start + size] = torch.tensor(
            [[-1.0 if (row & column).bit_count() & 1 else 1.0 for column in range(size)] for row in range(size)]
        )
    return full.to(device) * signs(dim, device)


def butterflies(rows: torch.Tensor, spare: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Unscaled Hadamard over dim 0 of [dim, count], float32 or int16, stages h = 1, 2, 4, ...

    `spare` is like `rows`; both are overwritten. Returns (result, the other one).
    """
    dim, count = rows.shape
    size = hadamard_size(dim)
    h = 1
    while h < size:
        source = rows.view(dim // (2 * h), 2, h, count)
        target = spare.view(dim // (2 * h), 2, h, count)
        torch.add(source[:, 0], source[:, 1], out=target[:, 0])
        torch.sub(source[:, 0], source[:, 1], out=target[:, 1])
        rows, spare = spare, rows
        h *= 2
    return rows, spare


@lru_cache(maxsize=64)
def back_rotation(dim: int, device: torch.device) -> torch.Tensor:
    """float32 [dim, dim]: a rotated row vector @ this is the row vector in the original channels."""
    return signed_hadamard(dim, device) * unit(dim)


def rotate_back(rotated: torch.Tensor) -> torch.Tensor:
    """Attention output accumulated on rotated values -> original channels. [..., value_dim], same dtype, fp32 inside.

    Linear, so it may be applied once per head after all blocks are summed.
    """
    matrix = back_rotation(rotated.shape[-1], rotated.device)
    return torch.matmul(rotated.to(torch.float32), matrix).to(rotated.dtype)
