"""Head and rows to a file and from it: natively and by Python alike, cut anywhere, to the byte; the head goes last."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

from quant import dispatch, native
from quant.native.checksum import OPERATION
from quant.native.summed_file import Sums, read_part, read_summed, write_all_summed, write_summed
from tests.quant.native.build_kit import ROOT, needs_extension

WAYS = ["native", "xxhash"] if native.kernels is not None else ["xxhash"]
BYTES = random.Random(5).randbytes(3 << 20)
SUM_AT, HEAD_BYTES = 72, 320
SIZES = [
    [1],
    [4096 - HEAD_BYTES],
    [70_000, 1],
    [0, 5, 0, 262_144, 0],
    [1_179_648 - HEAD_BYTES],
    [1_179_649 - HEAD_BYTES],
    [1_048_576 - HEAD_BYTES, 1_179_648],
    [600_001, 7, 250_000],
    [1_048_000],
    [300] * 1500,
    [2048, 5000] * 150,
]


@pytest.fixture(params=WAYS)
def _way(request: pytest.FixtureRequest) -> Iterator[None]:
    with dispatch.forced(OPERATION, "cpu", request.param):
        yield


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield opened
    os.close(opened)


def head_of(number: int) -> bytearray:
    return bytearray(random.Random(number).randbytes(HEAD_BYTES))


def one_sum(byte_count: int) -> Sums:
    return ((SUM_AT, byte_count),)


def expected_head(head: bytearray, payload: bytes) -> bytes:
    whole = bytes(head[:SUM_AT]) + xxhash.xxh3_128_digest(payload) + bytes(head[SUM_AT + 16 : -16])
    return whole + xxhash.xxh3_128_digest(whole)


def pieces(sizes: list[int]) -> list[bytes]:
    at, rows = 3, []
    for size in sizes:
        rows.append(BYTES[at : at + size])
        at = (at + size) % 1000
    return rows


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: f"{len(sizes)}x{sizes[0]}")
def test_what_was_written_is_read(fd: int, sizes: list[int]) -> None:
    rows, offset, tail_bytes = pieces(sizes), 8192, 100
    payload = b"".join(rows)
    os.pwrite(fd, b"\xee" * (offset + HEAD_BYTES + len(payload) + 300), 0)
    head = head_of(1)
    wanted = expected_head(head, payload)
    write_summed(fd, offset, head, one_sum(len(payload)), rows, tail_bytes)
    assert head == wanted
    stored = os.pread(fd, 1 << 22, 0)
    assert stored[:offset] == b"\xee" * offset
    assert stored[offset:].startswith(wanted + payload + bytes(tail_bytes) + b"\xee" * 200)
    found, own = [bytearray(size) for size in reversed(sizes)], head_of(1)  # cut otherwise than it was written
    assert read_summed(fd, offset, own, one_sum(len(payload)), found) is None
    assert own == wanted
    assert b"".join(found) == payload


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize(
    "cuts", [[1, 2_399_999], [1_048_576 - HEAD_BYTES, 1_048_576, 302_848 + HEAD_BYTES], [300_000] * 8]
)
def test_every_part_has_its_own_sum(fd: int, cuts: list[int]) -> None:
    rows = pieces([1_000_001, 1_399_999])
    payload, places = b"".join(rows), [8 + 40 * place for place in range(len(cuts))]
    sums, head = tuple(zip(places, cuts, strict=True)), head_of(1)
    write_summed(fd, 0, head, sums, rows, 0)
    at = 0
    for place, size in sums:
        assert head[place : place + 16] == xxhash.xxh3_128_digest(payload[at : at + size])
        found = [bytearray(size // 3), bytearray(size - size // 3)]
        assert read_part(fd, HEAD_BYTES + at, found) == head[place : place + 16]
        assert b"".join(found) == payload[at : at + size]
        at += size
    assert read_part(fd, HEAD_BYTES + at, [bytearray(1)]) is None
    own, back = head_of(1), [bytearray(len(payload))]
    assert read_summed(fd, 0, own, sums, back) is None
    assert (own, back[0]) == (head, payload)
    os.pwrite(fd, bytes([payload[-1] ^ 1]), HEAD_BYTES + len(payload) - 1)
    own = head_of(1)
    assert read_summed(fd, 0, own, sums, back) == head
    assert [place for place in places if own[place : place + 16] != head[place : place + 16]] == places[-1:]


@pytest.mark.usefixtures("_way")
def test_what_is_not_as_expected_gives_the_head_that_is_there(fd: int) -> None:
    payload = BYTES[:700_000]
    head = head_of(2)
    write_summed(fd, 0, head, one_sum(len(payload)), [payload], 0)
    for place in (0, 40, SUM_AT, HEAD_BYTES - 1, HEAD_BYTES, 500_000, HEAD_BYTES + len(payload) - 1):
        before = os.pread(fd, 1, place)
        os.pwrite(fd, bytes([before[0] ^ 1]), place)
        found, own = bytearray(len(payload)), head_of(2)
        assert read_summed(fd, 0, own, one_sum(len(found)), [found]) == os.pread(fd, HEAD_BYTES, 0)
        assert own[SUM_AT : SUM_AT + 16] == xxhash.xxh3_128_digest(found)
        os.pwrite(fd, before, place)
    assert read_summed(fd, 0, head_of(3), one_sum(len(payload)), [bytearray(len(payload))]) == head
    for length in (0, 1, HEAD_BYTES - 1, HEAD_BYTES, HEAD_BYTES + len(payload) - 1):
        os.ftruncate(fd, length)
        assert read_summed(fd, 0, head_of(2), one_sum(len(payload)), [bytearray(len(payload))]) == b""


@pytest.mark.usefixtures("_way")
def test_errors_of_the_file_are_raised(tmp_path: Path, fd: int) -> None:
    readonly = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        with pytest.raises(OSError, match="Bad file descriptor"):
            write_summed(readonly, 0, head_of(1), one_sum(1), [b"x"], 0)
    finally:
        os.close(readonly)
    with pytest.raises(OSError, match="Bad file descriptor"):
        read_summed(readonly, 0, head_of(1), one_sum(1), [bytearray(1)])


@pytest.mark.parametrize("way", WAYS)
def test_a_write_that_is_cut_off_leaves_no_head(tmp_path: Path, way: str) -> None:
    """Wherever the file ends growing: what lay there before is no frame any more, and the new one is none yet."""
    code = (
        "import os, resource, sys\nfrom quant import dispatch\nfrom quant.native.summed_file import write_summed\n"
        "fd = os.open(sys.argv[1], os.O_RDWR)\n"
        "for most in (400_000, 1_048_576, 1_700_000, 2_400_000):\n"
        "    os.pwrite(fd, b'\\xee' * 320, 0)\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))\n"
        "    with dispatch.forced('checksum', 'cpu', sys.argv[2]):\n"
        "        try:\n            sums = ((72, 400_000), (112, 1_999_700))\n"
        "            write_summed(fd, 0, bytearray(b'h' * 320), sums, [bytes(2_399_700)], 0)\n"
        "        except OSError as error:\n            print(error.errno, any(os.pread(fd, 320, 0)))\n"
    )
    file = tmp_path / "file"
    file.touch()
    command = [sys.executable, "-c", code, str(file), way]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["27 False"] * 4  # EFBIG


@pytest.mark.usefixtures("_way")
def test_many_are_written_in_order_up_to_one_that_fails(tmp_path: Path, fd: int) -> None:
    heads, rows = [head_of(number) for number in range(4)], [pieces([70_000 + number]) for number in range(4)]
    writes = [
        (fd, 100_000 * number, heads[number], one_sum(70_000 + number), rows[number], number) for number in range(4)
    ]
    write_all_summed(writes)
    for number in range(4):
        own, found = head_of(number), bytearray(70_000 + number)
        assert read_summed(fd, 100_000 * number, own, one_sum(len(found)), [found]) is None
        assert (own, found) == (heads[number], rows[number][0])
    os.ftruncate(fd, 0)
    readonly = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        with pytest.raises(OSError, match="Bad file descriptor"):
            write_all_summed([writes[0], (readonly, *writes[1][1:]), writes[2]])
    finally:
        os.close(readonly)
    assert os.fstat(fd).st_size == HEAD_BYTES + 70_000
    write_all_summed([])


@needs_extension
def test_misuse_of_many_is_refused(fd: int) -> None:
    write_all = native.kernels.segments_write_all
    for bad in ((), [b""], [(fd,)], [(fd, 0, head_of(1), one_sum(1), [b"x"], 0, 0)], None):
        with pytest.raises(TypeError, match="expected"):
            write_all(bad)


@needs_extension
def test_misuse_is_refused(fd: int) -> None:
    write, read = native.kernels.segments_write, native.kernels.segments_read
    head = head_of(1)
    for call, tail in ((write, (0,)), (read, ())):
        with pytest.raises(TypeError, match="expected segments"):
            call(fd)
        with pytest.raises(TypeError, match="list of buffers"):
            call(fd, 0, head, one_sum(1), (bytearray(1),), *tail)
        with pytest.raises(TypeError):
            call(fd, 0, head, one_sum(1), ["text"], *tail)
        for rows in ([], [bytearray()]):
            with pytest.raises(ValueError, match="got no bytes"):
                call(fd, 0, head, one_sum(1), rows, *tail)
        for number, offset, own in ((-1, 0, head), (fd, -1, head), (fd, 0, bytearray(31)), (fd, 0, bytearray(8193))):
            with pytest.raises(ValueError, match="expected 0 or more"):
                call(number, offset, own, ((0, 1),), [bytearray(1)], *tail)
        for bad in (SUM_AT, [(SUM_AT, 1)], (SUM_AT,), ((SUM_AT, "x"),), ((SUM_AT,),)):
            with pytest.raises(TypeError):
                call(fd, 0, head, bad, [bytearray(1)], *tail)
        few = ((), ((-1, 2),), ((HEAD_BYTES - 31, 2),), ((0, 1),), ((0, 3),), ((0, 2), (16, 0)), ((0, 1),) * 65)
        for sums in few:
            with pytest.raises(ValueError, match="sums: got"):
                call(fd, 0, head, sums, [bytearray(2)], *tail)
