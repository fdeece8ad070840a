"""Page copies: the kernel behind the shim, and the copier's promises about lifetimes, with a driver that runs late."""

from __future__ import annotations

import gc
import mmap
import weakref

import numpy as np
import pytest
import torch

from quant.cuda import CudaError, PageCopier, PageSet
from quant.cuda.launches import COPY_JOB, RECORD_JOB, RecordPlace, copy_launch
from quant.cuda.self_test import check_pages
from tests.quant.cuda.late_driver import LateDriver, Memory, aligned
from tests.quant.cuda.shim import ORDERS, ShimDevice


def filled(size_bytes: int, seed: int) -> Memory:
    memory = aligned(size_bytes)
    memory.array[:] = np.random.default_rng(seed).integers(0, 256, size_bytes, np.uint8)
    return memory


def pages(memory: Memory, offsets: list[int]) -> PageSet:
    return PageSet(memory.address, memory.array.nbytes, np.array(offsets, np.int64), memory)


def test_arguments_are_the_structs_of_the_kernels(shim: ShimDevice) -> None:
    assert shim.library("pages").shim_job_bytes() == COPY_JOB.itemsize
    assert shim.library("int4_bf16").shim_job_bytes() == RECORD_JOB.itemsize


@pytest.mark.parametrize("page_bytes", [16, 48, 2048, 2368, 16 * 131, 32768, 75776, 1 << 18])
@pytest.mark.parametrize("order", ORDERS)
def test_gather_and_scatter_move_every_byte_and_no_other(shim: ShimDevice, page_bytes: int, order: int) -> None:
    shim.order = order
    count = 7
    offsets = [int(place) * (page_bytes + 32) for place in np.random.default_rng(page_bytes).permutation(11)[:count]]
    slab, packed, back = (
        filled(11 * (page_bytes + 32), 1),
        aligned(count * page_bytes),
        filled(11 * (page_bytes + 32), 2),
    )
    copier = PageCopier(shim, 0)
    assert copier.gather(pages(slab, offsets), packed.address, page_bytes, packed).done()
    for index, offset in enumerate(offsets):
        got = packed.array[index * page_bytes : (index + 1) * page_bytes]
        assert (got == slab.array[offset : offset + page_bytes]).all()
    expected = back.array.copy()
    for offset in offsets:
        expected[offset : offset + page_bytes] = slab.array[offset : offset + page_bytes]
    copier.scatter(packed.address, pages(back, offsets), page_bytes, packed)
    assert (back.array == expected).all()


def test_slots_to_slots_and_no_page_at_all(shim: ShimDevice) -> None:
    memory = filled(4096, 3)
    before = memory.array.copy()
    copier = PageCopier(shim, 0)
    copier.copy(pages(memory, [3072, 0]), pages(memory, [1024, 2048]), 1024)
    assert (memory.array[3072:] == before[1024:2048]).all()
    assert (memory.array[:1024] == before[2048:3072]).all()
    assert copier.copy(pages(memory, []), pages(memory, []), 1024).done()


def test_offsets_are_64_bit(shim: ShimDevice) -> None:
    """Two gigabytes and more from the base: the base is put far below the memory."""
    target, far = aligned(4096), 5 << 32
    memory = np.frombuffer(mmap.mmap(-1, 4096), np.uint8)  # mapped high up, which the heap of some builds is not
    memory[:] = filled(4096, 4).array
    place = PageSet(memory.ctypes.data - far, far + 4096, np.array([far, far + 2048], np.int64), memory)
    PageCopier(shim, 0).gather(place, target.address, 2048, target)
    assert (target.array == memory).all()


def test_self_test_passes_and_can_fail(shim: ShimDevice) -> None:
    assert check_pages(shim) is None

    class Faulty(ShimDevice):
        def launch(self, launches, stream):  # type: ignore[no-untyped-def]
            for launch in launches:
                launch.job["page_count"] -= 1
            shim.launch(launches, stream)

    assert check_pages(Faulty(shim._folder)) == "self-test failed: page copies"


@pytest.mark.parametrize(
    ("offsets", "page_bytes", "said"),
    [
        ([0, 8], 1024, "multiples of 16"),
        ([0, -16], 1024, "not inside"),
        ([0, 3088], 1024, "not inside"),
        ([0, 16], 1000, "multiples of 16"),
    ],
)
def test_pages_outside_their_region_or_off_the_grid_are_refused(
    shim: ShimDevice, offsets: list[int], page_bytes: int, said: str
) -> None:
    memory, other = filled(4096, 5), aligned(4096)
    copier = PageCopier(shim, 0)
    for target, source in (
        (pages(memory, offsets), pages(other, [0, 1024])),
        (pages(other, [0, 1024]), pages(memory, offsets)),
    ):
        with pytest.raises(CudaError, match=said):
            copier.copy(target, source, page_bytes)
    assert not other.array.any()


def test_other_misuse_is_refused(shim: ShimDevice) -> None:
    memory = aligned(4096)
    copier = PageCopier(shim, 0)
    with pytest.raises(CudaError, match="2 source pages, 1 target pages"):
        copier.copy(pages(memory, [0]), pages(memory, [1024, 2048]), 1024)
    with pytest.raises(CudaError, match="int64"):
        copier.copy(PageSet(memory.address, 4096, np.zeros(1, np.int32), memory), pages(memory, [0]), 1024)
    with pytest.raises(CudaError, match="contiguous"):
        PageSet.of_tensor(torch.zeros(8, 8).t(), [0])
    with pytest.raises(ValueError, match="page bytes"):
        copy_launch(RecordPlace(0, 16), RecordPlace(0, 16), 0, 1)
    copier.close()
    with pytest.raises(CudaError, match="closed"):
        copier.copy(pages(memory, [0]), pages(memory, [1024]), 1024)


# ---- what is read late must still be there, and unchanged


def test_case_005_the_tables_of_two_submissions_do_not_share_a_buffer(shim: ShimDevice) -> None:
    """The copy engine is two steps behind; the caller reuses its array of offsets at once."""
    driver = LateDriver(shim)
    copier = PageCopier(driver, 0)
    slab, first, second = filled(5 * 1024, 6), aligned(2048), aligned(2048)
    table = np.array([1024, 2048], np.int64)
    fences = [copier.gather(PageSet(slab.address, 5120, table, slab), first.address, 1024, first)]
    table[:] = [3072, 4096]
    fences.append(copier.gather(PageSet(slab.address, 5120, table, slab), second.address, 1024, second))
    table[:] = 0
    assert [fence.done() for fence in fences] == [False, False]
    assert not first.array.any()
    driver.run_all()
    assert [fence.done() for fence in fences] == [True, True]
    assert (first.array == slab.array[1024:3072]).all()
    assert (second.array == slab.array[3072:5120]).all()
    assert driver.lost == 0


def test_everything_a_copy_reads_lives_until_it_ran_even_when_the_fence_is_dropped(shim: ShimDevice) -> None:
    """The CPU half of case 56: the copier, not the caller and not the fence, holds source, target and tables."""
    driver = LateDriver(shim)
    copier = PageCopier(driver, 0)
    source, target = filled(4096, 7), aligned(2048)
    watched = weakref.ref(source)
    expected = source.array[2048:].copy()
    copier.gather(pages(source, [2048, 3072]), target.address, 1024, target)
    del source
    gc.collect()
    assert watched() is not None
    assert copier.poll() == 1
    driver.run_all()
    assert driver.lost == 0
    assert (target.array == expected).all()
    assert copier.poll() == 0
    gc.collect()
    assert watched() is None, "kept beyond the copy"


def test_the_late_driver_notices_an_owner_that_went(shim: ShimDevice) -> None:
    """Or the tests above prove nothing."""
    driver = LateDriver(shim)
    buffer = driver.upload(np.ones(16, np.uint8), 0)
    del buffer
    gc.collect()
    driver.run_all()
    assert driver.lost == 1


def test_fences_order_copies_and_wait_blocks_until_done(shim: ShimDevice) -> None:
    driver = LateDriver(shim)
    one, two = PageCopier(driver, 1), PageCopier(driver, 2)
    memory = filled(4096, 8)
    before = memory.array.copy()
    first = one.copy(pages(memory, [1024]), pages(memory, [0]), 1024)
    second = two.copy(pages(memory, [2048]), pages(memory, [1024]), 1024, after=[first])
    assert len(driver.waited_for) == 1
    assert not second.done()
    second.wait()
    assert first.done()
    assert (memory.array[2048:3072] == before[:1024]).all()


def test_close_waits_for_what_is_in_flight(shim: ShimDevice) -> None:
    driver = LateDriver(shim)
    copier = PageCopier(driver, 0)
    memory = filled(4096, 9)
    before = memory.array.copy()
    fence = copier.copy(pages(memory, [1024]), pages(memory, [0]), 1024)
    copier.close()
    copier.close()
    assert fence.done()
    assert (memory.array[1024:2048] == before[:1024]).all()


def test_what_was_enqueued_before_an_error_keeps_its_memory(shim: ShimDevice) -> None:
    class Failing(LateDriver):
        def launch(self, launches, stream):  # type: ignore[no-untyped-def]
            raise RuntimeError("launch failed")

    driver = Failing(shim)
    copier = PageCopier(driver, 0)
    memory = aligned(4096)
    with pytest.raises(RuntimeError, match="launch failed"):
        copier.copy(pages(memory, [0]), pages(memory, [1024]), 1024)
    gc.collect()
    assert copier.poll() == 1
    driver.run_all()
    assert driver.lost == 0
    assert copier.poll() == 0
