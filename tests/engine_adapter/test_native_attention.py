"""The native backend's own promises: spans, threads, forks, far addresses, any shape; on every path that runs here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from allocator import CacheGroup, ConfigError, ExtentLayout, GroupKind, KVGeometry, Slab, UsageError
from engine_adapter.attention import AttentionBackend, AttentionSettings, get_backend
from engine_adapter.batch import StepBatch
from quant import BlockShape, Int4Codec, native
from tests.engine_adapter.attention_kit import LAYERS, MIXED_LENGTHS, PLAIN, SINKS, Scene

pytestmark = pytest.mark.skipif(native.kernels is None, reason=f"no C kernels: {native.reason}")
ERROR = {"float32": 1e-5, "bfloat16": 3e-3, "float16": 5e-4}
"""Relative; in 16 bits the rounding of the output alone is half of it."""


@pytest.fixture(params=native.available_paths())
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    with native.forced_path(request.param):
        yield request.param


@pytest.fixture
def one_thread_after() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


def _backend() -> AttentionBackend:
    return get_backend("native")


def _bound(scene: Scene) -> float:
    return max(ERROR[scene.geometry.dtype], 1e-3 if scene.cold_share else 0.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "shape",
    [
        {"key_dim": 128, "value_dim": 128, "kv_heads": 2, "heads": 8},
        {"key_dim": 8, "value_dim": 8, "kv_heads": 3, "heads": 3},
        {"key_dim": 80, "value_dim": 96, "kv_heads": 1, "heads": 7},
        {"key_dim": 192, "value_dim": 128, "kv_heads": 2, "heads": 10},
        {"key_dim": 72, "value_dim": 0, "kv_heads": 1, "heads": 130},
        {"key_dim": 1024, "value_dim": 1024, "kv_heads": 1, "heads": 2},
    ],
    ids=lambda shape: "-".join(map(str, shape.values())),
)
def test_every_shape_in_every_dtype(path: str, shape: dict[str, Any], dtype: str) -> None:
    lengths = [(16 * blocks + more, 1) for blocks in range(1, 6) for more in (-2, -1, 0)] + [(40, 4), (3, 12), (20, 40)]
    scene = Scene(lengths, dtype=dtype, cold_share=0.5, **shape)
    latent = None if shape["value_dim"] else 64
    settings = AttentionSettings(shape["key_dim"] ** -0.5, latent_value_dim=latent)
    assert scene.relative_error(_backend(), 1, settings) <= _bound(scene)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_full_precision_keeps_its_digits(path: str, dtype: str) -> None:
    """Without INT4 blocks float32 is near float64; 16 bits lose the output's rounding and no more."""
    scene = Scene(MIXED_LENGTHS, dtype=dtype, key_dim=64, value_dim=64)
    settings = AttentionSettings(0.4, softcap=9.0, sinks=SINKS)
    found, expected = scene.run(_backend(), 2, settings), scene.expected(2, settings)
    rounded = expected.to(found.dtype).double()
    least = float((rounded - expected).norm() / expected.norm())
    assert scene.relative_error(_backend(), 2, settings) <= 1.1 * least + 2e-6


@pytest.mark.parametrize("cold_share", [0.0, 0.5])
def test_contexts_of_several_spans(path: str, cold_share: float) -> None:
    """Contexts are summed in spans of 4,096 tokens: just before, on and behind the cuts, with and without a window."""
    for lengths, window in (([(4095, 1), (4096, 1), (8300, 3)], None), ([(9000, 1)], 4500)):
        scene = Scene(lengths, cold_share=cold_share, window=window, kv_heads=1, heads=2)
        scene.check(_backend())


@pytest.mark.parametrize("lengths", [[(6000, 1)], [(50, 1)], MIXED_LENGTHS, [(0, 300), (700, 1)]], ids=len)
@pytest.mark.parametrize("heads", [(1, 2), (6, 6)])
def test_two_threads_and_one_give_the_same_bits(
    path: str, one_thread_after: None, lengths: list[tuple[int, int]], heads: tuple[int, int]
) -> None:
    scene = Scene(lengths, cold_share=0.5, kv_heads=heads[0], heads=heads[1])
    one = scene.run(_backend(), 1, PLAIN)
    torch.set_num_threads(2)
    assert torch.equal(scene.run(_backend(), 1, PLAIN), one)


def test_neighbours_change_no_bit(path: str) -> None:
    scene = Scene(MIXED_LENGTHS, cold_share=0.5)
    together = scene.run(_backend(), 0, PLAIN)
    row = 0
    for one in scene.sequences:
        plan = _backend().plan(scene.cache, 0, StepBatch((one.part,)))
        rows = slice(row, row + one.part.token_count)
        keys, values = (part[0, :, one.part.start :].transpose(0, 1).float() for part in (one.keys, one.values))
        alone = _backend().attend(plan, 0, scene.query[rows], keys, values, PLAIN)
        assert torch.equal(alone, together[rows])
        row = rows.stop


def test_a_forked_process_attends_with_its_own_threads(one_thread_after: None) -> None:
    scene = Scene(MIXED_LENGTHS, cold_share=0.5)
    torch.set_num_threads(2)
    expected = scene.run(_backend(), 0, PLAIN)  # the parent's workers are running by now
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            same = torch.equal(scene.run(_backend(), 0, PLAIN), expected)
            os.write(writes, b"same" if same else b"differs")
        finally:
            os._exit(0)
    os.close(writes)
    answer = os.read(reads, 16)
    os.close(reads)
    assert os.waitpid(child, 0)[1] == 0
    assert answer == b"same"
    assert torch.equal(scene.run(_backend(), 0, PLAIN), expected)


def test_case_074_blocks_beyond_4_gib(path: str) -> None:
    """A slab of 9 GiB of which little is touched: slots of both kinds lie behind 2^32 and around it."""
    codec = Int4Codec()
    group = CacheGroup(kind=GroupKind.FULL, layers=tuple(range(LAYERS)), kv_heads=2, key_dim=16, value_dim=16)
    geometry = KVGeometry(groups=(group,), dtype="float32")
    full = geometry.full_slot_bytes(0)
    record = codec.encoded_bytes(BlockShape(LAYERS, 2, 16, 16, 16), "float32")
    slab = Slab(ExtentLayout(9 << 30, (full,), (record,), 4 * full), geometry)
    layout = slab.layout
    middle = (1 << 32) // layout.extent_bytes
    slots = [
        [*range((middle - 4) * layout.per_extent[0], (middle + 4) * layout.per_extent[0])],
        [*range((layout.extent_count - 8) * layout.per_extent[1], layout.extent_count * layout.per_extent[1])],
    ]
    assert slots[0][0] * full < 1 << 32 < slots[0][-1] * full
    scene = Scene([(200, 1), (60, 3), (16, 1)], cold_share=0.5, slab=(slab, slots))
    scene.check(_backend())


def test_a_query_of_any_strides_and_another_dtype(path: str) -> None:
    scene = Scene(MIXED_LENGTHS, dtype="bfloat16", cold_share=0.5)
    plan = _backend().plan(scene.cache, 0, scene.batch())
    wide = scene.query.float()
    expected = _backend().attend(plan, 1, wide, wide, wide, PLAIN)
    assert expected.dtype == torch.float32
    apart = torch.empty(wide.shape[1], wide.shape[2], wide.shape[0]).permute(2, 0, 1).copy_(wide)
    assert apart.stride(2) != 1
    transposed = wide.transpose(0, 1).contiguous().transpose(0, 1)
    for query in (apart, transposed):
        assert torch.equal(_backend().attend(plan, 1, query, wide, wide, PLAIN), expected)
    double = _backend().attend(plan, 1, wide.double(), wide, wide, PLAIN)
    assert torch.equal(double, expected.double())


def test_sinks_of_any_dtype() -> None:
    scene = Scene(MIXED_LENGTHS)
    settings = AttentionSettings(0.25, sinks=SINKS)
    narrow = replace(settings, sinks=SINKS.bfloat16())
    exact = replace(settings, sinks=SINKS.bfloat16().float())
    assert torch.equal(scene.run(_backend(), 0, narrow), scene.run(_backend(), 0, exact))


@pytest.mark.parametrize("entry", [1 << 20, (1 << 20) + 1])
def test_a_slot_that_does_not_exist_is_refused(entry: int) -> None:
    scene = Scene([(100, 1)], cold_share=0.5)
    scene.sequences[0].part.tables[0][2] = entry
    with pytest.raises(UsageError, match=f"entry {entry} names a slot that does not exist"):
        scene.run(_backend(), 0, PLAIN)


def test_tensors_that_do_not_fit_are_refused() -> None:
    scene = Scene([(100, 1)])
    plan = _backend().plan(scene.cache, 0, scene.batch())
    for shape in ((1, 5, 16), (1, 6, 24)):
        query = torch.zeros(shape)
        with pytest.raises(UsageError, match="does not fit"):
            _backend().attend(plan, 0, query, query, query, PLAIN)


def test_a_plan_of_another_build_is_refused() -> None:
    fields = np.zeros(64, np.int64)
    with pytest.raises(ValueError, match="not an attention plan"):
        native.kernels.attend(fields.ctypes.data, *[0] * 10, 1.0, 0.0)


def test_without_kernels_the_backend_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "kernels", None)
    monkeypatch.setattr(native, "reason", "none today")
    with pytest.raises(ConfigError, match="needs the C kernels: none today"):
        _backend()


def test_the_self_test_passes_on_every_path(path: str) -> None:
    assert native.kernels.attention_selftest()
