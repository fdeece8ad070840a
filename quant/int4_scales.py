"""Scales of int4 records: e4m3 codes under one bf16 base. Used by encode and decode; any thread."""

from __future__ import annotations

from functools import lru_cache

import torch

BASE_FACTOR = 1.06 / 448.0
BASE_FLOOR = 2.0**-100
BASE_CEILING = 2.0**106
SCALE_FLOOR = 2.0**-9


@lru_cache(maxsize=8)
def _e4m3_table(device: torch.device) -> torch.Tensor:
    """float32 [256]: the value of every byte."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    return codes.view(torch.float8_e4m3fn).to(torch.float32).to(device)


def scale_base(scales: torch.Tensor) -> torch.Tensor:
    """S, float32 [P, 1] holding bf16 values, from the true scales float32 [P, n]."""
    base = (scales.amax(1, keepdim=True) * BASE_FACTOR).clamp_min_(BASE_FLOOR)
    return base.to(torch.bfloat16).to(torch.float32)


def scale_codes(scales: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """e4m3 bytes, uint8 [P, n], of scales / base (a true division), at least 2^-9."""
    return torch.div(scales, base).clamp_min_(SCALE_FLOOR).to(torch.float8_e4m3fn).view(torch.uint8)


def e4m3(codes: torch.Tensor) -> torch.Tensor:
    """float32 values of e4m3fn bytes uint8 [...] (0x7f and 0xff are NaN)."""
    flat = codes.reshape(-1).to(torch.int32)
    return torch.index_select(_e4m3_table(codes.device), 0, flat).view(codes.shape)


def decoded_scale(codes: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """float32 [P, n]: e4m3 value times S; exact, since 4 + 8 significant bits fit."""
    return e4m3(codes).mul_(base)


def reciprocal(scales: torch.Tensor) -> torch.Tensor:
    """1 / scales as a true division."""
    return torch.div(torch.ones((), dtype=torch.float32, device=scales.device), scales)


def store_base(records: torch.Tensor, offset: int, base: torch.Tensor) -> None:
    """Write S [P, 1] as bf16, little-endian."""
    records[:, offset : offset + 2] = base.to(torch.bfloat16).view(torch.uint8)


def load_base(records: torch.Tensor, offset: int) -> torch.Tensor:
    """S of each record, float32 [P, 1]."""
    return records[:, offset : offset + 2].contiguous().view(torch.bfloat16).to(torch.float32)


def good_scales(codes: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """bool [P]: scale codes uint8 [P, n] and bases [P, 1] that an encoder may write."""
    good = ((codes >= 1) & (codes <= 0x7E)).all(1)
    return good & ((base >= BASE_FLOOR) & (base <= BASE_CEILING)).all(1)
