"""transformers' `QuantizedCache` as a peer process: `python -m benchmarks.decoding.quantized_peer FOLDER quanto|hqq`.

Runs under an interpreter with torch, transformers and the quantizer. FOLDER is written by `peer_rows`.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from benchmarks.decoding.cache_side import CacheSide
from benchmarks.peers import serve

_DISTRIBUTIONS = {"quanto": "optimum-quanto", "hqq": "hqq"}
# Per token for both, which each quantizer calls its own way; the defaults of the two differ.
_AXES = {"quanto": 0, "hqq": 1}


@dataclass(frozen=True, slots=True)
class _Context:
    continuation: list[int]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


class QuantizedSide:
    """The side that `peer_rows` asks."""

    def __init__(self, folder: Path, backend: str) -> None:
        self._folder = folder
        self._backend = backend
        self._side: CacheSide | None = None

    def prepare(self) -> float:
        """Load model and contexts; returns 0."""
        from transformers import AutoModelForCausalLM, QuantizedCache

        torch.set_num_threads(os.cpu_count() or 1)  # hqq takes minutes to quantize a context; that is not measured
        case = json.loads((self._folder / "case.json").read_text(encoding="utf-8"))
        contexts = [
            _Context(one["continuation"], self._read("keys", number, case), self._read("values", number, case))
            for number, one in enumerate(case["contexts"])
        ]
        model = AutoModelForCausalLM.from_pretrained(case["model"], dtype=torch.bfloat16, local_files_only=True)
        model.eval()
        axis = _AXES[self._backend]
        cache = QuantizedCache(self._backend, model.config, nbits=4, axis_key=axis, axis_value=axis)
        self._side = CacheSide(model, cache, [contexts[number] for number in case["sequences"]])
        torch.set_num_threads(1)
        return 0.0

    def decode(self, steps: int) -> float:
        """Seconds of one decode step."""
        assert self._side is not None
        return self._side.decode(steps)

    def _read(self, kind: str, number: int, case: dict[str, list[int]]) -> list[torch.Tensor]:
        shape = case["shape"]
        count = shape[0] * shape[1] * shape[2] * shape[3]
        name = str(self._folder / f"{kind}{number}.bin")
        words = torch.from_file(name, shared=False, size=count, dtype=torch.int16)
        return list(words.view(torch.bfloat16).view(shape).clone().unbind(0))


if __name__ == "__main__":
    serve(
        QuantizedSide(Path(sys.argv[1]), sys.argv[2]),
        f"{metadata.version(_DISTRIBUTIONS[sys.argv[2]])}, transformers {metadata.version('transformers')}",
    )
