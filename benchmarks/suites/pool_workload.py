"""What both sides of the `pool` suite do, in numbers. Standard library only: the peer's interpreter imports it too."""

from __future__ import annotations

import random
from typing import Protocol

BLOCK_TOKENS = 16
PROMPT_TOKENS = 32_768
PROMPT_BLOCKS = PROMPT_TOKENS // BLOCK_TOKENS
POOL_BLOCKS = 8_192
"""Blocks of the allocate-and-free pool; each pass hands out all of them and takes them back."""
PASSES = 3
REPEATS = 7
"""How often a round does what takes a tenth of a millisecond."""
BATCHES = (1, 16, 256, 2_048)
DECODE_SEQUENCES = 32
DECODE_STEPS = 64
DECODE_PROMPT_TOKENS = 1_000
FEW_SEQUENCES, MANY_SEQUENCES = 10, 1_000
"""Live sequences of the rows that say how cost grows with them."""
VOCABULARY = 49_152


class PoolSide(Protocol):
    """One side. Every method sets itself up, untimed, and returns seconds of the work that its name says.

    Where blocks are taken, the pool is full of idle blocks, half of them hashed: handing them out evicts those.
    """

    def alloc_free(self, batch: int, round_number: int) -> float:
        """Seconds a block, allocate and free together; of the blocks that come and go every other is hashed."""

    def hash_prompt(self, round_number: int) -> float:
        """Seconds from a list of token ids to the prompt's block hashes."""

    def lookup(self, round_number: int) -> float:
        """Seconds to find all blocks of a prompt whose hashes are ready."""

    def admit(self, warm: bool, hashed: bool, round_number: int) -> float:
        """Seconds from a prompt (its hashes ready, or not yet `hashed`) to its block table, all full blocks named."""

    def free(self, round_number: int) -> float:
        """Seconds to finish a sequence of one prompt."""

    def decode_step(self, round_number: int) -> float:
        """Seconds a sequence and token: room for one more, the token noted, full blocks named."""


def prompt(seed: int, tokens: int = PROMPT_TOKENS) -> list[int]:
    """Token ids that depend on `seed` only."""
    return random.Random(seed).choices(range(VOCABULARY), k=tokens)


def every_other(position: int) -> bool:
    """Which blocks are hashed."""
    return position % 2 == 0
