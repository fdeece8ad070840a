"""What must hold of copies between a card's pages and the tiers, whatever runs first: behind the shim and on a card.

Each scenario lets vLLM's steps and the connector's copies be enqueued as they are in an engine, makes one of the two
streams late, and looks at the bytes. A Machine says how kernels are enqueued and made late.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import torch

from allocator import CacheGroup, GroupKind, KVGeometry
from engine_adapter.vllm_connector.copier import Copier
from engine_adapter.vllm_connector.cuda_copier import CardLayer, CardPages
from engine_adapter.vllm_connector.device_tier import DeviceTier
from engine_adapter.vllm_connector.orders import LoadOrder, SaveOrder
from engine_adapter.vllm_connector.shelf import Shelf
from kvstore import HashChain, HostTier, Identity
from kvstore.executor import ThreadExecutor
from quant import get_codec

BLOCK, RATIO, PAGES, LAYERS, HEADS, DIM = 16, 2, 24, 3, 2, 32
PAGE = BLOCK * RATIO
STORED, TARGETS = (3, 9, 4, 11, 5), (20, 14, 22, 7, 13)
BLOCKS = len(STORED) * RATIO
LAYOUTS = ("heads outside", "tokens outside", "blocks outermost")


class Machine(Protocol):
    """device: of the pages. late: "compute" or "side", the stream that runs as late as it may."""

    device: torch.device
    copier: Copier
    late: str

    def step(self, kernel: Callable[[], None]) -> None:
        """Enqueue what a step of vLLM does, on the stream that it computes on."""

    def nothing_runs(self) -> AbstractContextManager[None]:
        """What is enqueued inside has not begun before the end of it."""

    def finish(self) -> None:
        """All that was enqueued has run."""


def geometry() -> KVGeometry:
    group = CacheGroup(kind=GroupKind.FULL, layers=(0, 1, 2), kv_heads=HEADS, key_dim=DIM, value_dim=DIM)
    return KVGeometry(groups=(group,), block_tokens=BLOCK, dtype="float32")


def layer_tensors(layout: str, device: torch.device) -> list[torch.Tensor]:
    """float32[pages, heads, page tokens, 2 * dim] a layer, in memory as vLLM's layouts are."""
    if layout == "heads outside":
        return [torch.zeros(PAGES, HEADS, PAGE, 2 * DIM, device=device) for _ in range(LAYERS)]
    if layout == "tokens outside":
        return [torch.zeros(PAGES, PAGE, HEADS, 2 * DIM, device=device).transpose(1, 2) for _ in range(LAYERS)]
    whole = torch.zeros(PAGES, LAYERS, HEADS, PAGE, 2 * DIM, device=device)
    return [whole[:, layer] for layer in range(LAYERS)]


def prompt_values(seed: int = 1) -> torch.Tensor:
    """float32[pages of the prompt, layers, heads, page tokens, 2 * dim], on the CPU."""
    return torch.randn(len(STORED), LAYERS, HEADS, PAGE, 2 * DIM, generator=torch.Generator().manual_seed(seed))


class Scene:
    """Pages on the machine's device, a shelf over the host tier, and vLLM's steps."""

    def __init__(
        self, machine: Machine, layout: str = LAYOUTS[0], *, codec: str = "raw", device_bytes: int = 0
    ) -> None:
        self.machine = machine
        self.tensors = layer_tensors(layout, machine.device)
        layers = tuple(CardLayer(one, 0) for one in self.tensors)
        self.pages = CardPages(layers, HEADS, DIM, BLOCK, RATIO, 4)
        kv = geometry()
        tiers: list[Any] = [HostTier(16 << 20)]
        if device_bytes:
            tiers.insert(0, DeviceTier(device_bytes, ThreadExecutor("device"), machine.copier))
        chosen = None if codec == "raw" else get_codec(codec)
        self.shelf = Shelf(kv, tiers, codec=chosen, deadline_seconds=60.0, copier=machine.copier)
        self.shelf.attach([self.pages])
        root = Identity(model="m", weights="w", geometry=kv).root()
        self.root, self.hashes = root, HashChain(root, BLOCK).extend(list(range(BLOCKS * BLOCK)))
        self._kept: list[torch.Tensor] = []

    def write(self, pages: Sequence[int], values: torch.Tensor) -> None:
        """A step that fills pages: values as of prompt_values."""
        ready = values.to(self.machine.device)
        self._kept.append(ready)

        def kernel() -> None:
            for layer, tensor in enumerate(self.tensors):
                for at, page in enumerate(pages):
                    tensor[page].copy_(ready[at, layer], non_blocking=True)

        self.machine.step(kernel)

    def read(self, pages: Sequence[int]) -> torch.Tensor:
        """A step that reads pages; what it saw is there after `finish`."""
        seen = torch.zeros(len(pages), LAYERS, HEADS, PAGE, 2 * DIM, device=self.machine.device)

        def kernel() -> None:
            for layer, tensor in enumerate(self.tensors):
                for at, page in enumerate(pages):
                    seen[at, layer].copy_(tensor[page], non_blocking=True)

        self.machine.step(kernel)
        return seen

    def save(self) -> None:
        self.shelf.save([SaveOrder(self.root, self.hashes, 0, None, [STORED])])

    def settle(self) -> None:
        self._until(lambda: self.shelf.is_idle)

    def load(self, lossy_at: int | None = None) -> None:
        """Enqueued all of it: what a step after this reads comes after it."""
        self.shelf.load(LoadOrder("r", self.root, self.hashes, 0, [TARGETS], lossy_at))
        found: list[Any] = []

        def ended() -> bool:
            found.extend(self.shelf.take_finished())
            return bool(found)

        self._until(ended)
        assert found[0].failed == []

    def _until(self, holds: Callable[[], bool]) -> None:
        until = time.monotonic() + 60
        while not holds():
            assert time.monotonic() < until, "it does not end"
            self.shelf.below.drain()
            time.sleep(0.001)

    def stored(self) -> torch.Tensor:
        """As prompt_values: what the host tier has."""
        key = self.shelf._residency.copy_key(self.root, 0, self.hashes[0], 0, True)
        rows = [np.zeros(self.pages.block_bytes, np.uint8) for _ in self.hashes]
        tier = self.shelf.below.tiers[-1]
        transfer = self.shelf.below.begin(
            lambda: tier.submit_get(list(zip(key.with_hashes(self.hashes), rows, strict=True)))
        )
        results = self.shelf.below.wait(transfer, time.monotonic() + 60)
        assert all(one == "ok" for one in results), results
        blocks = torch.from_numpy(np.stack(rows)).view(torch.float32)
        blocks = blocks.reshape(len(STORED), RATIO, LAYERS, HEADS, 2, BLOCK, DIM)
        return blocks.permute(0, 2, 3, 1, 5, 4, 6).reshape(len(STORED), LAYERS, HEADS, PAGE, 2 * DIM)

    def close(self) -> None:
        self.machine.finish()
        self.shelf.close()


def saved(scene: Scene, values: torch.Tensor) -> None:
    """Stored, quietly."""
    scene.write(STORED, values)
    scene.save()
    scene.settle()
    scene.machine.finish()


def a_gather_has_what_the_step_before_it_wrote(machine: Machine, layout: str = LAYOUTS[0]) -> None:
    scene, values = Scene(machine, layout), prompt_values()
    machine.late = "compute"
    scene.write(STORED, values)
    scene.save()
    scene.settle()
    assert torch.equal(scene.stored(), values)
    scene.close()


def the_next_step_writes_after_the_gather(machine: Machine) -> None:
    """Its pages were given to another request."""
    scene, values = Scene(machine), prompt_values()
    scene.write(STORED, values)
    machine.finish()
    machine.late = "side"
    with machine.nothing_runs():
        scene.save()
        scene.shelf.before_step()
        scene.write(STORED, prompt_values(2))
    machine.finish()
    scene.settle()
    assert torch.equal(scene.stored(), values)
    scene.close()


def tiers_get_no_buffer_that_is_not_filled(machine: Machine) -> None:
    scene, values = Scene(machine), prompt_values()
    scene.write(STORED, values)
    machine.finish()
    machine.late = "side"
    scene.save()
    scene.settle()
    assert torch.equal(scene.stored(), values)
    scene.close()


def a_step_after_a_load_reads_what_was_loaded(machine: Machine, layout: str = LAYOUTS[0]) -> None:
    scene, values = Scene(machine, layout), prompt_values()
    saved(scene, values)
    machine.late = "side"
    scene.load()
    seen = scene.read(TARGETS)
    machine.finish()
    assert torch.equal(seen.cpu(), values)
    scene.close()


def a_load_comes_after_the_steps_of_whom_its_pages_were_of(machine: Machine) -> None:
    scene, values = Scene(machine), prompt_values()
    saved(scene, values)
    machine.late = "compute"
    scene.write(TARGETS, prompt_values(3))
    scene.load()
    seen = scene.read(TARGETS)
    machine.finish()
    assert torch.equal(seen.cpu(), values)
    scene.close()


def no_buffer_is_read_into_before_it_has_left(machine: Machine) -> None:
    """With chunks of two blocks: five of them through two buffers."""
    scene, values = Scene(machine), prompt_values()
    saved(scene, values)
    machine.late = "side"
    scene.load()
    seen = scene.read(TARGETS)
    machine.finish()
    assert torch.equal(seen.cpu(), values)
    scene.close()


def blocks_of_the_tier_on_the_card_are_decoded_in_order(machine: Machine) -> None:
    scene, values = Scene(machine, codec="int4", device_bytes=1 << 20), prompt_values()
    saved(scene, values)
    machine.late = "side"
    scene.load(lossy_at=1)
    seen = scene.read(TARGETS)
    machine.finish()
    counts = scene.shelf.below.counters()
    assert counts["loaded_blocks_device"] == BLOCKS
    found, first = seen.cpu(), slice(0, BLOCK)
    assert torch.equal(found[0, :, :, first], values[0, :, :, first])
    assert 0 < float((found - values).norm() / values.norm()) < 0.15
    scene.shelf.below.tiers[0].clear()
    scene.load(lossy_at=1)
    again = scene.read(TARGETS)
    machine.finish()
    assert scene.shelf.below.counters()["loaded_blocks_host"] == BLOCKS
    assert torch.equal(again.cpu(), found)
    scene.close()


SCENARIOS: dict[str, Callable[[Machine], None]] = {
    one.__name__: one
    for one in (
        a_gather_has_what_the_step_before_it_wrote,
        the_next_step_writes_after_the_gather,
        tiers_get_no_buffer_that_is_not_filled,
        a_step_after_a_load_reads_what_was_loaded,
        a_load_comes_after_the_steps_of_whom_its_pages_were_of,
        no_buffer_is_read_into_before_it_has_left,
        blocks_of_the_tier_on_the_card_are_decoded_in_order,
    )
}
