"""The main job with all tensors on a device that is not the CPU: the same checks for the stand-in and for a card."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from allocator import COLD, FULL, Slab
from engine_adapter.attention.torch_paged import TorchPagedAttention
from engine_adapter.drafter import PromptLookupDrafter
from engine_adapter.request import Request
from quant import BlockShape, CodecError, get_codec
from quant.testing import bits_equal, random_block
from tests.engine_adapter.paged_kit import reference_tokens, tiny_model
from tests.engine_adapter.triton.attention_cases import Case, TritonScene
from tests.integration.model_kit import ModelKit, differences

CODECS = ("int4", "int8k", "raw")
SHAPES = (BlockShape(2, 2, 16, 64, 64), BlockShape(1, 1, 32, 576, 0), BlockShape(2, 1, 16, 80, 80))
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FAMILIES = ("llama", "mistral", "gemma3")
NEW_TOKENS = 12


def check_codec(device: str, name: str, shape: BlockShape, dtype: torch.dtype) -> None:
    """Bytes and refusals on the device are those of the CPU, bit for bit, and so is what comes back."""
    codec = get_codec(name)
    keys, values = random_block(shape, dtype, 1, (3,))
    keys[1, 0, 0, 3, 5] = torch.nan
    there = keys.to(device), None if values is None else values.to(device)
    payloads = [
        torch.zeros(3, codec.encoded_bytes(shape, dtype), dtype=torch.uint8, device=place) for place in ("cpu", device)
    ]
    accepted = codec.encode_batch(keys, values, payloads[0])
    on_device = codec.encode_batch(*there, payloads[1])
    assert payloads[1].device == torch.device(device)
    assert on_device.tolist() == accepted.tolist()
    good = [at for at, fits in enumerate(accepted.tolist()) if fits]
    assert torch.equal(payloads[1].cpu()[good], payloads[0][good])
    for at in good:
        found = [None if part is None else torch.empty_like(part[at]) for part in there]
        wanted = [None if part is None else torch.empty_like(part[at]) for part in (keys, values)]
        codec.decode_into(payloads[1][at], *found)
        codec.decode_into(payloads[0][at], *wanted)
        for part, expected in zip(found, wanted, strict=True):
            assert bits_equal(None if part is None else part.cpu(), expected)


def check_mixed_devices(device: str) -> None:
    """K on the device and a payload on the CPU: refused with both places named, not computed."""
    codec, shape = get_codec("int4"), SHAPES[0]
    keys, values = random_block(shape, torch.float32, 1, (1,))
    out = torch.zeros(1, codec.encoded_bytes(shape, torch.float32), dtype=torch.uint8)
    with pytest.raises(CodecError, match=f"on {device}, got .* on cpu"):
        codec.encode_batch(keys.to(device), values.to(device), out)


def check_slab(device: str) -> None:
    """Views, copies, zeroing and poison do to the device's bytes what they do to the CPU's."""
    scene = TritonScene([(100, 1)], cold_share=0.5)
    here, layout = scene.slab, scene.slab.layout
    there = Slab(layout, scene.geometry, device)
    assert there.bytes.device == torch.device(device)
    assert there.bytes.shape == (layout.total_bytes,)
    there.bytes.copy_(here.bytes)
    for slab in (here, there):
        slab.copy_slots(FULL, [scene.free_full[0] >> 1], [scene.free_full[1] >> 1])
        slab.copy_slots(COLD, [scene.free_cold[0] >> 1], [scene.free_cold[1] >> 1])
        slab.zero_slots(0, [scene.free_full[2] >> 1])
        slab.zero_tail(0, scene.free_full[3] >> 1, 5)
        slab.poison(FULL, [scene.free_full[0] >> 1])
        slab.cold_view(0)[0, 0, :7] = 3
        slab.values_view(0)[1, 0, 0, 2] = 0.5
    assert torch.equal(there.bytes.cpu(), here.bytes)


def check_attention(device: str, case: Case) -> None:
    """Torch's paged attention over mixed blocks against float64."""
    scene = TritonScene(case.lengths, device=device, **case.scene)
    layer, sinks = 1, case.settings.sinks
    settings = case.settings if sinks is None else replace(case.settings, sinks=sinks.to(device))
    found, expected = scene.attend(TorchPagedAttention(), layer, settings), scene.expected(layer, case.settings)
    assert found.isfinite().all()
    error = float((found - expected).norm() / expected.norm())
    assert error < 3 * case.error, f"relative error {error:.2e}"


def check_loop(device: str, family: str, directory: Path | None = None, backend: str | None = "torch") -> None:
    """In full precision and a memory too small: greedy tokens are `generate`'s, with hits, drafts, branches and a tier.

    Between two rounds of the same prompts others push them out, so that the second finds them in the tier below: the
    host's memory, or a disk in `directory`.
    """
    draw = random.Random(3)
    model = tiny_model(family)
    rounds = [_prompts(draw, f"first{at}", 40, (1, 8, 9, 30)) for at in (0, 1)]
    truth = {name: reference_tokens(model, tokens, NEW_TOKENS) for one in rounds for name, tokens in one.items()}
    kit = ModelKit(
        model.to(device), blocks=16, host_blocks=0 if directory else 60, disk=directory, device=device, backend=backend,
        step_tokens=24, max_batch_sequences=6, drafter=PromptLookupDrafter(draft_tokens=3),
    )  # fmt: skip
    try:
        assert kit.store.slab is not None
        assert kit.store.slab.device == torch.device(device)
        reused: Counter[str] = Counter()
        for prompts in (*rounds, rounds[0]):
            results = kit.run(*(Request(name, tokens, NEW_TOKENS, n=2) for name, tokens in prompts.items()))
            assert not differences(results, {name: truth[name] for name in prompts})
            for result in results.values():
                reused.update(result.reused_tokens)
        assert reused["device"] > 0
        assert reused["disk" if directory else "host"] > 0, reused
    finally:
        kit.close()


def check_cold_loop(device: str, family: str) -> None:
    """With INT4 blocks in the tables the tokens are those of the same run on the CPU: same codes, same attention.

    Blocks are encoded inline, so that the same ones are cold at each step of both.
    """
    found = []
    for place in (device, "cpu"):
        kit = ModelKit(
            tiny_model(family).to(place), blocks=16, codec="int4", io_threads="inline", device=place, backend="torch",
            step_tokens=64, max_batch_sequences=4,
        )  # fmt: skip
        try:
            prompts = _prompts(random.Random(4), "cold", 100, (9,) * 4)
            results = kit.run(*(Request(name, tokens, 24) for name, tokens in prompts.items()))
            assert [result.error for result in results.values()] == [None] * 4
            assert kit.cooled_blocks() > 0
            found.append({name: list(result.completions[0].token_ids) for name, result in results.items()})
        finally:
            kit.close()
    assert found[0] == found[1]


def _prompts(draw: random.Random, name: str, shared_tokens: int, lengths: Sequence[int]) -> dict[str, list[int]]:
    shared = [draw.randrange(1, 97) for _ in range(shared_tokens)]
    own = [[draw.randrange(1, 97) for _ in range(count)] for count in lengths]
    return {f"{name}-{at}": shared + tokens for at, tokens in enumerate(own)}
