"""Memory, bandwidth and dense 16-bit arithmetic of cards, from their makers' data sheets. For floors, not promises."""

from __future__ import annotations

from dataclasses import dataclass

from allocator import ConfigError


@dataclass(frozen=True, slots=True)
class Card:
    """One card: bytes, bytes a second, floating-point operations a second (bf16, no sparsity)."""

    memory_bytes: int
    bytes_per_second: float
    flops_per_second: float


CARDS = {
    "a100-40": Card(40 << 30, 1.555e12, 312e12),
    "a100": Card(80 << 30, 2.039e12, 312e12),
    "h100": Card(80 << 30, 3.35e12, 989e12),
    "h200": Card(141 * 10**9, 4.8e12, 989e12),
    "b200": Card(180 * 10**9, 8.0e12, 2250e12),
    "l4": Card(24 << 30, 0.3e12, 121e12),
    "l40s": Card(48 << 30, 0.864e12, 362e12),
    "rtx4090": Card(24 << 30, 1.008e12, 165e12),
    "mi300x": Card(192 * 10**9, 5.3e12, 1307e12),
}


def find_card(name: str) -> Card:
    card = CARDS.get(name.lower())
    if card is None:
        raise ConfigError(f"gpu: got {name!r}; expected one of {', '.join(CARDS)}, or its memory, bandwidth and FLOPs")
    return card
