"""Copies of pages on a card, without one: the kernels run behind the shim, streams and events are stood in for.

What cannot run here is the order in which a card takes up work. `Streams` keeps it as CUDA promises it, and no more: a
stream runs in its own order, waits for events that it was told to wait for, and is otherwise as early or as late as the
test says. tests/gpu runs the same scenarios on a card's own streams.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from allocator import ConfigError
from engine_adapter.vllm_connector import loading, saving
from engine_adapter.vllm_connector.cuda_copier import CardLayer, CardPages, CudaCopier, check_pages
from engine_adapter.vllm_connector.loading import Loader
from engine_adapter.vllm_connector.saving import Saver
from engine_adapter.vllm_connector.shelf import Shelf
from kvstore.tier import ByteRow
from quant.cuda.codec import CudaCodec
from quant.cuda.driver import Bytes, DeviceBuffer, Event
from quant.cuda.launches import Launch
from quant.int4 import Int4Codec
from tests.engine_adapter import card_copies_suite as suite
from tests.engine_adapter.card_copies_suite import LAYOUTS, SCENARIOS
from tests.quant.cuda.conftest import shim as shim
from tests.quant.cuda.conftest import shim_modules as shim_modules
from tests.quant.cuda.late_driver import aligned
from tests.quant.cuda.shim import ShimDevice

COMPUTE, SIDE = 1, 2


class Point:
    """An event: passed when its stream has come to it."""

    def __init__(self, streams: Streams, stream: int) -> None:
        self._streams = streams
        self.stream = stream
        self.passed = False

    def done(self) -> bool:
        return self.passed

    def wait(self) -> None:
        self._streams.wait_until(self)


class Streams:
    """quant.cuda.driver.Driver. Nothing runs before somebody waits for it or `run_all`."""

    def __init__(self, shim: ShimDevice) -> None:
        self._shim = shim
        self._lock = threading.Condition()
        self._is_still = False
        self._queues: dict[int, deque[Any]] = {COMPUTE: deque(), SIDE: deque()}

    def _enqueue(self, stream: int, entry: Any) -> None:
        with self._lock:
            self._queues[stream].append(entry)

    def call(self, stream: int, kernel: Callable[[], None]) -> None:
        self._enqueue(stream, kernel)

    def launch(self, launches: Sequence[Launch], stream: int) -> None:
        self._enqueue(stream, lambda: self._shim.run(launches))

    def record(self, stream: int) -> Point:
        point = Point(self, stream)
        self._enqueue(stream, point)
        return point

    def wait_for(self, stream: int, event: Event) -> None:
        self._enqueue(stream, ("wait", event))

    def upload(self, content: Bytes, stream: int) -> DeviceBuffer:
        kept, target = content.reshape(-1).view(np.uint8).copy(), aligned(content.nbytes)
        self._enqueue(stream, lambda: target.array.__setitem__(slice(None), kept))
        return DeviceBuffer(target.address, content.nbytes, target)

    def download(self, buffer: DeviceBuffer, stream: int) -> Bytes:
        self.run_until(self.record(stream))
        return np.frombuffer(ctypes.string_at(buffer.address, buffer.size_bytes), np.uint8).copy()

    @contextmanager
    def still(self, late: int) -> Iterator[None]:
        """Threads that wait for a point wait, until all that was enqueued inside has run."""
        self._is_still = True
        yield
        self.run_all(late)
        with self._lock:
            self._is_still = False
            self._lock.notify_all()

    def wait_until(self, point: Point) -> None:
        with self._lock:
            while self._is_still and not point.passed:
                self._lock.wait(60)
            self.run_until(point)

    def run_until(self, point: Point) -> None:
        """No more than what the point needs."""
        with self._lock:
            while not point.passed:
                self._run_one(point.stream)

    def run_all(self, late: int) -> None:
        """The other stream as far as it can go without the late one."""
        with self._lock:
            early = SIDE if late == COMPUTE else COMPUTE
            while self._queues[early] or self._queues[late]:
                self._run_one(early if self._can_go(early) else late)

    def _can_go(self, stream: int) -> bool:
        queue = self._queues[stream]
        if not queue:
            return False
        return not isinstance(queue[0], tuple) or bool(queue[0][1].passed)

    def _run_one(self, stream: int) -> None:
        entry = self._queues[stream].popleft()
        if isinstance(entry, tuple):
            self.run_until(entry[1])
        elif isinstance(entry, Point):
            entry.passed = True
        else:
            entry()


class HostMemory:
    """cuda_copier.CardMemory in host memory. torch works at once here, so the stream's own work runs before it."""

    device = torch.device("cpu")
    stream = SIDE

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def compute_stream(self) -> int:
        return COMPUTE

    def row(self, size_bytes: int) -> ByteRow:
        found = aligned(size_bytes).array
        found[:] = 0xEE
        return found

    @contextmanager
    def aside(self) -> Iterator[None]:
        self._streams.run_until(self._streams.record(SIDE))
        yield


class ShimMachine:
    """card_copies_suite.Machine."""

    device = torch.device("cpu")

    def __init__(self, shim: ShimDevice) -> None:
        self._streams = Streams(shim)
        self.copier = CudaCopier(self._streams, HostMemory(self._streams))
        self.late = "compute"

    def step(self, kernel: Callable[[], None]) -> None:
        self._streams.call(COMPUTE, kernel)

    def nothing_runs(self) -> AbstractContextManager[None]:
        return self._streams.still(self._late_stream)

    def finish(self) -> None:
        self._streams.run_all(self._late_stream)

    @property
    def _late_stream(self) -> int:
        return SIDE if self.late == "side" else COMPUTE


@pytest.fixture
def machine(shim: ShimDevice, monkeypatch: pytest.MonkeyPatch) -> ShimMachine:
    for module in (loading, saving):
        monkeypatch.setattr(module, "_CHUNK_BLOCKS", 2)
    return ShimMachine(shim)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_copies_and_steps_come_in_order_whichever_is_late(machine: ShimMachine, scenario: str) -> None:
    SCENARIOS[scenario](machine)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_pages_is_read(machine: ShimMachine, layout: str) -> None:
    suite.a_gather_has_what_the_step_before_it_wrote(machine, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_pages_is_written(machine: ShimMachine, layout: str) -> None:
    suite.a_step_after_a_load_reads_what_was_loaded(machine, layout)


@pytest.mark.nightly  # eight seconds to compile them once more
def test_blocks_of_the_tier_on_the_card_are_decoded_by_its_kernels(
    machine: ShimMachine, shim: ShimDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The codec takes the kernels of the device that the tensors are on."""
    ran: list[str] = []

    class Launcher:
        def run(self, launches: Sequence[Launch]) -> None:
            ran.extend(one.kernel for one in launches)
            shim.run(launches)

    def kernels(self: Int4Codec, operation: str, tensor: torch.Tensor) -> CudaCodec | None:
        return CudaCodec(Launcher()) if operation == "int4_decode" else None

    monkeypatch.setattr(Int4Codec, "_cuda", kernels)
    suite.blocks_of_the_tier_on_the_card_are_decoded_in_order(machine)
    assert {name.split("_")[1] for name in ran} == {"keys", "values"}, ran


# planted mistakes: a scenario must see each --------------------------------------------------------------------------


def _nothing(*_: Any) -> None:
    return


def _unordered_finish(self: Saver, group: int, chunk: Any, saves: Any, fence: Any) -> None:
    self._put(chunk, [self._item(one.key, one, chunk.rows[0], index) for index, one in enumerate(saves)])


def _first_layers_fence(self: CudaCopier, pages: CardPages, copy: Any) -> Any:
    fences = [copy(layer) for layer in range(len(pages.layers))]
    return fences[0]


def _early_buffer(self: Loader, number: int, size_bytes: int) -> Any:
    key = (number, size_bytes)
    return self._buffers.setdefault(key, loading._Buffer(self._copier.row(size_bytes)))


PLANTED: list[tuple[str, Any, str, Any]] = [
    ("a_gather_has_what_the_step_before_it_wrote", CudaCopier, "mark", _nothing),
    ("a_load_comes_after_the_steps_of_whom_its_pages_were_of", CudaCopier, "mark", _nothing),
    ("the_next_step_writes_after_the_gather", CudaCopier, "hold", _nothing),
    ("the_next_step_writes_after_the_gather", Shelf, "before_step", _nothing),
    ("the_next_step_writes_after_the_gather", CudaCopier, "_each_layer", _first_layers_fence),
    ("tiers_get_no_buffer_that_is_not_filled", Saver, "_finish", _unordered_finish),
    ("a_step_after_a_load_reads_what_was_loaded", CudaCopier, "hold", _nothing),
    ("a_step_after_a_load_reads_what_was_loaded", CudaCopier, "_each_layer", _first_layers_fence),
    ("no_buffer_is_read_into_before_it_has_left", Loader, "_buffer", _early_buffer),
]


@pytest.mark.parametrize(("scenario", "owner", "name", "mistake"), PLANTED)
def test_planted_a_wait_that_is_missing_or_too_early_is_seen(
    machine: ShimMachine, scenario: str, owner: Any, name: str, mistake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, mistake)
    with pytest.raises(AssertionError):
        SCENARIOS[scenario](machine)


# places --------------------------------------------------------------------------------------------------------------


def test_a_latents_block_is_one_run_where_its_tokens_lie_together() -> None:
    dense, apart = torch.zeros(4, 1, 32, 576), torch.zeros(4, 32, 2, 576)[:, :, :1].transpose(1, 2)
    for tensor, run_tokens in ((dense, 16), (apart, 1)):
        pages = CardPages((CardLayer(tensor, 0),), 1, 576, 16, 2, 4, is_latent=True)
        assert pages.run_bytes == run_tokens * 576 * 4
        found = pages.here(0, [([[3]], 1)])
        assert found.offsets[0] == (3 * tensor.stride(0) + 16 * tensor.stride(2)) * 4
        assert len(found.offsets) * pages.run_bytes == pages.block_bytes
        found.check("here", pages.run_bytes)


def test_pages_that_the_kernels_cannot_address_are_refused() -> None:
    with pytest.raises(ConfigError, match="runs of 24 bytes"):
        check_pages("full:0", CardPages((CardLayer(torch.zeros(2, 1, 16, 12), 0),), 1, 6, 16, 1, 4))


def test_a_copy_that_cannot_be_enqueued_has_ended_when_it_says_so(
    machine: ShimMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its buffer is given to somebody else then."""
    scene = suite.Scene(machine)
    real = CardPages.here

    def failing(self: CardPages, layer: int, places: Any) -> Any:
        return real(self, layer, places) if layer < 2 else 1 // 0

    monkeypatch.setattr(CardPages, "here", failing)
    row = machine.copier.row(scene.pages.block_bytes)
    with pytest.raises(ZeroDivisionError):
        machine.copier.gather(scene.pages, [([suite.STORED], 0)], row)
    assert machine.copier._copies.poll() == 0
    assert not row[: 2 * row.nbytes // 3].any()
    scene.save()
    scene.settle()
    assert scene.shelf.below.counters()["saves_failed"] == suite.BLOCKS
    scene.close()
