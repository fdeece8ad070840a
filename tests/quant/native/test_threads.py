"""The pool of worker threads: every task once, whoever calls, however many, across forks and inside one another."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from quant import native
from tests.quant.native.build_kit import COMPILER, ROOT, SOURCES, needs_compiler, needs_extension, run

HERE = Path(__file__).parent
ATTEMPTS = 12


@needs_extension
@pytest.mark.parametrize("threads", [-1, 0, 1, 2, 3, 5, 8, 1000])
def test_every_task_runs_once(threads: int) -> None:
    for tasks in (0, 1, 2, 3, 7, 64, 1000):
        once, nested, workers, _ = native.kernels.thread_probe(tasks, threads)
        assert (once, nested) == (tasks, 0)
        assert workers <= max(1, min(threads, tasks, 64))


@needs_extension
def test_other_threads_take_part() -> None:
    seen = max(native.kernels.thread_probe(1 << 21, 4)[2] for _ in range(20))
    assert 2 <= seen <= 4


@needs_extension
def test_a_task_that_starts_a_job_runs_it_alone() -> None:
    assert native.kernels.thread_probe(500, 4, True)[:2] == (500, 1500)


@needs_extension
def test_many_callers_at_once() -> None:
    wrong: list[tuple[int, int, int]] = []

    def caller(number: int) -> None:
        for round in range(600):
            tasks, threads = (7 * round + number) % 65, 1 + (round + number) % 8
            once, nested, _, _ = native.kernels.thread_probe(tasks, threads, round % 3 == 0)
            if once != tasks or nested != (3 * tasks if round % 3 == 0 else 0):
                wrong.append((tasks, once, nested))

    callers = [threading.Thread(target=caller, args=(number,)) for number in range(5)]
    for one in callers:
        one.start()
    for one in callers:
        one.join()
    assert wrong == []


_FORKS = """
import os, threading, warnings
from quant import native
warnings.simplefilter("ignore")  # forking beside threads is what is tested
stop = threading.Event()
def caller():
    while not stop.is_set():
        assert native.kernels.thread_probe(64, 4)[0] == 64
callers = [threading.Thread(target=caller) for _ in range(3)]
for one in callers: one.start()
ends = []
for _ in range(20):
    child = os.fork()
    if child == 0:
        fine = all(native.kernels.thread_probe(tasks, 4, True)[:2] == (tasks, 3 * tasks) for tasks in (1, 64, 500, 65))
        os._exit(0 if fine else 1)
    ends.append(os.waitpid(child, 0)[1])
    assert native.kernels.thread_probe(64, 4)[0] == 64
stop.set()
for one in callers: one.join()
print(ends)
"""


@needs_extension
def test_a_fork_in_the_middle_of_jobs() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FORKS], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout.strip(), done.returncode) == (str([0] * 20), 0), done.stderr


@needs_extension
def test_tasks_see_denormal_numbers_whatever_the_caller_has_set() -> None:
    import torch

    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormal numbers")
    try:
        assert float(torch.tensor([1e-39]) * 1.0) == 0  # it is on in this thread
        assert native.kernels.thread_probe(1, 1)[3] == 0
        assert native.kernels.thread_probe(1 << 16, 4)[3] == 0
        assert float(torch.tensor([1e-39]) * 1.0) == 0  # and is still
    finally:
        torch.set_flush_denormal(False)


@needs_extension
@pytest.mark.parametrize("wrong", [(-1, 2), (1 << 25, 2), ("x", 2), (1,)])
def test_the_probe_refuses_what_it_cannot_do(wrong: tuple[object, ...]) -> None:
    with pytest.raises((ValueError, TypeError)):
        native.kernels.thread_probe(*wrong)


def built_driver(folder: Path, *flags: str, pool: Path = SOURCES / "threads.c") -> Path:
    program = folder / "driver"
    sources = [str(HERE / "thread_driver.c"), str(pool)]
    run([str(COMPILER), "-std=gnu11", "-O1", "-g", "-pthread", f"-I{SOURCES}", *flags, *sources, "-o", str(program)])
    return program


def without_randomised_addresses(program: Path) -> list[str]:
    """gcc's race detector refuses some kernels' address layout."""
    return [*(["setarch", platform.machine(), "-R"] if shutil.which("setarch") else []), str(program)]


def detecting() -> dict[str, str]:
    """An environment for the race detector, which does not go together with another sanitizer."""
    return {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"} | {
        "TSAN_OPTIONS": "halt_on_error=1"
    }


def is_found_out(program: Path) -> str:
    """What the detector says of a broken program: it needs threads that meet, so a busy machine gets some attempts."""
    for _ in range(ATTEMPTS):
        done = subprocess.run(
            without_randomised_addresses(program),
            env=detecting(),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if done.returncode:
            return done.stderr
    return ""


@pytest.fixture(scope="module")
def detects_races(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skip unless the race detector builds, runs, and finds a race that was planted."""
    try:
        program = built_driver(tmp_path_factory.mktemp("planted"), "-fsanitize=thread", "-DPLANT_RACE")
    except AssertionError as error:
        pytest.skip(f"no race detector: {str(error)[:200]}")
    said = is_found_out(program)
    if "unexpected memory mapping" in said or "personality" in said:
        pytest.skip("the race detector does not run on this kernel")
    assert "data race" in said


@needs_compiler
@pytest.mark.usefixtures("detects_races")
def test_no_race_is_found(tmp_path: Path) -> None:
    program = built_driver(tmp_path, "-fsanitize=thread")
    said = "no worker took part"
    for _ in range(ATTEMPTS):  # on a busy machine the callers may have done all before a worker comes
        if said == "no worker took part":
            said = run(without_randomised_addresses(program), environment=detecting()).strip()
    assert said == "all tasks ran once"


@needs_compiler
@pytest.mark.usefixtures("detects_races")
@pytest.mark.parametrize(
    "left_out",
    [
        "    wait_until_empty();\n    pthread_mutex_unlock",
        "    atomic_store(&pool.wanted, 0); /* who has not joined",
    ],
)
def test_a_pool_without_one_of_its_steps_is_found_out(left_out: str, tmp_path: Path) -> None:
    source = (SOURCES / "threads.c").read_text(encoding="ascii")
    assert source.count(left_out) == 1
    broken = tmp_path / "threads.c"
    broken.write_text(
        source.replace(left_out, left_out.replace("wait_until_empty();", "").replace("    atomic", "// "))
    )
    program = built_driver(tmp_path, "-fsanitize=thread", pool=broken)
    assert is_found_out(program)
