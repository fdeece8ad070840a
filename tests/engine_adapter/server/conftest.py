"""One tiny random model and one server for the whole folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine_adapter.demo_kit import save_tiny_model
from tests.engine_adapter.server.server_kit import Client, serving


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("server") / "tiny")


@pytest.fixture(scope="module")
def client(tiny_folder: Path) -> Iterator[Client]:
    with serving(tiny_folder) as found:
        yield found
