"""A copier by torch alone, for pages on any device: what the kernels do, at once. It shows where tensors are mixed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from engine_adapter.vllm_connector.copier import DONE, Fence, NativeCopier, Places
from engine_adapter.vllm_connector.cuda_copier import CardPages
from kvstore.tier import ByteRow


class TorchCopier(NativeCopier):
    """Of float32 pages with K and V."""

    is_immediate = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def gather(self, pages: CardPages, places: Places, row: ByteRow) -> Fence:
        blocks = self._blocks(torch.from_numpy(row), pages, len(places))
        for at, layer, part in self._parts(pages, places):
            blocks[at, layer].copy_(part.unflatten(-1, (2, pages.dim)).permute(0, 2, 1, 3))
        return DONE

    def scatter(self, source: ByteRow | torch.Tensor, pages: CardPages, places: Places) -> Fence:
        blocks = self._blocks(torch.as_tensor(source), pages, len(places))
        for at, layer, part in self._parts(pages, places):
            part.unflatten(-1, (2, pages.dim)).copy_(blocks[at, layer].permute(0, 2, 1, 3))
        return DONE

    def upload(self, row: ByteRow) -> torch.Tensor:
        return torch.from_numpy(row).to(self.device)

    @staticmethod
    def _blocks(row: torch.Tensor, pages: CardPages, count: int) -> torch.Tensor:
        words = row[: count * pages.block_bytes].view(torch.float32)
        return words.reshape(count, len(pages.layers), pages.kv_heads, 2, pages.block_tokens, pages.dim)

    @staticmethod
    def _parts(pages: CardPages, places: Places) -> list[tuple[int, int, torch.Tensor]]:
        found = []
        for at, (tables, position) in enumerate(places):
            page, inside = divmod(position, pages.blocks_per_page)
            tokens = slice(inside * pages.block_tokens, (inside + 1) * pages.block_tokens)
            for layer, one in enumerate(pages.layers):
                found.append((at, layer, one.tensor[tables[one.table][page]][:, tokens]))
        return found


class TorchMachine:
    """card_copies_suite.Machine of a device that does everything at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.copier: Any = TorchCopier(device)
        self.late = ""

    def step(self, kernel: Callable[[], None]) -> None:
        kernel()

    def nothing_runs(self) -> AbstractContextManager[None]:
        return nullcontext()

    def finish(self) -> None:
        return
