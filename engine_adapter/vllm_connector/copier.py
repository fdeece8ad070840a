"""How blocks leave vLLM's pages and come into them: at once where these lie in host memory, else by cuda_copier.py.

vLLM's worker calls `mark` and `hold`, which put copies and what vLLM computes in order; the others any thread that
moves blocks. With a card, copies run on a stream of their own, and everything here only enqueues.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import torch

from allocator import ConfigError

if TYPE_CHECKING:
    from engine_adapter.vllm_connector.orders import Tables
    from kvstore.tier import ByteRow

Places: TypeAlias = "Sequence[tuple[Tables, int]]"
"""Store blocks, each by its request's tables and its position in the request."""


class Fence(Protocol):
    """The end of a copy: until it is done, what the copy reads must not change and what it writes means nothing."""

    def done(self) -> bool:
        """Never blocks."""

    def wait(self) -> None:
        """Blocks the calling thread."""


class Copier(Protocol):
    """device: of vLLM's pages. is_immediate: a copy is done when its call returns."""

    device: torch.device
    is_immediate: bool

    def row(self, size_bytes: int) -> ByteRow:
        """Host memory that blocks can be copied to and from, contents undefined."""

    def mark(self) -> None:
        """On vLLM's thread: copies begun from now on come after what vLLM has enqueued so far."""

    def hold(self, fence: Fence) -> None:
        """On vLLM's thread: what vLLM enqueues from now on comes after this copy. The thread does not wait."""

    def gather(self, pages: Any, places: Places, row: ByteRow) -> Fence:
        """Blocks out of the pages of a cache group, one behind the other into a row of `row`."""

    def scatter(self, source: ByteRow | torch.Tensor, pages: Any, places: Places) -> Fence:
        """The reverse, also from uint8 [bytes] on the device."""

    def aside(self) -> AbstractContextManager[Any]:
        """What torch is told inside runs in the order of the copies."""

    def upload(self, row: ByteRow) -> torch.Tensor:
        """Only inside `aside`: uint8 [bytes] on the device; on a CPU the row itself."""

    def close(self) -> None:
        """Waits for what is under way."""


class _Done:
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return


DONE: Fence = _Done()


class NativeCopier:
    """vLLM on a CPU: its pages are numpy's (layout.GroupPages), and it has no stream to put in order."""

    device = torch.device("cpu")
    is_immediate = True

    def row(self, size_bytes: int) -> ByteRow:
        return np.empty(size_bytes, np.uint8)

    def mark(self) -> None:
        return

    def hold(self, fence: Fence) -> None:
        return

    def gather(self, pages: Any, places: Places, row: ByteRow) -> Fence:
        pages.gather(places, row)
        return DONE

    def scatter(self, source: ByteRow | torch.Tensor, pages: Any, places: Places) -> Fence:
        pages.scatter(source.numpy() if isinstance(source, torch.Tensor) else source, places)
        return DONE

    def upload(self, row: ByteRow) -> torch.Tensor:
        return torch.from_numpy(row)

    def aside(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def close(self) -> None:
        return


def copier_for(device: torch.device) -> Copier:
    """The copier of the device that vLLM's pages lie on. ConfigError where there is none, with what to change."""
    if device.type == "cpu":
        return NativeCopier()
    if device.type == "cuda":
        from engine_adapter.vllm_connector.cuda_copier import card_copier

        return card_copier(device)
    raise ConfigError(f"device: got {device.type}; expected cpu or cuda")
