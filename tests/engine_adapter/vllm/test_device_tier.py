"""INT4 blocks beside vLLM's own memory, in a real engine: a hybrid model, little room in it, and host below it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from kvstore import HashChain
from tests.engine_adapter.vllm import kit
from tests.engine_adapter.vllm.kit import BLOCK, Engine, prompt
from tests.engine_adapter.vllm.test_requests import scheduler

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]
ROOM_BYTES = 2 << 20  # one prompt, not two


@pytest.fixture(scope="module")
def engine(models: dict[str, Path]) -> Iterator[Engine]:
    tiers = {"device_int4_bytes": ROOM_BYTES, "host_bytes": "64 MiB", "codec": "int4"}
    with kit.engine(models["hybrid"], tiers) as made:
        yield made


def counts(engine: Engine) -> dict[str, int]:
    found: dict[str, int] = engine.shelf.below.counters()
    return found


def test_a_hit_comes_out_of_it_and_says_what_the_host_tier_says(engine: Engine) -> None:
    asked = prompt(120, 300)
    engine.forget(store_too=True)
    engine.answer(asked)
    engine.forget()
    before, hits = counts(engine), engine.external_hits()
    answer, cached = engine.answer(asked)
    after = counts(engine)
    blocks = 299 // BLOCK
    assert cached == blocks * BLOCK == engine.external_hits() - hits
    loaded = after["loaded_blocks_device"] - before.get("loaded_blocks_device", 0)
    assert loaded >= 2 * blocks - 8, "both groups, the windowed one without what left its window"
    assert after.get("loaded_blocks_host", 0) == before.get("loaded_blocks_host", 0)
    engine.forget()
    engine.shelf.below.tiers[0].clear()
    assert engine.answer(asked) == (answer, cached)
    assert counts(engine)["loaded_blocks_host"] - after.get("loaded_blocks_host", 0) == loaded


def test_what_it_has_no_room_for_comes_from_below_and_its_budget_holds(engine: Engine) -> None:
    prompts = [prompt(121 + seed, 700) for seed in range(4)]
    engine.forget(store_too=True)
    for asked in prompts:
        engine.answer(asked)
    engine.forget()
    before = counts(engine)
    tier = engine.shelf.below.tiers[0]
    assert before["device_evicted"] > 0
    for asked in prompts:
        _, cached = engine.answer(asked)
        assert cached == 699 // BLOCK * BLOCK
    engine.settle()
    after = counts(engine)
    assert after["loaded_blocks_host"] > before.get("loaded_blocks_host", 0)
    assert after.get("loads_failed", 0) == before.get("loads_failed", 0)
    assert 0 < tier.peak_bytes <= ROOM_BYTES
    assert tier.memory.nbytes == ROOM_BYTES
    tier.check_invariants()


def test_planted_spoiled_bytes_show_in_the_answer(engine: Engine) -> None:
    """Nobody else can write to this memory, so it has no checksums: but what is loaded does come from there."""
    asked = prompt(130, 300)
    engine.forget(store_too=True)
    engine.answer(asked)
    engine.forget()
    expected, cached = engine.answer(asked)
    engine.forget()
    engine.shelf.below.tiers[0].memory.bitwise_xor_(0x21)
    answer, again = engine.answer(asked)
    assert again == cached
    assert answer != expected


def test_a_reset_with_new_weights_forgets_it(engine: Engine) -> None:
    asked = prompt(131, 300)
    engine.forget(store_too=True)
    first, _ = engine.answer(asked)
    engine.forget()
    assert engine.shelf.below.tiers[0].used_bytes > 0
    engine.forget(store_too=True)
    assert engine.shelf.below.tiers[0].used_bytes == 0
    assert engine.answer(asked) == (first, 0)


def test_it_is_a_tier_of_its_own_on_vllms_prometheus_page(engine: Engine) -> None:
    engine.forget(store_too=True)
    asked = prompt(132, 300)
    engine.answer(asked)
    engine.forget()
    engine.answer(asked)
    named = {one.labels["what"] for one in engine.llm.get_metrics() if one.name == "vllm:kvstore_counts"}
    assert {"loaded_blocks_device", "put_device_ok", "loaded_blocks_host"} <= named


def test_an_engine_that_wants_exact_blocks_gets_none_of_it(engine: Engine) -> None:
    """Its plan has raw copies of exact blocks only: here the first."""
    asked = prompt(133, 300)
    engine.forget(store_too=True)
    engine.answer(asked)
    engine.forget()
    shelf, book = engine.shelf, scheduler(engine).connector._book
    root = book._identity.root()
    hashes = HashChain(root, BLOCK).extend(asked)
    exact = shelf._residency.plan(root, hashes, True)
    lossy = shelf._residency.plan(root, hashes, False)
    assert exact.blocks <= 1 < lossy.blocks
    assert {copy.key.codec for group in exact.groups for copy in group.copies.values()} <= {"raw"}
