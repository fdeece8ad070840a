"""What one sequence holds on the device, by attention family: the table of the README, from real block pools.

`python -m benchmarks.resident_table` prints it; a test compares. Each model's own geometry, blocks of 16 tokens, bf16:
a store without bytes (device "absent") takes a sequence in chunks, as a prompt is computed, and its tables are counted.
"""

from __future__ import annotations

from dataclasses import replace

from allocator import CacheGroup, GroupKind, KVGeometry
from kvstore import Identity, KVStore, KVStoreConfig
from kvstore.planning.builtin_shapes import find_shape

MODELS = (
    ("llama-3.1-70b", "GQA, 8 of 64 heads"),
    ("mistral-7b", "GQA, window of 4,096 on every layer"),
    ("gemma-3-27b", "GQA, window of 1,024 on 52 of 62 layers"),
    ("gpt-oss-120b", "GQA, window of 128 on every other layer"),
    ("deepseek-v3", "MLA, one latent a token and layer"),
)
LENGTHS = (8192, 32768)
_CHUNK_TOKENS = 512


def unreduced(name: str) -> KVGeometry:
    """The same layers if every query head kept K and V of every token."""
    shape = find_shape(name)
    group = CacheGroup(
        kind=GroupKind.FULL, layers=tuple(range(shape.layers)), kv_heads=shape.query_heads,
        key_dim=shape.score_dim, value_dim=shape.value_dim,
    )  # fmt: skip
    return KVGeometry(groups=(group,), block_tokens=16, dtype="bfloat16")


def held(geometry: KVGeometry, lengths: tuple[int, ...]) -> list[tuple[list[int], int]]:
    """At each length: blocks by cache group that one sequence holds, and their bytes in the slab."""
    full = max(geometry.full_slot_bytes(group) for group in range(len(geometry.groups)))
    blocks = (lengths[-1] // geometry.block_tokens + 8) * len(geometry.groups)
    config = KVStoreConfig(device_bytes=2 * blocks * full, codec="raw")
    identity = Identity(model="m", weights=None, geometry=geometry)
    found = []
    with KVStore(geometry, identity, config, device="absent") as store:
        tokens = list(range(lengths[-1]))
        store.admit("one", tokens)
        for end in range(_CHUNK_TOKENS, lengths[-1] + 1, _CHUNK_TOKENS):
            store.grow("one", _CHUNK_TOKENS)
            store.commit("one", tokens[end - _CHUNK_TOKENS : end])
            store.step()
            if end in lengths:
                counts = [int((entries >= 0).sum()) for entries in store.tables("one")]
                sizes = [count * geometry.full_slot_bytes(group) for group, count in enumerate(counts)]
                used = sum(store.usage().bytes_by_class.values())
                assert used >= sum(sizes), "usage counts less than the tables hold"
                found.append((counts, sum(sizes)))
    return found


def rows() -> list[str]:
    header = [
        "| model | what a layer keeps | KiB a new token | " + " | ".join(f"blocks at {n:,}" for n in LENGTHS)
        + f" | MiB at {LENGTHS[-1]:,} | all heads, all tokens |",
        "|---|---|--:|" + "--:|" * (len(LENGTHS) + 2),
    ]  # fmt: skip
    return header + [_row(name, words) for name, words in MODELS]


def _row(name: str, words: str) -> str:
    geometry = replace(unreduced(name), groups=find_shape(name).groups)
    measured = held(geometry, LENGTHS)
    ((_, whole_bytes),) = held(unreduced(name), LENGTHS[-1:])
    counts = [" + ".join(f"{count:,}" for count in blocks) for blocks, _ in measured]
    last_bytes = measured[-1][1]
    cells = [name, words, f"{geometry.token_bytes / 1024:,.1f}", *counts, f"{last_bytes / (1 << 20):,.0f}"]
    return "| " + " | ".join([*cells, f"{whole_bytes / last_bytes:.1f} times"]) + " |"


if __name__ == "__main__":
    print("\n".join(rows()))
