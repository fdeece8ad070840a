"""Who a block is, from vLLM's own requests: media, adapters, salts, sessions. No engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from engine_adapter.vllm_connector.book import Book, Found
from tests.engine_adapter.vllm_kit import BLOCK, identity

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]
TOKENS = list(range(3 * BLOCK + 1))


class Asked:
    """Notes what is asked for."""

    def __init__(self) -> None:
        self.hashes: list[bytes] = []

    def find(self, epoch: int, root: bytes, hashes: Sequence[bytes], local_blocks: int) -> Found:
        self.hashes = list(hashes)
        return Found(0, False, epoch)

    def note(self, *_: object) -> None:
        raise AssertionError("nobody is told")


def names(**given: Any) -> list[bytes]:
    """The names of a request's three blocks; none where it shares nothing."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    asked = Asked()
    made = Book(identity(), BLOCK, asked, deadline_seconds=1.0)
    request = Request("r", TOKENS, SamplingParams(max_tokens=5), None, **given)
    assert made.matched_tokens(request, 0) == 0
    orders = made.step([("r", len(TOKENS))], lambda name: [[1, 2, 3, 4]])
    stored = [one for order in orders.saves for one in order.hashes]
    assert stored == asked.hashes
    return stored


def image(identifier: str, offset: int, length: int) -> Any:
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    return MultiModalFeatureSpec(
        data=None, modality="image", identifier=identifier, mm_position=PlaceholderRange(offset=offset, length=length)
    )


def adapter(folder: Path, weights: bytes, rank: int = 8) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank}))


def lora(name: str, number: int, path: Path | str) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, number, str(path))


def test_an_image_is_part_of_its_block_and_of_all_behind_it() -> None:
    plain, seen = names(), names(mm_features=[image("one", BLOCK + 1, 2)])
    assert len(plain) == 3
    assert seen[0] == plain[0]
    assert len({*plain[1:], *seen[1:]}) == 4
    assert names(mm_features=[image("one", BLOCK + 1, 2)]) == seen
    for other in (image("two", BLOCK + 1, 2), image("one", BLOCK, 2)):
        assert names(mm_features=[other])[1] != seen[1]


def test_the_second_of_two_images_counts_too() -> None:
    first = [image("one", 0, 2), image("two", 2 * BLOCK, 2)]
    other = [image("one", 0, 2), image("three", 2 * BLOCK, 2)]
    assert names(mm_features=first)[:2] == names(mm_features=other)[:2]
    assert names(mm_features=first)[2] != names(mm_features=other)[2]
    assert names(mm_features=first[::-1]) == names(mm_features=first)


def test_an_adapter_is_its_weights_its_name_and_its_number(tmp_path: Path) -> None:
    adapter(tmp_path / "a", b"weights")
    adapter(tmp_path / "b", b"others!")
    adapter(tmp_path / "c", b"weights", rank=16)
    kinds = [
        names(),
        names(lora_request=lora("x", 1, tmp_path / "a")),
        names(lora_request=lora("y", 1, tmp_path / "a")),
        names(lora_request=lora("x", 2, tmp_path / "a")),
        names(lora_request=lora("x", 1, tmp_path / "b")),
        names(lora_request=lora("x", 1, tmp_path / "c")),
        names(cache_salt="x"),
    ]
    assert len({one[0] for one in kinds}) == len(kinds)
    assert names(lora_request=lora("x", 1, tmp_path / "a")) == kinds[1]
    adapter(tmp_path / "a", b"trained")  # in place, of the same length
    assert names(lora_request=lora("x", 1, tmp_path / "a"))[0] != kinds[1][0]


def test_what_no_token_names_is_not_shared(tmp_path: Path) -> None:
    import torch

    assert names(lora_request=lora("x", 1, tmp_path / "nowhere")) == []
    assert names(prompt_embeds=torch.zeros(len(TOKENS), 4)) == []
    assert names(resumable=True) == []  # a session takes back the token that it sampled last
