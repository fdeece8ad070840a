"""The vLLM connector's own logic without vLLM: places in pages, what is named when, tiers behind it, settings."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from allocator import ConfigError
from engine_adapter.vllm_connector.book import Found
from engine_adapter.vllm_connector.layout import GroupPages, blocks_per_page
from engine_adapter.vllm_connector.lookup import Answer, LookupClient, LookupServer, Question
from engine_adapter.vllm_connector.orders import SaveOrder
from engine_adapter.vllm_connector.settings import make_tiers, model_and_weights, read_settings
from kvstore import HashChain, HostTier
from kvstore.disk_tier.tier import DiskTier
from kvstore.executor import ThreadExecutor
from kvstore.frame.specs import geometry_specs
from tests.engine_adapter.vllm_kit import (
    BLOCK,
    DIM,
    HEADS,
    RATIO,
    Memory,
    Worker,
    full,
    geometry,
    sliding,
)

# layout --------------------------------------------------------------------------------------------------------------


def test_gathered_blocks_have_the_stores_layout() -> None:
    memory = Memory(full((0, 1)))
    tables = [[3, 7]]
    row = np.zeros(2 * memory.pages.block_bytes, np.uint8)
    memory.pages.gather([(tables, 3), (tables, 0)], row)
    found = row.view(np.float32).reshape(2, 2, HEADS, 2, BLOCK, DIM)
    assert np.array_equal(found[0], memory.block(7, 1))
    assert np.array_equal(found[1], memory.block(3, 0))


def test_scatter_is_the_reverse_and_touches_nothing_else() -> None:
    memory = Memory(full((0, 1)))
    before = memory.tokens()
    row = np.zeros(memory.pages.block_bytes, np.uint8)
    memory.pages.gather([([[3, 7]], 3)], row)
    memory.pages.scatter(row, [([[5, 9]], 2)])
    assert np.array_equal(memory.block(9, 0), before[:, 7, :, :, BLOCK:])
    changed = np.argwhere((memory.tokens() != before).any(axis=(0, 2, 3, 5)))
    assert set(map(tuple, changed)) == {(9, token) for token in range(BLOCK)}


def test_layers_of_one_group_go_by_their_own_tables() -> None:
    one, other = Memory(full((0,)), table=0), Memory(full((1,)), table=1)
    both = GroupPages((*one.pages.layers, *other.pages.layers), HEADS, DIM, BLOCK, RATIO, 4)
    row = np.zeros(both.block_bytes, np.uint8)
    tables = [[2], [6]]
    both.gather([(tables, 1)], row)
    found = row.view(np.float32).reshape(2, HEADS, 2, BLOCK, DIM)
    assert np.array_equal(found[0], one.block(2, 1)[0])
    assert np.array_equal(found[1], other.block(6, 1)[0])
    assert both.is_there(tables, 1)
    assert not both.is_there([[2], [0]], 1)  # vLLM's null block
    assert not both.is_there([[2], []], 1)


def test_block_sizes_that_do_not_divide_are_refused() -> None:
    assert blocks_per_page(128, 16) == 8
    with pytest.raises(ConfigError, match="--block-size 48"):
        blocks_per_page(40, 16)


# the worker's side ---------------------------------------------------------------------------------------------------


TWO = geometry(full((0, 1)), sliding((2,), 9))


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker([HostTier(1 << 20)], TWO)
    yield made
    made.shelf.close()


def test_saved_blocks_come_back_to_other_pages(worker: Worker) -> None:
    worker.save()
    assert worker.found() == 10
    expected = [[memory.block(page, half) for page in pages for half in range(RATIO)] for memory, pages in
                zip(worker.memories, ((1, 2, 3, 4, 5), (6, 7, 8, 9, 10)), strict=True)]  # fmt: skip
    assert worker.load(0, 10, [[11, 12, 13, 14, 15], [0, 0, 11, 12, 13]]) == []
    for position in range(10):
        assert np.array_equal(worker.memories[0].block(11 + position // 2, position % 2), expected[0][position])
    for position in range(8, 10):
        assert np.array_equal(worker.memories[1].block(13, position % 2), expected[1][position])


def test_pages_that_the_engine_gave_up_are_not_stored(worker: Worker) -> None:
    worker.save(tables=((1, 2, 3, 4, 5), (0, 0, 0, 9, 10)))
    assert worker.found() == 10  # the window's blocks are there
    assert worker.shelf.find(0, worker.root, worker.hashes[:6], 0).blocks == 0  # and those before it are not


def test_a_window_begins_at_a_whole_engine_block(worker: Worker) -> None:
    """vLLM hands its blocks on as a whole, so none of them may hold a part that nobody loaded."""
    worker.save(tables=((1, 2, 3, 4, 5), (6, 7, 8, 9, 10)))
    assert worker.shelf._residency.window_first(1, 9 * BLOCK) % RATIO == 0


def test_what_vllm_has_need_not_be_stored(worker: Worker) -> None:
    worker.save(tables=((0, 0, 3, 4, 5), (0, 0, 8, 9, 10)))
    assert worker.found() == 0
    assert worker.found(local_blocks=4) == 10


def test_blocks_that_are_gone_are_reported_by_position(worker: Worker) -> None:
    worker.save()
    key = worker.shelf._residency.copy_key(worker.root, 0, worker.hashes[7], 0, True)
    assert worker.shelf.below.tiers[0].delete([key]) == 1
    failed = worker.load(0, 10, [[11, 12, 13, 14, 15], [0, 0, 11, 12, 13]])
    assert failed[0] == 7


PAGES_OF_A_LOAD = [[11, 12, 13, 14, 15]]


def _other_prompt(made: Worker, first_token: int, blocks: int) -> None:
    hashes = HashChain(made.root, BLOCK).extend(list(range(first_token, first_token + blocks * BLOCK)))
    made.shelf.save([SaveOrder(made.root, hashes, 0, None, [[1, 2, 3, 4, 5]])])


@pytest.mark.parametrize("blocks", [8, 10])
def test_what_a_lookup_has_promised_is_there_for_the_load_whatever_is_stored_between(blocks: int) -> None:
    """The oldest of what the host tier holds, which is full: the neighbour goes, not what was just found."""
    kv = geometry(full((0, 1)))
    made = Worker([HostTier(20 * kv.full_slot_bytes(0))], kv)
    made.save()
    expected = [made.memories[0].block(1 + at // RATIO, at % RATIO) for at in range(10)]
    _other_prompt(made, 1000, 10)
    assert made.found() == 10
    _other_prompt(made, 2000, blocks)
    assert made.shelf.below.counters()["host_evicted"] >= blocks
    assert made.load(0, 10, PAGES_OF_A_LOAD) == []
    for at, block in enumerate(expected):
        assert np.array_equal(made.memories[0].block(11 + at // RATIO, at % RATIO), block)
    made.shelf.close()


def test_what_is_gone_between_a_lookup_and_its_load_is_a_load_that_fails() -> None:
    """More is stored between than the tier holds. What was not loaded is said, nothing else is put in its place."""
    kv = geometry(full((0, 1)))
    made = Worker([HostTier(20 * kv.full_slot_bytes(0))], kv)
    made.save()
    assert made.found() == 10
    _other_prompt(made, 1000, 10)
    _other_prompt(made, 2000, 10)
    left = made.found()
    assert left < 10
    before = made.memories[0].tokens()
    failed = made.load(0, 10, PAGES_OF_A_LOAD)
    assert failed == list(range(left, 10))
    lost_pages = range(11 + -(-left // RATIO), 16)
    assert np.array_equal(made.memories[0].tokens()[:, lost_pages], before[:, lost_pages])
    counts = made.shelf.below.counters()
    assert (counts["loads_failed"], counts["loaded_tokens"]) == (1, 0)
    tier = made.shelf.below.tiers[0]
    assert isinstance(tier, HostTier)
    tier.check_invariants()
    made.shelf.close()


def test_a_bad_copy_on_disk_is_found_and_no_other_is_blamed(tmp_path: Path) -> None:
    kv = geometry(full((0, 1)))
    made = Worker([DiskTier(tmp_path, 8 << 20, specs=geometry_specs(kv))], kv)
    made.save()
    for file in tmp_path.iterdir():
        raw = bytearray(file.read_bytes())
        at = raw.find(made.memories[0].block(2, 1).tobytes()[:48])  # position 3
        if at >= 0:
            raw[at + 5] ^= 1
            file.write_bytes(raw)
            break
    else:
        raise AssertionError("the copy is not in the directory")
    assert made.load(0, 10, [[11, 12, 13, 14, 15]]) == [3]
    assert made.shelf.find(0, made.root, made.hashes, 0).blocks == 3
    made.shelf.close()


def test_a_bad_copy_is_taken_from_the_next_tier() -> None:
    kv = geometry(full((0, 1)))
    first, second = HostTier(1 << 20, name="first"), HostTier(1 << 20, name="second")
    made = Worker([first, second], kv)
    made.save()
    real = first._get_one
    first._get_one = lambda job, claim: (first.delete([job.key]), real(job, None))[1]  # type: ignore[method-assign]
    assert made.load(0, 10, [[11, 12, 13, 14, 15]]) == []
    assert made.shelf.below.counters()["loaded_blocks_second"] == 10
    made.shelf.close()


def test_a_disk_that_hangs_costs_a_deadline_and_the_next_load_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = geometry(full((0, 1)))
    tier = DiskTier(tmp_path, 8 << 20, ThreadExecutor("disk"), specs=geometry_specs(kv))
    made = Worker([tier], kv, deadline_seconds=0.2)
    made.save()
    go, plain = threading.Event(), DiskTier._get_one

    def hang(self: DiskTier, job: Any, claim: Any) -> Any:
        assert go.wait(60)
        return plain(self, job, claim)

    monkeypatch.setattr(DiskTier, "_get_one", hang)
    pages = [[11, 12, 13, 14, 15]]
    before = made.memories[0].tokens()
    assert made.load(0, 10, pages) == list(range(10))
    assert made.load(0, 10, pages) == list(range(10))
    assert made.shelf.below.counters()["blocks_left_to_a_stuck_tier"] == 10, "the second did not even begin"
    go.set()
    until = time.monotonic() + 30
    while made.shelf.below.is_stuck(tier) and time.monotonic() < until:
        made.shelf.below.drain()
        time.sleep(0.002)
    assert np.array_equal(made.memories[0].tokens(), before), "what came too late is put nowhere"
    monkeypatch.undo()
    made.shelf._loader._deadline_seconds = 60.0
    assert made.load(0, 10, pages) == []
    assert np.array_equal(made.memories[0].block(15, 1), made.memories[0].block(5, 1))
    made.shelf.close()


def test_saves_beyond_the_staging_budget_are_dropped_and_counted() -> None:
    kv = geometry(full((0, 1)))

    class Stuck(HostTier):
        private_memory = False

    made = Worker([Stuck(1 << 20)], kv, staging_bytes=1)
    made.shelf._saver.staging.take(5)
    made.shelf.save([SaveOrder(made.root, made.hashes, 0, None, [[1, 2, 3, 4, 5]])])
    assert made.shelf.below.counters()["saves_dropped_staging"] == 10
    made.shelf._saver.staging.used_bytes = 0
    made.shelf.close()


def test_a_reset_begins_an_epoch_and_empties_the_tiers(worker: Worker) -> None:
    worker.save()
    assert worker.shelf.below.reset() == 1
    answer = worker.shelf.find(0, worker.root, worker.hashes, 0)
    assert (answer.blocks, answer.epoch) == (0, 1)
    assert worker.shelf.below.tiers[0].used_bytes == 0


# the line between the two --------------------------------------------------------------------------------------------


def test_questions_go_over_a_socket_and_silence_is_a_miss() -> None:
    name = f"test {time.monotonic_ns()}"
    client = LookupClient(name)
    assert client.find(4, b"r" * 32, [b"h" * 32], 0) == Found(0, False, 4)
    asked: list[Question] = []

    def answer(question: Question, hashes: list[bytes]) -> Answer:
        asked.append(question)
        return Answer(len(hashes), True, 9, problem="no" if question.is_reset else "")

    server = LookupServer(name, answer)
    assert client.find(4, b"r" * 32, [b"h" * 32] * 3000, 2) == Found(3000, True, 9)
    assert asked[0].local_blocks == 2
    with pytest.raises(ConnectionError, match="no"):
        client.reset(4)
    server.close()
    assert client.find(4, b"r" * 32, [b"h" * 32], 0) == Found(0, False, 4)
    client.close()


# settings ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "no tier is named"),
        ({"host_byte": 1}, "unknown key 'host_byte'"),
        ({"host_bytes": "much"}, "host_bytes: got 'much'"),
        ({"host_bytes": 1, "daemon": "default"}, "got daemon beside"),
        ({"host_bytes": 1, "codec": "fp4"}, "codec: got 'fp4'"),
        ({"daemon": "redis://host"}, "daemon is 'redis://host'"),
        ({"host_bytes": 1, "block_tokens": 0}, "block_tokens is 0"),
        ({"daemon": 3}, "daemon is 3"),
    ],
)
def test_settings_that_cannot_work_are_refused(given: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        read_settings(given, {})


def test_the_environment_counts_over_the_config() -> None:
    assert read_settings({"host_bytes": "1 MiB"}, {"KVSTORE_HOST_BYTES": "2 MiB"}).store.host_bytes == 2 << 20


def test_unknown_weights_are_refused(tmp_path: Path) -> None:
    settings = read_settings({"host_bytes": 1}, {})
    with pytest.raises(ConfigError, match="weights"):
        model_and_weights(settings, "some/model", None)
    with pytest.raises(ConfigError, match="weights"):
        model_and_weights(settings, str(tmp_path), None)
    assert model_and_weights(settings, "some/model", "abc") == ("some/model", "abc")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    first = model_and_weights(settings, str(tmp_path), None)[1]
    (tmp_path / "model.safetensors").write_bytes(b"others!")
    assert model_and_weights(settings, str(tmp_path), None)[1] != first


def test_unknown_tier_url_is_refused() -> None:
    settings = read_settings({"redis_url": "ftp://host"}, {})
    with pytest.raises(ConfigError, match="ftp"):
        make_tiers(settings, geometry())
