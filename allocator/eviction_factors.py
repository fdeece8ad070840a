"""Who asks and how far into the prompt: how much more, or less, such blocks come back than their class promises.

Used by `allocator.eviction_reuse` alone, under the pool's lock. An *owner* is whoever shares with nobody else: a
tenant, an adapter; many are hashed into OWNERS rows. A *position* is a block's place in its chain, in powers of two.
For every (owner, position) two decayed sums are kept: how many blocks came back, and how many should have by what is
known of their classes. An owner's factor is the quotient of its sums, a position's that of what the owners leave
unexplained; few events leave a factor at 1. Since at any age a factor multiplies the hazard, it acts as a worth does:
a block is kept for as long as worth * factor * hazard is above the rent.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

Cells: TypeAlias = "npt.NDArray[np.int16]"
Floats: TypeAlias = "npt.NDArray[np.float64]"

OWNERS: Final = 64
POSITIONS: Final = 16
_CELLS = OWNERS * POSITIONS
_EVENTS = 100.0  # pseudo-events at a factor of 1
_STEPS_MAX = 6
_SPREAD = 0x9E3779B97F4A7C15


class ReuseFactors:
    """`steps[cell]`: by how many half powers of two blocks of that cell come back more often."""

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._came_back = np.zeros(_CELLS)
        self._expected = np.zeros(_CELLS)
        self._positions = np.minimum(np.frexp(np.arange(1 << POSITIONS))[1], POSITIONS - 1).astype(np.int16)  # by place
        self.steps: npt.NDArray[np.intp] = np.zeros(_CELLS, dtype=np.intp)

    def cells(self, owner: int, count: int) -> Cells:
        """int16[count]: of the blocks of a chain, head first."""
        row = (owner * _SPREAD & (1 << 64) - 1) >> 58
        if count > len(self._positions):
            self._positions = np.pad(self._positions, (0, count), constant_values=POSITIONS - 1)
        return self._positions[:count] + np.int16(row * POSITIONS)

    def end_epoch(self, came_back: list[Cells], placed: list[Cells], chances: Floats) -> None:
        """came_back: of blocks that were used again; placed: of all that requests had, with their chances of it."""
        self._came_back *= self._decay
        self._expected *= self._decay
        if came_back:
            self._came_back += np.bincount(np.concatenate(came_back), minlength=_CELLS)
        self._expected += np.bincount(np.concatenate(placed), chances, minlength=_CELLS)
        scale = self._came_back.sum() / max(float(self._expected.sum()), 1e-9)
        came = self._came_back.reshape(OWNERS, POSITIONS)
        expected = self._expected.reshape(OWNERS, POSITIONS) * scale
        owners = (came.sum(axis=1) + _EVENTS) / (expected.sum(axis=1) + _EVENTS)
        positions = (came.sum(axis=0) + _EVENTS) / ((expected * owners[:, None]).sum(axis=0) + _EVENTS)
        steps = np.rint(2 * np.log2(owners[:, None] * positions))
        self.steps = np.clip(steps, -_STEPS_MAX, _STEPS_MAX).astype(np.intp).reshape(-1)
