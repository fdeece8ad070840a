"""The torch backend against attention written out in float64, over random mixed tables."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from allocator import CacheGroup, GroupKind, KVGeometry, UsageError
from engine_adapter.attention import AttentionSettings
from engine_adapter.attention.torch_paged import TorchPagedAttention
from engine_adapter.batch import SequenceSlice, StepBatch
from engine_adapter.paged_cache import PagedCache
from quant import Int4Codec
from tests.engine_adapter.paged_kit import make_slab

LAYERS = 3
PLAIN = AttentionSettings(0.25)
HEADS = 6


@dataclass
class Sequence:
    """One sequence: KV of all its tokens, float64[layers, kv_heads, tokens, dim], as attention should read it."""

    keys: torch.Tensor
    values: torch.Tensor
    part: SequenceSlice


class Scene:
    """A slab with sequences of given (context, new tokens), a share of their older blocks INT4."""

    def __init__(
        self,
        lengths: list[tuple[int, int]],
        *,
        kv_heads: int = 2,
        key_dim: int = 16,
        value_dim: int = 16,
        window: int | None = None,
        cold_share: float = 0.0,
        dtype: str = "float32",
        codec: Any = None,
        block_tokens: int = 16,
        seed: int = 0,
    ) -> None:
        kind = GroupKind.LATENT if value_dim == 0 else GroupKind.FULL if window is None else GroupKind.SLIDING
        group = CacheGroup(
            kind=kind,
            layers=tuple(range(LAYERS)),
            kv_heads=kv_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            window_tokens=window,
        )
        self.geometry = KVGeometry(groups=(group,), block_tokens=block_tokens, dtype=dtype)
        self.codec = codec or Int4Codec()
        self.window = window
        total = sum(-(-(context + new) // block_tokens) for context, new in lengths)
        self.slab, (full, cold) = make_slab(self.geometry, total + 4, cold=cold_share > 0, codec=self.codec)
        draw = random.Random(seed)
        draw.shuffle(full)
        draw.shuffle(cold)
        self.free_full, self.free_cold = full, cold
        self.cache = PagedCache(self.slab, self.geometry, self.codec if cold_share else None)
        torch.manual_seed(seed)
        self.draw, self.cold_share = draw, cold_share
        self.sequences = [self._make(f"s{at}", *pair) for at, pair in enumerate(lengths)]
        self.new_count = sum(new for _, new in lengths)
        self.query = torch.randn(self.new_count, HEADS, key_dim).to(self.cache.dtype)

    def _make(self, name: str, context: int, new: int) -> Sequence:
        group, size = self.geometry.groups[0], self.geometry.block_tokens
        total = context + new
        keys = torch.randn(LAYERS, group.kv_heads, total, group.key_dim) * torch.rand(group.key_dim) * 2
        values = torch.randn(LAYERS, group.kv_heads, total, group.value_dim)
        keys, values = keys.to(self.cache.dtype), values.to(self.cache.dtype)
        table = np.array([self.free_full.pop() << 1 for _ in range(-(-total // size))], np.int64)
        positions = np.arange(total)
        mapping = (table[positions // size] >> 1) * size + positions % size
        for layer in range(LAYERS):
            self.cache.write(
                layer,
                mapping,
                keys[layer].transpose(0, 1),
                values[layer].transpose(0, 1) if group.value_dim else None,
            )
        for block in range(context // size):
            if self.draw.random() < self.cold_share:
                self._cool(table, block, keys, values)
        if self.window is not None:
            table[: max(0, context - self.window + 1) // size] = -1
        part = SequenceSlice(name, (1,) * new, context, 0, (table,), (mapping[context:],))
        return Sequence(keys.double(), values.double(), part)

    def _cool(self, table: np.ndarray, block: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Encode a block into an INT4 slot; from now on its KV is what that decodes to. Its full slot is poisoned."""
        size = self.geometry.block_tokens
        span = slice(block * size, block * size + size)
        slot = self.free_cold.pop()
        payload = torch.frombuffer(
            bytearray(self.codec.encode(keys[:, :, span], values[:, :, span] if values.shape[-1] else None)),
            dtype=torch.uint8,
        )
        self.slab.slot_bytes_view(1, slot)[: len(payload)] = payload
        decoded_values = torch.empty_like(values[:, :, span])
        decoded_keys = torch.empty_like(keys[:, :, span])
        self.codec.decode_into(payload, decoded_keys, decoded_values if values.shape[-1] else None)
        keys[:, :, span] = decoded_keys
        values[:, :, span] = decoded_values
        self.slab.poison(0, [int(table[block]) >> 1])
        table[block] = slot << 1 | 1

    def batch(self) -> StepBatch:
        return StepBatch(tuple(one.part for one in self.sequences))

    def run(self, layer: int, settings: AttentionSettings, bucket_bytes: int = 4 << 20) -> torch.Tensor:
        backend = TorchPagedAttention(bucket_bytes)
        plan = backend.plan(self.cache, 0, self.batch())
        keys = torch.cat([one.keys[layer, :, one.part.start :].transpose(0, 1) for one in self.sequences])
        values = torch.cat([one.values[layer, :, one.part.start :].transpose(0, 1) for one in self.sequences])
        dtype = self.cache.dtype
        given = values.to(dtype) if values.shape[-1] else None
        return backend.attend(plan, layer, self.query, keys.to(dtype), given, settings)

    def expected(self, layer: int, settings: AttentionSettings) -> torch.Tensor:
        """Attention in float64, one query at a time."""
        found, row = [], 0
        for one in self.sequences:
            for position in range(one.part.start, one.part.end):
                first = 0 if self.window is None else max(0, position - self.window + 1)
                keys = one.keys[layer, :, first : position + 1]
                values = one.values[layer, :, first : position + 1]
                if settings.latent_value_dim is not None:
                    values = keys[..., : settings.latent_value_dim]
                query = self.query[row].double().view(keys.shape[0], -1, keys.shape[-1])
                scores = torch.einsum("hgd,htd->hgt", query, keys) * settings.scaling
                if settings.softcap is not None:
                    scores = torch.tanh(scores / settings.softcap) * settings.softcap
                if settings.sinks is not None:
                    sinks = settings.sinks.double().view(keys.shape[0], -1, 1)
                    weights = torch.softmax(torch.cat((scores, sinks), -1), -1)[..., :-1]
                else:
                    weights = torch.softmax(scores, -1)
                found.append(torch.einsum("hgt,htd->hgd", weights, values).flatten(0, 1))
                row += 1
        return torch.stack(found)

    def check(self, settings: AttentionSettings = PLAIN, *, atol: float = 1e-5) -> None:
        for layer in range(LAYERS):
            found = self.run(layer, settings)
            assert found.isfinite().all()
            torch.testing.assert_close(found.double(), self.expected(layer, settings), rtol=0, atol=atol)


MIXED_LENGTHS = [
    (0, 1),
    (0, 16),
    (0, 40),
    (5, 1),
    (15, 1),
    (16, 1),
    (31, 17),
    (64, 5),
    (100, 1),
    (103, 1),
    (130, 30),
    (140, 3),
]
SINKS = torch.linspace(-2, 3, HEADS)


@pytest.mark.parametrize("cold_share", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("window", [None, 1, 20, 64])
@pytest.mark.parametrize(
    "settings",
    [
        AttentionSettings(0.25),
        AttentionSettings(0.3, softcap=2.0),
        AttentionSettings(0.25, sinks=SINKS),
        AttentionSettings(0.2, softcap=3.0, sinks=SINKS),
    ],
    ids=["plain", "softcap", "sinks", "both"],
)
def test_mixed_tables_equal_attention_on_decoded_values(
    cold_share: float, window: int | None, settings: AttentionSettings
) -> None:
    Scene(MIXED_LENGTHS, cold_share=cold_share, window=window).check(settings)


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_mha_gqa_and_mqa(kv_heads: int) -> None:
    Scene(MIXED_LENGTHS, cold_share=0.5, kv_heads=kv_heads).check()


def test_keys_and_values_of_different_dims() -> None:
    Scene(MIXED_LENGTHS, cold_share=0.5, key_dim=24, value_dim=16).check()


def test_blocks_of_two_runs() -> None:
    Scene(MIXED_LENGTHS, cold_share=0.5, block_tokens=32).check()


def test_bits_that_differ_by_layer_and_head() -> None:
    codec = Int4Codec(key_bits=[[4, 5], [5, 5], [4, 4]], value_bits=[[4, 4], [3, 4], [3, 3]], error_bound=0.9)
    Scene(MIXED_LENGTHS, cold_share=0.7, codec=codec).check()


def test_another_lossy_codec_is_decoded() -> None:
    from quant import get_codec

    Scene(MIXED_LENGTHS, cold_share=0.7, codec=get_codec("int8k")).check()


def test_latent_group_takes_v_from_k() -> None:
    scene = Scene(MIXED_LENGTHS, cold_share=0.5, kv_heads=1, key_dim=24, value_dim=0)
    scene.check(AttentionSettings(0.2, latent_value_dim=16))


@pytest.mark.parametrize(("dtype", "error"), [("bfloat16", 1e-2), ("float16", 1.5e-3)])
def test_sixteen_bit_dtypes_stay_near(dtype: str, error: float) -> None:
    """Relative error of the whole output; scores of up to about 20, where a score rounded to bf16 is off by 6 %."""
    scene = Scene([(1500, 1), (900, 1), (40, 1)], cold_share=0.5, dtype=dtype)
    settings = AttentionSettings(2.0)
    found, expected = scene.run(0, settings).double(), scene.expected(0, settings)
    assert (found - expected).norm() / expected.norm() < error


def test_small_buckets_give_the_same() -> None:
    scene = Scene(MIXED_LENGTHS, cold_share=0.5)
    settings = AttentionSettings(0.25)
    torch.testing.assert_close(scene.run(1, settings, bucket_bytes=1), scene.run(1, settings), rtol=0, atol=2e-6)


def test_shared_int4_blocks_are_read_once() -> None:
    scene = Scene([(160, 1), (160, 1)], cold_share=1.0)
    first, second = scene.sequences
    table = second.part.tables[0].copy()
    table[:5] = first.part.tables[0][:5]
    second.keys[:, :, :80], second.values[:, :, :80] = first.keys[:, :, :80], first.values[:, :, :80]
    second.part = replace(second.part, tables=(table,))
    plan = TorchPagedAttention().plan(scene.cache, 0, scene.batch())
    assert plan.cold_slots is not None
    assert len(plan.cold_slots) == 15
    scene.check()


def test_case_067_nan_in_unwritten_places_never_reaches_the_output() -> None:
    """Every byte that no sequence wrote is NaN (the kit's slab starts as 0xff), the tails of open blocks too."""
    scene = Scene([(context, 1) for context in (0, 3, 15, 16, 17, 47, 48, 49)] + [(40, 60)], cold_share=0.5)
    table = scene.sequences[1].part.tables[0]
    assert scene.slab.keys_view(0)[int(table[0]) >> 1, :, :, 4:].isnan().all()
    scene.check()


@pytest.mark.parametrize("window", [None, 20])
def test_garbage_in_places_that_are_not_referenced_has_no_influence(window: int | None) -> None:
    scene = Scene(MIXED_LENGTHS, cold_share=0.5, window=window)
    settings = AttentionSettings(0.25)
    before = scene.run(2, settings)
    written = torch.zeros(len(scene.slab.bytes), dtype=torch.bool)
    size = scene.geometry.block_tokens
    for one in scene.sequences:
        for block, entry in enumerate(one.part.tables[0].tolist()):
            if entry < 0:
                continue
            start = scene.slab.layout.slot_offset_bytes(entry & 1, entry >> 1)
            kept = scene.slab.layout.raw_slot_bytes[entry & 1]
            if entry & 1 or (block + 1) * size <= one.part.end:
                written[start : start + kept] = True
            else:  # an open block: written up to the sequence's end, in each run of K and V
                tokens = torch.arange(kept // 4).view(LAYERS, -1, 2, size, 16)[..., : one.part.end - block * size, :]
                places = start + 4 * tokens.reshape(-1, 1) + torch.arange(4)
                written[places.reshape(-1)] = True
    assert not written.all()
    scene.slab.bytes[~written] = torch.randint(0, 256, (int((~written).sum()),), dtype=torch.uint8)
    assert torch.equal(scene.run(2, settings), before)


def test_a_block_that_must_be_seen_but_was_dropped_is_refused() -> None:
    scene = Scene([(100, 1)])
    scene.sequences[0].part.tables[0][2] = -1
    with pytest.raises(UsageError, match=r"block 2 was dropped"):
        scene.run(0, AttentionSettings(0.25))


def test_a_table_that_is_too_short_is_refused() -> None:
    scene = Scene([(96, 1)])
    part = scene.sequences[0].part
    scene.sequences[0].part = replace(part, tables=(part.tables[0][:6],))
    with pytest.raises(UsageError, match="97 tokens need 7"):
        scene.run(0, AttentionSettings(0.25))


def test_writing_into_an_int4_block_is_refused() -> None:
    scene = Scene([(96, 1)])
    scene.sequences[0].part.tables[0][6] |= 1
    with pytest.raises(UsageError, match="slot mapping"):
        scene.run(0, AttentionSettings(0.25))
