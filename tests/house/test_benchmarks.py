"""The measuring tools themselves: rows, rounds, the command, and the pool suite against our own fake-free sides."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.report import markdown
from benchmarks.rows import Report, Row, Stopwatch, compared, interleaved, rotated, shown, spread

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = {"suite", "case", "unit", "value", "baseline", "baseline_value", "ratio", "rounds", "spread", "note"}


@pytest.mark.parametrize(("better", "ratio"), [("smaller", 3.0), ("larger", 1 / 3)])
def test_ratio_is_turned_so_that_larger_is_better(better: str, ratio: float) -> None:
    row = compared("s", "c", "us", [2.0, 1.0, 1.0], better=better, baseline="peer", theirs=[3.0, 9.0, 1.0])  # type: ignore[arg-type]
    assert (row.value, row.baseline_value) == (1.0, 3.0)
    assert row.ratio == pytest.approx(ratio)


def test_a_row_without_a_peer_has_no_ratio() -> None:
    row = compared("s", "c", "us", [1.0], better="smaller", baseline="peer")
    assert (row.baseline, row.baseline_value, row.ratio, row.spread) == (None, None, None, None)


def test_rounds_alternate_which_side_begins_and_leave_the_first_out() -> None:
    order: list[str] = []

    def side(name: str, seconds: float):  # type: ignore[no-untyped-def]
        def run(number: int) -> float:
            order.append(f"{name}{number}")
            return seconds + number

        return run

    ours, theirs = interleaved(side("o", 1), side("t", 2), 3)
    assert order == ["t-1", "o-1", "o0", "t0", "t1", "o1", "o2", "t2"]
    assert (ours, theirs) == ([1, 2, 3], [2, 3, 4])


def test_rotated_rounds_begin_with_each_side_in_turn() -> None:
    order: list[str] = []

    def side(name: str):  # type: ignore[no-untyped-def]
        def run(number: int) -> float:
            order.append(f"{name}{number}")
            return number

        return run

    found = rotated({name: side(name) for name in "abc"}, 3)
    assert order == ["c-1", "a-1", "b-1", "a0", "b0", "c0", "b1", "c1", "a1", "c2", "a2", "b2"]
    assert found == {name: [0, 1, 2] for name in "abc"}


def test_spread_is_half_the_quartiles_distance_over_the_median() -> None:
    assert spread([1.0, 1.0, 1.0]) == 0
    assert spread([1.0, 2.0, 3.0]) == pytest.approx(0.5)
    assert spread([1.0, 2.0]) is None


def test_stopwatch_adds_up_and_gives_the_collector_back() -> None:
    import gc

    watch = Stopwatch()
    for _ in range(2):
        with watch:
            assert not gc.isenabled()
    assert gc.isenabled()
    assert watch.seconds > 0


@pytest.mark.parametrize(("value", "text"), [(0, "0"), (0.00234, "0.00234"), (1234.5, "1234"), (1e-6, "1.000e-06")])
def test_figures_are_shown_with_four_digits(value: float, text: str) -> None:
    assert shown(value) == text


def test_page_has_a_table_a_suite_and_each_note_once() -> None:
    rows = [
        Row(suite="a", case="x", unit="us", value=1.5, note="n"),
        Row(suite="a", case="y", unit="us", value=2, note="n"),
    ]
    page = markdown(Report({"commit": "abc", "torch": None}, rows), "python -m benchmarks")
    assert page.count("## a") == 1
    assert page.count("- n") == 1
    assert "| commit | abc |" in page
    assert "torch" not in page


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--suite", "nonsense", "--json", "-"], "unknown suite nonsense: choose from pool"),
        (["--suite", "pool", "--json", "-", "--rounds", "0"], "--rounds: got 0"),
        (["--suite", "fidelity", "--model", "nowhere", "--json", "-"], "unknown nowhere: choose from gemma3, smollm2"),
        (["--suite", "pool", "--model", "smollm2", "--json", "-"], "unknown smollm2: choose from (none)"),
        (["--suite", "pool"], "--json: give a file"),
        (["--suite", "pool", "--from", "x.json"], "--suite measures and --from reads"),
        (["--from", "/proc/nothing.json"], "--from: /proc/nothing.json is no report"),
        (["--suite", "pool", "--json", "/"], "--json: got the folder /"),
        (["--suite", "pool", "--json", "-", "--report", "/proc/page.md"], "--report: cannot write"),
    ],
)
def test_bad_usage_is_said_before_anything_is_measured(arguments: list[str], said: str) -> None:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_pool_suite_has_every_case_that_is_asked_for() -> None:
    command = [sys.executable, "-m", "benchmarks", "--suite", "pool", "--json", "-", "--quick", "--rounds", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert {"machine", "commit", "seed", "python", "torch"} <= set(report["environment"])
    assert all(set(row) == COLUMNS for row in report["rows"])
    cases = {row["case"].removesuffix("_vs_vllm") for row in report["rows"]}
    assert cases >= {
        *("alloc_free_1", "alloc_free_16", "alloc_free_256", "alloc_free_2048"),
        *("hash_32k", "lookup_32k", "admit_cold_32k", "admit_warm_32k", "free_32k", "decode_step"),
    }


def test_hash_and_pages_suites_have_every_case_that_is_asked_for() -> None:
    command = [sys.executable, "-m", "benchmarks", "--suite", "hash,pages", "--json", "-", "--quick", "--rounds", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = {row["case"]: row for row in json.loads(done.stdout)["rows"]}
    assert rows["hash_32k_vs_hashlib"]["ratio"] > 0
    for case in ("gather_32KiB", "scatter_32KiB", "gather_2KiB", "scatter_2KiB"):
        assert rows[case]["ratio"] > 0
        assert rows[case]["baseline"] == "memmove"
