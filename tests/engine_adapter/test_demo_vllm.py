"""`make demo-vllm` without vLLM: its usage, its verdict, its page, and the rows that a benchmark makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.suites.vllm import report_rows
from engine_adapter.demo.vllm import measure_round, parse, prefixes, tier_report
from engine_adapter.demo.vllm_engines import Answered
from engine_adapter.demo.vllm_page import render


def answered(seconds: float, tokens: tuple[int, ...] = (1, 2), cached: int = 0) -> dict[str, Any]:
    return {"token_ids": tokens, "cached_tokens": cached, "ttft_seconds": seconds, "itl_seconds": 0.03}


def one_round(**changed: Any) -> dict[str, Any]:
    return {
        "cold_plain": answered(4.0),
        "cold_tier": answered(4.4),
        "cold_reader": answered(4.1),
        "warm": answered(0.3, (3, 4), 4096),
        "itl_plain": answered(0.2, (3, 4), 4096),
        "itl_tier": answered(0.2, (3, 4), 4096),
        **changed,
    }


def report(**changed: Any) -> dict[str, Any]:
    tier = tier_report("disk", [one_round(**changed)] * 3, 4100)
    machine = {"processor": "a <b>", "cores": 2, "python": "3", "torch": "2"}
    return {
        "tiers": [tier],
        "left_out": {"redis": "no server"},
        "prefix_tokens": 4100,
        "new_tokens": 16,
        "model": "m",
        "vllm": "0.32",
        "machine": machine,
        "wall_seconds": 9.0,
    }


def test_the_verdict_of_a_tier() -> None:
    found = report()["tiers"][0]
    assert found["warm_over_cold"] == pytest.approx(0.075)
    assert (found["bar"], found["answers_equal"], found["all_loaded"]) == (0.12, True, True)


@pytest.mark.parametrize("side", ["cold_tier", "cold_reader", "warm", "itl_tier"])
def test_an_answer_that_differs_shows(side: str) -> None:
    assert report(**{side: answered(4.0, (9, 9), 4096)})["tiers"][0]["answers_equal"] is False


def test_a_prefix_that_was_computed_again_shows() -> None:
    assert report(warm=answered(0.3, (3, 4), 4080))["tiers"][0]["all_loaded"] is False


def test_rows_for_the_benchmarks() -> None:
    rows = {row.case: row for row in report_rows(report())}
    assert set(rows) == {"disk_warm", "disk_miss", "disk_storing", "disk_itl"}
    assert rows["disk_warm"].ratio == pytest.approx(4.0 / 0.3)
    assert rows["disk_miss"].ratio == pytest.approx(4.0 / 4.1)
    assert "disk 0.12" in rows["disk_warm"].note


def test_the_page_says_it_all_and_needs_no_other_file() -> None:
    page = render(report())
    for text in ("13 times sooner", "0.075", "left out: no server", "a &lt;b&gt;", "equal"):
        assert text in page
    assert "http" not in page.replace("http-equiv", "")
    plain = report()
    plain["tiers"][0]["miss_ttft_seconds"] = None  # without --misses
    assert ("a miss" in page, "a miss" in render(plain)) == (True, False)
    wrong = render(report(warm=answered(0.3, (7,), 4096)))
    assert "DIFFER" in wrong
    assert ("are the same tokens" in page, "are the same tokens" in wrong) == (True, False)


class _Side:
    """An engine that has what it was asked before; the tier's forgets all but what it stored."""

    def __init__(self, log: list[str], name: str, late: int = 0) -> None:
        self.log, self.name, self.late = log, name, late

    def answer(self, token_ids: list[int], new_tokens: int) -> Answered:
        self.log.append(f"{self.name} {token_ids[-1]}")
        is_late, self.late = self.late > 0 and "forgets" in self.log, self.late - ("forgets" in self.log)
        return Answered((1,) * new_tokens, 0 if is_late else 64, 1.0, None)

    def forget(self) -> None:
        self.log.append("forgets")


def test_sides_take_turns_and_a_copy_that_is_late_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine_adapter.demo.vllm._WRITE_SECONDS", 0.0)
    for number, first in ((0, "plain"), (1, "tier")):
        log: list[str] = []
        sides: Any = {"plain": _Side(log, "plain"), "tier": _Side(log, "tier", late=1)}
        found = measure_round(number, sides, [5] * 64, [[7], [8]], 2)
        assert log[0] == f"{first} 7"
        assert log[2:6] == ["forgets", "tier 8", "forgets", "tier 8"]
        assert found["warm"].cached_tokens == 64
        assert set(found) == {"cold_plain", "cold_tier", "warm", "itl_plain", "itl_tier"}


def test_prefixes_share_nothing_and_end() -> None:
    class Letters:
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return [ord(one) for one in text]

    found = prefixes(Letters(), 3, 100)
    assert [len(one) for one in found] == [100, 100, 100]
    assert len({tuple(one) for one in found}) == 3
    with pytest.raises(ValueError, match="this Python's documentation has"):
        prefixes(Letters(), 1000, 100_000)


def test_bad_usage_exits_with_2(tmp_path: Path) -> None:
    wrong = (["--tiers", "tape"], ["--tiers", ""], ["--tokens", "5"], ["--rounds", "0"], ["--model", str(tmp_path)])
    for one in (*wrong, ["--html", "-"], ["--json", str(tmp_path / "no" / "x")]):
        with pytest.raises(SystemExit) as caught:
            parse(one)
        assert caught.value.code == 2
