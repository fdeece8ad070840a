"""One vLLM engine in processes of its own, as a server has it: answers prompts and prints them as JSON.

python -m tests.engine_adapter.vllm.one_run MODEL TIERS_JSON PROMPTS_JSON [RANKS]
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


def main(model: str, tiers: str, prompts: str, ranks: str = "1") -> None:
    from tests.engine_adapter.vllm.kit import Engine

    engine = Engine(Path(model), json.loads(tiers), tensor_parallel_size=int(ranks))
    answers = [engine.answer(one) for one in json.loads(prompts)]
    hits = engine.external_hits()
    time.sleep(0.5)  # what waits is written
    print("RESULT " + json.dumps({"answers": answers, "hits": hits}))


if __name__ == "__main__":
    main(*sys.argv[1:])
