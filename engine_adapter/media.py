"""Images, sound and video among the tokens of a prompt: what names them, and what the model computes with.

A prompt holds a placeholder token for each of their features. The placeholders are the same for every image, so the
digest goes into the hash of the block where one starts, and no two images ever share.

Pure values; any thread.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from allocator.errors import UsageError
from kvstore.identity import HASH_BYTES, Media

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddedMedia:
    """One medium as the model's encoder has read it, over the placeholders from token `start` of the sequence on.

    digest: SHA-256 (32 bytes) of whatever decides the features; see `digest_of`. features: Tensor[length, hidden], what
    takes the place of the placeholders' embeddings.
    """

    digest: bytes
    start: int
    features: Tensor

    def __post_init__(self) -> None:
        if getattr(self.features, "ndim", 0) != 2 or not len(self.features):
            raise UsageError(f"features: got {type(self.features).__name__}; expected a Tensor[length, hidden]")
        self.name()

    def name(self) -> Media:
        """What reaches the hash. UsageError where digest or start are none."""
        return Media(self.digest, self.start, len(self.features))

    @property
    def stop(self) -> int:
        return self.start + len(self.features)


def digest_of(*inputs: Tensor) -> bytes:
    """SHA-256 over what the encoder is given for one medium (pixel values, ...): content and preprocessing at once."""
    import torch

    state = hashlib.sha256()
    for one in inputs:
        state.update(f"{one.dtype} {list(one.shape)};".encode())
        state.update(one.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    digest = state.digest()
    assert len(digest) == HASH_BYTES
    return digest


def pieces_in(media: Iterable[EmbeddedMedia], start: int, count: int) -> tuple[tuple[int, Tensor], ...]:
    """What of the media falls on the tokens [start, start + count): (offset in them, features)."""
    found = []
    for one in media:
        low, high = max(one.start, start), min(one.stop, start + count)
        if low < high:
            found.append((low - start, one.features[low - one.start : high - one.start]))
    return tuple(found)


def same_tokens(left: Sequence[EmbeddedMedia], right: Sequence[EmbeddedMedia]) -> int | None:
    """Up to which token two prompts of equal tokens are the same prompt; None: to their end."""
    for at in range(max(len(left), len(right))):
        here = [one[at].name() if at < len(one) else None for one in (left, right)]
        if here[0] != here[1]:
            return min(name.start for name in here if name is not None)
    return None
