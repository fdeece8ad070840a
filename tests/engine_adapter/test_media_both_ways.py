"""Models that do more with media than with so many tokens: Gemma 3, whose images see themselves both ways, and Qwen-VL.

Through `generate`, over tiny models with random weights: either the answers are the model's own, or it is refused.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from allocator import ConfigError, UsageError
from engine_adapter import digest_of
from engine_adapter.transformers_cache import arguments
from kvstore.identity import Media
from tests.engine_adapter.generate_kit import NEW_TOKENS, generate, opened, random_ids
from tests.engine_adapter.paged_kit import tiny_config, tiny_model

IMAGE_TOKEN, IMAGE_TOKENS = 96, 16
_DRAW = random.Random(5)
BEFORE, AFTER = ([_DRAW.randrange(1, 94) for _ in range(count)] for count in (21, 26))
PROMPT = [*BEFORE, *[IMAGE_TOKEN] * IMAGE_TOKENS, *AFTER]
IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(3))
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def gemma() -> Any:
    import transformers as hf

    config = hf.Gemma3Config(
        vision_config=hf.SiglipVisionConfig(**SMALL, image_size=16, patch_size=4),
        text_config=tiny_config("gemma3"),
        mm_tokens_per_image=IMAGE_TOKENS, image_token_id=IMAGE_TOKEN, image_token_index=IMAGE_TOKEN,
        boi_token_index=94, eoi_token_index=95, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = hf.Gemma3ForConditionalGeneration(config).float().eval()
    with torch.no_grad():
        for parameter in model.model.multi_modal_projector.parameters():
            parameter.normal_(0.0, 0.5)
        model.lm_head.weight[IMAGE_TOKEN] = 0  # it is never put out
    return model


def answer(model: Any, ids: torch.Tensor, images: list[int], cache: Any = None, **given: Any) -> list[list[int]]:
    types = (ids == IMAGE_TOKEN).long()
    return generate(model, ids, cache, pixel_values=IMAGES[images], token_type_ids=types, **given)


def named(image: int, start: int = len(BEFORE)) -> list[Media]:
    return [Media(digest_of(IMAGES[image]), start, IMAGE_TOKENS)]


@pytest.fixture(scope="module")
def expected(gemma: Any) -> list[list[list[int]]]:
    """By image, of the model alone."""
    found = [answer(gemma, torch.tensor([PROMPT]), [image]) for image in (0, 1)]
    assert found[0] != found[1]
    return found


def test_an_image_that_sees_itself_both_ways_is_reused_and_never_another(
    gemma: Any, expected: list[list[list[int]]]
) -> None:
    reused = []
    with opened(gemma) as kv:
        for image in (0, 1, 0, 1):
            cache = kv.cache(media=[named(image)])
            assert answer(gemma, torch.tensor([PROMPT]), [image], cache) == expected[image], image
            reused.append(cache.reused_tokens)
            cache.finish()
        assert reused == [0, 16, 48, 48]


def test_rows_with_padding_and_images_of_their_own(gemma: Any) -> None:
    batch = torch.tensor([PROMPT, [*[0] * 9, *PROMPT[9:]]])
    media = [named(0), named(1, len(BEFORE) - 9)]
    alone = answer(gemma, batch, [0, 1])
    assert alone[0] != alone[1]
    with opened(gemma) as kv:
        for reused in (0, 48 + 39):
            cache = kv.cache(media=media)
            assert answer(gemma, batch, [0, 1], cache) == alone
            assert cache.reused_tokens == reused
            cache.finish()


def test_planted_token_types_of_the_new_columns_only(
    gemma: Any, expected: list[list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks read them by position in the whole sequence."""
    monkeypatch.setattr(arguments, "_BY_COLUMN", (*arguments._BY_COLUMN, "token_type_ids"))
    found = []
    with opened(gemma) as kv:
        for image in (0, 1):
            cache = kv.cache(media=[named(image)])
            found.append(answer(gemma, torch.tensor([PROMPT]), [image], cache))
            cache.finish()
    assert found[0] == expected[0], "nothing was reused"
    assert found[1] != expected[1]


def test_blocks_in_place_are_refused_since_they_are_read_one_way(gemma: Any) -> None:
    with opened(gemma, paged=True) as kv:
        with pytest.raises(ConfigError, match=r"attends to images in both directions.*such as LLaVA"):
            kv.cache(media=[named(0)])
        text = torch.tensor([PROMPT[:21]])
        assert len(generate(gemma, text, kv.cache())[0]) == NEW_TOKENS


def test_positions_in_two_dimensions_are_refused() -> None:
    model = tiny_model("llama")
    model.config.rope_parameters = {**model.config.rope_parameters, "mrope_section": [2, 1, 1]}
    with opened(model) as kv, pytest.raises(ConfigError, match="counts their positions in two dimensions"):
        kv.cache(media=[named(0)])


def test_token_types_that_no_medium_explains_are_refused(gemma: Any) -> None:
    """GPT-2 adds them to its embeddings: the same token ids would have two KVs under one name."""
    import transformers as hf

    torch.manual_seed(0)
    config = hf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=97, n_positions=128, initializer_range=0.3)
    gpt = hf.GPT2LMHeadModel(config).eval()
    ids = torch.tensor([random_ids(40)])
    assert generate(gpt, ids) != generate(gpt, ids, token_type_ids=torch.full_like(ids, 5))
    with opened(gpt) as kv:
        assert generate(gpt, ids, kv.cache()) == generate(gpt, ids)
        with pytest.raises(UsageError, match="token_type_ids: they would change the KV"):
            generate(gpt, ids, kv.cache(), token_type_ids=torch.zeros_like(ids))
    text = torch.tensor([PROMPT[:21]])
    with opened(gemma) as kv:
        assert generate(gemma, text, kv.cache(), token_type_ids=torch.zeros_like(text)) == generate(gemma, text)
        with pytest.raises(UsageError, match="token_type_ids: they would change the KV"):
            generate(gemma, text, kv.cache(), token_type_ids=torch.ones_like(text))
