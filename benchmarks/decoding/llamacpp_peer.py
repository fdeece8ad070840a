"""llama.cpp with a quantized KV cache as a peer process: `python -m benchmarks.decoding.llamacpp_peer FOLDER q8_0`.

Runs under an interpreter that has xllamacpp and nothing else. FOLDER is written by `peer_rows`. The prompt is computed
in one slot and copied to the others through a slot file; each round then decodes in all slots at once.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import urllib.request
from importlib import metadata
from pathlib import Path
from typing import Any

import xllamacpp

from benchmarks.peers import serve

_SPARE_TOKENS = 128
_TIMEOUT_SECONDS = 300


class LlamaSide:
    """The side that `peer_rows` asks."""

    def __init__(self, folder: Path, cache_type: str) -> None:
        case = json.loads((folder / "case.json").read_text(encoding="utf-8"))
        if len(case["gguf"]) != 1:
            raise RuntimeError(f"expected a GGUF in one file, got {case['gguf']}")
        self._tokens: list[int] = case["contexts"][0]["token_ids"]
        self._slots = len(case["sequences"])
        parameters = xllamacpp.CommonParams()
        parameters.model.path = case["gguf"][0]
        parameters.n_parallel = self._slots
        parameters.n_ctx = self._slots * (len(self._tokens) + _SPARE_TOKENS)
        parameters.kv_unified = False
        kind = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{cache_type.upper()}")
        parameters.cache_type_k = parameters.cache_type_v = kind
        parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
        parameters.cpuparams.n_threads = 1
        parameters.cpuparams_batch.n_threads = os.cpu_count() or 1  # the prompt, which is not measured
        parameters.warmup = False
        parameters.verbosity = 0
        parameters.slot_save_path = f"{folder}/"
        self._server = xllamacpp.Server(parameters)

    def prepare(self) -> float:
        """Compute the prompt once and give it to every slot; returns 0."""
        self._ask(0, 1)
        self._slot(0, "save")
        for slot in range(1, self._slots):
            self._slot(slot, "restore")
        self.decode(1)
        return 0.0

    def decode(self, steps: int) -> float:
        """Seconds of one decode step with all slots busy: the slowest slot's, the first token left out."""
        timings: list[dict[str, float]] = []
        threads = [
            threading.Thread(target=lambda slot=slot: timings.append(self._ask(slot, steps + 4)))
            for slot in range(self._slots)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if len(timings) != self._slots:
            raise RuntimeError(f"{len(timings)} of {self._slots} slots answered")
        return max(1e-3 * one["predicted_ms"] / (one["predicted_n"] - 1) for one in timings)

    def _ask(self, slot: int, new_tokens: int) -> dict[str, float]:
        answer: Any = self._server.handle_completions(
            {
                "prompt": self._tokens,
                "n_predict": new_tokens,
                "id_slot": slot,
                "cache_prompt": True,
                "ignore_eos": True,
                "temperature": 0,
            }
        )
        timings: dict[str, float] = answer["timings"]
        return timings

    def _slot(self, slot: int, action: str) -> None:
        request = urllib.request.Request(
            f"{self._server.listening_address}/slots/{slot}?action={action}",
            json.dumps({"filename": "slot.bin"}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as answer:
            json.load(answer)


if __name__ == "__main__":
    serve(LlamaSide(Path(sys.argv[1]), sys.argv[2]), metadata.version("xllamacpp"))
