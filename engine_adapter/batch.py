"""What a decode loop hands a model runner for one step: which tokens, where they stand, where their KV goes.

Plain frozen records over numpy arrays, no torch: the loop that builds them does not need it. A step batch is read
by one thread, the one that runs the model, and is not kept after the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from allocator.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor

    from kvstore.identity import Adapter

Int64Array: TypeAlias = npt.NDArray[np.int64]

FORM_FULL = 0
"""Low bit of a table entry: the block lies in a full precision slot."""
FORM_INT4 = 1
"""Low bit of a table entry: the block lies in an INT4 record slot."""
DROPPED = -1
"""Table entry of a block that left a sliding window; its position is kept, its KV is gone."""


class SliceError(UsageError):
    """A runner cannot compute these sequences of a step, whoever is beside them; the others may be asked again."""

    def __init__(self, sequence_ids: Iterable[str], message: str) -> None:
        super().__init__(message)
        self.sequence_ids = frozenset(sequence_ids)


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """The tokens of one sequence that this step computes: a prefill chunk, a decode token, or tokens to verify.

    token_ids: the tokens fed, in order; token i stands at position start + i.
    start: tokens of this sequence whose KV is already written.
    logits_count: rows of logits wanted, for the last tokens of the slice (0 for a chunk inside a prompt).
    tables: per cache group, int64[blocks]: slot << 1 | form, or -1 where the window dropped the block. Block b holds
        the positions [b * block_tokens, (b + 1) * block_tokens); blocks must reach start + len(token_ids).
    slot_mappings: per cache group, int64[len(token_ids)]: slot * block_tokens + offset, where each token is written.
    media: (offset in the slice, features Tensor[length, hidden]) that stand in for the embeddings of those tokens.
    adapter: the fine-tuned overlay to compute with, None for the model as it is.
    """

    sequence_id: str
    token_ids: Sequence[int]
    start: int
    logits_count: int
    tables: tuple[Int64Array, ...]
    slot_mappings: tuple[Int64Array, ...]
    media: Sequence[tuple[int, Tensor]] = ()
    adapter: Adapter | None = None

    def __post_init__(self) -> None:
        count = len(self.token_ids)
        if count == 0:
            raise ValueError(f"slice of sequence {self.sequence_id!r} has no tokens; at least one is needed")
        if self.start < 0:
            raise ValueError(f"slice of sequence {self.sequence_id!r} starts at {self.start}; expected 0 or more")
        if not 0 <= self.logits_count <= count:
            raise ValueError(
                f"slice of sequence {self.sequence_id!r} asks for {self.logits_count} rows of logits; "
                f"expected 0..{count}, its tokens"
            )
        if len(self.tables) != len(self.slot_mappings):
            raise ValueError(
                f"slice of sequence {self.sequence_id!r} has {len(self.tables)} tables and "
                f"{len(self.slot_mappings)} slot mappings; expected one of each per cache group"
            )
        for group, mapping in enumerate(self.slot_mappings):
            if mapping.shape != (count,):
                raise ValueError(
                    f"slot mapping of sequence {self.sequence_id!r}, group {group} has shape {mapping.shape}; "
                    f"expected ({count},), one place per token"
                )

    @property
    def token_count(self) -> int:
        return len(self.token_ids)

    @property
    def end(self) -> int:
        """Written tokens of the sequence after this step."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepBatch:
    """All slices of one step, in the order in which their logits come back; each sequence at most once.

    before_layer: to be called with the number of each layer before its attention reads a block, on the thread that runs
        the model; what it raises ends the step. A runner that does not call it must not be given one.
    """

    slices: tuple[SequenceSlice, ...]
    before_layer: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        if not self.slices:
            raise ValueError("a step batch needs at least one slice")
        names = [part.sequence_id for part in self.slices]
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"a step batch holds a sequence at most once; found twice: {twice}")

    def __iter__(self) -> Iterator[SequenceSlice]:
        return iter(self.slices)

    def __len__(self) -> int:
        return len(self.slices)

    @property
    def token_count(self) -> int:
        return sum(part.token_count for part in self.slices)

    @property
    def row_count(self) -> int:
        """Rows of logits that the step returns: slice by slice, the last `logits_count` tokens of each."""
        return sum(part.logits_count for part in self.slices)
