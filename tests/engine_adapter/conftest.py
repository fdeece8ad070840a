from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.engine_adapter.loop_kit import Kit, KitMaker, geometry, make_store

torch.set_num_threads(1)


@pytest.fixture
def make_kit() -> Iterator[KitMaker]:
    """make_kit(family, block_tokens=4, blocks=64, host_blocks=0, loop={...}, **store settings) -> Kit."""
    made: list[Kit] = []

    def make(
        family: str = "full", block_tokens: int = 4, *, loop: dict[str, Any] | None = None, **settings: Any
    ) -> Kit:
        kit = Kit(make_store(geometry(family, block_tokens), **settings), loop or {})
        made.append(kit)
        return kit

    yield make
    for kit in made:
        kit.store.close()
