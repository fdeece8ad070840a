"""Cache groups and geometry: bytes, refusals and the fingerprint."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from allocator import DTYPE_BYTES, CacheGroup, ConfigError, GeometryError, GroupKind, KVGeometry


def sliding(**changes: object) -> CacheGroup:
    fields: dict[str, object] = {
        "kind": GroupKind.SLIDING, "layers": (0, 1), "kv_heads": 2, "key_dim": 64, "value_dim": 64, "window_tokens": 32,
    }  # fmt: skip
    return CacheGroup(**{**fields, **changes})  # type: ignore[arg-type]


def test_bytes_of_a_known_model() -> None:
    """SmolLM2-135M: 30 layers, 3 KV heads of 64, bf16: 23,040 bytes a token, 368,640 a block of 16."""
    geometry = KVGeometry.uniform(layers=30, kv_heads=3, head_dim=64)
    assert geometry.token_bytes == 23_040
    assert geometry.full_slot_bytes(0) == 368_640


def test_a_latent_group_has_one_head_and_no_values() -> None:
    geometry = KVGeometry.latent(layers=2, latent_dim=512, rope_dim=64)
    assert geometry.full_slot_bytes(0) == 2 * 16 * 576 * 2
    assert geometry.groups[0].value_dim == 0


def test_keys_and_values_may_differ_in_dim() -> None:
    group = CacheGroup(kind=GroupKind.FULL, layers=(3,), kv_heads=2, key_dim=192, value_dim=128)
    assert group.block_elements(16) == 2 * 16 * 320


def test_layers_find_their_group() -> None:
    full = CacheGroup(kind=GroupKind.FULL, layers=(2, 5), kv_heads=1, key_dim=8, value_dim=8)
    geometry = KVGeometry(groups=(sliding(layers=(0, 1, 3, 4)), full))
    assert geometry.group_of_layer(3) == (0, 2)
    assert geometry.group_of_layer(5) == (1, 1)
    assert geometry.groups[0].name == "sliding:0-1,3-4"
    with pytest.raises(GeometryError, match="got 6"):
        geometry.group_of_layer(6)


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": ()}, {"layers": (1, 1)}, {"layers": (-1,)}, {"kv_heads": 0}, {"key_dim": 0}, {"value_dim": -1},
        {"value_dim": 0}, {"window_tokens": None}, {"window_tokens": 0}, {"lookahead_tokens": -1}, {"kind": "full"},
        {"kind": "latent", "window_tokens": None}, {"kind": "latent", "window_tokens": None, "value_dim": 0},
    ],
)  # fmt: skip
def test_a_group_that_cannot_be_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(GeometryError, match="cache group of layers"):
        sliding(**changes)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="banded"):
        sliding(kind="banded")


@pytest.mark.parametrize("dtype", ["int8", "bf16", "", "float64"])
def test_an_unknown_dtype_is_refused(dtype: str) -> None:
    with pytest.raises(ConfigError, match="expected a dtype"):
        KVGeometry.uniform(layers=1, kv_heads=1, head_dim=8, dtype=dtype)


def test_a_layer_in_two_groups_is_refused() -> None:
    with pytest.raises(GeometryError, match="layer 1 is in group"):
        KVGeometry(groups=(sliding(), sliding(layers=(1, 2))))


@pytest.mark.parametrize("block_tokens", [1, 2, 3, 4, 8, 16, 17, 128, 256])
@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
def test_case_143_every_block_size_has_exact_bytes(block_tokens: int, dtype: str) -> None:
    geometry = KVGeometry.uniform(layers=2, kv_heads=3, head_dim=40, dtype=dtype, block_tokens=block_tokens)
    assert geometry.full_slot_bytes(0) == geometry.token_bytes * block_tokens


@pytest.mark.parametrize("block_tokens", [0, -16, 65_537, 1.5, "16", True, None])
def test_case_143_an_impossible_block_size_names_the_group(block_tokens: object) -> None:
    with pytest.raises(ConfigError, match="full:0-1"):
        KVGeometry.uniform(layers=2, kv_heads=1, head_dim=8, block_tokens=block_tokens)  # type: ignore[arg-type]


def test_fingerprints_of_different_geometries_differ() -> None:
    base: dict[str, object] = {"block_tokens": 16, "dtype": "bfloat16", "position": "", "scale_identity": ""}
    variants = [KVGeometry(groups=(sliding(),), **{**base, **change}) for change in (  # type: ignore[arg-type]
        {}, {"block_tokens": 32}, {"dtype": "float16"}, {"position": "rope"}, {"scale_identity": "rope"},
        {"position": "ab", "scale_identity": "c"}, {"position": "a", "scale_identity": "bc"},
    )]  # fmt: skip
    variants += [KVGeometry(groups=(group,)) for group in (
        sliding(layers=(0, 2)), sliding(layers=(0,)), sliding(kv_heads=4), sliding(key_dim=32), sliding(value_dim=32),
        sliding(window_tokens=33), sliding(lookahead_tokens=1), sliding(kind=GroupKind.FULL, window_tokens=None),
    )]  # fmt: skip
    variants.append(KVGeometry(groups=(sliding(layers=(0,)), sliding(layers=(1,)))))
    variants.append(KVGeometry(groups=(sliding(layers=(1,)), sliding(layers=(0,)))))
    for one, other in itertools.combinations(variants, 2):
        assert one.fingerprint() != other.fingerprint(), (one, other)
    assert len(variants[0].fingerprint()) == 32
    assert variants[0].fingerprint() == KVGeometry(groups=(sliding(),)).fingerprint()


def test_the_fingerprint_does_not_change_between_versions() -> None:
    """A stored cache would be lost: change the scheme name in the fingerprint when this has to change."""
    geometry = KVGeometry.uniform(layers=30, kv_heads=3, head_dim=64, position="rope:theta=100000")
    assert geometry.fingerprint().hex() == "a8918bf5c3f1be05dae0bc8370ed8f91265f6ca53a93c72495ff999daa70842c"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: KVGeometry.uniform(layers="2", kv_heads=1, head_dim=8), "layers: got '2' (str); expected how many"),  # type: ignore[arg-type]
        (lambda: KVGeometry.uniform(layers=2, kv_heads=1.0, head_dim=8), "got kv_heads 1.0 (float); expected an int"),  # type: ignore[arg-type]
        (lambda: KVGeometry.uniform(layers=2, kv_heads=True, head_dim=8), "got kv_heads True (bool)"),
        (lambda: KVGeometry.uniform(layers=2, kv_heads=1, head_dim=8, position=5), "position: got 5; expected text"),  # type: ignore[arg-type]
        (lambda: KVGeometry(groups="x"), "groups: got 'x'; expected CacheGroups"),  # type: ignore[arg-type]
        (
            lambda: CacheGroup(kind="fully", layers=(0,), kv_heads=1, key_dim=8, value_dim=8),  # type: ignore[arg-type]
            "got kind 'fully'; expected one of full, sliding, latent",
        ),
        (
            lambda: CacheGroup(kind=GroupKind.FULL, layers=3, kv_heads=1, key_dim=8, value_dim=8),  # type: ignore[arg-type]
            "got layers 3; expected layer numbers",
        ),
    ],
)
def test_kinds_that_cannot_be_are_refused_by_name(make: Callable[[], object], said: str) -> None:
    with pytest.raises(GeometryError) as caught:
        make()
    assert said in str(caught.value)
