"""Identity and the hash chain: what must differ, what must agree, what is refused, and how it grows and shrinks."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import subprocess
import sys
import time
from itertools import combinations
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import Adapter, ConfigError, HashChain, Identity, Media, UsageError

ROOT = Identity(model="m", weights="w", geometry=b"g").root()
WORKTREE = Path(__file__).parents[2]


class Shapes:
    def __init__(self, text: bytes) -> None:
        self.text = text

    def fingerprint(self) -> bytes:
        return hashlib.sha256(self.text).digest()


def identity(**changes: object) -> Identity:
    return Identity(**({"model": "m", "weights": "w", "geometry": b"g"} | changes))  # type: ignore[arg-type]


def image(start: int, length: int, content: bytes = b"image") -> Media:
    return Media(hashlib.sha256(content).digest(), start, length)


# roots ---------------------------------------------------------------------------------------------------------------


def test_case_003_adapters_of_one_name_are_told_apart() -> None:
    tokens = list(range(64))
    one = HashChain(identity(adapter=("a", 1, "X")).root(), 16).extend(tokens)
    for other in (("a", 2, "Y"), ("a", 2, "X"), ("a", 1, "Y"), ("b", 1, "X"), None, "a"):
        assert not set(one) & set(HashChain(identity(adapter=other).root(), 16).extend(tokens))
    again = identity(adapter={"name": "a", "id": 1, "digest": "X"})
    assert HashChain(again.root(), 16).extend(tokens) == one
    assert identity(adapter=Adapter("a")).root() == identity(adapter="a").root()


def test_case_008_a_reset_makes_everything_before_it_foreign() -> None:
    before = identity(epoch=3)
    assert before.next_epoch().epoch == 4
    assert before.next_epoch().root() not in {before.root(), identity().root()}
    assert before.root() == identity(epoch=3).root(), "next_epoch changes its own copy only"


def test_case_012_the_stored_dtype_is_part_of_the_geometry_and_so_of_the_root() -> None:
    geometry = pytest.importorskip("allocator.geometry").KVGeometry
    roots = {
        identity(geometry=geometry.uniform(layers=2, kv_heads=1, head_dim=64, dtype=dtype)).root()
        for dtype in ("bfloat16", "float16", "float32", "float8_e4m3fn")
    }
    assert len(roots) == 4


def test_case_020_no_two_assignments_share_a_root() -> None:
    texts = ["", "a", "X", "a\x00b", "adapter", "N", "aX", None]
    wholes = [text for text in texts if text is not None]
    assignments: dict[bytes, tuple[object, ...]] = {}
    for model in wholes:
        for adapter in texts:
            for tenant in texts:
                for extra in ((), ("",), ("a",), ("a", "X"), ("aX",), (("a", "X"),)):
                    given = (model, adapter, tenant, extra)
                    root = identity(model=model, adapter=adapter, tenant=tenant, extra=extra).root()
                    assert assignments.setdefault(root, given) == given
    assert identity(adapter="X").root() != identity(tenant="X").root()


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.binary(max_size=3),
    lambda inner: st.tuples(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=5,
)


def _typed(value: object) -> object:
    """Equal only for equal values of equal types (1 == True otherwise)."""
    if isinstance(value, dict):
        return ("M", tuple(sorted((name, repr(_typed(one))) for name, one in value.items())))
    if isinstance(value, tuple):
        return tuple(_typed(one) for one in value)
    return type(value).__name__, value


@given(_values, _values)
@settings(max_examples=300, deadline=None)
def test_case_020_any_two_extras_that_differ_have_different_roots(one: object, two: object) -> None:
    same = _typed(one) == _typed(two)
    assert (identity(extra=one).root() == identity(extra=two).root()) == same


def test_every_field_and_type_counts() -> None:
    variants = [
        identity(),
        identity(model="n"),
        identity(model=b"m"),
        identity(weights="v"),
        identity(weights=None),
        identity(weights=b"w"),
        identity(geometry=b"h"),
        identity(geometry=Shapes(b"g")),
        identity(tenant=""),
        identity(tenant=b""),
        identity(epoch=1),
        identity(extra=(1,)),
        identity(extra=(True,)),
        identity(extra=("1",)),
        identity(extra=(None,)),
        identity(extra=None),
        identity(adapter=("a", 1, None)),
        identity(adapter=("a", "1", None)),
    ]
    for one, two in combinations(variants, 2):
        assert one.root() != two.root(), (one, two)
    assert all(len(one.root()) == 32 for one in variants)
    assert identity(geometry=Shapes(b"s")).root() == identity(geometry=hashlib.sha256(b"s").digest()).root()


def test_case_033_another_salt_shares_no_block() -> None:
    prompt = list(range(100))
    ours = HashChain(identity(tenant="A").root(), 16).extend(prompt)
    theirs = HashChain(identity(tenant="B").root(), 16).extend(prompt)
    assert not set(ours) & set(theirs)
    assert HashChain(identity(tenant="A").root(), 16).extend(prompt) == ours


@pytest.mark.parametrize("tenant", [3, 1.5, True, ["A", "B"], [(0, 16, "A"), (8, 32, "B")], {"A": (0, 16)}, object()])
def test_case_140_a_salt_is_one_text_for_the_whole_identity(tenant: object) -> None:
    with pytest.raises(ValueError, match="tenant: got"):
        identity(tenant=tenant)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": None}, "model: got None"),
        ({"model": 7}, "model: got 7"),
        ({"weights": 7}, "weights: got 7"),
        ({"geometry": "text"}, "geometry: got str"),
        ({"geometry": None}, "geometry: got NoneType"),
        ({"epoch": -1}, "epoch: got -1"),
        ({"epoch": True}, "epoch: got True"),
        ({"epoch": "1"}, "epoch: got '1'"),
        ({"adapter": 5}, "adapter: got 5"),
        ({"adapter": ("a", 1)}, "adapter: got"),
        ({"adapter": {"id": 1}}, "adapter: expected the keys"),
        ({"adapter": {"name": "a", "rank": 8}}, "adapter: expected the keys"),
        ({"adapter": ("a", 1.5, None)}, "adapter.id: got 1.5"),
        ({"extra": (1.5,)}, r"extra\[0\]: got 1.5"),
        ({"extra": {1: 2}}, "extra: mapping keys"),
        ({"extra": {"a": {"b": {3}}}}, "extra.a.b: got"),
        ({"extra": ("\ud800",)}, r"extra\[0\]: text is not valid Unicode"),
    ],
)
def test_a_wrong_field_is_named(changes: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        identity(**changes).root()


def test_unknown_weights_must_not_be_shared() -> None:
    identity().require_shareable()
    with pytest.raises(ConfigError, match="weights: got None"):
        identity(weights=None).require_shareable()


# chains --------------------------------------------------------------------------------------------------------------


def test_case_030_ids_are_not_cut_and_borders_do_not_move() -> None:
    block = 4
    edges = [0, 65, 255, 256, 321, 2**16 - 1, 2**16, 2**31 - 1, 2**31, 2**32 - 1]
    hashes = [HashChain(ROOT, block).extend([edge] * block)[0] for edge in edges]
    assert len(set(hashes)) == len(edges)
    pairs = ([1, 23], [12, 3], [123, 0], [1, 2], [2, 1])
    assert len({HashChain(ROOT, 2).extend(list(pair))[0] for pair in pairs}) == len(pairs)
    assert HashChain(ROOT, 1).extend([1, 2])[1] != HashChain(ROOT, 2).extend([1, 2])[0]


@pytest.mark.parametrize("form", [list, tuple, np.array, lambda ids: np.array(ids, np.uint32), range])
def test_every_form_of_the_same_ids_has_the_same_hashes(form: object) -> None:
    expected = HashChain(ROOT, 4).extend(list(range(11)))
    given_ids = range(11) if form is range else form(list(range(11)))  # type: ignore[operator]
    assert HashChain(ROOT, 4).extend(given_ids) == expected


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([1, 2, -1], "index 2 is -1"),
        ([1, 2**32], "index 1 is 4294967296"),
        ([0, 1, True], "index 2 is True"),
        ([False], "index 0 is False"),
        ([1.0], "index 0 is 1.0"),
        ([1, "7"], "index 1 is '7'"),
        ([1, None], "index 1 is None"),
        ((5, float("nan")), "index 1 is nan"),
        (np.array([1.0]), "float64"),
        (np.array([True]), "bool"),
        (np.array([[1, 2]]), "shape"),
        (np.array([3, -2]), "index 1 is -2"),
        (np.array([2**32], np.int64), "index 0 is 4294967296"),
        (np.array([1], object), "object"),
        ("123", "got str"),
        (b"123", "got bytes"),
        (7, "got int"),
        (None, "got NoneType"),
    ],
)
def test_a_bad_id_is_named_and_nothing_is_appended(ids: object, words: str) -> None:
    chain = HashChain(ROOT, 2)
    chain.extend([9])
    with pytest.raises(ValueError, match=words):
        chain.extend(ids)  # type: ignore[arg-type]
    assert chain.token_count == 1
    assert chain.extend([8]) == HashChain(ROOT, 2).extend([9, 8])


def test_the_borders_of_the_range_are_ids() -> None:
    assert HashChain(ROOT, 2).extend([0, 2**32 - 1])
    assert HashChain(ROOT, 2).extend(np.array([0, 2**32 - 1], np.uint64))
    assert HashChain(ROOT, 2).extend([np.int64(3), np.uint8(4)]) == HashChain(ROOT, 2).extend([3, 4])  # type: ignore[list-item]


@pytest.mark.parametrize("root", [b"short", "text", None, bytearray(32)])
def test_a_root_is_32_bytes(root: object) -> None:
    with pytest.raises(UsageError, match="root: got"):
        HashChain(root, 16)  # type: ignore[arg-type]


@pytest.mark.parametrize("block_tokens", [0, -1, True, 1.5, None, 2**32])
def test_a_block_has_tokens(block_tokens: object) -> None:
    with pytest.raises(UsageError, match="block_tokens: got"):
        HashChain(ROOT, block_tokens)  # type: ignore[arg-type]


_steps = st.lists(
    st.one_of(
        st.lists(st.integers(0, 3), max_size=9).map(lambda ids: ("extend", ids)),
        st.integers(0, 12).map(lambda count: ("back", count)),
        st.just(("fork", None)),
    ),
    max_size=12,
)


@given(_steps, st.integers(1, 4), st.integers(0, 3))
@settings(max_examples=300, deadline=None)
def test_any_history_ends_like_a_fresh_chain(steps: list[tuple[str, object]], block: int, lookahead: int) -> None:
    chain = HashChain(ROOT, block)
    tokens: list[int] = []
    others: list[tuple[HashChain, list[int]]] = []
    for action, argument in steps:
        if action == "extend":
            assert isinstance(argument, list)
            before = list(chain.hashes)
            fresh = chain.extend(argument)
            assert chain.hashes == before + fresh
            tokens += argument
        elif action == "back":
            assert isinstance(argument, int)
            kept = max(0, len(tokens) - argument)
            chain.truncate(kept)
            del tokens[kept:]
        else:
            others.append((chain, list(tokens)))
            chain = chain.fork()
        chain.group_hashes(lookahead)
    for one, expected in [*others, (chain, tokens)]:
        plain = HashChain(ROOT, block)
        plain.extend(expected)
        assert one.hashes == plain.hashes
        assert one.group_hashes(lookahead) == plain.group_hashes(lookahead)
        assert (one.token_count, one.token_ids()) == (len(expected), expected)
        assert one.tokens_equal(0, expected)
        assert not one.tokens_equal(0, [*expected, 1])
        assert not expected or not one.tokens_equal(0, [expected[0] + 1])


@pytest.mark.parametrize("count", [-1, 6, True, 1.5, None])
def test_truncate_knows_its_range(count: object) -> None:
    chain = HashChain(ROOT, 2)
    chain.extend([1, 2, 3, 4, 5])
    with pytest.raises(UsageError, match=r"expected an int in \[0, 5\]"):
        chain.truncate(count)  # type: ignore[arg-type]
    assert len(chain.hashes) == 2


def test_case_076_a_lookahead_group_sees_the_token_after_the_block() -> None:
    one, two = HashChain(ROOT, 4), HashChain(ROOT, 4)
    one.extend([1, 2, 3, 4, 5])
    two.extend([1, 2, 3, 4, 6])
    assert one.hashes == two.hashes, "the target model's block is shared"
    assert one.group_hashes(1) != two.group_hashes(1), "the draft model's is not"
    three = HashChain(ROOT, 4)
    three.extend([1, 2, 3, 4])
    assert three.group_hashes(1) == [], "not known yet"
    three.extend([5])
    assert three.group_hashes(1) == one.group_hashes(1)
    assert three.group_hashes(0) is three.hashes
    assert not set(one.group_hashes(1)) & set(one.hashes)
    three.truncate(4)
    assert three.group_hashes(1) == []
    with pytest.raises(UsageError, match="lookahead_tokens"):
        three.group_hashes(-1)


# media ---------------------------------------------------------------------------------------------------------------


def test_case_053_placeholders_without_their_media_are_refused() -> None:
    tokens = [1, 2, 99, 99, 3, 4, 5, 6]
    with_image = HashChain(ROOT, 4, placeholder_ids=[99]).extend(tokens, [image(2, 2)])
    bare = HashChain(ROOT, 4, placeholder_ids=[99])
    with pytest.raises(ValueError, match="index 2 is 99, a placeholder"):
        bare.extend(tokens)
    assert bare.token_count == 0
    assert bare.extend([1, 2]) == []
    with pytest.raises(ValueError, match="index 0 is 99"):
        bare.extend([99])
    with pytest.raises(ValueError, match="index 1 is 99"):
        bare.extend([99, 99], [image(2, 1)])
    # Where the ids are not declared, tokens without media never reach blocks with media.
    assert not set(HashChain(ROOT, 4).extend(tokens)) & set(with_image)


def test_media_that_differ_in_content_place_or_length_differ() -> None:
    tokens = [9] * 16
    media = [[image(0, 4)], [image(1, 4)], [image(0, 5)], [image(0, 4, b"other")], [], [image(0, 16)]]
    media += [[image(0, 2), image(2, 2)], [image(0, 4), image(4, 4)], [image(0, 4), image(4, 4, b"other")]]
    firsts = [HashChain(ROOT, 8).extend(tokens, one)[-1] for one in media]
    assert len(set(firsts)) == len(media)


def test_media_may_reach_past_what_is_known_and_are_named_once() -> None:
    whole = HashChain(ROOT, 4, placeholder_ids=[99])
    expected = whole.extend([1, 99, 99, 99, 99, 99, 2, 3], [image(1, 5)])
    parts = HashChain(ROOT, 4, placeholder_ids=[99])
    assert parts.extend([1, 99, 99], [image(1, 5)]) == []
    assert parts.extend([99]) + parts.extend([99, 99]) + parts.extend([2, 3]) == expected
    with pytest.raises(UsageError, match="index 0 is 99"):
        parts.extend([99])
    parts.truncate(2)
    assert parts.extend([99, 99, 99, 99, 2, 3])[0] == expected[0]
    parts.truncate(1)
    with pytest.raises(UsageError, match="index 0 is 99"):
        parts.extend([99])


@pytest.mark.parametrize(
    ("media", "words"),
    [
        ([image(4, 2)], "starts at token 4"),
        ([image(2, 2), image(3, 1)], "overlaps or precedes"),
        ([image(3, 1), image(1, 1)], "overlaps or precedes"),
        ([(b"", 0, 1)], "expected kvstore.identity.Media"),
    ],
)
def test_misplaced_media_are_refused_and_nothing_is_appended(media: list[Media], words: str) -> None:
    chain = HashChain(ROOT, 2)
    with pytest.raises(UsageError, match=words):
        chain.extend([1, 2, 3, 4], media)
    assert chain.token_count == 0
    chain.extend([1, 2])
    with pytest.raises(UsageError, match="starts at token 1"):
        chain.extend([3, 4], [image(1, 2)])
    assert chain.extend([3, 4], [image(2, 1)])


@pytest.mark.parametrize(
    "arguments", [(b"x", 0, 1), ("0" * 32, 0, 1), (bytes(32), -1, 1), (bytes(32), 0, 0), (bytes(32), True, 1)]
)
def test_media_are_checked(arguments: tuple[object, ...]) -> None:
    with pytest.raises(UsageError, match="media"):
        Media(*arguments)  # type: ignore[arg-type]


# processes and time --------------------------------------------------------------------------------------------------

_SCRIPT = """
from kvstore import HashChain, Identity
root = Identity(model="m", weights="w", geometry=b"g", adapter=("a", 1, "X"), tenant="t", extra={"b": 1, "a": 2}).root()
print(root.hex(), HashChain(root, 16).extend(list(range(64)))[-1].hex())
"""


def test_case_042_processes_agree_whatever_their_hash_seed() -> None:
    answers = set()
    for seed in (None, "0", "random", "12345"):
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
        environment["PYTHONPATH"] = str(WORKTREE)
        if seed is not None:
            environment["PYTHONHASHSEED"] = seed
        run = subprocess.run(
            [sys.executable, "-c", _SCRIPT], env=environment, capture_output=True, text=True, check=True
        )
        answers.add(run.stdout)
    assert len(answers) == 1
    assert len(answers.pop().split()) == 2


def _stored_by_worker(rank: int, pipe: Connection) -> None:
    """A worker of one rank: names what it would store for a prompt."""
    root = identity(adapter=("a", 1, "X"), tenant="t").root()
    pipe.send({(rank, hash) for hash in HashChain(root, 16).extend(list(range(70)))})
    pipe.close()


def test_case_083_a_lookup_process_finds_what_spawned_workers_store() -> None:
    context = multiprocessing.get_context("spawn")
    pipes, workers = [], []
    for rank in range(2):
        ours, theirs = context.Pipe(duplex=False)
        worker = context.Process(target=_stored_by_worker, args=(rank, theirs))
        worker.start()
        theirs.close()
        pipes.append(ours)
        workers.append(worker)
    stored = set().union(*(pipe.recv() for pipe in pipes))
    for worker in workers:
        worker.join(30)
        assert worker.exitcode == 0
    wanted = HashChain(identity(adapter=("a", 1, "X"), tenant="t").root(), 16).extend(list(range(70)))
    assert [sum((rank, hash) in stored for hash in wanted) for rank in range(2)] == [4, 4]


def test_hashing_is_linear_and_quick() -> None:
    """A guard against a slip, not a benchmark: about 1 ms on a quiet machine, far below the bound."""
    tokens = np.random.default_rng(0).integers(0, 50_000, 32_768).tolist()
    best = float("inf")
    for _ in range(5):
        chain = HashChain(ROOT, 16)
        start = time.perf_counter()
        chain.extend(tokens)
        best = min(best, time.perf_counter() - start)
    assert len(chain.hashes) == 2048
    assert best < 0.02
    one_by_one = float("inf")
    for first in range(0, 4096, 1024):
        start = time.perf_counter()
        for token in tokens[first : first + 1024]:
            chain.extend([token])
        one_by_one = min(one_by_one, time.perf_counter() - start)
    assert one_by_one / 1024 < 50e-6


@pytest.mark.parametrize("name", ["model", "weights", "tenant"])
def test_text_that_is_not_unicode_is_refused_where_it_is_given(name: str) -> None:
    fields = {"model": "m", "weights": "w", "geometry": bytes(32), name: "\ud800"}
    with pytest.raises(UsageError, match=f"{name}: text is not valid Unicode"):
        Identity(**fields)  # type: ignore[arg-type]
