"""How lossy a block may be, decided exactly.

The decision is made on integers, so that every implementation takes the same one whatever its order of summation:
errors are counted in 1/64 of a code step, magnitudes in code steps, both weighted by the scale code rounded to an
integer. See docs/formats/int4.md, "When a block is refused". Any thread.
"""

from __future__ import annotations

import torch

from quant.codec import CodecError

DEFAULT_ERROR_BOUND = 0.15
MAGNITUDE_LIMIT = 2.0**112  # inputs at or above it, NaN and Inf are refused: so every scale and product is finite
ERROR_STEPS = 64.0


def check_error_bound(bound: float) -> float:
    """The bound as a float. Raises CodecError unless 0 < bound <= 1."""
    if isinstance(bound, bool) or not isinstance(bound, int | float) or not 0.0 < bound <= 1.0:
        raise CodecError(f"error_bound must be a number in (0, 1], got {bound!r}")
    return float(bound)


def part_bound(bound: float, bits: int) -> float:
    """`bound` is meant for 4-bit codes; coarser codes are held to as much more as their step is larger."""
    return bound * 15.0 / 7.0 if bits == 3 else bound


def scale_weights(scale_values: torch.Tensor) -> torch.Tensor:
    """float64, like `scale_values` (float32 e4m3 values): the square of the value rounded to an integer."""
    rounded = torch.round(scale_values).to(torch.float64)
    return rounded * rounded


def within_bound(
    weights: torch.Tensor, squared_errors: torch.Tensor, squared_codes: torch.Tensor, bound: float
) -> torch.Tensor:
    """bool [records]: relative RMS error at most `bound`.

    All float64 [records, scales]: weights from scale_weights; squared_errors: sum over a scale's elements of
    rint(64 e)^2; squared_codes: sum of (q - z)^2. Sums are integers below 2^53, so they are exact in any order.
    """
    errors = (weights * squared_errors).sum(1)
    signal = (weights * squared_codes).sum(1)
    return errors <= signal * (bound * bound * (ERROR_STEPS * ERROR_STEPS))


def relative_rms(original: torch.Tensor, decoded: torch.Tensor) -> torch.Tensor:
    """float64 [...]: RMS error over RMS of `original`, over the last two dims; inf where original is not in range."""
    reference = original.to(torch.float64)
    difference = decoded.to(torch.float64) - reference
    signal = reference.square().sum((-1, -2))
    ratio = (difference.square().sum((-1, -2)) / signal.clamp_min(1e-300)).sqrt()
    usable = reference.abs().amax((-1, -2)) < MAGNITUDE_LIMIT
    return torch.where(usable, ratio, torch.inf)
