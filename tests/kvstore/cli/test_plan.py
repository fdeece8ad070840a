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
        (("--model", "llama-3.1-8b", "--tier", "host"), "tier: got 'host'; expected name=size"),
        (("--model", "llama-3.1-8b", "--tier", "host=1GiB@0"), "expected a bandwidth above 0"),
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
