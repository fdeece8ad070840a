"""The int4 kernels on a card: the suite that runs behind the shim, and what only a card can show."""

from __future__ import annotations

import pytest
import torch

from quant import BlockShape, BlockTooLossy, get_codec
from quant.cuda import CudaDevice, cuda_codec_for
from quant.cuda.codec import CudaCodec, TorchStream
from quant.cuda.self_test import check_int4
from quant.cuda.source import KINDS as ELEMENT_KINDS
from quant.testing import bits_equal, random_block
from tests.quant.cuda.inputs import DIMS, DTYPES, KINDS
from tests.quant.cuda.int4_suite import check, codec_of, decoded, reference

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dims", [*DIMS, (8, 1024), (1024, 8), (24, 40), (8, 768)])
def test_bytes_and_refusals_equal_the_reference(card: CudaDevice, name: str, dims: tuple[int, int]) -> None:
    for dtype in DTYPES:
        check(CudaCodec(TorchStream(card)), codec_of((4, 4)), name, dims, dtype, "cuda")


@pytest.mark.parametrize("bits", [(5, 4), (4, 3), (5, 3)])
@pytest.mark.parametrize("dims", DIMS)
def test_other_bits(card: CudaDevice, bits: tuple[int, int], dims: tuple[int, int]) -> None:
    for name in ("normal", "offset", "bits", "poisoned"):
        check(CudaCodec(TorchStream(card)), codec_of(bits, 0.3), name, dims, torch.bfloat16, "cuda")


@pytest.mark.parametrize("kind", ELEMENT_KINDS)
def test_self_test_passes(card: CudaDevice, kind: str) -> None:
    assert check_int4(card, kind) is None


@pytest.mark.parametrize("shape", [BlockShape(32, 8, 16, 128, 128), BlockShape(61, 1, 32, 576, 0)])
def test_a_batch_of_a_real_size_repeats_exactly(card: CudaDevice, shape: BlockShape) -> None:
    """Thousands of thread blocks at once: where a race would show."""
    codec = get_codec("int4")
    keys, values = random_block(shape, torch.bfloat16, 1, (8,))
    payload, accepted = reference(codec_of((4, 4)), keys, values)
    on_card = keys.cuda(), None if values is None else values.cuda()
    for _ in range(20):
        out = torch.zeros_like(payload, device="cuda")
        assert codec.encode_batch(*on_card, out).tolist() == accepted.tolist()
        assert torch.equal(out.cpu(), payload)
    got = torch.empty_like(on_card[0]), None if values is None else torch.empty_like(on_card[0])
    codec.decode_into(payload.cuda(), *got)
    expected = decoded(codec_of((4, 4)), payload, (keys, values))
    for part, wanted in zip(got, expected, strict=True):
        assert bits_equal(None if part is None else part.cpu(), wanted)


def test_the_codec_takes_the_kernels_and_keeps_its_errors(card: CudaDevice) -> None:
    keys = torch.randn(2, 3, 16, 64, device="cuda")
    assert cuda_codec_for(keys) is not None
    keys[1, 2, 3, 4] = torch.nan
    with pytest.raises(BlockTooLossy) as caught:
        get_codec("int4").encode(keys, keys)
    assert {(error.layer, error.kv_head) for error in caught.value.errors} == {(1, 2)}


def test_work_runs_in_order_on_torchs_current_stream(card: CudaDevice) -> None:
    codec = codec_of((4, 4))
    keys = torch.randn(4, 1, 1, 16, 128)
    payload, _ = reference(codec, keys, keys)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        late = torch.zeros_like(keys, device="cuda")
        torch.cuda._sleep(100_000_000)
        late.copy_(keys.cuda())
        out = torch.zeros_like(payload, device="cuda")
        assert codec.encode_batch(late, late, out).all()
        del late
    stream.synchronize()
    assert torch.equal(out.cpu(), payload)
