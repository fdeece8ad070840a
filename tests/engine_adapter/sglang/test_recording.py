"""What a storage below SGLang records: real trees say what is asked for and written, a real controller does it."""

from __future__ import annotations

import json
import logging
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch
from sglang.srt.managers.cache_controller import HiCacheController, PrefetchOperation, StorageOperation
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.hybrid_cache import hybrid_cache_controller as hybrid
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from allocator import ConfigError
from engine_adapter.sglang_storage import backend, recording
from kvstore.simulation import read
from kvstore.trace_recorder import FILE_VARIABLE
from tests.engine_adapter.sglang import kit
from tests.engine_adapter.sglang.kit import PAGE, indices, mha_pool, storage

THRESHOLD = 8  # tokens: what SGLang's prefetch_threshold is set to


class Server:
    """SGLang's radix tree and its controller's storage work, in the scheduler's order; write-through."""

    def __init__(self, made: Any, pool: Any, core: str, passes_prefixes: bool = True) -> None:
        allocator = PagedTokenToKVPoolAllocator(4096, PAGE, torch.bfloat16, "cpu", None, False)
        self.tree = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=None,
                token_to_kv_pool_allocator=allocator,
                page_size=PAGE,
                tree_components=(ComponentType.FULL,),
                tree_core_backend=core,
            )
        )
        self.core = self.tree.tree_core
        self.core.enable_storage = True
        self.controller = hybrid.HybridCacheController.__new__(hybrid.HybridCacheController)
        one = self.controller
        one.storage_backend, one.mem_pool_host, one.storage_host_pool, one.page_size = made, pool, pool, PAGE
        one.prefetch_sync_queue = Queue()
        one.page_set_func = one._page_set_zero_copy
        self.passes_prefixes = passes_prefixes

    def ask(self, prompt: Sequence[int]) -> bool:
        """As the scheduler does for a request that has come (`_prefetch_kvcache`); whether the storage was asked."""
        match = self.tree.match_prefix(MatchPrefixParams(key=RadixKey(array("q", prompt[:-1]))))
        anchor, new = match.last_host_node, list(prompt[match.device_prefix_len : -1])
        new = new[: len(new) // PAGE * PAGE]
        if len(new) < THRESHOLD:
            return False
        before = self.tree.get_prefix_hash_values(anchor) if self.passes_prefixes else None
        operation = hybrid.PrefetchOperation(
            hybrid.CacheRequestHandle("request", 0), new, self.tree.get_last_hash_value(anchor), prefix_keys=before
        )
        self.controller._storage_hit_query(operation)
        return True

    def compute(self, tokens: Sequence[int]) -> None:
        """KV of whole pages goes into the tree; a new node's pages are written, with the pages before it."""
        whole = len(tokens) // PAGE * PAGE
        done = self.tree.insert(InsertParams(key=RadixKey(array("q", tokens[:whole])), value=torch.arange(whole)))
        if done.prefix_len < whole:
            node = done.last_device_node
            keys = self.core.get_hash_values(node)
            before = self.core.get_prefix_hash_values(node) if self.passes_prefixes else None
            operation = StorageOperation(indices(range(len(keys))), [], hash_value=keys, prefix_keys=before)
            HiCacheController._page_backup(self.controller, operation)

    def serve(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        self.ask(prompt)
        self.compute(prompt)
        self.compute([*prompt, *answer[:-1]])


@contextmanager
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, core: str = "python", **given: Any) -> Iterator[Server]:
    """A server whose storage records; its lines are in `lines_of(tmp_path)` afterwards."""
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "trace.jsonl"))
    monkeypatch.setattr(backend, "_prefix_settings", lambda: (True, THRESHOLD))
    monkeypatch.setattr(recording, "_JOIN_SECONDS", 0.0)
    pool = kit.fill(mha_pool())
    with storage(pool, {"disk_path": str(tmp_path / "disk"), "disk_bytes": "64 MiB"}, **given) as made:
        yield Server(made, pool, core)


def lines_of(tmp_path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text(encoding="utf-8").splitlines()]
    assert lines[0] == {"format": "kvstore-trace", "version": 1, "block_tokens": PAGE, "model": "tiny"}
    return sorted(lines[1:], key=lambda line: line["timestamp"])


def shape(line: dict[str, Any]) -> tuple[int, int, int]:
    return line["input_length"], line["output_length"], len(line["hash_ids"])


@pytest.mark.parametrize("core", ["python", "rust"])
def test_each_request_of_a_conversation_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, core: str) -> None:
    system, first, second = list(range(16)), list(range(100, 113)), list(range(200, 217))
    answer, other = list(range(300, 320)), list(range(400, 412))
    with recorded(tmp_path, monkeypatch, core) as server:
        server.serve([*system, *first], answer)  # 29 tokens, 28 of them asked for; 19 of the answer have KV
        time.sleep(0.002)
        server.serve([*system, *second], other)  # leaves the first one's node in its middle: SGLang's prefix lacks it
        time.sleep(0.002)
        server.serve([*system, *first, *answer, *second], other)  # the next turn
    one, two, three = lines_of(tmp_path)
    assert [shape(line) for line in (one, two, three)] == [(28, 20, 7), (32, 12, 8), (64, 12, 16)]
    assert two["hash_ids"][:4] == one["hash_ids"][:4]
    assert not set(two["hash_ids"][4:]) & set(one["hash_ids"])
    assert three["hash_ids"][:7] == one["hash_ids"]
    assert len(read(tmp_path / "trace.jsonl")) == 3


def test_a_request_that_asks_again_while_it_waits_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = list(range(30))
    with recorded(tmp_path, monkeypatch) as server:
        assert server.ask(prompt)
        assert server.ask(prompt)
        server.serve(prompt, list(range(300, 320)))
        assert not server.ask(prompt)  # SGLang has it
    (line,) = lines_of(tmp_path)
    assert shape(line) == (28, 20, 7)


def test_what_is_not_asked_for_is_taken_from_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A next turn of less than SGLang's threshold, with its past in SGLang's own cache."""
    prompt, answer = list(range(30)), list(range(300, 319))
    again = [*prompt, *answer, 500, 501]
    with recorded(tmp_path, monkeypatch) as server:
        server.serve(prompt, answer)  # 48 tokens have KV
        time.sleep(0.002)
        assert not server.ask(again)
        server.serve(again, list(range(600, 613)))  # 51 tokens; the 13th is never computed
    one, two = lines_of(tmp_path)
    assert shape(one) == (28, 20, 7)
    # 51 tokens fill no page more: the answer is written first, and of it one page (less than the threshold) is taken
    # for prompt.
    assert two["input_length"] + two["output_length"] == 60
    assert (two["input_length"], two["hash_ids"][:7]) == (52, one["hash_ids"])


def test_a_restarted_server_records_prompts_that_it_finds_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, answer = list(range(30)), list(range(300, 320))
    with recorded(tmp_path, monkeypatch) as server:
        server.serve(prompt, answer)
    (before,) = lines_of(tmp_path)
    (tmp_path / "trace.jsonl").unlink()
    with recorded(tmp_path, monkeypatch) as server:
        assert server.ask(prompt)
        server.serve(prompt, answer)
    (line,) = lines_of(tmp_path)
    assert shape(line) == shape(before)
    assert line["hash_ids"] != before["hash_ids"]  # another salt


def test_batches_of_sglang_s_plain_controller_are_one_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks for 128 pages at a time, and not beyond the first batch that lacks one."""
    tokens = list(range(300 * PAGE))
    with recorded(tmp_path, monkeypatch) as server:
        made = server.controller.storage_backend
        monkeypatch.setattr(made, "_flags", lambda keys, name, until: [True] * len(keys))
        one = HiCacheController.__new__(HiCacheController)
        one.storage_backend, one.page_size = made, PAGE
        hashes, _ = one._storage_hit_query(PrefetchOperation("request", tokens, prefix_keys=[]))
        made._recording.wrote(hashes, [])
        made._recording.wrote(hashes[:1], hashes[1:2])
    (line,) = lines_of(tmp_path)
    assert shape(line) == (1200, 0, 300)


def test_one_rank_records_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with recorded(tmp_path, monkeypatch, tp_rank=1, tp_size=2) as server:
        server.serve(list(range(30)), list(range(300, 320)))
    assert not (tmp_path / "trace.jsonl").exists()


@pytest.mark.parametrize(
    ("extra", "settings", "named"),
    [({}, (False, 256), "hicache_storage_pass_prefix_keys"), ({"interface_v1": 0}, (True, 256), "interface_v1")],
)
def test_what_cannot_be_recorded_is_refused_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: dict[str, Any], settings: tuple[bool, int], named: str
) -> None:
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "trace.jsonl"))
    monkeypatch.setattr(backend, "_prefix_settings", lambda: settings)
    given = {"disk_path": str(tmp_path / "disk"), "disk_bytes": "64 MiB", **extra}
    with pytest.raises(ConfigError, match=f'{named} is not set.*expected "{named}"'), storage(mha_pool(), given):
        pass
    assert not (tmp_path / "trace.jsonl").exists()
    monkeypatch.delenv(FILE_VARIABLE)
    with storage(mha_pool(), given):  # nothing is recorded, so nothing is asked
        pass


def test_a_running_server_says_what_it_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """From SGLang's own settings, where this process is a server's."""
    from sglang.srt import runtime_context

    assert backend._prefix_settings() is None
    for text, expected in (
        ('{"hicache_storage_pass_prefix_keys": true, "prefetch_threshold": 64}', (True, 64)),
        ('{"interface_v1": 1}', (False, 256)),
        (None, None),
    ):
        context = runtime_context.get_context()
        with monkeypatch.context() as patch:
            bag = type("Bag", (), {"hicache_storage_backend_extra_config": text})
            patch.setattr(type(context), "config_bag", lambda self, name, bag=bag: bag)
            assert backend._prefix_settings() == expected


def test_a_server_that_turns_out_to_pass_none_ends_the_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Attached while it ran, by settings that nobody keeps."""
    with caplog.at_level(logging.ERROR), recorded(tmp_path, monkeypatch) as server:
        server.passes_prefixes = False
        server.serve(list(range(30)), list(range(300, 320)))
        server.serve(list(range(50, 80)), list(range(300, 320)))
    assert lines_of(tmp_path) == []
    assert [
        one.message for one in caplog.records if "recording ends" in one.message and one.levelno == logging.ERROR
    ] == [
        "kvstore: recording ends: pages come without those before them; expected "
        '"hicache_storage_pass_prefix_keys": true in --hicache-storage-backend-extra-config'
    ]
