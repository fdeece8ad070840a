"""The toy model must notice every single wrong value, or the loop tests prove nothing."""

from __future__ import annotations

import numpy as np
import pytest

from allocator import IntegrityError
from engine_adapter.batch import SequenceSlice, StepBatch
from engine_adapter.request import Request
from engine_adapter.testing import ToyModel, ToyRunner, toy_generate, toy_states
from tests.engine_adapter.loop_kit import FAMILIES, Kit, KitMaker, geometry, prompt


def begin(kit: Kit, count: int) -> list[int]:
    """Compute all but the last token of a prompt under the id "s" and return the prompt."""
    tokens = prompt(3, count)
    kit.store.admit("s", tokens)
    feed(kit, tokens, 0, count - 1)
    return tokens


def feed(kit: Kit, tokens: list[int], start: int, end: int) -> np.ndarray:
    kit.store.grow("s", end - start)
    logits = kit.runner.forward(StepBatch((part(kit, tokens, start, end),)))
    kit.store.commit("s", tokens[start:end])
    row: np.ndarray = logits.numpy()[-1]
    return row


def part(kit: Kit, tokens: list[int], start: int, end: int) -> SequenceSlice:
    groups = range(len(kit.store.geometry.groups))
    return SequenceSlice(
        "s",
        tokens[start:end],
        start,
        1,
        kit.store.tables("s"),
        tuple(kit.store.slot_mapping("s", group, start, end - start) for group in groups),
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_oracle_is_sensitive_to_every_token_in_sight(family: str, dtype: str) -> None:
    kv = geometry(family)
    model = ToyModel(type(kv)(groups=kv.groups, block_tokens=4, dtype=dtype), 97)
    tokens = prompt(1, 23)
    truth = toy_states(model, tokens)[-1]
    changed = 0
    for place in range(len(tokens)):
        other = [*tokens[:place], (tokens[place] + 1) % 97, *tokens[place + 1 :]]
        changed += int(toy_states(model, other)[-1] != truth)
    reach = len(tokens) if family != "sliding" else 2 * 9 + 1
    assert changed >= reach - 1  # one chance collision is allowed in bfloat16, whose modulus is small
    assert len(set(toy_generate(model, tokens, 12))) > 6


@pytest.mark.parametrize("family", FAMILIES)
def test_every_value_of_a_visible_block_reaches_the_logits(make_kit: KitMaker, family: str) -> None:
    kit = make_kit(family)
    tokens = begin(kit, 11)
    kit.store.grow("s", 1)
    batch = StepBatch((part(kit, tokens, 10, 11),))
    truth = kit.runner.forward(batch).numpy()
    assert int(truth.argmax()) == kit.expect(tokens, 1)[0]
    slab = kit.store.slab
    assert slab is not None
    for group, entries in enumerate(batch.slices[0].tables):
        window = kit.store.geometry.groups[group].window_tokens
        for place, entry in enumerate(entries.tolist()):
            block = slab.full_view(group)[entry >> 1].view(-1)
            for index in range(0, block.numel(), 7):
                kept = block[index].clone()
                block[index] = kept + 1
                same = bool((kit.runner.forward(batch).numpy() == truth).all())
                block[index] = kept
                if same:
                    kit.runner.forward(batch)
                    assert position_of(kit, group, place, index) not in visible(11, window), (group, place, index)


def position_of(kit: Kit, group_index: int, place: int, index: int) -> int:
    """Token position of a value inside a block: layout [layers, kv_heads, (K, V), block_tokens, dim]."""
    group, block_tokens = kit.store.geometry.groups[group_index], kit.store.geometry.block_tokens
    inside = index % (block_tokens * (group.key_dim + group.value_dim))
    keys = block_tokens * group.key_dim
    offset = inside // group.key_dim if inside < keys else (inside - keys) // group.value_dim
    return place * block_tokens + offset


def visible(count: int, window: int | None) -> range:
    """Positions whose stored KV the last of `count` tokens reads; its own is written anew."""
    return range(0 if window is None else max(0, count - window), count - 1)


def test_wrong_tables_change_the_output(make_kit: KitMaker) -> None:
    kit = make_kit("full")
    tokens = begin(kit, 11)
    kit.store.grow("s", 1)
    good = part(kit, tokens, 10, 11)
    truth = kit.runner.forward(StepBatch((good,))).numpy()
    table = good.tables[0]
    for order in ([1, 0, 2], [0, 0, 2], [1, 1, 2]):
        bad = SequenceSlice("s", good.token_ids, 10, 1, (table[order],), good.slot_mappings)
        assert (kit.runner.forward(StepBatch((bad,))).numpy() != truth).any()
    late = SequenceSlice("s", good.token_ids, 9, 1, good.tables, (good.slot_mappings[0] - 1,))
    assert (kit.runner.forward(StepBatch((late,))).numpy() != truth).any()


def test_impossible_tables_are_named(make_kit: KitMaker) -> None:
    kit = make_kit("full")
    tokens = begin(kit, 11)
    kit.store.grow("s", 1)
    good = part(kit, tokens, 10, 11)
    dropped = np.array([-1, *good.tables[0][1:]])
    cold = np.array([good.tables[0][0] | 1, *good.tables[0][1:]])
    shifted = (good.slot_mappings[0] + 1,)
    for bad, said in (
        (SequenceSlice("s", good.token_ids, 10, 1, (dropped,), good.slot_mappings), "reads positions 0..10"),
        (SequenceSlice("s", good.token_ids, 10, 1, (cold,), good.slot_mappings), "no codec"),
        (SequenceSlice("s", good.token_ids, 10, 1, good.tables, shifted), "positions 10..10"),
    ):
        with pytest.raises(IntegrityError, match=said):
            kit.runner.forward(StepBatch((bad,)))
    twin = SequenceSlice("t", good.token_ids, 10, 1, good.tables, good.slot_mappings)
    with pytest.raises(IntegrityError, match="one place"):
        kit.runner.forward(StepBatch((good, twin)))


def test_nan_in_the_slab_is_noticed(make_kit: KitMaker) -> None:
    kit = make_kit("full")
    tokens = begin(kit, 11)
    slab = kit.store.slab
    assert slab is not None
    kit.store.grow("s", 1)
    batch = StepBatch((part(kit, tokens, 10, 11),))
    truth = kit.runner.forward(batch).numpy()
    slab.full_view(0)[int(batch.slices[0].tables[0][0]) >> 1].view(-1)[0] = float("nan")
    assert (kit.runner.forward(batch).numpy() != truth).any()


def test_one_pass_equals_token_by_token(make_kit: KitMaker) -> None:
    for family in FAMILIES:
        kit = make_kit(family)
        results = kit.drive(Request("a", prompt(9, 30), 6))
        assert results["a"].token_ids == kit.expect(prompt(9, 30), 6)
        assert isinstance(kit.runner, ToyRunner)
        assert kit.runner.computed_tokens == 30 + 5
