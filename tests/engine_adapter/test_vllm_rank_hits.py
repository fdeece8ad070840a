"""What tensor-parallel ranks have together: one answer for all of them, whatever each lost on its own."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from allocator import CacheGroup, GroupKind, KVGeometry
from engine_adapter.vllm_connector.lookup import Answer, LookupClient, LookupServer, Question
from engine_adapter.vllm_connector.orders import LoadOrder
from engine_adapter.vllm_connector.shelf import Shelf
from kvstore import HashChain, HostTier, Identity
from kvstore.tier import CopyKey
from tests.engine_adapter.test_vllm_copies import BLOCKS, LOADED, Rank, gqa, prompt_values

RANKS, LOST_RANK, LOST_BLOCK = 4, 2, 2
_NAMES = itertools.count()


@contextmanager
def asked(shelves: Sequence[Shelf]) -> Iterator[LookupClient]:
    """The scheduler's side of an engine whose ranks own these shelves."""

    def server(shelf: Shelf, name: str, rank: int) -> LookupServer:
        def answer(question: Question, hashes: list[bytes]) -> Answer:
            found = shelf.find(question.epoch, question.root, hashes, question.local_blocks)
            return Answer(found.blocks, found.pending, found.epoch, found.lossy_at)

        return LookupServer(name, answer, rank)

    name = f"ranks {time.monotonic_ns()} {next(_NAMES)}"
    client = LookupClient(name, len(shelves), 60.0)
    with ExitStack() as closing:
        for rank, shelf in enumerate(shelves):
            closing.callback(server(shelf, name, rank).close)
        closing.callback(client.close)
        yield client


def test_case_054_a_chunk_that_one_rank_lost_ends_the_hit_of_all(tmp_path: Path) -> None:
    """Four ranks, the third chunk of rank 2 alone is gone: two chunks are promised, and each rank can load them."""
    kv = gqa(4)
    with ExitStack() as closing:
        ranks = [Rank(kv, tmp_path / str(rank), (rank, RANKS)) for rank in range(RANKS)]
        for one in ranks:
            closing.callback(one.shelf.close)
            one.save()
        client = closing.enter_context(asked([one.shelf for one in ranks]))
        root, hashes = ranks[0].root, ranks[0].hashes
        assert client.find(0, root, hashes, 0).blocks == BLOCKS
        lost = ranks[LOST_RANK]
        key = lost.shelf._residency.copy_key(root, 0, hashes[LOST_BLOCK], 0, True)
        assert lost.shelf.below.tiers[0].delete([key]) == 1
        assert [one.found()[0] for one in ranks] == [BLOCKS, BLOCKS, LOST_BLOCK, BLOCKS]
        promised = client.find(0, root, hashes, 0).blocks
        assert promised == LOST_BLOCK
        whole = prompt_values(kv)
        for one in ranks:
            one.shelf.load(LoadOrder("r", root, hashes[:promised], 0, [LOADED]))
            until = time.monotonic() + 60
            while not (ended := one.shelf.take_finished()):
                assert time.monotonic() < until, "the load did not end"
                time.sleep(0.001)
            assert ended[0].failed == []
            tokens = promised * kv.block_tokens
            start, stop = one.heads
            assert np.array_equal(one.values()[..., :tokens, :], whole[:, start:stop, :, :tokens])


WINDOW = 33
HYBRID = KVGeometry(
    groups=(
        CacheGroup(kind=GroupKind.FULL, layers=(0,), kv_heads=4, key_dim=8, value_dim=8),
        CacheGroup(kind=GroupKind.SLIDING, layers=(1,), kv_heads=4, key_dim=8, value_dim=8, window_tokens=WINDOW),
    ),
    dtype="float32",
)


def _put(shelf: Shelf, keys: Sequence[CopyKey], group: int) -> None:
    row = np.zeros(HYBRID.full_slot_bytes(group) // RANKS, np.uint8)
    tier = shelf.below.tiers[0]
    shelf.below.wait(shelf.below.begin(lambda: tier.submit_put([(key, row, None) for key in keys])), 1e18)


@pytest.mark.parametrize("seed", range(8))
def test_case_054_ranks_of_a_hybrid_model_agree_on_a_hit_that_each_can_load(seed: int) -> None:
    """Windows lost here and there: the answer is the longest prefix whose window every rank has, not the least one."""
    random = np.random.default_rng(seed)
    root = Identity(model="m", weights="w", geometry=HYBRID).root()
    hashes = HashChain(root, HYBRID.block_tokens).extend(list(range(16 * HYBRID.block_tokens)))
    shelves = [Shelf(HYBRID, [HostTier(4 << 20)], rank=(rank, RANKS)) for rank in range(RANKS)]
    kept = random.random((RANKS, 2, len(hashes))) > np.array([0.01, 0.12])[:, None]
    for rank, shelf in enumerate(shelves):
        for group in range(2):
            key = shelf._residency.copy_key(root, group, hashes[0], 0, True)
            _put(shelf, key.with_hashes([one for at, one in enumerate(hashes) if kept[rank, group, at]]), group)

    def holds(blocks: int) -> bool:
        first = max(0, blocks * HYBRID.block_tokens - WINDOW + 1) // HYBRID.block_tokens
        return bool(kept[:, 0, :blocks].all() and kept[:, 1, first:blocks].all())

    expected = max(blocks for blocks in range(len(hashes) + 1) if holds(blocks))
    with asked(shelves) as client:
        assert client.find(0, root, hashes, 0).blocks == expected
    for shelf in shelves:
        shelf.close()
