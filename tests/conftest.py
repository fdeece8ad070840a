"""Searches repeat exactly in the usual run, so that a red run is red for everybody; the nightly one draws anew.

HYPOTHESIS_PROFILE=nightly for the latter. What a failed test had open is closed here, so that it fails alone: its
sockets would be found, and complained of, in a later one.

What measures time, or starts servers that must answer in time, is marked `alone`: `make test` runs it with no other
test beside.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None, database=None)
settings.register_profile("nightly", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

_ROOT = Path(__file__).resolve().parent
_ALONE = (
    "engine_adapter/server",
    "engine_adapter/test_prefill_and_decode.py",
    "hostile",
    "kvstore/daemon",
    "kvstore/diagnosis",
    "kvstore/test_redis_faults.py",
    "kvstore/test_redis_outages.py",
    "kvstore/test_redis_topology.py",
)
_CLOSED = ("allocator", "benchmarks", "engine_adapter", "kvstore", "tests", "socket")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(item.path.is_relative_to(_ROOT / part) for part in _ALONE):
            item.add_marker(pytest.mark.alone)


def pytest_collection_finish() -> None:
    """What is there now stays, so the collector need not look at it again. Found in CI: it took 0.3 s of processor
    time on a thread of a daemon in this process, which charged its client for that and refused the next request.
    `kvstore serve` has no such pauses."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when == "call" and report.failed and call.excinfo is not None:
        close_what_is_open(call.excinfo.tb, list(getattr(item, "funcargs", {}).values()))
    return report


def close_what_is_open(traceback: TracebackType | None, fixtures: Sequence[Any] = ()) -> None:
    """Locals of the tests' own frames that can be closed or stopped, the last one first; fixtures end by themselves."""
    while traceback is not None:
        frame, traceback = traceback.tb_frame, traceback.tb_next
        if not str(frame.f_globals.get("__name__", "")).startswith("tests."):
            continue
        for value in reversed(list(frame.f_locals.values())):
            for one in reversed(value) if isinstance(value, list | tuple) else (value,):
                end = _end_of(one)
                if end is not None and not any(one is given for given in fixtures):
                    with suppress(Exception):  # it is the failure before this one that counts
                        end()


def _end_of(value: Any) -> Any:
    if isinstance(value, type) or not type(value).__module__.startswith(_CLOSED):
        return None
    ends = (getattr(value, name, None) for name in ("close", "stop"))
    return next((end for end in ends if callable(end)), None)
