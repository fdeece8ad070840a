"""vLLM's own OpenAI server, slow on purpose in three ways: `kvstore doctor --url` names the cause of each.

One server for all three: a model whose KV of a token is far larger than what computes it, and room for two requests at
once. What is asked makes it slow: long prompts with short answers, long answers with long contexts, many requests.
"""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.engine_adapter.doctor_kit import diagnosed, save_slow_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.filterwarnings("default")]
_START_SECONDS = 300.0
_PLACES = 2


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The server's, while it runs."""
    folder = tmp_path_factory.mktemp("slow")
    model = save_slow_model(folder / "model", num_attention_heads=64, num_key_value_heads=64, head_dim=128)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [
        *("--model", str(model), "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", "4096", "--max-num-seqs", str(_PLACES), "--kv-cache-memory-bytes", str(1 << 30)),
    ]
    environ = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    log = folder / "log"
    with log.open("w") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words],
            env=environ, stdout=said, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        until = time.monotonic() + _START_SECONDS
        while not _answers(port):
            is_coming = process.poll() is None and time.monotonic() < until
            assert is_coming, log.read_text()[-4000:]
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/v1/models")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def cause(report: dict[str, Any]) -> tuple[str, str]:
    return report["verdict"]["bottleneck"], report["verdict"]["cause"]


def test_compute_bound_prefill(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--prompt-tokens", "256,1024,2304", "--answer-tokens", "8", "--concurrency", "2")
    report = diagnosed(url, capsys, *asked)
    assert cause(report) == ("prompt", "compute"), report
    assert report["repeated_prompt_share"] < 0.5, "vLLM's own prefix cache must show"


def test_bandwidth_bound_decode_with_long_context(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--prompt-tokens", "256,768,1536", "--answer-tokens", "224", "--concurrency", "1")
    report = diagnosed(url, capsys, *asked)
    assert cause(report) == ("decode", "bandwidth"), report
    assert "(KV)" in report["verdict"]["because"], report


def test_queueing(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--prompt-tokens", "32,64,128", "--answer-tokens", "96", "--concurrency")
    report = diagnosed(url, capsys, *asked, str(6 * _PLACES))
    assert cause(report) == ("queue", "queueing"), report
    assert report["shares"][-1]["answers_at_once"] == _PLACES
    # as many as there is room for: whatever it is, it is no queue
    alone = diagnosed(url, capsys, *asked, str(_PLACES), names=False)
    assert alone["verdict"]["bottleneck"] != "queue", alone
