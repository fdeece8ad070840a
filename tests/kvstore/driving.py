"""Drive a store as a decode loop does, with KV whose bytes tell which token wrote them.

`fill` writes a pattern that depends on the token id, its position and the layer, so a block that is shifted, foreign
or stale is seen by `read_back`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from allocator import CapacityError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore import KVStore


def pattern(token_ids: Sequence[int], start: int, layers: int, heads: int, dim: int) -> torch.Tensor:
    """float32 [tokens, layers, heads, dim], deterministic in (token id, position, layer, head, channel)."""
    tokens = torch.tensor(list(token_ids), dtype=torch.float64)
    positions = torch.arange(start, start + len(token_ids), dtype=torch.float64)
    seed = tokens * 7.0 + positions * 13.0
    grid = torch.arange(layers * heads * dim, dtype=torch.float64).reshape(layers, heads, dim)
    return torch.sin(seed[:, None, None, None] + grid * 0.37).float()


def fill(store: KVStore, sequence_id: str, token_ids: Sequence[int], start: int) -> None:
    """Write the KV of tokens at positions start.. through the slot mapping, as a forward pass does."""
    assert store.slab is not None
    block_tokens = store.geometry.block_tokens
    for index, group in enumerate(store.geometry.groups):
        rows = store.slot_mapping(sequence_id, index, start, len(token_ids))
        slots, offsets = torch.from_numpy(rows // block_tokens), torch.from_numpy(rows % block_tokens)
        kv = pattern(token_ids, start, len(group.layers), group.kv_heads, group.key_dim)
        keys = store.slab.keys_view(index)
        keys[slots, :, :, offsets] = kv.to(keys.dtype)
        if group.value_dim:
            store.slab.values_view(index)[slots, :, :, offsets] = (-kv[..., : group.value_dim]).to(keys.dtype)


def compute(store: KVStore, sequence_id: str, token_ids: Sequence[int], chunk: int = 64) -> None:
    """grow, write and commit `token_ids` in chunks from the committed end on."""
    for begin in range(0, len(token_ids), chunk):
        part = list(token_ids[begin : begin + chunk])
        start = store.committed_tokens(sequence_id)
        while True:
            try:
                store.grow(sequence_id, len(part))
                break
            except CapacityError as error:
                if not error.transient:
                    raise
                store.wait(1.0)  # a transfer holds the memory: it will be free after the next step
                store.step()
        fill(store, sequence_id, part, start)
        store.commit(sequence_id, part)


def run_prompt(store: KVStore, sequence_id: str, token_ids: Sequence[int], **admit: object) -> int:
    """Admit, wait for the fetch, compute the rest. Returns the tokens that were reused."""
    while store.admit(sequence_id, token_ids, **admit).ask_again:  # type: ignore[arg-type]
        store.wait(1.0)
        store.step()
    while not store.fetch(sequence_id).done:
        store.step()
        store.wait(1.0)
    ready = store.fetch(sequence_id).ready_tokens
    compute(store, sequence_id, token_ids[ready:])
    store.prefill_done(sequence_id)
    return ready


def check_bytes(store: KVStore, sequence_id: str, token_ids: Sequence[int]) -> None:
    """Every raw block of the sequence holds exactly the pattern of `token_ids`."""
    assert store.slab is not None
    block_tokens = store.geometry.block_tokens
    for index, group in enumerate(store.geometry.groups):
        expected = pattern(token_ids, 0, len(group.layers), group.kv_heads, group.key_dim)
        keys = store.slab.keys_view(index)
        for position, entry in enumerate(store.tables(sequence_id)[index].tolist()):
            if entry < 0 or entry & 1:
                continue
            want = expected[position * block_tokens : (position + 1) * block_tokens].to(keys.dtype)
            got = keys[entry >> 1].permute(2, 0, 1, 3)[: len(want)]
            assert torch.equal(got, want), f"group {index}, block {position} of {sequence_id!r} holds other bytes"


class HeldExecutor:
    """Keeps tasks until `run` is called: a tier that is as slow as a test wants."""

    def __init__(self) -> None:
        self.tasks: list[Callable[[], None]] = []

    def submit(self, task: Callable[[], None]) -> None:
        self.tasks.append(task)

    def run(self) -> None:
        tasks, self.tasks = self.tasks, []
        for task in tasks:
            task()

    def close(self) -> None:
        self.run()
