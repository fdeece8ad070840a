"""However an engine orders layers, pages, heads, tokens and channels in memory, a stored block has one form.

Every count is another number, so that an axis taken for another one shows; every value names its own place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
import torch

from engine_adapter.vllm_connector.copier import Copier, NativeCopier
from engine_adapter.vllm_connector.cuda_copier import CardLayer, CardPages
from engine_adapter.vllm_connector.layout import GroupPages, LayerPages, PagesShape
from tests.engine_adapter.test_vllm_card_copies import ShimMachine
from tests.quant.cuda.conftest import shim as shim
from tests.quant.cuda.conftest import shim_modules as shim_modules
from tests.quant.cuda.late_driver import aligned
from tests.quant.cuda.shim import ShimDevice

LAYERS, HEADS, PAGES, BLOCK, RATIO, DIM = 3, 5, 11, 16, 2, 8
PAGE = BLOCK * RATIO
TABLE, BLOCKS = [7, 2, 9], 6
Values = npt.NDArray[np.float32]
"""float32[layers, heads, (K, V), tokens of the prompt, dim]; of latents one head, K alone."""


@dataclass
class Engine:
    """An engine's memory, and its own indexing of it. view(layer): [pages, heads, (K, V), tokens, dim]."""

    pages: PagesShape
    view: Callable[[int], torch.Tensor]

    def write(self, values: Values) -> None:
        for layer in range(LAYERS):
            for at, page in enumerate(TABLE):
                self.view(layer)[page] = torch.from_numpy(values[layer, :, :, at * PAGE : (at + 1) * PAGE])

    def read(self) -> Values:
        found = [torch.cat([self.view(layer)[page] for page in TABLE], dim=2) for layer in range(LAYERS)]
        return torch.stack(found).numpy()


def _card(tensors: list[torch.Tensor], is_latent: bool) -> Engine:
    """tensors: [pages, heads, page tokens, (K, V) dims], of any strides."""
    layers = tuple(CardLayer(one, 0) for one in tensors)
    pages = CardPages(layers, 1 if is_latent else HEADS, DIM, BLOCK, RATIO, 4, is_latent)
    return Engine(pages, lambda layer: tensors[layer].unflatten(-1, (-1, DIM)).transpose(2, 3))


def cpu_full() -> Engine:
    """vLLM on a CPU: of one page and head first K, channel by channel, then V, token by token."""
    memory = [torch.zeros(PAGES, HEADS, 2, PAGE * DIM) for _ in range(LAYERS)]
    flat = tuple(LayerPages(one.reshape(-1).numpy().view(np.uint8), 0) for one in memory)

    class Halves:
        def __init__(self, layer: int) -> None:
            self.whole = memory[layer]

        def __getitem__(self, page: int) -> torch.Tensor:
            keys, values = self.whole[page, :, 0], self.whole[page, :, 1]
            return torch.stack([keys.view(HEADS, DIM, PAGE).transpose(1, 2), values.view(HEADS, PAGE, DIM)], dim=1)

        def __setitem__(self, page: int, values: torch.Tensor) -> None:
            self.whole[page, :, 0] = values[:, 0].transpose(1, 2).reshape(HEADS, -1)
            self.whole[page, :, 1] = values[:, 1].reshape(HEADS, -1)

    return Engine(GroupPages(flat, HEADS, DIM, BLOCK, RATIO, 4), Halves)  # type: ignore[arg-type]


def cpu_latent() -> Engine:
    memory = [torch.zeros(PAGES, 1, PAGE, DIM) for _ in range(LAYERS)]
    flat = tuple(LayerPages(one.reshape(-1).numpy().view(np.uint8), 0) for one in memory)
    return Engine(GroupPages(flat, 1, DIM, BLOCK, RATIO, 4, True), lambda layer: memory[layer].unsqueeze(2))


def card_layer_first() -> Engine:
    return _card([torch.zeros(PAGES, HEADS, PAGE, 2 * DIM) for _ in range(LAYERS)], False)


def card_token_first() -> Engine:
    return _card([torch.zeros(PAGES, PAGE, HEADS, 2 * DIM).transpose(1, 2) for _ in range(LAYERS)], False)


def card_block_first() -> Engine:
    whole = torch.zeros(PAGES, LAYERS, HEADS, PAGE, 2 * DIM)
    return _card([whole[:, layer] for layer in range(LAYERS)], False)


def card_layers_inside() -> Engine:
    """Of each page and token all layers: the joint form."""
    whole = torch.zeros(PAGES, PAGE, LAYERS, HEADS, 2 * DIM)
    return _card([whole[:, :, layer].transpose(1, 2) for layer in range(LAYERS)], False)


def card_latent_layer_first() -> Engine:
    """As engines keep latents: three axes, to which the head's is put."""
    return _card([torch.zeros(PAGES, PAGE, DIM).unsqueeze(1) for _ in range(LAYERS)], True)


def card_latent_block_first() -> Engine:
    whole = torch.zeros(PAGES, LAYERS, PAGE, DIM)
    return _card([whole[:, layer].unsqueeze(1) for layer in range(LAYERS)], True)


def card_latent_layers_inside() -> Engine:
    whole = torch.zeros(PAGES, PAGE, LAYERS, DIM)
    return _card([whole[:, :, layer].unsqueeze(1) for layer in range(LAYERS)], True)


FULL = [cpu_full, card_layer_first, card_token_first, card_block_first, card_layers_inside]
LATENT = [cpu_latent, card_latent_layer_first, card_latent_block_first, card_latent_layers_inside]


def patterned(is_latent: bool) -> Values:
    shape = (LAYERS, 1 if is_latent else HEADS, 1 if is_latent else 2, BLOCKS * BLOCK, DIM)
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


@pytest.mark.parametrize(
    ("source", "target"),
    [(one, other) for kind in (FULL, LATENT) for one in kind for other in kind],
    ids=lambda make: make.__name__,
)
def test_case_128_patterned_values_go_from_every_layout_into_every_other(
    shim: ShimDevice, source: Callable[[], Engine], target: Callable[[], Engine]
) -> None:
    writer, reader = source(), target()
    values = patterned(writer.pages.is_latent)
    writer.write(values)
    row = aligned(BLOCKS * writer.pages.block_bytes).array
    places = [([TABLE], position) for position in range(BLOCKS)]

    card, host = ShimMachine(shim).copier, NativeCopier()

    def copier(engine: Engine) -> Copier:
        return card if isinstance(engine.pages, CardPages) else host

    copier(writer).gather(writer.pages, places, row).wait()
    heads, parts = values.shape[1:3]
    stored = row.view(np.float32).reshape(BLOCKS, LAYERS, heads, parts, BLOCK, DIM)
    for position in range(BLOCKS):
        assert np.array_equal(stored[position], values[..., position * BLOCK : (position + 1) * BLOCK, :]), position
    copier(reader).scatter(row, reader.pages, places).wait()
    assert np.array_equal(reader.read(), values)
    for layer in range(LAYERS):
        for page in set(range(PAGES)) - set(TABLE):
            assert not reader.view(layer)[page].any(), "a page of somebody else was written to"
