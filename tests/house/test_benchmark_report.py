"""What is asked for, the verdicts, the page and its charts, and the check that fails."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.__main__ import SUITES
from benchmarks.report import charts, markdown
from benchmarks.rows import Report, Row
from benchmarks.targets import State, summary, targets, verdicts

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {"machine": "a <machine>", "commit": "abc", "when": "2026-01-02"}
POOL = targets()["pool"]


def pool_rows(factor: float, leave_out: str = "") -> list[Row]:
    return [
        Row(suite="pool", case=case, unit="us", value=1, baseline="vllm", baseline_value=1, ratio=factor * target)
        for case, target in POOL.items()
        if case != leave_out
    ]


def test_a_case_is_met_short_or_missing() -> None:
    first, second, third = list(POOL)[:3]
    rows = [
        Row(suite="pool", case=first, unit="us", value=1, ratio=POOL[first]),
        Row(suite="pool", case=second, unit="us", value=1, ratio=0.999 * POOL[second]),
        Row(suite="pool", case=third, unit="us", value=1),
    ]
    found = {one.case: one.state for one in verdicts(rows, ["pool"])}
    assert (found[first], found[second], found[third]) == (State.MET, State.SHORT, State.MISSING)
    assert set(found) == set(POOL)
    assert summary(verdicts(rows, ["pool"])).startswith(f"1 of {len(POOL)} cases asked for are met, 1 short")
    assert len(verdicts(rows)) == sum(map(len, targets().values()))


def test_page_names_what_is_not_met_and_what_is_not_there() -> None:
    page = markdown(Report(ENVIRONMENT, pool_rows(0.9, leave_out="free_32k_vs_vllm")), "c", {"pool": "p.svg"})
    assert f"**0 of {len(POOL)} cases asked for are met, {len(POOL) - 1} short, 1 missing.**" in page
    assert "- pool free_32k_vs_vllm: missing: no row, asked for 2" in page
    assert "| 2.5, short |" in page
    assert "(p.svg)" in page
    assert "Not in this page: codec" in page
    assert ", met |" in markdown(Report(ENVIRONMENT, pool_rows(1.0)), "c")


def test_charts_are_whole_files_that_name_every_case_and_work_in_the_dark() -> None:
    rows = [*pool_rows(1.2, leave_out="free_32k_vs_vllm"), Row(suite="own", case="x", unit="us", value=1, ratio=3.0)]
    found = charts(Report(ENVIRONMENT, [*rows, Row(suite="bare", case="y", unit="us", value=1)]))
    assert set(found) == {"pool", "own"}
    for chart in found.values():
        root = ElementTree.fromstring(chart)
        assert root.tag.endswith("svg")
        assert "prefers-color-scheme: dark" in chart
        assert "href" not in chart
        assert "url(" not in chart
        assert "a &lt;machine&gt;, commit abc, 2026-01-02" in chart
    texts = "".join(ElementTree.fromstring(found["pool"]).itertext())
    assert all(case in texts for case in POOL)
    assert "missing: no row, asked 2" in texts
    bars = [one for one in ElementTree.fromstring(found["pool"]).iter() if one.tag.endswith("rect")]
    assert sorted({one.get("class") for one in bars}) == ["met", "missing"]


@pytest.mark.parametrize(("factor", "code"), [(1.0, 1), (0.5, 1)])
def test_the_check_fails_while_any_suite_is_missing(tmp_path: Path, factor: float, code: int) -> None:
    done = check(tmp_path, pool_rows(factor))
    assert done.returncode == code
    assert "codec encode_int4_d64: missing" in done.stderr
    assert ("pool hash_32k_vs_vllm: short" in done.stderr) == (factor < 1)


def test_the_check_holds_when_all_is_met(tmp_path: Path) -> None:
    rows = [
        Row(suite=suite, case=case, unit="us", value=1, ratio=target)
        for suite, cases in targets().items()
        for case, target in cases.items()
    ]
    done = check(tmp_path, rows)
    assert done.returncode == 0
    count = len(rows)
    assert f"{count} of {count} cases asked for are met" in done.stderr
    assert (tmp_path / "page.md").is_file()
    assert {f"page-{suite}.svg" for suite in targets()} <= {path.name for path in tmp_path.iterdir()}


def check(folder: Path, rows: list[Row]) -> subprocess.CompletedProcess[str]:
    (folder / "rows.json").write_text(Report(ENVIRONMENT, rows).to_json(), encoding="utf-8")
    command = ["--from", str(folder / "rows.json"), "--check", "targets", "--report", str(folder / "page.md")]
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *command], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_reports_read_back_and_join_without_claiming_one_machine_for_all() -> None:
    one = Report({"machine": "a", "seed": 0}, pool_rows(1.0))
    two = Report({"machine": "b", "seed": 0}, [*pool_rows(2.0), Row(suite="own", case="x", unit="s", value=1)])
    assert Report.from_json(one.to_json()) == one
    joined = one.joined(two)
    assert joined.environment == {"machine": "a; b", "seed": 0}
    assert joined.rows == two.rows


def test_the_suites_exist_and_decode_has_every_case_that_is_asked_for() -> None:
    command = [sys.executable, "-m", "benchmarks", "--suite", "decode", "--json", "-", "--quick", "--rounds", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = {row["case"]: row for row in json.loads(done.stdout)["rows"]}
    assert set(targets()["decode"]) <= set(rows)
    share = rows["loop_overhead_share_inverse"]
    assert 0 < share["value"] < share["baseline_value"]
    for suite in SUITES:
        assert find_spec(f"benchmarks.suites.{suite}") is not None, suite
