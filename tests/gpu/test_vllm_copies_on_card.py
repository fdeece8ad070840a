"""The vLLM connector's copies on a card's own streams: the scenarios that run behind the shim elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from engine_adapter.vllm_connector import loading, saving
from engine_adapter.vllm_connector.cuda_copier import CudaCopier, card_copier
from quant.cuda import CudaDevice
from tests.engine_adapter import card_copies_suite as suite
from tests.engine_adapter.card_copies_suite import LAYOUTS, SCENARIOS
from tests.gpu.test_pages_on_card import LONG_CYCLES

pytestmark = pytest.mark.gpu


class CardMachine:
    """card_copies_suite.Machine: a stream is late behind a kernel that only takes its time."""

    def __init__(self, card: CudaDevice) -> None:
        self.device = torch.device("cuda", card.index)
        self.copier: CudaCopier = card_copier(self.device)
        self._late = ""

    @property
    def late(self) -> str:
        return self._late

    @late.setter
    def late(self, stream: str) -> None:
        self._late = stream
        if stream == "side":
            self._delay_side()

    def _delay_side(self) -> None:
        with self.copier.aside():
            torch.cuda._sleep(LONG_CYCLES)

    def step(self, kernel: Callable[[], None]) -> None:
        if self._late == "compute":
            torch.cuda._sleep(LONG_CYCLES)
        kernel()

    @contextmanager
    def nothing_runs(self) -> Iterator[None]:
        self._delay_side()
        yield

    def finish(self) -> None:
        torch.cuda.synchronize(self.device)


@pytest.fixture
def machine(card: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> CardMachine:
    for module in (loading, saving):
        monkeypatch.setattr(module, "_CHUNK_BLOCKS", 2)
    return CardMachine(card)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_copies_and_steps_come_in_order_whichever_is_late(machine: CardMachine, scenario: str) -> None:
    SCENARIOS[scenario](machine)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_pages_is_read(machine: CardMachine, layout: str) -> None:
    suite.a_gather_has_what_the_step_before_it_wrote(machine, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_pages_is_written(machine: CardMachine, layout: str) -> None:
    suite.a_step_after_a_load_reads_what_was_loaded(machine, layout)
