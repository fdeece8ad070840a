"""INT4 attention kernels of every form against float64 on the decoded values, AMX on emulated tiles included."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.quant.native.build_kit import CAN_BUILD
from tests.quant.native.int4_kit import FORMS, Case, build, relative_error, runs_here

pytestmark = pytest.mark.skipif(not CAN_BUILD, reason="no C compiler, or no headers of Python")
BOUND, LARGEST = 1e-3, 1.5e-2


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ctypes.CDLL]:
    folder = tmp_path_factory.mktemp("int4")
    forms = [form for form in FORMS if runs_here(form)]
    with ThreadPoolExecutor() as pool:
        return dict(zip(forms, pool.map(lambda form: build(form, folder), forms), strict=True))


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, libraries: dict[str, ctypes.CDLL]) -> ctypes.CDLL:
    if request.param not in libraries:
        pytest.skip(f"this CPU does not run {request.param}")
    return libraries[request.param]


def check(form: ctypes.CDLL, case: Case) -> None:
    rms, largest = relative_error(case.found(form)[0], case.expected())
    assert rms <= BOUND
    assert largest <= LARGEST


SHAPES = [(128, 128), (64, 64), (80, 80), (96, 96), (192, 128), (256, 256), (8, 8), (24, 40), (72, 8), (1024, 1024)]
LATENTS = [(576, 512), (72, 40), (8, 8), (136, 64), (1024, 1016)]
BITS = [(4, 4), (5, 4), (4, 3), (5, 3)]


@pytest.mark.parametrize("bits", BITS, ids=lambda bits: f"K{bits[0]}V{bits[1]}")
@pytest.mark.parametrize("dims", SHAPES, ids=lambda dims: f"{dims[0]}-{dims[1]}")
def test_every_shape_and_all_bits(form: ctypes.CDLL, dims: tuple[int, int], bits: tuple[int, int]) -> None:
    """16 pieces fill no span, 37 are one and a part; rows of one tile, with padding, and of several."""
    for rows, pieces in ((4, 37), (7, 3), (1, 16)):
        check(form, Case(*dims, key_bits=bits[0], value_bits=bits[1], rows=rows, pieces=pieces))


@pytest.mark.parametrize("key_bits", [4, 5])
@pytest.mark.parametrize("dims", LATENTS, ids=lambda dims: f"{dims[0]}-{dims[1]}")
def test_latents(form: ctypes.CDLL, dims: tuple[int, int], key_bits: int) -> None:
    for rows, pieces in ((4, 37), (6, 3), (1, 16)):
        check(form, Case(*dims, latent=True, key_bits=key_bits, rows=rows, pieces=pieces, heads=1))


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 8, 9, 16, 23, 64])
def test_any_number_of_rows(form: ctypes.CDLL, rows: int, latent: bool) -> None:
    check(form, Case(64, 64, latent=latent, rows=rows, pieces=9))


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("chunk", [1, 5, 32, 64])
def test_rows_that_see_different_tokens(form: ctypes.CDLL, chunk: int, latent: bool) -> None:
    """Windows that begin and end anywhere; one row sees a single token, and one nothing: its sum stays 0."""
    first = torch.tensor([0, 3, 200, 590, 17, 700], dtype=torch.int32)
    last = torch.tensor([591, 15, 370, 590, 16 + 17, 800], dtype=torch.int32)
    case = Case(64, 48, latent=latent, rows=6, chunk=chunk, window=(first, last))
    found, total = case.found(form)
    assert bool((total[:, 5] == 0).all())
    rms, largest = relative_error(found[:, :5], case.expected()[:, :5])
    assert rms <= BOUND
    assert largest <= LARGEST


def test_softcap(form: ctypes.CDLL) -> None:
    """A cap well inside the scores; it matters, or the test proves nothing."""
    case, free = Case(rows=3, softcap=1.5), Case(rows=3)
    case.query = free.query = free.query * 4
    check(form, case)
    assert relative_error(case.found(form)[0], free.expected())[0] > 0.1


@pytest.mark.parametrize("dims", [(128, 128, False), (576, 512, True)], ids=["usual", "latent"])
@pytest.mark.parametrize("factor", [1e-30, 1e-6, 0.1, 3.0, 10.0, 100.0, 1e4])
def test_queries_of_any_size(form: ctypes.CDLL, factor: float, dims: tuple[int, int, bool]) -> None:
    """Small ones give plain means, large ones a single token. One row is zeros."""
    case = Case(*dims, rows=4)
    case.query = case.query * factor
    case.query[:, 2] = 0
    check(form, case)


@pytest.mark.parametrize("channel", [0, 5, 100])
@pytest.mark.parametrize("size", [50.0, 1e3, 1e4])
def test_one_huge_channel(form: ctypes.CDLL, size: float, channel: int) -> None:
    case = Case(rows=4)
    case.query[..., channel] = size
    check(form, case)


def test_scales_of_every_size(form: ctypes.CDLL) -> None:
    """Scale codes down to the smallest subnormal, some of them where the query is large."""
    case = Case(rows=4)
    scales = case.records[:, 16 * 128 : 17 * 128]
    scales[:, ::3] = torch.randint(1, 9, scales[:, ::3].shape, dtype=torch.uint8)
    case.query[..., ::3] *= 1e3
    check(form, case)


def test_chunks_do_not_matter(form: ctypes.CDLL) -> None:
    """However the pieces are cut into calls: the same sums, but for the order of rounding."""
    whole, cut = Case(pieces=64), Case(pieces=64, chunk=7)
    assert relative_error(cut.found(form)[0], whole.found(form)[0])[0] < 5e-4


@pytest.mark.parametrize("part", ["keys", "values", "key zeros", "value zeros"])
def test_the_bound_notices_a_wrong_byte_in_each_record(form: ctypes.CDLL, part: str) -> None:
    at = {"keys": 0, "values": 8 * 128, "key zeros": 17 * 128, "value zeros": 18 * 128 + 16}[part]
    case = Case()
    expected = case.expected()
    case.records[:, at] ^= 0x07
    assert relative_error(case.found(form)[0], expected)[0] > BOUND
