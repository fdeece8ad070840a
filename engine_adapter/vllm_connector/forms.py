"""Blocks of vLLM in the forms that tiers keep: raw, or encoded by a codec; and a rank's part of other ranks' copies.

No state; any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from allocator import FULL
from quant import BlockShape

if TYPE_CHECKING:
    from allocator import KVGeometry
    from engine_adapter.vllm_connector.shards import Heads
    from kvstore.tier import ByteRow
    from quant import BlockCodec


class Forms:
    """own: per cache group the heads that this rank has. codec: of cold copies, None where all are raw.

    A raw block has the bytes [layers, heads, (K, V), block_tokens, dim], in the geometry's dtype.
    """

    def __init__(self, geometry: KVGeometry, codec: BlockCodec | None, own: Sequence[Heads]) -> None:
        self.codec = codec
        self._geometry = geometry
        self._dtype: torch.dtype = getattr(torch, geometry.dtype)
        self.own = tuple(own)

    @property
    def cold(self) -> tuple[str, bytes] | None:
        return None if self.codec is None else (self.codec.name, self.codec.parameters())

    def payload_bytes(self, group: int, form: int, heads: Heads) -> int:
        """Of one copy of these heads."""
        if form == FULL or self.codec is None:
            return self.raw_bytes(group, heads)
        return self.codec.encoded_bytes(self._shape(group, heads), self._dtype)

    def raw_bytes(self, group: int, heads: Heads) -> int:
        return self._shape(group, heads).element_count * self._geometry.dtype_bytes

    def encode(self, group: int, raw: ByteRow, count: int, target: ByteRow) -> list[bool]:
        """`count` raw blocks of this rank's heads into payloads; False where a block is too lossy and stays raw."""
        assert self.codec is not None
        keys, values = self._tensors(group, self.own[group], torch.from_numpy(raw), count)
        out = torch.from_numpy(target).reshape(count, -1)
        return [bool(one) for one in self.codec.encode_batch(keys, values, out).tolist()]

    def assemble(
        self, group: int, form: int, ranges: Sequence[Heads], payloads: torch.Tensor, count: int, target: torch.Tensor
    ) -> None:
        """`count` raw blocks of this rank's heads into `target`, on the device of both (uint8 [bytes]).

        payloads: of the first range all copies one behind the other, then of the next.
        """
        start, stop = self.own[group]
        mine = self._tensors(group, self.own[group], target, count)
        at = 0
        for first, last in ranges:
            size = count * self.payload_bytes(group, form, (first, last))
            piece = payloads[at : at + size]
            at += size
            if (first, last) == (start, stop):
                self._decode(group, form, (first, last), piece, count, mine)
                continue
            whole = torch.empty(count * self.raw_bytes(group, (first, last)), dtype=torch.uint8, device=target.device)
            part = self._tensors(group, (first, last), whole, count)
            self._decode(group, form, (first, last), piece, count, part)
            low, high = max(start, first), min(stop, last)
            for here, there in zip(mine, part, strict=True):
                if here is not None and there is not None:
                    here[:, :, low - start : high - start] = there[:, :, low - first : high - first]

    def read_places(
        self, group: int, form: int, memory: torch.Tensor, places: Sequence[int], target: torch.Tensor
    ) -> None:
        """Copies of this rank's heads at byte offsets of `memory` into raw blocks, one behind the other in `target`.

        memory, target: uint8 [bytes] on one device.
        """
        size = self.payload_bytes(group, form, self.own[group])
        payloads = [memory[place : place + size] for place in places]
        if form == FULL or self.codec is None:
            for index, payload in enumerate(payloads):
                target[index * size : (index + 1) * size].copy_(payload)
            return
        tensors = self._tensors(group, self.own[group], target, len(places))
        in_place = getattr(self.codec, "decode_slots", None)
        if in_place is None or not in_place(memory, torch.tensor(places, dtype=torch.int64), *tensors):
            self.codec.decode_into(torch.stack(payloads), *tensors)

    def _decode(
        self,
        group: int,
        form: int,
        heads: Heads,
        payloads: torch.Tensor,
        count: int,
        target: tuple[torch.Tensor, torch.Tensor | None],
    ) -> None:
        if form != FULL and self.codec is not None:
            self.codec.decode_into(payloads.reshape(count, -1), *target)
            return
        for here, there in zip(target, self._tensors(group, heads, payloads, count), strict=True):
            if here is not None and there is not None:
                here.copy_(there)

    def _shape(self, group: int, heads: Heads) -> BlockShape:
        one = self._geometry.groups[group]
        tokens = self._geometry.block_tokens
        return BlockShape(len(one.layers), heads[1] - heads[0], tokens, one.key_dim, one.value_dim)

    def _tensors(
        self, group: int, heads: Heads, row: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Views of raw blocks: K [count, layers, heads, block_tokens, key_dim], V alike, None of latents."""
        shape = self._shape(group, heads)
        tokens, split = shape.block_tokens, shape.block_tokens * shape.key_dim
        words = row[: count * self.raw_bytes(group, heads)].view(self._dtype)
        words = words.reshape(count, shape.layers, shape.kv_heads, -1)
        keys = words[..., :split].unflatten(-1, (tokens, shape.key_dim))
        if shape.is_latent:
            return keys, None
        return keys, words[..., split:].unflatten(-1, (tokens, shape.value_dim))
