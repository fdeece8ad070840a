"""transformers' `generate` with a store: two questions about one document, the second in a fraction of the time.

`python examples/reuse_in_generate.py [--disk DIRECTORY]`; with a directory a second start reuses what the first wrote.
"""

import argparse
import time

from engine_adapter import load_model
from engine_adapter.transformers_cache import ModelStore
from kvstore import KVStoreConfig

options = argparse.ArgumentParser()
options.add_argument("--model", help="a model's folder; default SmolLM2-135M-Instruct from PyPI")
options.add_argument("--disk", default="", help="directory that outlives the process")
options.add_argument("--paged", action="store_true", help="attend over blocks in place")
given = options.parse_args()

loaded = load_model(given.model, "float32")
document = "The Danube rises in the Black Forest and reaches the Black Sea after 2,850 km. " * 90
config = KVStoreConfig(device_bytes="512 MiB", disk_path=given.disk, share=bool(given.disk), fetch_deadline_seconds=10)
with ModelStore(loaded.model, config, paged=given.paged, weights=loaded.weights) as kv:
    for question in ("Where does it rise?", "How long is it?", "Which sea does it reach?"):
        inputs = loaded.tokenizer(f"{document}\n{question}", return_tensors="pt")
        cache = kv.cache()
        started = time.perf_counter()
        loaded.model.generate(**inputs, cache=cache, max_new_tokens=1, do_sample=False)
        seconds = time.perf_counter() - started
        print(
            f"{question:26}{inputs.input_ids.shape[1]} prompt tokens, {cache.reused_tokens} reused "
            f"{cache.reused_by_tier}: first token after {seconds:.2f} s"
        )
