"""The second stage of frames (zstd) over the KV of a real model: what it saves, what it costs, when it pays.

Blocks of 16 tokens of all layers, after the first one, of one text. Beside a memmove of the same raw bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.rows import Options, Row, Stopwatch, compared, interleaved
from kvstore.compression import Packer, read_staged
from kvstore.copy_key import CopyKey
from kvstore.frame.parsing import FrameSpec
from kvstore.tier import ByteRow

BLOCK_TOKENS = 16
_CONTEXT_TOKENS, _QUICK_TOKENS = 1_024, 128
_LEVEL = 1
_NOTE = (
    f"zstd level {_LEVEL}, header and checksum included, CPU time of one thread; blocks of 16 tokens, all layers of "
    "SmolLM2-135M, over real text. link_below: the speed of a link below which packing, sending and unpacking takes "
    "less time than sending plain."
)


def rows(options: Options) -> Iterator[Row]:
    """Rows of raw bf16 blocks, of the same packed without splitting their bytes, and of INT4 blocks."""
    raw, int4 = _blocks(options)
    yield from _rows_of("raw_bf16", raw, "raw", "bfloat16", options)
    yield from _rows_of("raw_bf16_not_split", raw, "raw", "bytes", options)
    yield from _rows_of("int4", int4, "int4", "bfloat16", options)


def _blocks(options: Options) -> tuple[list[ByteRow], list[ByteRow]]:
    import torch
    from transformers import AutoTokenizer

    from benchmarks.decoding.recording import recorded
    from benchmarks.quality import texts
    from engine_adapter.model_source import SMOLLM2, load_model, packaged_model_dir
    from quant import get_codec

    loaded = load_model(SMOLLM2, torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(packaged_model_dir(), local_files_only=True)
    count = _QUICK_TOKENS if options.quick else _CONTEXT_TOKENS
    (window,) = texts.windows(texts.tokenizer_of(tokenizer), 1, count, first_token=tokenizer.bos_token_id)
    record = recorded(loaded.model, window[0].tolist(), count)
    keys, values = torch.stack(list(record.keys)), torch.stack(list(record.values))  # [layers, heads, tokens, dim]
    raw, int4, codec = [], [], get_codec("int4")
    for start in range(BLOCK_TOKENS, count, BLOCK_TOKENS):
        key, value = (one[:, :, start : start + BLOCK_TOKENS].contiguous() for one in (keys, values))
        both = torch.stack([key, value], dim=2).contiguous()  # [layers, heads, (K, V), tokens, dim]
        raw.append(both.view(torch.uint8).reshape(-1).numpy().copy())
        int4.append(np.frombuffer(codec.encode(key, value), np.uint8).copy())
    return raw, int4


def _rows_of(form: str, blocks: Sequence[ByteRow], codec: str, dtype: str, options: Options) -> Iterator[Row]:
    key = CopyKey(bytes(32), 0, bytes(32), codec, True, (0, 3), (0, 30))
    spec = FrameSpec(key, BLOCK_TOKENS, 64, 64, dtype, blocks[0].nbytes)
    packer, out = Packer(_LEVEL, None), np.empty(blocks[0].nbytes, np.uint8)
    total = sum(block.nbytes for block in blocks)
    frames = [packer.pack(spec, [block]) for block in blocks]
    packed = [frame for frame in frames if frame is not None]
    fraction = sum(block.nbytes if frame is None else len(frame) for block, frame in zip(blocks, frames, strict=True))

    def speed(work: Callable[[Any], object], items: Sequence[Any]) -> Callable[[int], float]:
        def run(_: int) -> float:
            watch = Stopwatch(time.thread_time)
            with watch:
                for item in items:
                    work(item)
            return len(items) * blocks[0].nbytes / watch.seconds / 1e9

        return run

    def unpack(frame: bytes) -> None:
        assert read_staged(frame, spec, [out], None) is None

    plain = speed(lambda block: np.copyto(out, block), blocks)
    yield compared("packing", f"fraction_{form}", "of its bytes", [fraction / total], better="smaller", note=_NOTE)
    pack, memmove = interleaved(speed(lambda block: packer.pack(spec, [block]), blocks), plain, options.rounds)
    yield _beside(f"pack_{form}", pack, memmove)
    if packed:
        back, memmove = interleaved(speed(unpack, packed), plain, options.rounds)
        yield _beside(f"unpack_{form}", back, memmove)
        saved = 1 - fraction / total
        limits = [saved / (1 / one + 1 / other) for one, other in zip(pack, back, strict=True)]
        yield compared("packing", f"link_below_{form}", "GB/s", limits, better="larger", note=_NOTE)


def _beside(case: str, ours: Sequence[float], memmove: Sequence[float]) -> Row:
    return compared("packing", case, "GB/s", ours, better="larger", baseline="memmove", theirs=memmove, note=_NOTE)
