"""Where threads of the vLLM connector run, beside a main thread that is bound to a core."""

from __future__ import annotations

import os
import threading

import pytest

from engine_adapter.vllm_connector.cores import beside_the_computing

CORES = os.sched_getaffinity(0)


def cores_of_a_thread() -> set[int]:
    found: list[set[int]] = []
    thread = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.skipif(len(CORES) < 2, reason="one core")
def test_threads_started_inside_run_beside_a_bound_main_thread() -> None:
    first = {min(CORES)}
    os.sched_setaffinity(0, first)
    try:
        with beside_the_computing():
            assert cores_of_a_thread() == os.sched_getaffinity(os.getppid()) - first
        assert os.sched_getaffinity(0) == cores_of_a_thread() == first
    finally:
        os.sched_setaffinity(0, CORES)


def test_an_engine_that_is_not_bound_stays_as_it_is() -> None:
    with beside_the_computing():
        assert cores_of_a_thread() == CORES
