"""What `generate` does to a cache as a whole (crop, reorder, repeat, select), also where blocks are INT4, and windows.

Public cases by number, memory bounds, and planted mistakes that must show.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from allocator import CacheGroup, CannotRollback, ConfigError, GroupKind, KVGeometry
from engine_adapter.model_geometry import geometry_from_config
from engine_adapter.paged_cache import PagedCache
from engine_adapter.transformers_cache import ModelStore, StoreCache, model_store
from engine_adapter.transformers_cache.arguments import PassArguments
from kvstore import KVStore
from tests.engine_adapter.generate_kit import (
    BLOCK,
    SLIDING,
    WINDOW,
    generate,
    logits_of,
    opened,
    random_ids,
)
from tests.engine_adapter.paged_kit import reference_logits, tiny_model

ROUNDING = 1e-4
MISTAKE = 1e-2
LONG = random_ids(100)
COLD = {"codec": "int4", "residual_tokens": 16, "error_bound": 1.0, "cool_blocks_per_step": 64}


def filled(kv: ModelStore, ids: list[int] = LONG, **arguments: Any) -> StoreCache:
    """A cache that holds `ids`, settled, with the store given time to cool."""
    cache = kv.cache(**arguments)
    logits_of(kv.model, ids, cache)
    for _ in range(4):
        cache.rows.settle()
    return cache


def forms(kv: ModelStore, cache: StoreCache, row: int = 0, group: int = 0) -> list[int]:
    """Per block 0 full, 1 INT4, -1 dropped."""
    sequence_id = cache.rows.rows[row].sequence_id
    assert sequence_id is not None
    return [int(entry) if entry < 0 else int(entry) & 1 for entry in kv.store.tables(sequence_id)[group]]


def held(kv: ModelStore, cache: StoreCache, row: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of the first layer, Tensor[kv_heads, tokens, dim], as attention reads them."""
    found = cache.rows.rows[row]
    assert found.sequence_id is not None
    keys, values = kv._paged.gather(0, kv.store.tables(found.sequence_id)[0])
    return keys[:, : len(found.ids)], values[:, : len(found.ids)]


def test_case_027_crop_to_every_length_of_a_cache_that_is_int4_in_part() -> None:
    """What is left equals the same tokens before the cut, bit for bit: nothing is rounded a second time."""
    model = tiny_model("llama")
    for length in (*range(1, 35), *range(62, 82), 99):
        with opened(model, **COLD) as kv:
            cache = filled(kv)
            assert forms(kv, cache) == [0, 1, 1, 1, 1, 0, 0], "the test needs INT4 blocks"
            keys, values = held(kv, cache)
            cold_slots = [int(e) for e in kv.store.tables(cache.rows.rows[0].sequence_id or "")[0] if e & 1]
            cache.crop(length - len(LONG))
            assert cache.get_seq_length() == length
            found_keys, found_values = held(kv, cache)
            assert torch.equal(found_keys, keys[:, :length])
            assert torch.equal(found_values, values[:, :length])
            left = [int(e) for e in kv.store.tables(cache.rows.rows[0].sequence_id or "")[0] if e & 1]
            assert left == cold_slots[: len(left)], "whole INT4 blocks stay the ones they were"
            assert len(left) == max(0, min(4, length // BLOCK - 1))
            # it goes on, and what is computed after the cut counts as lossy, even if no INT4 block is left
            logits_of(model, random_ids(20), cache)
            cache.rows.settle()
            sequence_id = cache.rows.rows[0].sequence_id or ""
            assert kv.store.is_exact(sequence_id) == (length <= BLOCK)


def test_case_027_reorder_select_and_repeat_of_a_cache_that_is_int4_in_part() -> None:
    model = tiny_model("llama")
    with opened(model, **COLD) as kv:
        cache = kv.cache()
        batch = torch.tensor([random_ids(60) for _ in range(3)])
        with torch.inference_mode():
            model(input_ids=batch, cache=cache)
        for _ in range(4):
            cache.rows.settle()
        assert 1 in forms(kv, cache)
        before = [held(kv, cache, row) for row in range(3)]
        cache.batch_repeat_interleave(2)
        rows = [0, 0, 1, 1, 2, 2]
        cache.reorder_cache(torch.tensor([5, 0, 0, 3, 2, 2]))
        rows = [rows[at] for at in (5, 0, 0, 3, 2, 2)]
        cache.batch_select_indices(torch.tensor([4, 0, 1]))
        rows = [rows[at] for at in (4, 0, 1)]
        for row, source in enumerate(rows):
            for found, expected in zip(held(kv, cache, row), before[source], strict=True):
                assert torch.equal(found, expected)
        # each row goes its own way: what one writes, the other does not see
        own = torch.tensor([random_ids(3) for _ in range(3)])
        with torch.inference_mode():
            model(input_ids=own, cache=cache)
        for row, source in enumerate(rows):
            assert cache.rows.rows[row].ids == [*batch[source].tolist(), *own[row].tolist()]
            assert torch.equal(held(kv, cache, row)[0][:, :60], before[source][0])
        kv.store.check_invariants()


def test_case_109_a_window_that_was_dropped_cannot_be_cut_back_to() -> None:
    """Sliding layers refuse and nothing changes; the same cut of a model without windows works."""
    for family in (*SLIDING, "llama"):
        model = tiny_model(family)
        with opened(model) as kv:
            cache = filled(kv)
            if family == "llama":
                cache.crop(-60)
                ids = LONG[:40]
            else:
                with pytest.raises(CannotRollback):
                    cache.crop(-60)
                ids = LONG
                assert cache.get_seq_length() == len(LONG)
            more = random_ids(5)
            found = logits_of(model, more, cache)[-1]
            torch.testing.assert_close(found, reference_logits(model, [*ids, *more])[-1], rtol=0, atol=ROUNDING)


def test_case_109_tokens_of_the_last_pass_can_always_be_taken_back() -> None:
    """Drafts are not committed before the next pass, so no window has been dropped for them."""
    for family in (*SLIDING, "llama", "deepseek_v3"):
        for paged in (False, True):
            model = tiny_model(family)
            with opened(model, paged=paged) as kv:
                cache = filled(kv)
                for drafts in (1, 15, 16, 40):
                    logits_of(model, random_ids(drafts), cache)
                    cache.crop(-drafts)
                more = random_ids(5)
                found = logits_of(model, more, cache)[-1]
            torch.testing.assert_close(found, reference_logits(model, [*LONG, *more])[-1], rtol=0, atol=ROUNDING)


def test_rejected_drafts_are_never_found() -> None:
    model = tiny_model("llama")
    with opened(model) as kv:
        cache = filled(kv, LONG[:40])
        drafts = random_ids(30)
        logits_of(model, drafts, cache)
        cache.crop(-30)
        cache.finish()
        assert kv.store.lookup([*LONG[:40], *drafts]).tokens == 32


def test_a_cut_by_the_padding_of_a_row() -> None:
    model = tiny_model("llama")
    ids = torch.tensor([random_ids(6), [0, 0, 0, 0, *random_ids(2)]])
    with opened(model) as kv:
        cache = kv.cache()
        generate(model, ids, cache, max_new_tokens=1, min_new_tokens=1)
        cache.crop(-3)
        assert [(row.pad, len(row.ids)) for row in cache.rows.rows] == [(0, 3), (3, 0)]
        cache.crop(0)
        cache.crop(-30)
        assert cache.get_seq_length() == 0


def test_case_120_beams_that_branch_and_die_leave_nothing_behind() -> None:
    """200 rounds of random pruning and forking, a failed pass in the middle: no double free, all blocks return."""
    model = tiny_model("mistral")
    draw = random.Random(7)
    with opened(model, device_bytes="2 MiB") as kv:
        cache = kv.cache()
        with torch.inference_mode():
            model(input_ids=torch.tensor([random_ids(30)] * 4), cache=cache)
        for turn in range(200):
            cache.reorder_cache(torch.tensor([draw.randrange(4) for _ in range(4)]))
            with torch.inference_mode():
                model(input_ids=torch.tensor([[draw.randrange(1, 97)] for _ in range(4)]), cache=cache)
            if turn == 100:
                with pytest.raises(IndexError):  # the pass dies half way: 97 is no token of this vocabulary
                    model(input_ids=torch.tensor([[500]] * 4), cache=cache)
                assert cache.get_seq_length() == 131
            kv.store.check_invariants()
        cache.finish()
        assert kv.store.sequence_ids() == []
        assert kv.store.usage().live_sequences == 0


# ---- fidelity


def test_what_was_computed_after_int4_is_found_as_lossy_only() -> None:
    model = tiny_model("llama")
    for paged in (False, True):
        with opened(model, paged=paged, **COLD) as kv:
            cache = filled(kv)
            more = random_ids(40)
            logits_of(model, more, cache)
            cache.finish()
            asked = [*LONG, *more]
            assert kv.store.lookup(asked).tokens == 128
            assert kv.store.lookup(asked, exact=True).tokens < 128
            exact = kv.cache(exact=True)
            found = generate(model, torch.tensor([asked]), exact)
            assert found == [generate_plain(asked)]


def generate_plain(ids: list[int]) -> list[int]:
    return generate(tiny_model("llama"), torch.tensor([ids]))[0]


# ---- memory


@pytest.mark.parametrize("family", SLIDING)
def test_resident_blocks_of_a_window_are_bounded(family: str) -> None:
    """However long the sequence: the window, its two ragged ends, and one block for a slightly shorter prompt."""
    model = tiny_model(family)
    most = -(-WINDOW // BLOCK) + 2
    with opened(model) as kv:
        sliding = [at for at, group in enumerate(kv.geometry.groups) if group.kind is GroupKind.SLIDING]
        assert sliding
        cache = filled(kv)
        for token in random_ids(60):
            logits_of(model, [token], cache)
            for group in sliding:
                assert sum(form >= 0 for form in forms(kv, cache, group=group)) <= most
        assert len(forms(kv, cache, group=sliding[0])) == 10


def test_bytes_of_a_token_by_family() -> None:
    """One latent a token and layer for MLA, 8 of 64 heads an eighth; the window bounds the rest."""
    import transformers as hf

    deepseek = hf.DeepseekV3Config()
    kv = geometry_from_config(deepseek, "bfloat16")
    assert kv.token_bytes == deepseek.num_hidden_layers * (512 + 64) * 2
    many, few = (
        geometry_from_config(
            hf.LlamaConfig(num_attention_heads=64, num_key_value_heads=heads, hidden_size=8192), "bfloat16"
        )
        for heads in (64, 8)
    )
    assert many.token_bytes == 8 * few.token_bytes


def test_a_latent_layer_stores_one_latent_and_is_read_back_as_it_was() -> None:
    model = tiny_model("deepseek_v3")
    with opened(model) as kv:
        assert kv.geometry.token_bytes == 4 * (24 + 8) * 4
        cache = filled(kv)
        used = sum(kv.store.usage().bytes_by_class.values())
        assert used == -(-len(LONG) // BLOCK) * BLOCK * kv.geometry.token_bytes
        cache.finish()


# ---- planted mistakes


def after_a_hit(kv: ModelStore, ids: list[int]) -> torch.Tensor:
    """Logits of the last token, its prompt taken from the store as far as it goes, then one decode step."""
    generate(kv.model, torch.tensor([ids]), kv.cache(), max_new_tokens=1, min_new_tokens=1)
    cache = kv.cache()
    with torch.inference_mode():
        kv.model(input_ids=torch.tensor([ids[:-1]]), cache=cache, logits_to_keep=1)
        assert cache.reused_tokens > 0
        logits: torch.Tensor = kv.model(input_ids=torch.tensor([ids[-1:]]), cache=cache).logits
    return logits[0, -1].float()


@pytest.mark.parametrize("paged", [False, True], ids=["own", "paged"])
@pytest.mark.parametrize(
    ("family", "mistake"),
    [
        *(
            (family, mistake)
            for family in ("llama", "gemma3")
            for mistake in ("none", "positions", "exchanged", "partial")
        ),
        ("gemma3", "window"),
    ],
)
def test_planted_mistakes_show(family: str, paged: bool, mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(family)
    expected = reference_logits(model, LONG)[-1]
    plant(mistake, monkeypatch)
    with opened(model, paged=paged) as kv:
        if mistake == "partial":
            with pytest.raises(ValueError, match="between the two"):
                after_a_hit(kv, LONG)
            return
        if mistake == "window" and paged:
            with pytest.raises(ConfigError, match="window of 20 tokens"):
                after_a_hit(kv, LONG)
            return
        difference = (after_a_hit(kv, LONG) - expected).abs().max()
    assert difference < ROUNDING if mistake == "none" else difference > MISTAKE


def plant(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if mistake == "window":  # one token too narrow
        right = model_store.geometry_from_config

        def narrower(*args: Any, **kwargs: Any) -> KVGeometry:
            return with_windows(right(*args, **kwargs), -1)

        monkeypatch.setattr(model_store, "geometry_from_config", narrower)
    elif mistake == "positions":  # what follows a hit stands at 0 again
        cut = PassArguments.cut

        def restarted(self: PassArguments, columns: int, media_to_come: bool) -> None:
            cut(self, columns, media_to_come)
            if columns:
                count = self.kwargs["input_ids"].shape[1]
                self.kwargs["position_ids"] = torch.arange(count)[None]

        monkeypatch.setattr(PassArguments, "cut", restarted)
    elif mistake == "exchanged":
        write = PagedCache.write
        monkeypatch.setattr(
            PagedCache, "write", lambda self, layer, at, keys, values: write(self, layer, at, values, keys)
        )
    elif mistake == "partial":  # the store claims tokens of a block that was never full
        fetch = KVStore.fetch
        monkeypatch.setattr(
            KVStore,
            "fetch",
            lambda self, name: replace(fetch(self, name), ready_tokens=fetch(self, name).ready_tokens + 3),
        )


def with_windows(geometry: KVGeometry, change: int) -> KVGeometry:
    def changed(group: CacheGroup) -> CacheGroup:
        window = group.window_tokens
        return group if window is None else replace(group, window_tokens=window + change)

    return replace(geometry, groups=tuple(changed(group) for group in geometry.groups))
