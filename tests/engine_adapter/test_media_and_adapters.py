"""Two images behind the same placeholder tokens never share KV, the same image does; adapters likewise.

Through generate, the decode loop and the interface that one's own loop uses, over a tiny LLaVA with random weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from allocator import KVGeometry, UsageError
from engine_adapter import DecodeLoop, EmbeddedMedia, HFRunner, Request, StoreAdapter, digest_of
from kvstore import Identity, KVStore, KVStoreConfig
from kvstore.identity import Adapter, Media
from tests.engine_adapter.generate_kit import generate, opened, random_ids
from tests.engine_adapter.paged_kit import reference_tokens, tiny_config, tiny_model

IMAGE_TOKEN = 96
IMAGE_TOKENS = 16
BEFORE, AFTER, OTHER = (random_ids(count, IMAGE_TOKEN) for count in (21, 26, 9))
PROMPT = [*BEFORE, *[IMAGE_TOKEN] * IMAGE_TOKENS, *AFTER]
QUESTIONS = {"one": PROMPT, "two": [*PROMPT[:-9], *OTHER], "near": [*PROMPT[:40], *OTHER]}
NEW_TOKENS = 8
IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def llava() -> Any:
    import transformers as hf

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = hf.CLIPVisionConfig(**sizes, image_size=16, patch_size=4, initializer_range=0.5)
    config = hf.LlavaConfig(vision_config=vision, text_config=tiny_config("llama"), image_token_id=IMAGE_TOKEN)
    torch.manual_seed(0)
    model = hf.LlavaForConditionalGeneration(config).float().eval()
    with torch.no_grad():
        for parameter in model.model.multi_modal_projector.parameters():
            parameter.mul_(20)
        model.lm_head.weight[IMAGE_TOKEN] = 0  # it is never put out
    return model


@pytest.fixture(scope="module")
def expected(llava: Any) -> dict[tuple[int, str], list[int]]:
    """By image and question, of the model alone."""
    found = {(image, name): answer(llava, ids, image) for image in (0, 1) for name, ids in QUESTIONS.items()}
    assert len({tuple(tokens) for tokens in found.values()}) == 6, "images and questions that change nothing"
    return found


def answer(model: Any, ids: list[int], image: int, cache: Any = None, **arguments: Any) -> list[int]:
    arguments = {"pixel_values": IMAGES[image : image + 1], "max_new_tokens": NEW_TOKENS, **arguments}
    return generate(model, torch.tensor([ids]), cache, min_new_tokens=NEW_TOKENS, **arguments)[0]


def named(image: int) -> Media:
    return Media(digest_of(IMAGES[image]), len(BEFORE), IMAGE_TOKENS)


@pytest.mark.parametrize("paged", [False, True], ids=["own", "paged"])
def test_generate_reuses_an_image_and_never_another(
    llava: Any, expected: dict[tuple[int, str], list[int]], paged: bool
) -> None:
    reused = []
    beams = answer(llava, PROMPT, 1, num_beams=3)
    with opened(llava, paged=paged) as kv:
        for image, name in ((0, "one"), (1, "one"), (0, "one"), (0, "two"), (1, "near")):
            cache = kv.cache(media=[[named(image)]])
            assert answer(llava, QUESTIONS[name], image, cache) == expected[image, name], (image, name)
            reused.append(cache.reused_tokens)
            cache.finish()
        # behind the image, or only what lies before it: the last one shares half of its image's blocks
        assert reused == [0, 16, 48, 48, len(BEFORE)]
        cache = kv.cache(media=[[named(1)]])
        assert answer(llava, PROMPT, 1, cache, num_beams=3) == beams
        assert cache.reused_tokens == 3 * 48


def test_generate_refuses_media_without_names_and_names_without_media(llava: Any) -> None:
    with opened(llava) as kv:
        for cache, message in (
            (kv.cache(), r"brings \w+, and the cache was told of none"),
            (kv.cache(media=[[named(0)]]), "brings no media, and the cache was told of some"),
            (kv.cache(), "placeholder of media, but no media covers it"),
        ):
            given = {"pixel_values": IMAGES[:1]} if "of none" in message else {}
            with pytest.raises(UsageError, match=message):
                generate(llava, torch.tensor([PROMPT]), cache, **given)
        with pytest.raises(UsageError, match="media of 2 prompts for a batch of 1"):
            answer(llava, PROMPT, 0, kv.cache(media=[[named(0)], [named(1)]]))


@pytest.fixture
def served(llava: Any) -> Iterator[DecodeLoop]:
    with loop_over(HFRunner(llava), placeholder_ids=[IMAGE_TOKEN]) as loop:
        yield loop


@contextmanager
def loop_over(runner: HFRunner, **arguments: Any) -> Iterator[DecodeLoop]:
    identity = Identity(model="tiny", weights="0" * 64, geometry=runner.geometry)
    config = KVStoreConfig(device_bytes="8 MiB", codec="raw", io_threads="inline")
    with KVStore(runner.geometry, identity, config, **arguments) as store:
        runner.attach(store.slab, store.cold_codec)  # type: ignore[arg-type]
        yield DecodeLoop(runner, store, step_tokens=19)  # an image comes in pieces
        store.check_invariants()
    runner.release()


def features(model: Any, image: int) -> EmbeddedMedia:
    with torch.inference_mode():
        found = model.get_image_features(pixel_values=IMAGES[image : image + 1]).pooler_output[0]
    return EmbeddedMedia(digest_of(IMAGES[image]), len(BEFORE), found)


def test_the_loop_reuses_an_image_and_never_another(
    llava: Any, served: DecodeLoop, expected: dict[tuple[int, str], list[int]]
) -> None:
    for _ in range(2):  # both at once, then again
        for image in (0, 1):
            served.submit(Request(f"image {image}", PROMPT, NEW_TOKENS, media=[features(llava, image)]))
        results = served.run()
        for image in (0, 1):
            assert list(results[f"image {image}"].token_ids) == expected[image, "one"]
    assert [sum(results[f"image {image}"].reused_tokens.values()) for image in (0, 1)] == [48, 48]
    served.submit(Request("bare", PROMPT, NEW_TOKENS))
    assert "placeholder" in str(served.run()["bare"].error)


def test_one_name_for_two_images_would_show(
    llava: Any, served: DecodeLoop, expected: dict[tuple[int, str], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Media, "record", lambda self: bytes(32))
    for image in (0, 1):
        served.submit(Request("one", PROMPT, NEW_TOKENS, media=[features(llava, image)]))
        result = served.run()["one"]
    assert sum(result.reused_tokens.values()) == 48
    assert list(result.token_ids) != expected[1, "one"]


@pytest.mark.parametrize(
    "media",
    [
        [Media(bytes(32), 0, 4)],
        [EmbeddedMedia(bytes(32), 60, torch.zeros(8, 32))],
        [EmbeddedMedia(bytes(32), 4, torch.zeros(4, 32)), EmbeddedMedia(bytes(32), 6, torch.zeros(4, 32))],
    ],
)
def test_media_at_no_place_of_the_prompt_are_refused(served: DecodeLoop, media: list[Any]) -> None:
    with pytest.raises(UsageError, match="media must be EmbeddedMedia in the order"):
        served.submit(Request("one", PROMPT, NEW_TOKENS, media=media))


def test_features_of_another_width_and_models_that_see_both_ways_are_refused(llava: Any, served: DecodeLoop) -> None:
    narrow = EmbeddedMedia(bytes(32), len(BEFORE), torch.zeros(IMAGE_TOKENS, 8))
    served.submit(Request("one", PROMPT, NEW_TOKENS, media=[narrow]))
    assert "features of 8 values" in str(served.run()["one"].error)
    llava.config.text_config.rope_parameters["mrope_section"] = [2, 3, 3]
    served.submit(Request("two", PROMPT, NEW_TOKENS, media=[features(llava, 0)]))
    error = served.run()["two"].error
    del llava.config.text_config.rope_parameters["mrope_section"]
    assert "two dimensions" in str(error)


def test_own_loop_names_media_adapters_and_tenants() -> None:
    """The calls of examples/own_loop.py, with what a prompt is beside its tokens."""
    kv = KVGeometry.uniform(layers=2, kv_heads=2, head_dim=8, dtype="float32")
    own = Identity(model="m", weights="w", geometry=kv)
    one, other = Media(b"1" * 32, 21, 16), Media(b"2" * 32, 21, 16)
    lora = Identity(model="m", weights="w", geometry=kv, adapter=("lora", 1, "x"))
    other_lora = Identity(model="m", weights="w", geometry=kv, adapter=("lora", 1, "y"))
    with KVStore(kv, own, KVStoreConfig(device_bytes="1 MiB"), device="absent", placeholder_ids=[IMAGE_TOKEN]) as store:
        adapter = StoreAdapter(store)

        def ready(**names: Any) -> int:
            given = adapter.reserve("one", PROMPT, **names)
            adapter.allocate("one", len(PROMPT) - given.ready_tokens)
            adapter.commit("one", PROMPT[given.ready_tokens :])
            adapter.finish("one")
            return given.ready_tokens

        assert [ready(media=[one]), ready(media=[other]), ready(media=[one])] == [0, 16, 48]
        assert [ready(media=[one], identity=lora), ready(media=[one], identity=other_lora)] == [0, 0]
        assert ready(media=[one], identity=lora) == 48


class Switched:
    """A model with two adapters that change its keys and values, and how to switch to one."""

    def __init__(self) -> None:
        self.model = tiny_model("llama")
        self.used: list[str | bytes | None] = []
        self._layers = [layer.self_attn.v_proj.weight for layer in self.model.model.layers]
        self._plain = [weight.detach().clone() for weight in self._layers]
        draw = torch.Generator().manual_seed(1)
        self._deltas = {
            name: [torch.randn(weight.shape, generator=draw) * 0.3 for weight in self._plain] for name in ("a", "b")
        }

    def to(self, adapter: Adapter | None) -> None:
        self.used.append(None if adapter is None else adapter.name)
        deltas: Any = [0.0] * 4 if adapter is None else self._deltas[str(adapter.name)]
        with torch.no_grad():
            for weight, plain, delta in zip(self._layers, self._plain, deltas, strict=True):
                weight.copy_(plain + delta)


ADAPTERS = (None, ("a", 1, "x"), ("b", 2, "y"))


def test_the_loop_serves_adapters_beside_each_other_and_never_mixes_their_kv() -> None:
    switched = Switched()
    prompt = random_ids(50)
    alone = {}
    for adapter in ADAPTERS:
        switched.to(Adapter.of(adapter))
        alone[adapter] = reference_tokens(switched.model, prompt, NEW_TOKENS)
    assert len({tuple(tokens) for tokens in alone.values()}) == 3
    with loop_over(HFRunner(switched.model, use_adapter=switched.to)) as loop:
        for turn in range(2):
            switched.used.clear()
            for adapter in ADAPTERS:
                loop.submit(Request(f"by {adapter}", prompt, NEW_TOKENS, adapter=adapter))
            results = loop.run()
            for adapter in ADAPTERS:
                found = results[f"by {adapter}"]
                assert list(found.token_ids) == alone[adapter]
                assert sum(found.reused_tokens.values()) == (48 if turn else 0)
            assert (None, "a", "b") in zip(switched.used, switched.used[1:], switched.used[2:], strict=False)


def test_a_runner_that_cannot_switch_says_so() -> None:
    with loop_over(HFRunner(tiny_model("llama"))) as loop:
        with pytest.raises(UsageError, match="use_adapter"):
            loop.submit(Request("one", random_ids(20), 2, adapter="a"))
        with pytest.raises(UsageError, match="adapter"):
            loop.submit(Request("two", random_ids(20), 2, adapter=3.5))


def test_an_empty_tenant_is_a_tenant() -> None:
    model = tiny_model("llama")
    ids = torch.tensor([random_ids(40)])
    with opened(model, tenant="t") as kv:
        generate(model, ids, kv.cache())
        for tenant, reused in ((None, 32), ("", 0), ("t", 32)):
            cache = kv.cache(tenant=tenant)
            generate(model, ids, cache)
            assert cache.reused_tokens == reused, tenant
            cache.finish()
