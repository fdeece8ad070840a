"""The CUDA kernels, thread by thread on the CPU, against the torch reference: the same bytes, the same refusals."""

from __future__ import annotations

import ctypes

import pytest
import torch

from quant import BlockShape, CodecError, get_codec
from quant.cuda.codec import CudaCodec
from quant.cuda.launches import value_segment
from quant.cuda.self_test import BLOCKS, EXPECTED, as_kind, check_int4, digest, inputs
from quant.cuda.source import KINDS as ELEMENT_KINDS
from quant.cuda.source import source_of
from quant.int4 import Int4Codec
from quant.int4_records import decode_records, encode_records_checked
from quant.record_layout import record_layout
from quant.rotation import sign_list
from quant.testing import CodecContract, bits_equal
from tests.quant.cuda.inputs import DIMS, DTYPES, KINDS
from tests.quant.cuda.int4_suite import check, codec_of, decoded, reference
from tests.quant.cuda.shim import ORDERS, ShimDevice, run_on


def normal(*shape: int) -> torch.Tensor:
    """Drawn from a generator of its own: other tests' draws must not depend on ours."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dims", [dims for dims in DIMS if max(dims) < 512 or dims == (576, 0)])
def test_bytes_and_refusals_equal_the_reference(shim: ShimDevice, name: str, dims: tuple[int, int]) -> None:
    kernels = CudaCodec(shim)
    for dtype in DTYPES if name in ("normal", "poisoned") else (torch.float32,):
        check(kernels, codec_of((4, 4)), name, dims, dtype, "cpu")


@pytest.mark.parametrize("name", ["normal", "bits", "poisoned"])
@pytest.mark.parametrize("dims", [(512, 512), (8, 1024), (1024, 8), (24, 40), (8, 768)])
def test_large_and_small_dims(shim: ShimDevice, name: str, dims: tuple[int, int]) -> None:
    check(CudaCodec(shim), codec_of((4, 4)), name, dims, torch.float32, "cpu")


@pytest.mark.parametrize("bits", [(5, 4), (4, 3), (5, 3)])
@pytest.mark.parametrize("dims", [(64, 64), (80, 96), (128, 256), (576, 0)])
def test_other_bits(shim: ShimDevice, bits: tuple[int, int], dims: tuple[int, int]) -> None:
    for name in ("normal", "offset", "poisoned"):
        check(CudaCodec(shim), codec_of(bits, 0.3), name, dims, torch.bfloat16, "cpu")


def test_the_bound_is_decided_alike_where_it_is_close(shim: ShimDevice) -> None:
    counts = [
        check(CudaCodec(shim), codec_of((4, 4), bound), "normal", dims, torch.float32, "cpu")
        for bound in (0.09, 0.095, 0.1)
        for dims in DIMS[:4]
    ]
    assert sum(0 < count < 7 for count in counts) >= 5, counts


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("flush", [False, True])
def test_neither_thread_order_nor_flushed_subnormals_change_a_byte(shim: ShimDevice, order: int, flush: bool) -> None:
    """A missing barrier shows as a difference between orders; CuPy compiles with -ftz=true."""
    shim.order, shim.flush = order, flush
    for dims in ((64, 64), (80, 80), (128, 128), (256, 256)):
        for name in ("normal", "subnormal", "tiny", "large", "bits"):
            check(CudaCodec(shim), codec_of((4, 4)), name, dims, torch.float32, "cpu")
    check(CudaCodec(shim), codec_of((5, 3)), "normal", (96, 96), torch.float16, "cpu")


def test_a_missing_barrier_shows(shim: ShimDevice) -> None:
    """Or the orders above prove nothing."""
    text = source_of("int4_fp32")
    barrier = "            __syncthreads();\n            const FOUR got"
    assert text.count(barrier) == 1
    broken = ctypes.CDLL(
        str(shim.build("int4_fp32", text.replace(barrier, "            const FOUR got"), "no_barrier"))
    )

    class Broken:
        def run(self, launches: list) -> None:  # type: ignore[type-arg]
            for launch in launches:
                assert run_on(broken, launch, 0, False) == 0

    with pytest.raises(AssertionError):
        check(CudaCodec(Broken()), codec_of((4, 4)), "normal", (8, 256), torch.float32, "cpu")


def test_a_barrier_that_some_threads_skip_is_reported(shim: ShimDevice) -> None:
    text = source_of("int4_fp32")
    start = "    const ValuePlace where = find_values(job);\n    TokenScales& scales"
    assert text.count(start) == 1
    leaving = text.replace(start, "    if (!place.live) return;\n" + start)
    broken = ctypes.CDLL(str(shim.build("int4_fp32", leaving, "leaves_early")))
    codes: list[int] = []

    class Broken:
        def run(self, launches: list) -> None:  # type: ignore[type-arg]
            codes.extend(run_on(broken, launch, 0, False) for launch in launches)

    keys = normal(1, 1, 1, 16, 64)  # one record where four share a thread block
    payload, _ = reference(codec_of((4, 4)), keys, keys)
    CudaCodec(Broken()).encode(keys, keys, payload, codec_of((4, 4))._head_runs(BlockShape(1, 1, 16, 64, 64)), 0.15)
    assert codes == [0, 1]


class _OnShim(Int4Codec):
    """The codec as it is with CUDA tensors, but on the CPU behind the shim."""

    device: ShimDevice

    def _cuda(self, operation: str, tensor: torch.Tensor) -> CudaCodec:
        return CudaCodec(self.device)


class TestContractBehindTheShim(CodecContract):
    """Strides, batches, odd addresses, refused neighbours, hostile payloads: through the kernels."""

    @pytest.fixture(autouse=True)
    def _device(self, shim: ShimDevice) -> None:
        self.shim = shim

    def make_codec(self) -> _OnShim:
        codec = _OnShim()
        codec.device = self.shim
        return codec

    def shapes(self) -> tuple[BlockShape, ...]:
        return (BlockShape(2, 3, 16, 64, 64), BlockShape(1, 1, 32, 80, 96), BlockShape(2, 1, 16, 72, 0))

    def dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.bfloat16, torch.float32)

    def test_threads_do_not_share_work_buffers(self) -> None:
        """Not here: the shim is one thread. On a card each call is a launch on the caller's stream."""


def test_a_bits_table_is_one_launch_a_run_of_heads(shim: ShimDevice) -> None:
    codec = get_codec("int4", key_bits=[[4, 5, 5], [4, 4, 5]], value_bits=[[4, 4, 3], [3, 4, 4]], error_bound=0.3)
    assert isinstance(codec, Int4Codec)
    keys, values = normal(3, 2, 3, 32, 80), normal(3, 2, 3, 32, 32)
    payload, accepted = reference(codec, keys, values)
    shape = BlockShape(2, 3, 32, 80, 32)
    out = torch.zeros_like(payload)
    assert CudaCodec(shim).encode(keys, values, out, codec._head_runs(shape), 0.3).tolist() == accepted.tolist()
    assert accepted.all()
    assert torch.equal(out, payload)


@pytest.mark.parametrize("dims", [(64, 64), (576, 0)])
def test_slots_of_a_slab_are_coded_in_place(shim: ShimDevice, dims: tuple[int, int]) -> None:
    """Scattered full slots into scattered INT4 slots, touching nothing else, and back."""
    codec, row = codec_of((4, 4)), 16 * sum(dims)
    slab = normal(6, 2, 1, row)
    keys = slab[..., : 16 * dims[0]].view(6, 2, 1, 16, dims[0])
    values = slab[..., 16 * dims[0] :].view(6, 2, 1, 16, dims[1]) if dims[1] else None
    slots = [4, 1, 3]
    slab[1, 1, 0, 7] = torch.inf
    some = None if values is None else values[slots]
    payload, accepted = reference(codec, keys[slots], some)
    assert accepted.tolist() == [True, False, True]
    size = payload.shape[1]
    offsets, memory = [2 * size, 5 * size, 0], torch.full((6 * size,), 0xAB, dtype=torch.uint8)
    runs = codec._head_runs(BlockShape(2, 1, 16, *dims))
    kernels = CudaCodec(shim)
    flags = kernels.encode_slots((keys, values), slots, memory, offsets, runs, 0.15)
    assert flags is not None
    assert flags.tolist() == accepted.tolist()
    assert torch.equal(memory.view(6, size)[[2, 0]], payload[[0, 2]])
    assert bool((memory.view(6, size)[[1, 3, 4]] == 0xAB).all())
    places = torch.tensor([2 * size, 0])
    got = torch.zeros_like(keys[:2]), None if values is None else torch.zeros_like(values[:2])
    expected = decoded(codec, payload[[0, 2]], got)
    assert kernels.decode_slots(memory, places, got, runs)
    assert bits_equal(got[0], expected[0])
    assert bits_equal(got[1], expected[1])


def test_slots_that_kernels_cannot_address_are_left_to_the_caller(shim: ShimDevice) -> None:
    codec, kernels = codec_of((4, 4)), CudaCodec(shim)
    keys, shape = normal(6, 1, 1, 16, 64), BlockShape(1, 1, 16, 64, 0)
    size, runs = codec.encoded_bytes(shape, keys.dtype), codec._head_runs(shape)
    memory = torch.zeros(6 * size, dtype=torch.uint8)
    assert kernels.encode_slots((keys, None), [], memory, [], runs, 0.15) is not None
    assert kernels.encode_slots((keys.transpose(3, 4), None), [0], memory, [0], runs, 0.15) is None
    assert kernels.encode_slots((keys, None), [0], memory[::2], [0], runs, 0.15) is None
    assert kernels.encode_slots((keys, keys[::2]), [0], memory, [0], runs, 0.15) is None
    assert not kernels.decode_slots(memory[1:], torch.tensor([0]), (keys[:1], None), runs)
    for slots, places in (([6], [0]), ([-1], [0]), ([0], [8]), ([0], [-16]), ([0], [5 * size + 16]), ([0, 1], [0])):
        with pytest.raises(CodecError):
            kernels.encode_slots((keys, None), slots, memory, places, runs, 0.15)
    with pytest.raises(CodecError, match="multiples of 16"):
        kernels.decode_slots(memory, torch.tensor([5 * size + 16]), (keys[:1], None), runs)


def test_what_does_not_fit_a_kernel_is_copied_into_place(shim: ShimDevice) -> None:
    codec = codec_of((4, 4))
    keys, values = normal(2, 1, 1, 16, 64), normal(2, 1, 1, 16, 64)
    payload, _ = reference(codec, keys, values)
    odd_keys = torch.zeros(keys.numel() + 1)[1:].view(keys.shape).copy_(keys)
    transposed = values.transpose(-1, -2).contiguous().transpose(-1, -2)
    assert odd_keys.data_ptr() % 16 == 4 or odd_keys.data_ptr() % 16
    assert transposed.stride(-1) != 1
    out = torch.zeros(payload.numel() + 2 * 3 + 1, dtype=torch.uint8)[1:]
    out = out.as_strided(payload.shape, (payload.shape[1] + 3, 1))
    runs = codec._head_runs(BlockShape(1, 1, 16, 64, 64))
    assert CudaCodec(shim).encode(odd_keys, transposed, out, runs, 0.15).all()
    assert torch.equal(out, payload)
    wanted = decoded(codec, payload, (keys, values))
    CudaCodec(shim).decode(out, odd_keys, transposed, runs)
    assert torch.equal(odd_keys, wanted[0])
    assert bits_equal(transposed.contiguous(), wanted[1])


def test_errors_say_what_was_given_even_when_kernels_would_run(shim: ShimDevice) -> None:
    codec = _OnShim()
    codec.device = shim
    with pytest.raises(CodecError, match="block_tokens"):
        codec.encode(normal(1, 1, 8, 64), normal(1, 1, 8, 64))


def test_the_published_signs_are_in_the_source() -> None:
    text = source_of("int4_bf16")
    table = text[text.index("VALUE_SIGNS[32]") :].split("};")[0].split("\n", 1)[1]
    words = [int(word.strip().removesuffix("u"), 16) for word in table.replace("\n", " ").split(",") if word.strip()]
    assert [-1 if words[d // 32] >> d % 32 & 1 else 1 for d in range(1024)] == list(sign_list(1024))


@pytest.mark.parametrize("dim", range(8, 1025, 8))
def test_threads_of_a_hadamard_lie_in_whole_warps_or_in_one(dim: int) -> None:
    segment, group = value_segment(dim), (dim & -dim) // 4
    assert segment >= dim // 4
    assert segment % 32 == 0 or (segment < 32 and segment & (segment - 1) == 0)
    assert group <= 32 or dim // 4 % group == 0
    assert segment % min(group, 32) == 0
    assert 2 * segment <= 512


# ---- the self-test that guards a real card


@pytest.mark.parametrize("kind", ELEMENT_KINDS)
def test_self_test_passes_behind_the_shim(shim: ShimDevice, kind: str) -> None:
    assert check_int4(shim, kind) is None


@pytest.mark.parametrize("dims", EXPECTED)
def test_self_test_digests_are_the_reference(dims: tuple[int, int, int, int]) -> None:
    key_bits, value_bits = dims[2:]
    keys = torch.from_numpy(inputs(dims[0], 0))
    values = torch.from_numpy(inputs(dims[1], 1)) if dims[1] else None
    records, accepted = encode_records_checked(keys, values, key_bits=key_bits, value_bits=value_bits, error_bound=0.3)
    assert accepted.tolist() == [True] * (BLOCKS - 1) + [False]
    decoded = decode_records(records, dims[0], dims[1], key_bits=key_bits, value_bits=value_bits)
    parts = [part[: BLOCKS - 1].numpy().view("uint8") for part in decoded if part is not None]
    assert EXPECTED[dims] == (digest(records[: BLOCKS - 1].numpy()), digest(*parts))
    for dtype, kind in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        narrow = torch.from_numpy(as_kind(inputs(dims[0], 0), kind)).view(dtype).view(keys.shape)
        assert torch.equal(narrow[: BLOCKS - 1].float(), keys[: BLOCKS - 1])


def test_self_test_names_what_is_wrong(shim: ShimDevice) -> None:
    class Faulty(ShimDevice):
        def launch(self, launches, stream):  # type: ignore[no-untyped-def]
            for launch in launches:
                launch.job["unit"] *= 0.5
            shim.launch(launches, stream)

    found = check_int4(Faulty(shim._folder), "fp32")
    assert found is not None
    assert found.startswith("self-test failed: records at dims (128, 128, 4, 4)")


def test_record_layouts_keep_what_kernels_align_to() -> None:
    for dims in ((8, 8), (24, 40), (576, 0), (1024, 1024)):
        for key_bits in (4, 5):
            for value_bits in (3, 4):
                layout = record_layout(*dims, key_bits, value_bits)
                assert layout.value_codes % 16 == layout.key_plane % 8 == layout.record_bytes % 64 == 0
                assert layout.key_scales % 4 == layout.key_zeros % 4 == layout.value_scales % 4 == 0
                assert layout.value_zeros % 4 == layout.value_plane % 2 == layout.key_base % 2 == 0
