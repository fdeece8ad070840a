"""Our side of the `pool` suite: the allocator alone, the hash chain alone, and the store without bytes for the rest."""

from __future__ import annotations

import itertools
import time

import numpy as np
import numpy.typing as npt

from allocator import FULL, BlockPool, ExtentLayout, KVGeometry
from benchmarks.rows import Stopwatch
from benchmarks.suites import pool_workload as work
from kvstore import HashChain, Identity, KVStore, KVStoreConfig

# Llama-8B's shape; no byte of it is allocated here.
_GEOMETRY = KVGeometry.uniform(layers=32, kv_heads=8, head_dim=128, dtype="bfloat16", block_tokens=work.BLOCK_TOKENS)
_IDENTITY = Identity(model="benchmark", weights="none", geometry=_GEOMETRY)
_SLOT_BYTES = _GEOMETRY.full_slot_bytes(0)


class OwnSide:
    """`pool_workload.PoolSide` over this project's classes."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def alloc_free(self, batch: int, round_number: int) -> float:
        pool = BlockPool(_layout(work.POOL_BLOCKS))
        watch = Stopwatch(time.thread_time)
        for repeat in range(work.PASSES + 1):
            counted = watch if repeat else Stopwatch(time.thread_time)
            if batch == 1:
                with counted:
                    one_by_one = [pool.allocate_one(0) for _ in range(work.POOL_BLOCKS)]
                self._seal_every_other(pool, np.array(one_by_one, dtype=np.int32), f"{round_number} {repeat}")
                with counted:
                    for block in one_by_one:
                        pool.release_one(block)
                continue
            with counted:
                batches = [pool.allocate(0, batch, FULL) for _ in range(work.POOL_BLOCKS // batch)]
            self._seal_every_other(pool, np.concatenate(batches).astype(np.int32), f"{round_number} {repeat}")
            with counted:
                for blocks in batches:
                    pool.release(blocks[::-1])
        return watch.seconds / (work.PASSES * work.POOL_BLOCKS)

    def _seal_every_other(self, pool: BlockPool, ids: npt.NDArray[np.int32], name: str) -> None:
        hashed = [position for position in range(len(ids)) if work.every_other(position)]
        pool.seal_many(ids[hashed], [f"{name} {position}".encode().ljust(32) for position in hashed], True)

    def hash_prompt(self, round_number: int) -> float:
        tokens = work.prompt(round_number)
        chain = HashChain(_IDENTITY.root(), work.BLOCK_TOKENS)
        watch = Stopwatch(time.thread_time)
        with watch:
            chain.extend(tokens)
        assert len(chain.hashes) == work.PROMPT_BLOCKS
        return watch.seconds

    def lookup(self, round_number: int) -> float:
        store = self._store(work.PROMPT_BLOCKS + 1)
        tokens = work.prompt(round_number)
        self._leave_behind(store, tokens)
        chain = _chain([*tokens, 0])
        watch = Stopwatch(time.thread_time)
        with watch:
            for _ in range(work.REPEATS):
                hit = store.lookup_hashes(chain.root, chain.hashes, chain.token_count)
        assert hit.tokens == work.PROMPT_TOKENS
        return watch.seconds / work.REPEATS

    def admit(self, warm: bool, hashed: bool, round_number: int) -> float:
        store = self._store(work.PROMPT_BLOCKS)
        tokens = work.prompt(round_number)
        self._leave_behind(store, tokens if warm else work.prompt(-1 - round_number, work.PROMPT_TOKENS // 2))
        chain = _chain(tokens) if hashed else None
        watch = Stopwatch(time.thread_time)
        with watch:
            self._admit(store, tokens, work.PROMPT_TOKENS - work.BLOCK_TOKENS if warm else 0, chain)
        return watch.seconds

    def free(self, round_number: int) -> float:
        store = self._store(work.PROMPT_BLOCKS)
        tokens = work.prompt(round_number)
        watch = Stopwatch(time.thread_time)
        for repeat in range(work.REPEATS):
            sequence = self._admit(store, tokens, work.PROMPT_TOKENS - work.BLOCK_TOKENS if repeat else 0)
            with watch:
                store.finish(sequence)
        return watch.seconds / work.REPEATS

    def decode_step(self, round_number: int) -> float:
        per_sequence = -(-(work.DECODE_PROMPT_TOKENS + work.DECODE_STEPS) // work.BLOCK_TOKENS)
        store = self._store(per_sequence * work.DECODE_SEQUENCES)
        half = per_sequence * work.DECODE_SEQUENCES * work.BLOCK_TOKENS // 2
        self._leave_behind(store, work.prompt(-1 - round_number, half))
        sequences = [
            self._admit(store, work.prompt(1_000 * (round_number + 2) + number, work.DECODE_PROMPT_TOKENS), 0)
            for number in range(work.DECODE_SEQUENCES)
        ]
        watch = Stopwatch(time.thread_time)
        with watch:
            for step in range(work.DECODE_STEPS):
                for sequence in sequences:
                    store.grow(sequence, 1)
                    store.commit(sequence, [step])
                store.step()
        return watch.seconds / (work.DECODE_STEPS * work.DECODE_SEQUENCES)

    def among(self, what: str, sequences: int, round_number: int) -> float:
        """Seconds for one sequence (or lookup) while so many are live.

        what: "grow" room for a token and the token noted; "step" that for all and the store's own step; "lookup" of
        the prompt of one of them
        """
        per_sequence = -(-(work.DECODE_PROMPT_TOKENS + work.DECODE_STEPS) // work.BLOCK_TOKENS)
        store = self._store((per_sequence + 1) * sequences)
        seed = 1_000_000 + 10_000 * round_number
        prompts = [work.prompt(seed + number, work.DECODE_PROMPT_TOKENS) for number in range(sequences)]
        names = [self._admit(store, prompt, 0) for prompt in prompts]
        watch = Stopwatch(time.thread_time)
        if what == "lookup":
            chains = [_chain(prompt) for prompt in prompts[:: sequences // work.FEW_SEQUENCES]]
            with watch:
                for _ in range(work.REPEATS):
                    for chain in chains:
                        store.lookup_hashes(chain.root, chain.hashes, chain.token_count)
            return watch.seconds / (work.REPEATS * len(chains))
        for step in range(work.DECODE_STEPS):
            with watch:
                for name in names:
                    store.grow(name, 1)
                    store.commit(name, [step])
                if what == "step":
                    store.step()
            if what == "grow":
                store.step()
        return watch.seconds / (work.DECODE_STEPS * sequences)

    def _store(self, blocks: int) -> KVStore:
        total = _layout(blocks).total_bytes
        config = KVStoreConfig(device_bytes=total, host_bytes=0, codec="raw", io_threads="inline")
        store = KVStore(_GEOMETRY, _IDENTITY, config, device="absent")
        sequence = str(next(self._numbers))
        store.admit(sequence, [0])  # every block has been used before, as in a server that has run for a while
        store.grow(sequence, blocks * work.BLOCK_TOKENS)
        store.abort(sequence)
        return store

    def _admit(self, store: KVStore, tokens: list[int], expected_hit: int, chain: HashChain | None = None) -> str:
        """As a loop does it: admit, room for what is left to compute, the table handed out, all committed."""
        sequence = str(next(self._numbers))
        admission = store.admit(sequence, tokens if chain is None else chain)
        assert admission.reused_tokens == expected_hit, (admission, expected_hit)
        rest = tokens[expected_hit:] if expected_hit else tokens
        store.grow(sequence, len(rest))
        store.tables(sequence)
        store.commit(sequence, rest)
        return sequence

    def _leave_behind(self, store: KVStore, tokens: list[int]) -> None:
        """A finished sequence: its blocks are idle and hashed, the pool's others are free and not."""
        store.finish(self._admit(store, tokens, 0))


def _chain(tokens: list[int]) -> HashChain:
    chain = HashChain(_IDENTITY.root(), work.BLOCK_TOKENS)
    chain.extend(tokens)
    return chain


def _layout(blocks: int) -> ExtentLayout:
    """A slab that holds exactly `blocks` full precision blocks."""
    layout = ExtentLayout(blocks * _SLOT_BYTES, (_SLOT_BYTES,), ())
    found = BlockPool(layout).available(0)
    if found != blocks:
        raise RuntimeError(f"asked for a pool of {blocks} blocks, got {found}")
    return layout
