"""Prefill here, decode there: one vLLM computes a prompt, another answers from the blocks that the first one stores.

`python examples/prefill_and_decode.py [--redis URL]`, where vLLM is (`make demo-vllm` makes such an environment). The
second is asked at once, while the first computes: it loads block by block as they come, and computes what never came.
Two hosts share a Redis; here, without --redis, both are clients of one daemon.
"""

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path


def engine(model: str, role: str, tiers: dict[str, str], size: int) -> object:
    from vllm import LLM

    transfer = {
        "kv_connector": "KVStoreConnector",
        "kv_connector_module_path": "engine_adapter.vllm_connector",
        "kv_role": role,  # kv_producer stores; kv_consumer only loads
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": tiers,
    }
    return LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=size,
        max_num_batched_tokens=512,  # a prompt is computed, and stored, in pieces of so many tokens
        kv_cache_memory_bytes=512 << 20,
        kv_transfer_config=transfer,
        use_tqdm_on_load=False,
        skip_tokenizer_init=True,  # prompts and answers are token ids here
    )


def ask(llm: object, prompt: list[int], tokens: int, **params: float) -> object:
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, extra_args={"kv_transfer_params": params}
    )
    (out,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)  # type: ignore[attr-defined]
    return out


def main(model: str, tiers: dict[str, str], token_count: int) -> int:
    prefill, decode = (engine(model, role, tiers, token_count + 64) for role in ("kv_producer", "kv_consumer"))
    prompt = [100 + (7 * at * at + at) % 300 for at in range(token_count)]
    for llm in (prefill, decode):
        ask(llm, [5] * 40, 1)  # the first request of an engine is slow
    started, ended = time.perf_counter(), []

    def compute() -> None:
        ask(prefill, prompt, 1)
        ended.append(time.perf_counter() - started)

    thread = threading.Thread(target=compute)
    thread.start()
    out = ask(decode, prompt, 16, prefill_wait_seconds=30)
    seconds = time.perf_counter() - started
    thread.join()
    answer = list(out.outputs[0].token_ids)  # type: ignore[attr-defined]
    cached = out.num_cached_tokens  # type: ignore[attr-defined]
    print(f"prefill: {token_count} prompt tokens computed after {ended[0]:.2f} s")
    print(f"decode: {cached} of them loaded, {len(answer)} tokens answered after {seconds:.2f} s")
    same = answer == list(ask(prefill, prompt, 16).outputs[0].token_ids)  # type: ignore[attr-defined]
    print("the first engine answers the same" if same else "THE FIRST ENGINE ANSWERS OTHERWISE")
    return 0 if same and cached >= (token_count - 1) // 16 * 16 else 1


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("--model", help="a model's folder; default SmolLM2-135M-Instruct from PyPI")
    options.add_argument("--redis", help="a server's URL")
    options.add_argument("--tokens", type=int, default=4096)
    given = options.parse_args()
    if not given.model:
        from engine_adapter.model_source import packaged_model_dir

        given.model = str(packaged_model_dir())
    if given.redis:
        sys.exit(main(given.model, {"redis_url": given.redis}, given.tokens))
    path = Path(tempfile.mkdtemp(prefix="kvstore-example-")) / "daemon.sock"
    command = [sys.executable, "-m", "kvstore.cli", "serve", "--socket", str(path), "--host-bytes", "1 GiB"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as daemon:
        try:
            assert daemon.stdout is not None
            assert "ready on" in daemon.stdout.readline()
            code = main(given.model, {"daemon": str(path)}, given.tokens)
        finally:
            daemon.terminate()
    sys.exit(code)
