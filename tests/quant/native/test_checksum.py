"""XXH3-128 against the xxhash package: every path and the fallback, every short length, pieces cut anywhere, copies."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import xxhash

from quant import dispatch, native
from quant.native import check_checksum
from quant.native.checksum import OPERATION, Checksum, checksum
from tests.quant.native.build_kit import COMPILER, SOURCES, needs_extension, run

WAYS = [*native.available_paths(), "xxhash"]
BYTES = random.Random(3).randbytes(1 << 20)
LONG = [1023, 1024, 1025, 2047, 2048, 2049, 4096, 16_383, 16_384, 65_537, 262_145, 1 << 20]
kernels = native.kernels


@contextmanager
def computed_by(way: str) -> Iterator[None]:
    if way == "xxhash":
        with dispatch.forced(OPERATION, "cpu", way):
            yield
    else:
        with native.forced_path(way), dispatch.forced(OPERATION, "cpu", "native"):
            yield


@pytest.mark.parametrize("way", WAYS)
def test_every_short_length_and_some_long_ones(way: str) -> None:
    with computed_by(way):
        for count in [*range(1300), *LONG]:
            for start in (0, 1, 13):  # loads at any address
                view = memoryview(BYTES)[start : start + count]
                assert checksum(view) == xxhash.xxh3_128_digest(view), (count, start)


@pytest.mark.parametrize("way", WAYS)
def test_pieces_cut_anywhere_and_copied_on_the_way(way: str) -> None:
    """Updates and copies in any order, to targets at any address; nothing is written beside them."""
    chance = random.Random(7)
    with computed_by(way):
        for _ in range(400):
            count = chance.choice([chance.randrange(300), chance.randrange(3000), chance.randrange(100_000)])
            offset = chance.randrange(1, 70)
            target, state, at = bytearray(offset + count + 70), Checksum(), 0
            while at < count:
                size = min(count - at, chance.choice([1, 63, 64, 255, 256, 257, 1024, chance.randrange(1, 50_000)]))
                piece, place = BYTES[at : at + size], memoryview(target)[offset + at : offset + at + size]
                if chance.random() < 0.3:
                    state.update(piece)
                    place[:] = piece
                else:
                    state.copy(piece, place)
                at += size
                if chance.random() < 0.2:
                    assert state.digest() == xxhash.xxh3_128_digest(BYTES[:at])
            assert state.digest() == xxhash.xxh3_128_digest(BYTES[:count])
            assert target == bytes(offset) + BYTES[:count] + bytes(70)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("start", [0, 16, 64])
def test_a_copy_past_the_cache(way: str, start: int) -> None:
    """Copies of 4 MiB and more stream where their target begins on a vector."""
    source, target = BYTES * 4 + b"end", bytearray(start + (4 << 20) + 3)
    with computed_by(way):
        state = Checksum()
        state.copy(source, memoryview(target)[start:])
        assert state.digest() == xxhash.xxh3_128_digest(source)
    assert target[start:] == source


@pytest.mark.parametrize("way", [WAYS[0], "xxhash"])
def test_misuse_is_refused(way: str) -> None:
    with computed_by(way):
        state = Checksum()
        for source, target in ((b"123", bytearray(2)), (b"12", bytearray(3))):
            with pytest.raises(ValueError, match=f"got {len(target)} bytes for a source of {len(source)}"):
                state.copy(source, target)
        with pytest.raises((TypeError, BufferError)):
            state.copy(b"12", b"34")
        with pytest.raises(TypeError):
            checksum("text")
        assert state.digest() == xxhash.xxh3_128_digest(b"")


@needs_extension
def test_a_state_of_any_bytes_leads_nowhere() -> None:
    """Fields out of range are refused, and a digest of any others is some digest."""
    good = kernels.checksum_begin()
    for call in (lambda state: kernels.checksum_update(state, b"x"), kernels.checksum_digest):
        for wrong in (bytearray(), bytearray(len(good) - 1), bytearray(b"\xff" * len(good))):
            with pytest.raises(ValueError, match="state: got"):
                call(wrong)
    for seed in range(300):
        state = bytearray(random.Random(seed).randbytes(len(good)))
        state[72:80] = (seed % 16).to_bytes(4, "little") + (seed % 257).to_bytes(4, "little")
        kernels.checksum_update(state, BYTES[: seed * 31])
        assert len(kernels.checksum_digest(state)) == 16
    for arguments in ((), (good,), (good, b"", b"", b"")):
        with pytest.raises(TypeError, match="expected checksum_copy"):
            kernels.checksum_copy(*arguments)
    with pytest.raises(TypeError, match="expected checksum_update"):
        kernels.checksum_update(good)


@needs_extension
def test_what_was_copied_is_what_was_summed_while_another_thread_writes() -> None:
    """The source changes under the copy: the digest is that of the target, whatever arrived there."""
    source, stop = bytearray(BYTES[:300_001]), threading.Event()

    def scribble() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            source[number % 4096 :: 4096] = bytes([number % 256]) * len(range(number % 4096, len(source), 4096))

    thread = threading.Thread(target=scribble)
    thread.start()
    try:
        for _ in range(60):
            target, state = bytearray(len(source)), Checksum()
            state.copy(source, target)
            assert state.digest() == xxhash.xxh3_128_digest(target)
    finally:
        stop.set()
        thread.join()


class Wrong:
    """The extension with one function spoilt."""

    def __init__(self, **spoilt: object) -> None:
        self.spoilt = spoilt

    def __getattr__(self, name: str) -> object:
        return self.spoilt.get(name) or getattr(kernels, name)


@needs_extension
def test_self_test_finds_wrong_sums_and_lost_bytes() -> None:
    assert check_checksum.check(kernels) == ""
    assert "is not" in check_checksum.check(Wrong(checksum=lambda given: bytes(16)))
    assert "is not" in check_checksum.check(
        Wrong(checksum=lambda given: kernels.checksum(given if len(given) < 3000 else given[1:]))
    )
    assert "bytes differ" in check_checksum.check(
        Wrong(checksum_copy=lambda state, source, target: kernels.checksum_update(state, source))
    )
    assert "in pieces differs" in check_checksum.check(Wrong(checksum_update=lambda state, source: None))


def test_no_torch_and_no_numpy_are_needed() -> None:
    code = (
        "import sys\nfrom quant.native.checksum import checksum\nchecksum(b'x')\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], check=True)


def by_driver(command: list[str], program: Path, *runner: str) -> str:
    flags = ["-std=gnu11", "-O2", "-Wall", "-Werror", f"-I{SOURCES}", "-DKV_PATH=driver"]
    driver = str(Path(__file__).parent / "checksum_driver.c")
    run([*command, *flags, driver, str(SOURCES / "checksum.c"), "-o", str(program)])
    return run([*runner, str(program)])


def expected_of_driver() -> str:
    bytes_ = bytes((i * 7 + i // 256) % 256 for i in range(5000))
    sizes = (0, 1, 3, 4, 8, 9, 16, 17, 64, 65, 128, 129, 240, 241, 256, 257, 1024, 1025, 4096, 5000)
    return "".join(f"{size} {xxhash.xxh3_128_hexdigest(bytes_[:size])}\n" for size in sizes)


@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
@pytest.mark.parametrize("sanitizer", ["address", "undefined"])
def test_under_the_sanitizers(tmp_path: Path, sanitizer: str) -> None:
    flags = [str(COMPILER), f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    assert by_driver(flags, tmp_path / "driver") == expected_of_driver()


ARM_COMPILER, ARM_MACHINE = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64-static")


@pytest.mark.skipif(not (ARM_COMPILER and ARM_MACHINE), reason="no cross compiler for 64-bit Arm, or no emulator")
def test_arm_computes_the_same(tmp_path: Path) -> None:
    found = by_driver([str(ARM_COMPILER), "-static"], tmp_path / "driver", str(ARM_MACHINE))
    assert found == expected_of_driver()
