"""Copies between vLLM's pages on a card and host memory: the CUDA kernels on a stream of their own, ordered by events.

    the step's kernels -> event -> gather on the side stream -> event -> the next step's kernels     (`mark`, `hold`)
    the step's kernels -> event -> scatter on the side stream -> event -> the step that reads it

The side stream runs in order, so a copy's fence is that of all before it, and decoded blocks and slots of the tier on
the card need no more than to be used on it. Only this file of the adapter needs quant.cuda, and so CuPy.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from allocator import ConfigError
from engine_adapter.vllm_connector.layout import PagesShape
from quant.cuda import CudaUnavailable, Fence, PageCopier, PageSet, cuda_device, status

if TYPE_CHECKING:
    from engine_adapter.vllm_connector.copier import Places
    from kvstore.tier import ByteRow
    from quant.cuda.driver import Driver

_UNIT_BYTES = 16
_Offsets = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CardLayer:
    """One layer's Tensor[pages, heads of this rank, page tokens, (K, V) dims], last stride 1, others any.

    table: the vLLM cache group whose table leads to it.
    """

    tensor: torch.Tensor
    table: int


@dataclass(frozen=True, slots=True)
class CardPages(PagesShape):
    """In a card's memory: of each token and head first K, then V. layers: CardLayer."""

    @property
    def run_bytes(self) -> int:
        """Of what lies together both here and in a store block: a token's K or V, or a block's whole latent."""
        tokens = self.block_tokens if self._is_dense else 1
        return tokens * self.dim * self.item_bytes

    @property
    def _is_dense(self) -> bool:
        return self.is_latent and all(one.tensor.stride(2) == self.dim for one in self.layers)

    def here(self, layer: int, places: Places) -> PageSet:
        """The runs of these blocks in a layer's pages, in the order of store blocks."""
        one: CardLayer = self.layers[layer]
        tensor, ratio = one.tensor, self.blocks_per_page
        page_stride, head_stride, token_stride, _ = tensor.stride()
        at = np.array([(tables[one.table][at // ratio], at % ratio) for tables, at in places], np.int64).reshape(-1, 2)
        first = at[:, 0] * page_stride + at[:, 1] * (self.block_tokens * token_stride)
        heads = np.arange(self.kv_heads, dtype=np.int64) * head_stride
        parts = np.arange(self._parts, dtype=np.int64) * self.dim
        tokens = np.arange(1 if self._is_dense else self.block_tokens, dtype=np.int64) * token_stride
        offsets = _sums(first, heads, parts, tokens) * self.item_bytes
        elements = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        return PageSet(tensor.data_ptr(), elements * self.item_bytes, offsets, tensor)

    def in_row(self, layer: int, count: int) -> _Offsets:
        """Where the same runs lie in `count` blocks, one behind the other."""
        layer_bytes = self.block_bytes // len(self.layers)
        blocks = np.arange(count, dtype=np.int64) * self.block_bytes + layer * layer_bytes
        return _sums(blocks, np.arange(layer_bytes // self.run_bytes, dtype=np.int64) * self.run_bytes)


def _sums(*axes: _Offsets) -> _Offsets:
    """All sums of one of each, flat, the last axis quickest."""
    found = np.zeros(1, np.int64)
    for axis in axes:
        found = (found[:, None] + axis).reshape(-1)
    return found


class CardMemory(Protocol):
    """What CudaCopier asks of torch. stream: a raw handle, of a stream that nobody else uses."""

    device: torch.device
    stream: int

    def compute_stream(self) -> int:
        """Raw handle of the stream that the calling thread, vLLM's, computes on."""

    def row(self, size_bytes: int) -> ByteRow:
        """Pinned host memory; the card finds it at the same address."""

    def aside(self) -> AbstractContextManager[Any]:
        """torch works on `stream` inside."""


class CudaCopier:
    """See copier.Copier."""

    is_immediate = False

    def __init__(self, driver: Driver, memory: CardMemory) -> None:
        self.device = memory.device
        self._driver = driver
        self._memory = memory
        self._copies = PageCopier(driver, memory.stream, memory)

    def row(self, size_bytes: int) -> ByteRow:
        return self._memory.row(size_bytes)

    def mark(self) -> None:
        self._driver.wait_for(self._memory.stream, self._driver.record(self._memory.compute_stream()))

    def hold(self, fence: Any) -> None:
        if isinstance(fence, Fence) and not fence.done():
            fence.hold(self._memory.compute_stream())

    def gather(self, pages: CardPages, places: Places, row: ByteRow) -> Fence:
        address, size = row.ctypes.data, len(places) * pages.block_bytes
        return self._each_layer(
            pages,
            lambda layer: self._copies.copy(
                PageSet(address, size, pages.in_row(layer, len(places)), row),
                pages.here(layer, places),
                pages.run_bytes,
            ),
        )

    def scatter(self, source: ByteRow | torch.Tensor, pages: CardPages, places: Places) -> Fence:
        address = source.data_ptr() if isinstance(source, torch.Tensor) else source.ctypes.data
        size = len(places) * pages.block_bytes
        return self._each_layer(
            pages,
            lambda layer: self._copies.copy(
                pages.here(layer, places),
                PageSet(address, size, pages.in_row(layer, len(places)), source),
                pages.run_bytes,
            ),
        )

    def _each_layer(self, pages: CardPages, copy: Callable[[int], Fence]) -> Fence:
        """The last one's fence. What was enqueued before an error has ended when the error is raised."""
        fence: Fence | None = None
        try:
            for layer in range(len(pages.layers)):
                fence = copy(layer)
        except BaseException:
            if fence is not None:
                fence.wait()
            raise
        assert fence is not None
        return fence

    def aside(self) -> AbstractContextManager[Any]:
        return self._memory.aside()

    def upload(self, row: ByteRow) -> torch.Tensor:
        return torch.from_numpy(row).to(self.device, non_blocking=True)

    def close(self) -> None:
        self._copies.close()


class TorchMemory:
    """CardMemory of a card, by torch. side: a CuPy stream."""

    def __init__(self, device: torch.device, side: Any) -> None:
        self.device = device
        self.stream = int(side.ptr)
        self._owner = side

    def compute_stream(self) -> int:
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def row(self, size_bytes: int) -> ByteRow:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True).numpy()

    def aside(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(torch.cuda.ExternalStream(self.stream, device=self.device))


def card_copier(device: torch.device) -> CudaCopier:
    """For vLLM's pages on this card. ConfigError where the kernels do not run here, with the reason."""
    usable, reason = status()
    try:
        if usable:
            card = cuda_device(device.index)
            return CudaCopier(card, TorchMemory(device, card.new_stream()))
    except CudaUnavailable as error:
        reason = str(error)
    raise ConfigError(
        f"device: got {device}, whose pages cannot be copied ({reason}); expected the CUDA kernels of quant to run: "
        "pip install -e '.[cuda13]' in a checkout (or cuda12), and see kvstore doctor --kernels"
    )


def check_pages(name: str, pages: CardPages) -> None:
    """ConfigError for pages that the kernels cannot address."""
    steps = [step * pages.item_bytes for one in pages.layers for step in one.tensor.stride()[:3]]
    addresses = [one.tensor.data_ptr() for one in pages.layers]
    if pages.run_bytes % _UNIT_BYTES or any(place % _UNIT_BYTES for place in (*steps, *addresses)):
        raise ConfigError(
            f"{name!r}: runs of {pages.run_bytes} bytes in steps of {steps[:3]}; expected multiples of {_UNIT_BYTES}"
        )
