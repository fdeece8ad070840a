"""The codec contract as a test class, so that whoever writes a codec can prove it. Imports torch, not pytest.

Subclass it in a test module and say which codec it is about:

    class TestMyCodec(CodecContract):
        def make_codec(self) -> BlockCodec:
            return MyCodec()

Each test_* method is one promise of `BlockCodec`. Not thread-safe; a test runner calls it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import torch

from quant.codec import BlockCodec, BlockShape, BlockTooLossy, CodecError, codec_from_parameters
from quant.tensor_checks import resolve_dtype


def raised(error: type[Exception], call: Callable[[], object]) -> Exception:
    """The exception that `call` raises; fails if it raises none of that type."""
    try:
        call()
    except error as caught:
        return caught
    raise AssertionError(f"expected {error.__name__}")


def random_block(
    shape: BlockShape, dtype: torch.dtype, seed: int, batch: tuple[int, ...] = ()
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gaussian keys and values with a different offset and size a channel, [*batch, L, H, T, dim]."""
    draw = torch.Generator().manual_seed(seed)
    tensors = []
    for dims in (shape.keys_shape, shape.values_shape):
        if not dims[-1]:
            continue
        noise = torch.randn((*batch, *dims), generator=draw)
        spread = torch.randn((dims[-1],), generator=draw).exp()
        offset = torch.randn((dims[-1],), generator=draw) * 3
        tensors.append((noise * spread + offset).to(dtype))
    return tensors[0], tensors[1] if len(tensors) > 1 else None


def bits_equal(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    """Same shape, dtype and bytes (NaN equals itself, -0 differs from 0)."""
    if left is None or right is None:
        return left is right
    same = left.dtype == right.dtype and left.shape == right.shape
    return same and torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


class CodecContract:
    """What every block codec keeps. Override make_codec; override shapes, dtypes or largest_error where they differ."""

    def make_codec(self) -> BlockCodec:
        """The codec under test."""
        raise NotImplementedError

    def shapes(self) -> tuple[BlockShape, ...]:
        """Shapes that the codec must take."""
        return (
            BlockShape(2, 3, 16, 64, 64),
            BlockShape(1, 1, 32, 80, 96),
            BlockShape(2, 1, 16, 192, 128),
            BlockShape(3, 1, 16, 576, 0),
        )

    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes that the codec must take."""
        return (torch.bfloat16, torch.float16, torch.float32)

    def largest_error(self) -> float:
        """Largest relative RMS error of random blocks; 0 for an exact codec."""
        return 0.0 if self.make_codec().exact else 0.15

    def _cases(self) -> list[tuple[BlockShape, torch.dtype]]:
        return [(shape, dtype) for shape in self.shapes() for dtype in self.dtypes()]

    def _encoded(self, shape: BlockShape, dtype: torch.dtype, count: int) -> torch.Tensor:
        codec = self.make_codec()
        keys, values = random_block(shape, dtype, 1, (count,))
        out = torch.empty((count, codec.encoded_bytes(shape, dtype)), dtype=torch.uint8)
        assert codec.encode_batch(keys, values, out).tolist() == [True] * count
        return out

    # ---- sizes and round trips

    def test_is_a_block_codec(self) -> None:
        codec = self.make_codec()
        assert isinstance(codec, BlockCodec)
        assert codec.name
        assert isinstance(codec.parameters(), bytes)

    def test_payload_has_the_promised_length(self) -> None:
        codec = self.make_codec()
        for shape, dtype in self._cases():
            keys, values = random_block(shape, dtype, 0)
            assert len(codec.encode(keys, values)) == codec.encoded_bytes(shape, dtype)
            assert codec.encoded_bytes(shape, str(dtype).removeprefix("torch.")) == codec.encoded_bytes(shape, dtype)

    def test_round_trip(self) -> None:
        codec = self.make_codec()
        for shape, dtype in self._cases():
            keys, values = random_block(shape, dtype, 2)
            got = codec.decode(codec.encode(keys, values), shape, dtype)
            for original, decoded in zip((keys, values), got, strict=True):
                if codec.exact:
                    assert bits_equal(original, decoded)
                    continue
                assert (original is None) == (decoded is None)
                if original is None or decoded is None:
                    continue
                assert decoded.dtype == dtype
                assert decoded.shape == original.shape
                error = (decoded.double() - original.double()).norm() / original.double().norm()
                assert float(error) <= self.largest_error(), (shape, dtype, float(error))

    def test_parameters_rebuild_the_codec(self) -> None:
        codec = self.make_codec()
        again = codec_from_parameters(codec.name, codec.parameters())
        assert again.parameters() == codec.parameters()
        for shape, dtype in self._cases():
            assert again.encoded_bytes(shape, dtype) == codec.encoded_bytes(shape, dtype)
        raised(CodecError, lambda: codec_from_parameters(codec.name, codec.parameters() + b"\x07"))

    # ---- one value, one payload

    def test_payload_depends_on_the_values_alone(self) -> None:
        """Batch size, batch dims, strides and threads leave no trace."""
        codec = self.make_codec()
        for shape, dtype in self._cases():
            keys, values = random_block(shape, dtype, 3, (2, 3))
            flat = self._encode_into(codec, keys, values, shape)
            for index in ((0, 0), (1, 2)):
                one = codec.encode(keys[index], None if values is None else values[index])
                assert flat[index].numpy().tobytes() == one
            wide = [None if t is None else torch.cat((t, t), -1)[..., : t.shape[-1]] for t in (keys, values)]
            assert wide[0] is not None
            assert torch.equal(self._encode_into(codec, wide[0], wide[1], shape), flat)
            threads = torch.get_num_threads()
            try:
                torch.set_num_threads(3)
                assert torch.equal(self._encode_into(codec, keys, values, shape), flat)
            finally:
                torch.set_num_threads(threads)

    def _encode_into(
        self, codec: BlockCodec, keys: torch.Tensor, values: torch.Tensor | None, shape: BlockShape
    ) -> torch.Tensor:
        size = codec.encoded_bytes(shape, keys.dtype)
        holder = torch.full((*keys.shape[:-4], size + 64), 0xAB, dtype=torch.uint8)
        codec.encode_into(keys, values, holder[..., :size])
        assert bool((holder[..., size:] == 0xAB).all()), "wrote past the payload"
        return holder[..., :size].clone()

    def test_inputs_are_left_alone(self) -> None:
        codec = self.make_codec()
        for shape, dtype in self._cases():
            keys, values = random_block(shape, dtype, 4, (1,))
            before = keys.clone(), None if values is None else values.clone()
            out = torch.empty((1, codec.encoded_bytes(shape, dtype)), dtype=torch.uint8)
            codec.encode_batch(keys, values, out)
            payload = out.clone()
            codec.decode_into(out, torch.empty_like(keys), None if values is None else torch.empty_like(values))
            assert bits_equal(keys, before[0])
            assert bits_equal(values, before[1])
            assert torch.equal(out, payload)

    def test_decode_into_batches_and_strided_targets(self) -> None:
        codec = self.make_codec()
        for shape, dtype in self._cases():
            payload = self._encoded(shape, dtype, 3)
            slab = torch.zeros(
                (3, shape.layers, shape.kv_heads, shape.block_tokens * (shape.key_dim + shape.value_dim))
            )
            slab = slab.to(dtype)
            cut = shape.block_tokens * shape.key_dim
            keys = slab[..., :cut].view(3, *shape.keys_shape)
            values = slab[..., cut:].view(3, *shape.values_shape) if shape.value_dim else None
            codec.decode_into(payload, keys, values)
            for block in range(3):
                expected = codec.decode(payload[block].numpy().tobytes(), shape, dtype)
                assert bits_equal(keys[block], expected[0])
                assert bits_equal(None if values is None else values[block], expected[1])

    def test_batch_dims_need_not_be_contiguous(self) -> None:
        codec = self.make_codec()
        for shape, dtype in self._cases()[:2]:
            keys, values = random_block(shape, dtype, 10, (2, 3))
            size = codec.encoded_bytes(shape, dtype)
            out = torch.zeros((3, 2, size), dtype=torch.uint8).transpose(0, 1)
            codec.encode_into(keys, values, out)
            got = [None if t is None else torch.zeros_like(t.transpose(0, 1)).transpose(0, 1) for t in (keys, values)]
            assert got[0] is not None
            codec.decode_into(out, got[0], got[1])
            one = codec.decode(out[1, 2], shape, dtype)
            assert bits_equal(got[0][1, 2], one[0])
            assert bits_equal(None if got[1] is None else got[1][1, 2], one[1])

    def test_empty_batch(self) -> None:
        codec = self.make_codec()
        shape, dtype = self._cases()[0]
        keys, values = random_block(shape, dtype, 5, (0,))
        out = torch.empty((0, codec.encoded_bytes(shape, dtype)), dtype=torch.uint8)
        assert codec.encode_batch(keys, values, out).shape == (0,)
        codec.decode_into(out, keys, values)
        assert codec.validate(out, shape, dtype).shape == (0,)

    def test_threads_do_not_share_work_buffers(self) -> None:
        codec = self.make_codec()
        shape, dtype = self._cases()[0]
        blocks = [random_block(shape, dtype, seed) for seed in range(4)]
        expected = [codec.encode(*block) for block in blocks]
        found: list[bool] = []

        def work(index: int) -> None:
            found.append(all(codec.encode(*blocks[index]) == expected[index] for _ in range(10)))

        workers = [threading.Thread(target=work, args=(index,)) for index in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert found == [True] * 4

    # ---- what must be refused

    def test_refused_blocks_are_masked_and_leave_neighbours_alone(self) -> None:
        codec = self.make_codec()
        if codec.exact:
            return
        for shape, dtype in self._cases():
            keys, values = random_block(shape, dtype, 6, (3,))
            clean = torch.empty((3, codec.encoded_bytes(shape, dtype)), dtype=torch.uint8)
            assert codec.encode_batch(keys, values, clean).all()
            for poison in (math.nan, math.inf, -math.inf):
                bad = keys.clone()
                bad[1, -1, -1, 3, 5] = poison
                out = torch.empty_like(clean)
                assert codec.encode_batch(bad, values, out).tolist() == [True, False, True]
                assert torch.equal(out[::2], clean[::2])
                block_values = None if values is None else values[1]
                error = raised(BlockTooLossy, lambda: codec.encode(bad[1], block_values))  # noqa: B023
                assert isinstance(error, BlockTooLossy)
                found = [(e.layer, e.kv_head, e.part) for e in error.errors]
                assert found == [(shape.layers - 1, shape.kv_heads - 1, "keys")]

    def test_exact_codecs_carry_anything(self) -> None:
        codec = self.make_codec()
        if not codec.exact:
            return
        for shape, dtype in self._cases():
            keys, values = random_block(shape, dtype, 7)
            if dtype.itemsize > 1:
                keys[..., 0] = math.nan
                keys[..., 1] = math.inf
                keys[..., 2] = -0.0
            got = codec.decode(codec.encode(keys, values), shape, dtype)
            assert bits_equal(got[0], keys)
            assert bits_equal(got[1], values)

    def test_misuse_is_a_codec_error(self) -> None:
        codec = self.make_codec()
        shape, dtype = self._cases()[0]
        keys, values = random_block(shape, dtype, 8)
        assert values is not None
        payload = codec.encode(keys, values)
        size = len(payload)
        calls: list[Callable[[], object]] = [
            lambda: codec.encode(keys[0], values[0]),
            lambda: codec.encode(keys, values[:, :, :8]),
            lambda: codec.encode(keys, values.to(torch.float64)),
            lambda: codec.encode(keys.to(torch.int32), values.to(torch.int32)),
            lambda: codec.encode_into(keys, values, torch.empty(size - 1, dtype=torch.uint8)),
            lambda: codec.encode_into(keys, values, torch.empty(size, dtype=torch.int8)),
            lambda: codec.encode_into(keys, values, torch.empty(size * 2, dtype=torch.uint8)[::2]),
            lambda: codec.decode(payload[:-1], shape, dtype),
            lambda: codec.decode(payload + b"\0", shape, dtype),
            lambda: codec.decode(b"", shape, dtype),
            lambda: codec.decode(payload, BlockShape(shape.layers + 1, *shape.keys_shape[1:], shape.value_dim), dtype),
            lambda: codec.decode(payload, shape, "int4"),
            lambda: codec.decode(payload, shape, torch.int8),
            lambda: codec.decode_into(torch.zeros(size, dtype=torch.int8), keys, values),
            lambda: codec.decode_into(payload, keys, None),
            lambda: codec.encoded_bytes(shape, "float64"),
        ]
        for index, call in enumerate(calls):
            assert str(raised(CodecError, call)), index

    def test_hostile_payloads_decode_or_are_named_invalid(self) -> None:
        codec = self.make_codec()
        for shape, dtype in self._cases():
            size = codec.encoded_bytes(shape, dtype)
            good = self._encoded(shape, dtype, 1)[0]
            draw = torch.Generator().manual_seed(9)
            hostile = [torch.full((size,), byte, dtype=torch.uint8) for byte in (0, 0x7F, 0x80, 0xFF)]
            hostile += [torch.randint(0, 256, (size,), generator=draw, dtype=torch.uint8) for _ in range(3)]
            for payload in (good, *hostile):
                keys, values = codec.decode(payload, shape, dtype)
                valid = bool(codec.validate(payload, shape, dtype))
                finite = all(bool(t.float().isfinite().all()) for t in (keys, values) if t is not None)
                assert finite or not valid or codec.exact
            assert bool(codec.validate(good, shape, dtype))
            assert bool(codec.validate(good.numpy().tobytes(), shape, dtype))
            assert not bool(codec.validate(good[:-1].clone(), shape, dtype))
            assert not bool(codec.validate(b"", shape, dtype))
            assert codec.validate(torch.stack((good, good)), shape, dtype).tolist() == [True, True]

    def test_dtype_names_are_known(self) -> None:
        codec = self.make_codec()
        for dtype in self.dtypes():
            assert resolve_dtype(str(dtype).removeprefix("torch.")) == dtype
        raised(CodecError, lambda: codec.encoded_bytes(self.shapes()[0], "bf16"))
