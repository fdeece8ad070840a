"""What sequences held when they ended, told to the device's eviction policy a few a step, for a policy that learns.

Under the store's lock. A note costs the end of a sequence next to nothing; what can be learned from it is learned in
`step`, between forward passes. Notes are kept in order, since a block may be in several.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from kvstore.relocation import is_promotion

if TYPE_CHECKING:
    import numpy.typing as npt

    from allocator import BlockPool
    from kvstore.loss_prices import LossPrices
    from kvstore.sequence import Sequence

NOTES_PER_STEP = 8
_NOTES_MAX = 1024  # beyond it the oldest are forgotten
_KEY_WORDS = 4  # 64-bit words of a block hash; the first is the key


class ReuseNotes:
    def __init__(
        self, pool: BlockPool, block_tokens: int, prices: LossPrices | None = None, *, is_learning: bool
    ) -> None:
        self._pool = pool
        self._block_tokens = block_tokens
        self.prices = prices
        self._is_learning = is_learning
        self._notes: deque[tuple[bytes, list[bytes], list[npt.NDArray[np.int32]]]] = deque(maxlen=_NOTES_MAX)

    def note(self, sequence: Sequence) -> None:
        """A sequence is about to give its blocks back."""
        count = sequence.sealed_blocks
        if sequence.private_from is not None:
            count = min(count, sequence.private_from // self._block_tokens)
        if self._is_learning and count and sequence.shared and not is_promotion(sequence.sequence_id):
            tables = [table.ids()[:count] for table in sequence.tables]
            self._notes.append((sequence.root, sequence.chain.hashes[:count], tables))

    def tell(self) -> None:
        """Bounded work of a step: some notes; once there are none left, blocks take the places they have earned."""
        if not self._is_learning:
            return
        policies, notes = self._pool.policies, self._notes
        for _ in range(min(NOTES_PER_STEP, len(notes))):
            root, hashes, tables = notes.popleft()
            keys = np.frombuffer(b"".join(hashes), dtype="<u8")[::_KEY_WORDS]
            prices = None if self.prices is None else self.prices.of(root, hashes)
            policies[0].observe(keys, tables, prices, int.from_bytes(root[:8], "little"))
        if not notes:
            for policy in policies:
                policy.settle()
