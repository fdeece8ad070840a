"""Page copies, fences and host registration on a card, behind a kernel that keeps the stream busy."""

from __future__ import annotations

import gc
import mmap
import threading

import numpy as np
import numpy.typing as npt
import pytest
import torch

from quant.cuda import CudaDevice, CudaMemoryError, Fence, PageCopier, PageSet, RegisteredHost
from quant.cuda.codec import current_stream
from quant.cuda.self_test import check_pages

pytestmark = pytest.mark.gpu
LONG_CYCLES = 400_000_000  # some 0.2 s


def busy(card: CudaDevice) -> Fence:
    """A fence behind a long kernel on torch's current stream."""
    torch.cuda._sleep(LONG_CYCLES)
    return Fence(card, card.record(current_stream(card.index)))


def slab_of(pages: int, page_bytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (pages * page_bytes,), dtype=torch.uint8, device="cuda")


def places(count: int, page_bytes: int, seed: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng(seed).permutation(count).astype(np.int64) * page_bytes


def test_self_test_passes(card: CudaDevice) -> None:
    assert check_pages(card) is None


@pytest.mark.parametrize("page_bytes", [16, 2048, 2368, 32768, 75776, 1 << 20])
def test_gather_and_scatter_between_slab_and_registered_host(
    card: CudaDevice, copier: PageCopier, page_bytes: int
) -> None:
    count = 33
    slab = slab_of(count, page_bytes)
    before = slab.cpu().numpy()
    torch.cuda.synchronize()
    arena = mmap.mmap(-1, -(-count * page_bytes // 4096) * 4096)
    with RegisteredHost(card, arena, piece_bytes=1 << 20) as host:
        order = places(count, page_bytes, 1)
        copier.gather(PageSet.of_tensor(slab, order), host.device_address, page_bytes, host).wait()
        for index, offset in enumerate(order):
            got = np.frombuffer(arena, np.uint8, page_bytes, index * page_bytes)
            assert (got == before[offset : offset + page_bytes]).all()
        back = torch.zeros_like(slab)
        torch.cuda.synchronize()
        copier.scatter(host.device_address, PageSet.of_tensor(back, order), page_bytes, host).wait()
        assert (back.cpu().numpy() == before).all()


def test_between_devices(card: CudaDevice, copier: PageCopier) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one card")
    other = next(index for index in range(torch.cuda.device_count()) if index != card.index)
    try:
        card.enable_peer(other)
    except CudaMemoryError as error:
        pytest.skip(str(error))
    source = torch.randint(0, 256, (64 * 4096,), dtype=torch.uint8, device=f"cuda:{other}")
    target = torch.zeros(64 * 4096, dtype=torch.uint8, device=f"cuda:{card.index}")
    torch.cuda.synchronize(other)
    torch.cuda.synchronize(card.index)
    order = places(64, 4096, 2)
    copier.copy(PageSet.of_tensor(target, order), PageSet.of_tensor(source, order), 4096).wait()
    assert torch.equal(target.cpu(), source.cpu())


def test_a_view_is_the_tensors_own_memory(card: CudaDevice) -> None:
    tensor = torch.arange(64, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    view = card.view(tensor.data_ptr(), tensor.nbytes, tensor)
    view[3] = 200
    card.synchronize()
    assert int(tensor[3]) == 200


def test_a_fence_is_asked_without_blocking(card: CudaDevice, copier: PageCopier) -> None:
    slab, target = slab_of(4, 4096), torch.zeros(4096, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    fence = copier.copy(PageSet.of_tensor(target, [0]), PageSet.of_tensor(slab, [8192]), 4096, after=[busy(card)])
    assert not fence.done()
    assert copier.poll() == 1
    fence.wait()
    assert fence.done()
    assert torch.equal(target, slab[8192:12288])
    assert copier.poll() == 0


def test_case_005_tables_of_offsets_are_read_late_and_hold(card: CudaDevice, copier: PageCopier) -> None:
    slab = slab_of(5, 1024)
    first, second = (torch.zeros(2048, dtype=torch.uint8, device="cuda") for _ in range(2))
    torch.cuda.synchronize()
    table = np.array([1024, 2048], np.int64)
    gate = busy(card)
    ends = PageSet.of_tensor(first, [0, 1024]), PageSet.of_tensor(second, [0, 1024])
    copier.copy(ends[0], PageSet.of_tensor(slab, table), 1024, after=[gate])
    table[:] = [3072, 4096]
    last = copier.copy(ends[1], PageSet.of_tensor(slab, table), 1024)
    table[:] = 0
    assert not last.done()
    last.wait()
    assert torch.equal(first, slab[1024:3072])
    assert torch.equal(second, slab[3072:])


def test_case_028_a_source_changed_behind_the_fence_leaves_no_trace(card: CudaDevice, copier: PageCopier) -> None:
    slab = slab_of(2, 4096)
    before = slab.cpu()
    arena = mmap.mmap(-1, 8192)
    torch.cuda.synchronize()
    with RegisteredHost(card, arena) as host:
        fence = copier.gather(PageSet.of_tensor(slab, [4096, 0]), host.device_address, 4096, host)
        fence.hold(current_stream(card.index))
        slab.zero_()
        fence.wait()
        stored = np.frombuffer(arena, np.uint8).copy()
    assert (stored[:4096] == before[4096:].numpy()).all()
    assert (stored[4096:] == before[:4096].numpy()).all()


def test_case_056_a_pinned_source_dropped_in_mid_copy_is_intact(card: CudaDevice, copier: PageCopier) -> None:
    import cupy

    size = 1 << 20
    content = np.random.default_rng(3).integers(0, 256, size, np.uint8)
    pinned = cupy.cuda.alloc_pinned_memory(size)
    np.frombuffer(pinned, np.uint8, size)[:] = content
    target = torch.zeros(size, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    source = PageSet.contiguous(int(pinned.ptr), 4096, size // 4096, pinned)
    fence = copier.copy(PageSet.of_tensor(target, source.offsets), source, 4096, after=[busy(card)])
    del pinned, source
    gc.collect()
    cupy.get_default_pinned_memory_pool().free_all_blocks()
    cupy.get_default_memory_pool().free_all_blocks()
    again = cupy.cuda.alloc_pinned_memory(size)
    np.frombuffer(again, np.uint8, size)[:] = 0
    assert not fence.done(), "or the copy was not in flight"
    del fence
    copier.close()
    assert (target.cpu().numpy() == content).all()


def test_case_147_a_large_arena_is_pinned_beside_and_usable_at_once(card: CudaDevice, copier: PageCopier) -> None:
    arena = mmap.mmap(-1, 2 << 30)
    host = RegisteredHost(card, arena, piece_bytes=16 << 20)
    try:
        assert host.register_next()
        beside = threading.Thread(target=host.register_all)
        beside.start()
        slab = slab_of(64, 4096)
        torch.cuda.synchronize()
        fence = copier.gather(PageSet.of_tensor(slab, places(64, 4096, 4)), host.device_address, 4096, host)
        fence.wait()
        beside.join()
        assert host.registered_bytes == 2 << 30
    finally:
        host.close()
