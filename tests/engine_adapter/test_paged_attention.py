"""Every attention backend, and every kernel path of the native one, against attention written out in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from allocator import UsageError
from engine_adapter.attention import AttentionBackend, AttentionSettings, get_backend
from quant import Int4Codec, native
from tests.engine_adapter.attention_kit import LAYERS, MIXED_LENGTHS, SINKS, Scene

BACKENDS = ("torch", *(f"native on {path}" for path in native.available_paths()))


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[AttentionBackend]:
    """Each backend; the native one on each path that runs here."""
    name, _, path = str(request.param).partition(" on ")
    if not path:
        yield get_backend(name)
        return
    with native.forced_path(path):
        yield get_backend(name)


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
    backend: AttentionBackend, cold_share: float, window: int | None, settings: AttentionSettings
) -> None:
    Scene(MIXED_LENGTHS, cold_share=cold_share, window=window).check(backend, settings)


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_mha_gqa_and_mqa(backend: AttentionBackend, kv_heads: int) -> None:
    Scene(MIXED_LENGTHS, cold_share=0.5, kv_heads=kv_heads).check(backend)


def test_keys_and_values_of_different_dims(backend: AttentionBackend) -> None:
    Scene(MIXED_LENGTHS, cold_share=0.5, key_dim=24, value_dim=16).check(backend)


def test_blocks_of_two_runs(backend: AttentionBackend) -> None:
    Scene(MIXED_LENGTHS, cold_share=0.5, block_tokens=32).check(backend)


def test_bits_that_differ_by_layer_and_head(backend: AttentionBackend) -> None:
    codec = Int4Codec(key_bits=[[4, 5], [5, 5], [4, 4]], value_bits=[[4, 4], [3, 4], [3, 3]], error_bound=0.9)
    Scene(MIXED_LENGTHS, cold_share=0.7, codec=codec).check(backend)


def test_another_lossy_codec_is_decoded(backend: AttentionBackend) -> None:
    from quant import get_codec

    Scene(MIXED_LENGTHS, cold_share=0.7, codec=get_codec("int8k")).check(backend)


def test_latent_group_takes_v_from_k(backend: AttentionBackend) -> None:
    scene = Scene(MIXED_LENGTHS, cold_share=0.5, kv_heads=1, key_dim=24, value_dim=0)
    scene.check(backend, AttentionSettings(0.2, latent_value_dim=16))


@pytest.mark.parametrize(("dtype", "error"), [("bfloat16", 1e-2), ("float16", 1.5e-3)])
def test_sixteen_bit_dtypes_stay_near(backend: AttentionBackend, dtype: str, error: float) -> None:
    """Relative error of the whole output; scores of up to about 20, where a score rounded to bf16 is off by 6 %."""
    scene = Scene([(1500, 1), (900, 1), (40, 1)], cold_share=0.5, dtype=dtype)
    settings = AttentionSettings(2.0)
    found, expected = scene.run(backend, 0, settings).double(), scene.expected(0, settings)
    assert (found - expected).norm() / expected.norm() < error


def test_case_067_nan_in_unwritten_places_never_reaches_the_output(backend: AttentionBackend) -> None:
    """Every byte that no sequence wrote is NaN (the kit's slab starts as 0xff), the tails of open blocks too."""
    scene = Scene([(context, 1) for context in (0, 3, 15, 16, 17, 47, 48, 49)] + [(40, 60)], cold_share=0.5)
    table = scene.sequences[1].part.tables[0]
    assert scene.slab.keys_view(0)[int(table[0]) >> 1, :, :, 4:].isnan().all()
    scene.check(backend)


@pytest.mark.parametrize("window", [None, 20])
def test_garbage_in_places_that_are_not_referenced_has_no_influence(
    backend: AttentionBackend, window: int | None
) -> None:
    scene = Scene(MIXED_LENGTHS, cold_share=0.5, window=window)
    settings = AttentionSettings(0.25)
    before = scene.run(backend, 2, settings)
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
    assert torch.equal(scene.run(backend, 2, settings), before)


def test_a_block_that_must_be_seen_but_was_dropped_is_refused(backend: AttentionBackend) -> None:
    scene = Scene([(100, 1)])
    scene.sequences[0].part.tables[0][2] = -1
    with pytest.raises(UsageError, match=r"block 2 was dropped"):
        scene.run(backend, 0, AttentionSettings(0.25))


def test_a_table_that_is_too_short_is_refused(backend: AttentionBackend) -> None:
    scene = Scene([(96, 1)])
    part = scene.sequences[0].part
    scene.sequences[0].part = replace(part, tables=(part.tables[0][:6],))
    with pytest.raises(UsageError, match="97 tokens need 7"):
        scene.run(backend, 0, AttentionSettings(0.25))


def test_writing_into_an_int4_block_is_refused(backend: AttentionBackend) -> None:
    scene = Scene([(96, 1)])
    scene.sequences[0].part.tables[0][6] |= 1
    with pytest.raises(UsageError, match="slot mapping"):
        scene.run(backend, 0, AttentionSettings(0.25))
