"""Page copies on every path and by numpy, against slices copied one by one; and what must never be copied."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quant import dispatch, native
from quant.native import check_pages, pages
from quant.native.pages import Stores

PATHS = [*native.available_paths(), "numpy"]
GUARD = 0xEE


class On:
    """Run page copies on one path of the extension, or by numpy."""

    def __init__(self, path: str) -> None:
        self.parts = [dispatch.forced(pages.OPERATION, "cpu", "numpy" if path == "numpy" else "native")]
        if path != "numpy":
            self.parts.append(native.forced_path(path))

    def __enter__(self) -> None:
        for part in self.parts:
            part.__enter__()

    def __exit__(self, *_: object) -> None:
        for part in reversed(self.parts):
            part.__exit__(None, None, None)


def noise(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def one_by_one(
    source: np.ndarray, starts: list[int], target: np.ndarray, goals: list[int], sizes: list[int]
) -> np.ndarray:
    expected = target.copy()
    for start, goal, size in zip(starts, goals, sizes, strict=True):
        expected[goal : goal + size] = source[start : start + size]
    return expected


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=120, deadline=None)
@given(st.data())
def test_pieces_of_any_sizes_go_to_any_places(path: str, data: st.DataObject) -> None:
    """Odd starts, odd goals, empty pieces, pieces shorter and longer than a vector; nothing beside them is touched."""
    sizes = data.draw(st.lists(st.one_of(st.integers(0, 70), st.integers(200, 1100)), max_size=7))
    gaps = data.draw(st.lists(st.integers(0, 130), min_size=len(sizes), max_size=len(sizes)))
    source = noise(6000)
    starts = [data.draw(st.integers(0, 6000 - size)) for size in sizes]
    goals, at = [], 0
    for size, gap in zip(sizes, gaps, strict=True):
        goals.append(at + gap)
        at += gap + size
    target = np.full(at + 200, GUARD, dtype=np.uint8)
    expected = one_by_one(source, starts, target, goals, sizes)
    threads, stores = data.draw(st.sampled_from([1, 2, 3])), data.draw(st.sampled_from(list(Stores)))
    with On(path):
        pages.copy_pieces(source, starts, target, goals, sizes, threads=threads, stores=stores)
    assert np.array_equal(target, expected)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("piece_bytes", [1, 64, 255, 256, 257, 2048, 4103, 32 << 10])
def test_gather_and_scatter_are_each_others_inverse(path: str, threads: int, piece_bytes: int) -> None:
    count = max(3, (600 << 10) // piece_bytes if piece_bytes >= 256 else 300)
    pool, places = noise(count * piece_bytes + 13), np.random.default_rng(1).permutation(count) * piece_bytes + 13
    packed = np.zeros(count * piece_bytes + 7, dtype=np.uint8)
    with On(path):
        pages.gather(pool, places, packed, piece_bytes, threads=threads)
        assert np.array_equal(
            packed[: count * piece_bytes].reshape(count, -1)[5 % count], pool[places[5 % count] :][:piece_bytes]
        )
        assert not packed[count * piece_bytes :].any()
        back = np.zeros_like(pool)
        pages.scatter(packed, back, places, piece_bytes, threads=threads)
    assert np.array_equal(back[13:], pool[13:])
    assert not back[:13].any()


@pytest.mark.parametrize("path", PATHS)
def test_much_goes_past_the_cache_and_arrives(path: str) -> None:
    """Above the size from which a contiguous target is streamed into, unaligned at both ends, on two threads."""
    size, count = 100_003, 50
    source, target = noise(size * count), np.full(size * count + 5, GUARD, dtype=np.uint8)
    order = np.random.default_rng(2).permutation(count).astype(np.int64) * size
    with On(path):
        pages.gather(source, order, target[3:], size, threads=2)
    assert np.array_equal(target[3:-2].reshape(count, size), source.reshape(count, size)[order // size])
    assert target[:3].tolist() == [GUARD] * 3
    assert target[-2:].tolist() == [GUARD] * 2


@pytest.mark.parametrize("path", PATHS)
def test_sizes_of_their_own_in_packed_buffers(path: str) -> None:
    source, sizes = noise(1000), [0, 7, 300, 1, 256]
    packed, target = np.zeros(600, dtype=np.uint8), np.zeros(1000, dtype=np.uint8)
    starts = [999, 10, 100, 999, 500]
    with On(path):
        pages.gather(source, starts, packed, sizes)
        pages.scatter(packed, target, starts, sizes)
    at = 0
    for start, size in zip(starts, sizes, strict=True):
        assert np.array_equal(packed[at : at + size], source[start : start + size])
        assert np.array_equal(target[start : start + size], source[start : start + size])
        at += size
    assert not packed[at:].any()


@pytest.mark.parametrize("path", PATHS)
def test_move_copies_one_run(path: str) -> None:
    source, target = noise(50_000), bytearray(60_000)
    with On(path):
        pages.move(source, 3, target, 7, 40_001)
        pages.move(memoryview(source)[1:9], 2, memoryview(target)[50_000:], 0, 5)
    assert target[7:40_008] == source[3:40_004].tobytes()
    assert target[50_000:50_005] == source[3:8].tobytes()
    assert not any(target[:7])
    assert not any(target[40_008:50_000])


@pytest.mark.parametrize("path", PATHS)
def test_nothing_is_something(path: str) -> None:
    target = np.full(4, GUARD, dtype=np.uint8)
    with On(path):
        pages.gather(b"", [], target, 16)
        pages.gather(b"", [0, 0], target, 0)
        pages.scatter(b"", target, [4], 0)
        pages.move(b"", 0, bytearray(), 0, 0)
    assert target.tolist() == [GUARD] * 4


LARGE = (1 << 63) - 1


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("starts", "goals", "sizes", "message"),
    [
        ([0, 993], [0, 8], 8, r"source: piece 1 has 8 bytes from 993 on, expected it inside 0\.\.1000"),
        ([-1], [0], 8, "source: piece 0 has 8 bytes from -1"),
        ([0], [93], 8, r"target: piece 0 has 8 bytes from 93 on, expected it inside 0\.\.100"),
        ([0], [101], 0, "target: piece 0 has 0 bytes from 101"),
        ([0], [-(1 << 63)], 8, "target: piece 0"),
        ([LARGE], [0], 8, "source: piece 0"),
        ([LARGE], [LARGE], LARGE, "source: piece 0"),
        ([0], [0], LARGE, "source: piece 0"),
        ([1], [0], LARGE, "source: piece 0"),
        ([0], [0], -1, "piece 0: got -1 bytes"),
        ([0, 0], [0, 0], [8, -8], "piece 1: got -8 bytes"),
        ([0, 1, 2], None, 34, "target: .*102 .*100"),
        (None, [0, 0], 501, "source: .*1002 .*1000"),
        ([0, 0], None, [50, 51], "target: .*101 .*100"),
        ([0, 0], [0], 8, "expected one each"),
        ([0], [0], [8, 8], "expected one each"),
        (None, None, 8, "expected piece bytes, and offsets"),
    ],
)
def test_a_piece_outside_its_buffer_is_refused_and_nothing_copied(
    path: str, starts: list[int] | None, goals: list[int] | None, sizes: object, message: str
) -> None:
    source, target = noise(1000), np.full(100, GUARD, dtype=np.uint8)
    with On(path), pytest.raises(ValueError, match=message):
        pages.copy_pieces(source, starts, target, goals, sizes)  # type: ignore[arg-type]
    assert target.tolist() == [GUARD] * 100


@pytest.mark.parametrize("path", PATHS)
def test_buffers_that_cannot_be_written_or_have_gaps_are_refused(path: str) -> None:
    with On(path):
        with pytest.raises((ValueError, BufferError)):
            pages.gather(noise(100), [0], bytes(16), 16)
        with pytest.raises((ValueError, BufferError, TypeError)):
            pages.gather(noise(100), [0], np.zeros(64, dtype=np.uint8)[::2], 16)
        with pytest.raises(ValueError, match="int64"):
            pages.gather(noise(100), np.array([0.5]), bytearray(16), 16)


@pytest.mark.skipif(native.kernels is None, reason=f"no native kernels: {native.reason}")
def test_the_extension_itself_trusts_nobody() -> None:
    copy, source, target = native.kernels.page_copy, noise(100), bytearray(100)
    with pytest.raises(ValueError, match="int64"):
        copy(source, np.zeros(2, dtype=np.int32), target, None, 8, 0, 1)
    with pytest.raises(ValueError, match="expected piece bytes"):
        copy(source, 0, target, 0, None, 0, 1)
    with pytest.raises(ValueError, match="stores 3"):
        copy(source, 0, target, 0, 8, 3, 1)
    with pytest.raises(ValueError, match="0 threads"):
        copy(source, 0, target, 0, 8, 0, 0)
    with pytest.raises(ValueError, match="got 1 for 2 pieces"):
        copy(source, np.zeros(2, dtype=np.int64), target, 0, 8, 0, 1)
    with pytest.raises(OverflowError):
        copy(source, 1 << 64, target, 0, 8, 0, 1)
    with pytest.raises(TypeError, match="expected page_copy"):
        copy(source, 0, target)
    with pytest.raises(TypeError):
        copy(source, 0.5, target, 0, 8, 0, 1)
    assert not any(target)


@pytest.mark.skipif(native.kernels is None, reason=f"no native kernels: {native.reason}")
def test_other_threads_run_meanwhile() -> None:
    """A long copy gives Python's lock away: a counter goes on while it lasts."""
    size = 64 << 20
    source, target = np.ones(size, dtype=np.uint8), np.ones(size, dtype=np.uint8)
    ticks, stop = [0], threading.Event()

    def count() -> None:
        while not stop.wait(0.0001):
            ticks[0] += 1

    counter = threading.Thread(target=count)
    counter.start()
    try:
        before = ticks[0]
        for _ in range(200):
            pages.move(source, 0, target, 0, size)
            if ticks[0] > before + 3:
                break
        assert ticks[0] > before
    finally:
        stop.set()
        counter.join()


@pytest.mark.parametrize("path", [one for one in PATHS if one != "numpy"])
def test_self_test_passes_on_every_path_and_finds_a_wrong_byte(path: str) -> None:
    class Wrong:
        def __init__(self, place: int) -> None:
            self.place = place

        def page_copy(self, source: object, starts: object, target: bytearray, *rest: object) -> None:
            native.kernels.page_copy(source, starts, target, *rest)
            target[self.place] ^= 1

    with native.forced_path(path):
        assert check_pages.check(native.kernels) == ""
        for place in (0, 1, 700, -1):
            assert "differ" in check_pages.check(Wrong(place))
