"""Traces for the simulator's tests: the public ones where they lie, and made-up ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvstore.simulation import Trace, read

ROOT = Path(__file__).resolve().parents[3]
FOLDER = Path(os.environ.get("KVSTORE_TRACES") or ROOT.parent / "shared" / "traces")


def public(name: str) -> Trace:
    path = FOLDER / name
    if not path.is_file():
        pytest.skip(f"no {name} in {FOLDER} (KVSTORE_TRACES says where traces lie)")
    return read(path)


@pytest.fixture(scope="session")
def synthetic() -> Trace:
    return public("mooncake_synthetic_trace.jsonl")


@pytest.fixture(scope="session")
def conversation() -> Trace:
    return public("mooncake_conversation_first_half.jsonl")
