"""`kvstore plan`: table, JSON, page and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.cli import main

ROOT = Path(__file__).resolve().parents[3]
SHOWN = ("plan", "--model", "llama-3.1-70b", "--context", "131072")
FIELDS = {"kv_bytes_per_token", "kv_bytes_per_request", "requests_that_fit", "decode_step_read_bytes",
          "itl_floor_seconds", "ttft_floor_seconds"}  # fmt: skip


def test_the_table_says_what_the_shown_command_asks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(SHOWN) == 0
    said = capsys.readouterr().out
    for text in ("320 KiB", "40 GiB", "MHA: 64 heads x (128 + 128)", "8.00", "92.5 KiB", "3.46", "prefix sharing"):
        assert text in said


def test_json_and_page_hold_every_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    words = (*SHOWN, "--concurrency", "4", "--shared-prefix", "8192", "--tier", "host=256GiB@20GB", "--html", str(page))
    assert main((*words, "--json", "-")) == 0
    plan = json.loads(capsys.readouterr().out)
    assert {(one["codec"], one["shared_tokens"]) for one in plan["settings"]} == {
        (codec, shared) for codec in ("raw", "int8k", "int4") for shared in (0, 8192)
    }
    assert all(one.keys() >= FIELDS for one in plan["settings"])
    assert plan["settings"][0]["kv_bytes_per_request"] == 40 << 30
    assert plan["machine"]["gpus"] == 3  # 141 GB of weights and 40 GiB: two cards of 80 GiB at 90 % do not hold them
    assert {one["name"] for one in plan["tiers"]} == {"host"}
    text = page.read_text(encoding="utf-8")
    assert "<svg" in text
    assert "src=" not in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


def test_a_config_file_serves_as_well_as_a_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields = {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "torch_dtype": "float16",
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    settings = []
    for model in (str(tmp_path), "llama-3.1-8b"):
        assert main(("plan", "--model", model, "--json", "-")) == 0
        settings.append(json.loads(capsys.readouterr().out)["settings"])
    assert settings[0] == settings[1]


def traffic_of(folder: Path, *lines: dict[str, object]) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(f"{json.dumps(one)}\n" for one in lines))
    return path


def line_of(number: int, ids: list[int]) -> dict[str, object]:
    return {"timestamp": number, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids}


SMALL = ("--model", "llama-3.1-8b", "--gpu-memory", "20GiB", "--gpus", "1", "--json", "-")


def test_a_trace_is_replayed_on_the_planned_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ten times the same hundred documents: 50 blocks of 512 tokens fit raw, all 100 do in INT4, or with host memory.

    A store computes what it could load until it has tried how fast its host memory is.
    """
    lines = [line_of(number, [number % 100 + 1]) for number in range(1000)]
    words = ("plan", *SMALL, "--trace", str(traffic_of(tmp_path, *lines)), "--tier", "host=16GiB@20GB")
    page = tmp_path / "plan.html"
    assert main((*words, "--weights-bytes", "14.8GiB", "--codec", "raw,int4", "--html", str(page))) == 0
    rows = json.loads(capsys.readouterr().out)["traffic"]
    assert [one["name"] for one in rows] == ["raw", "raw + host", "int4", "int4 + host"]
    assert [one["capacity_blocks"] for one in rows] == [51, 51, 177, 177]
    assert rows[0]["block_hit_ratio"] < 0.1
    assert [one["block_hit_ratio"] for one in rows[1:]] == [0.836, 0.9, 0.9]
    by_tier = rows[1]["hit_ratio_by_tier"]
    assert by_tier["device"] < 0.1 < 0.7 < by_tier["host"]
    assert rows[0]["ttft_seconds_saved_mean"] < rows[1]["ttft_seconds_saved_mean"]
    assert rows[1]["ttft_seconds_saved_mean"] < rows[2]["ttft_seconds_saved_mean"], "fetching costs time"
    assert "Blocks of the trace that were hits, by tier" in page.read_text(encoding="utf-8")


def test_the_replayed_times_are_the_plans_floors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = traffic_of(tmp_path, line_of(0, list(range(1, 17))))
    assert main(("plan", *SMALL, "--weights-bytes", "10GiB", "--trace", str(path), "--codec", "raw")) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["demand"]["context_tokens"] == 8192 == 16 * 512
    assert plan["settings"][0]["ttft_bound_by"] == "compute"
    replayed = plan["traffic"][0]["ttft_seconds_mean_without_cache"]
    assert replayed == pytest.approx(plan["settings"][0]["ttft_floor_seconds"], rel=0.01)


@pytest.mark.parametrize(
    ("tiers", "message"),
    [
        (("host=1GiB@1GB", "disk=1GiB@1GB", "redis=1GiB@1GB"), "got 3 tiers; it is replayed with at most 2"),
        (("host=1GiB",), "tier host has no bandwidth; expected host=size@bandwidth"),
    ],
)
def test_tiers_that_no_trace_can_be_replayed_with(
    tiers: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word for tier in tiers for word in ("--tier", tier)]
    assert main(("plan", *SMALL, "--trace", str(traffic_of(tmp_path, line_of(0, [1]))), *words)) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_exit_code_1_when_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main((*SHOWN, "--gpu", "l4", "--gpus", "1")) == 1
    assert "nothing is left for KV" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model", "gpt-2-xl"), "model: got 'gpt-2-xl'"),
        (("--model", "llama-3.1-8b", "--context", "0"), "context: got 0; expected a count"),
        (
            ("--model", "llama-3.1-8b", "--shared-prefix", "9000"),
            "shared-prefix: got 9000; expected a count in [0, 8192]",
        ),
        (("--model", "llama-3.1-8b", "--codec", "int3"), "codec: got 'int3'; expected some of raw, int8k, int4"),
        (("--model", "llama-3.1-8b", "--block-tokens", "24"), "block_tokens: got 24"),
        (("--model", "llama-3.1-8b", "--dtype", "int8"), "expected a dtype of"),
        (("--model", "llama-3.1-8b", "--gpu", "h9000"), "gpu: got 'h9000'; expected one of a100"),
        (("--model", "llama-3.1-8b", "--gpu-memory", "lots"), "gpu-memory: got 'lots'"),
        (("--model", "llama-3.1-8b", "--weights-bytes", "-1"), "weights-bytes: got '-1'"),
        (("--model", "llama-3.1-8b", "--weights-bytes", "0"), "weights-bytes: got '0'; expected a size above 0"),
        (("--model", "llama-3.1-8b", "--weights-bytes", "0 GiB"), "weights-bytes: got '0 GiB'; expected a size above"),
        (("--model", "llama-3.1-8b", "--tier", "host"), "tier: got 'host'; expected name=size"),
        (("--model", "llama-3.1-8b", "--tier", "host=1GiB@0"), "expected a bandwidth above 0"),
        (("--model", "llama-3.1-8b", "--tier", "host=0@1GB"), "expected a size above 0"),
        (("--model", "llama-3.1-8b", "--tier", "host=1GB", "--tier", "host=2GB"), "expected each name once"),
        (("--model", "llama-3.1-8b", "--policy", "mru"), "policy: got 'mru'; expected one of lru"),
        (("--model", "llama-3.1-8b", "--trace", "/no/such/trace"), "No such file or directory; expected a trace"),
        (("--model", "llama-3.1-8b", "--json", "/no/such/folder/plan.json"), "there is no folder"),
    ],
)
def test_bad_usage_is_told(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("plan", *words)) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_planning_imports_neither_torch_nor_transformers() -> None:
    program = (
        "import sys; from kvstore.cli import main; code = main(['plan', '--model', 'deepseek-v3', '--json', '-'])\n"
        "print([m for m in ('torch', 'transformers', 'redis', 'lmdb') if m in sys.modules], code, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "[] 0"


@pytest.mark.parametrize("model", ["deepseek-v3", "gpt-oss-20b"])
def test_weights_that_are_published_in_fewer_bits_are_told(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(("plan", "--model", model))
    assert "published with quantised weights" in capsys.readouterr().out
    main(("plan", "--model", model, "--weights-bytes", "700 GB"))
    assert "quantised" not in capsys.readouterr().out
