"""`kvstore simulate`: rows, table and page; parallel runs equal serial ones; bad usage exits with 2."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.cli import main
from kvstore.cli.simulate import _folded

WORKLOAD = ("simulate", "--workload", "rag", "--requests", "300", "--capacity-percent", "2,20")


def test_rows_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORKLOAD, "--policy", "lru,default,belady", "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["trace"]["requests"] == 300
    assert [(row["policy"], row["capacity_percent"]) for row in report["rows"]] == [
        (policy, percent) for policy in ("lru", "default", "belady") for percent in (2, 20)
    ]
    for row in report["rows"]:
        assert 0 < row["block_hit_ratio"] <= row["token_hit_ratio"] < 1
        assert row["evictions"] > 0
        assert row["ttft_seconds_mean"] < row["ttft_seconds_mean_without_cache"]


def test_the_table_names_what_was_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORKLOAD, "--policy", "lru", "--codec", "raw,int4", "--jobs", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "300 requests" in lines[0]
    assert [line.split()[0] for line in lines[2:]] == ["lru"] * 4
    assert [line.split()[4] for line in lines[2:]] == ["raw", "raw", "int4", "int4"]


def test_a_table_too_wide_for_the_terminal_is_folded() -> None:
    table = [["policy", "capacity", "blocks", "codec", "hosts", "hits", "saved"],
             ["lru", "5 %", "29", "raw", "1", "20.25%", "0.01"],
             ["lru", "10 %", "59", "raw", "1", "28.34%", "0.01"]]  # fmt: skip
    widths = [max(len(row[at]) for row in table) for at in range(7)]
    assert _folded(table, widths, None) == _folded(table, widths, 53) == [[0, 1, 2, 3, 4, 5, 6]]
    assert _folded(table, widths, 40) == [[0, 1, 2, 3, 4], [0, 1, 2, 5, 6]], "what tells rows apart stands in each"
    assert _folded(table, widths, 1) == [[0, 1, 2, at] for at in (3, 4, 5, 6)], "a column in each, however narrow"


def test_many_processes_come_to_the_same_rows(capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for jobs in ("1", "3"):
        assert main([*WORKLOAD, "--json", "-", "--jobs", jobs]) == 0
        rows = json.loads(capsys.readouterr().out)["rows"]
        found.append([{**row, "seconds": 0} for row in rows])
    assert found[0] == found[1]


def test_the_page_stands_alone_and_has_the_bound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert main([*WORKLOAD, "--policy", "lru", "--html", str(page)]) == 0
    assert "belady" in capsys.readouterr().out
    text = page.read_text(encoding="utf-8")
    assert text.count("<polyline") == 2
    assert 'class="line bound"' in text
    assert "<script" not in text
    assert "http" not in text


def test_one_host_is_run_once_whatever_the_routings(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--policy", "lru", "--hosts", "1,2", "--routing", "random,prefix", "--json", "-"]
    assert main([*WORKLOAD, *arguments]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["hosts"], row["routing"]) for row in rows[::2]] == [(1, "-"), (2, "random"), (2, "prefix")]


def test_requests_of_a_trace_are_its_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [{"timestamp": n, "input_length": 512, "output_length": 1, "hash_ids": [n]} for n in range(8)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for words, count in (((), 8), (("--requests", "5"), 5)):
        assert main(["simulate", "--trace", str(path), *words, "--policy", "lru", "--json", "-"]) == 0
        assert json.loads(capsys.readouterr().out)["trace"]["requests"] == count
    assert main(["simulate", "--trace", str(path), "--requests", "0"]) == 2
    assert "requests: got 0; expected at least 1" in " ".join(capsys.readouterr().err.split())
    assert main(["simulate", "--trace", str(path), "--block-tokens", "16"]) == 2
    assert "hash_ids: got 1 for 512 tokens in blocks of 16; expected 32" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "expected either --trace or --workload"),
        (("--workload", "rag", "--policy", "mru"), "policy: got 'mru'"),
        (("--workload", "rag", "--capacity-percent", "x"), "--capacity-percent: got 'x'"),
        (("--workload", "rag", "--capacity-percent", "1", "--capacity-blocks", "1"), "not both"),
        (("--workload", "rag", "--capacity-percent", "101"), "capacity percent: got 101"),
        (("--workload", "rag", "--tiers", "disk=5"), "--tiers: got 'disk=5'"),
        (("--workload", "rag", "--prefill-rate", "0"), "prefill_tokens_per_second: got 0"),
        (("--trace", "/no/such/file"), "No such file"),
        (("--workload", "rag", "--json", "/no/such/folder/x"), "there is no folder"),
    ],
)
def test_bad_usage_exits_with_2(arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *arguments]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_the_module_is_the_command_and_loads_no_torch() -> None:
    program = (
        "import sys, kvstore.cli as cli\n"
        "code = cli.main(['simulate', '--workload', 'rag', '--requests', '50', '--policy', 'lru', '--json', '-'])\n"
        "sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    module = [sys.executable, "-m", "kvstore.testing.sim", "--workload", "rag", "--requests", "50", "--json", "-"]
    again = subprocess.run(module, capture_output=True, text=True, check=False)
    assert again.returncode == 0
    assert json.loads(again.stdout)["rows"]
