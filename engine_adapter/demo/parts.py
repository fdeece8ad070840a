"""The two parts of the demo: exactness in float32, then memory and fidelity in bf16.

Each part loads the model in its precision, runs its settings one after the other and returns reports and promises.
One thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from engine_adapter.demo import promises
from engine_adapter.demo.fidelity import Divergence, Reference, agreement
from engine_adapter.demo.measure import SettingReport, SettingRun, compared, run_setting
from engine_adapter.demo.settings import (
    AMPLE,
    BLOCK_TOKENS,
    EXACT_AMPLE,
    EXACT_TIGHT,
    HOST_SHARE,
    MULTI_TURN,
    TIGHT,
    TIGHT_INT4,
    TIGHT_SHARE,
    Below,
    Setting,
    Sizes,
)
from engine_adapter.demo.workload import (
    ChatFormat,
    Session,
    Workload,
    chat_sessions,
    document_sessions,
    mixed_order,
)
from engine_adapter.model_source import LoadedModel
from engine_adapter.runner import HFRunner

if TYPE_CHECKING:
    from allocator import KVGeometry
    from engine_adapter.demo.serve import Progress

_EXACT_TIGHT_SHARE = 0.5
_INT4_CODEC = "int4"


class Display(Protocol):
    """Where progress goes."""

    def note(self, text: str) -> None: ...

    def begin(self, title: str, total: int) -> Callable[[Progress], None]:
        """A run of `total` requests begins; call the result after each step."""
        ...

    def end(self) -> None: ...


@dataclass(frozen=True, slots=True)
class PartReport:
    settings: tuple[SettingReport, ...]
    promises: tuple[promises.Promise, ...]


@dataclass(frozen=True, slots=True)
class MemoryReport(PartReport):
    multi_turn: SettingReport
    cold_block: promises.ColdBlock
    kv_token_bytes: int
    document_tokens: dict[str, int]
    output_tokens_compared: int


# -- part 1 -----------------------------------------------------------------------------------------------------------


def exact_part(loaded: LoadedModel, sizes: Sizes, display: Display, below: Below) -> PartReport:
    """Part 1: in float32, equal to transformers' generate, with much memory and with little."""
    workload = exact_workload(loaded, sizes)
    display.note(f"reference: transformers' generate, one request after the other ({workload.request_count})")
    expected = generated(loaded, workload)
    runner = HFRunner(loaded.model, block_tokens=BLOCK_TOKENS)
    try:
        geometry = runner.geometry
        ample = _run(Setting(EXACT_AMPLE, geometry.dtype, ample_bytes(geometry, workload), 0, "raw", exact=True),
                     loaded, runner, workload, sizes, display)  # fmt: skip
        peak = ample.report.peak_device_bytes
        device_bytes = max(int(_EXACT_TIGHT_SHARE * peak), least_bytes(geometry, workload))
        little = Setting(EXACT_TIGHT, geometry.dtype, device_bytes, int(HOST_SHARE * peak), "raw", True, below)
        tight = _run(little, loaded, runner, workload, sizes, display)
    finally:
        runner.release()
    reports = [
        compared(run, outputs_equal=dict(run.outputs) == expected, agreement=agreement(run.outputs, expected))
        for run in (ample, tight)
    ]
    return PartReport(tuple(reports), tuple(promises.exact_promises(*reports)))


def exact_workload(loaded: LoadedModel, sizes: Sizes) -> Workload:
    """Questions about shared documents and a chat of two turns, `exact_requests` requests in all."""
    chat_format = ChatFormat(loaded.tokenizer)
    questions = document_sessions(
        chat_format, sizes.exact_requests - 2, sizes.exact_document_tokens, sizes.exact_documents
    )
    chat = chat_sessions(chat_format, 1, 2, sizes.passage_tokens)
    order = mixed_order(questions, sizes.seed)
    return Workload((*chat, *order), sizes.exact_users, sizes.exact_new_tokens, eos_token_ids(loaded))


def generated(loaded: LoadedModel, workload: Workload) -> dict[str, tuple[int, ...]]:
    """What transformers' own greedy generate says to each request, by request id."""
    outputs: dict[str, tuple[int, ...]] = {}
    for session in workload.sessions:
        prompt = list(session.first_prompt)
        for turn in range(session.turn_count):
            if turn:
                prompt = session.next_prompt(turn, prompt, outputs[session.request_id(turn - 1)])
            outputs[session.request_id(turn)] = _generate(loaded.model, prompt, workload)
    return outputs


def _generate(model: Any, prompt: list[int], workload: Workload) -> tuple[int, ...]:
    token_ids = torch.tensor([prompt], device=model.device)
    eos = sorted(workload.eos_token_ids)
    with torch.inference_mode():
        found = model.generate(
            token_ids,
            attention_mask=torch.ones_like(token_ids),
            max_new_tokens=workload.max_new_tokens,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            eos_token_id=eos or None,
            pad_token_id=eos[0] if eos else 0,
        )
    return tuple(found[0, len(prompt) :].tolist())


# -- part 2 -----------------------------------------------------------------------------------------------------------


def memory_part(loaded: LoadedModel, sizes: Sizes, display: Display, below: Below) -> MemoryReport:
    """Part 2: the same requests with ample memory, with a quarter of it, and with that quarter holding INT4 blocks."""
    workload = memory_workload(loaded, sizes)
    runner = HFRunner(loaded.model, block_tokens=BLOCK_TOKENS)
    try:
        geometry = runner.geometry
        reference = Reference()
        roomy = Setting(AMPLE, geometry.dtype, ample_bytes(geometry, workload), 0, "raw")
        ample = _run(roomy, loaded, runner, workload, sizes, display, keep_logits=reference.keep)
        peak = ample.report.peak_device_bytes
        device_bytes = max(int(TIGHT_SHARE * peak), least_bytes(geometry, workload))
        host_bytes = int(HOST_SHARE * peak)
        forced: list[SettingReport] = []
        for name, codec in ((TIGHT, "raw"), (TIGHT_INT4, _INT4_CODEC)):
            setting = Setting(name, geometry.dtype, device_bytes, host_bytes, codec, below=below)
            divergence = Divergence(reference)
            run = _run(setting, loaded, runner, workload, sizes, display, forced=ample.outputs,
                       keep_logits=divergence.compare)  # fmt: skip
            forced.append(_against(ample, run, divergence))
        chats = replace(workload, sessions=tuple(chats_only(loaded, sizes)))
        talk = Setting(MULTI_TURN, geometry.dtype, device_bytes, host_bytes, _INT4_CODEC)
        multi_turn = _run(talk, loaded, runner, chats, sizes, display).report
    finally:
        runner.release()
    free = compared(ample, outputs_equal=True, agreement=1.0, mean_kl=0.0, max_kl=0.0)
    tight, int4 = forced
    cold = cold_block(geometry)
    found = [
        *promises.memory_promises(free, tight, int4, cold),
        promises.waste_promise([free, tight, int4, multi_turn]),
        promises.fidelity_promise(int4, tight),
    ]
    return MemoryReport(
        settings=(free, tight, int4),
        promises=tuple(found),
        multi_turn=multi_turn,
        cold_block=cold,
        kv_token_bytes=geometry.token_bytes,
        document_tokens=workload.document_tokens(),
        output_tokens_compared=sum(len(tokens) for tokens in ample.outputs.values()),
    )


def _against(ample: SettingRun, run: SettingRun, divergence: Divergence) -> SettingReport:
    share = agreement(run.argmaxes, ample.outputs)
    return compared(run, outputs_equal=share == 1.0, agreement=share, mean_kl=divergence.mean,
                    max_kl=divergence.largest)  # fmt: skip


def memory_workload(loaded: LoadedModel, sizes: Sizes) -> Workload:
    """Questions about shared documents in an order with locality, and chats from the beginning on."""
    chat_format = ChatFormat(loaded.tokenizer)
    questions = document_sessions(chat_format, sizes.questions, sizes.document_tokens, sizes.documents)
    chat = chat_sessions(chat_format, sizes.mixed_chats, sizes.chat_turns, sizes.passage_tokens)
    order = mixed_order(questions, sizes.seed)
    return Workload((*chat, *order), sizes.users, sizes.max_new_tokens, eos_token_ids(loaded))


def chats_only(loaded: LoadedModel, sizes: Sizes) -> list[Session]:
    """The multi-turn workload."""
    return chat_sessions(ChatFormat(loaded.tokenizer), sizes.chats, sizes.chat_turns, sizes.passage_tokens)


def cold_block(geometry: KVGeometry) -> promises.ColdBlock:
    """Bytes of one block over all groups, in the geometry's own precision and as INT4 records."""
    from kvstore.device_blocks import cold_slot_bytes
    from quant import get_codec

    full = sum(geometry.full_slot_bytes(group) for group in range(len(geometry.groups)))
    return promises.ColdBlock(full, sum(cold_slot_bytes(geometry, get_codec(_INT4_CODEC))))


# -- both -------------------------------------------------------------------------------------------------------------


def _run(
    setting: Setting,
    loaded: LoadedModel,
    runner: HFRunner,
    workload: Workload,
    sizes: Sizes,
    display: Display,
    **kwargs: Any,
) -> SettingRun:
    on_step = display.begin(setting.name, workload.request_count)
    try:
        return run_setting(setting, loaded, runner, workload, step_tokens=sizes.step_tokens, on_step=on_step, **kwargs)
    finally:
        display.end()


def eos_token_ids(loaded: LoadedModel) -> frozenset[int]:
    """Tokens that end an answer, of the model and of its tokenizer."""
    found: set[int] = set()
    named = getattr(loaded.model.generation_config, "eos_token_id", None)
    for token in [*(named if isinstance(named, list | tuple) else [named]), loaded.tokenizer.eos_token_id]:
        if token is not None:
            found.add(int(token))
    return frozenset(found)


def ample_bytes(geometry: KVGeometry, workload: Workload) -> int:
    """Device bytes that hold every token of the workload at once, with some room."""
    shared = workload.document_tokens()
    tokens = sum(shared.values())
    for session in workload.sessions:
        said = len(session.first_prompt) - shared.get(session.document, 0)
        said += sum(map(len, session.follow_ups)) + session.turn_count * workload.max_new_tokens
        tokens += said + 2 * BLOCK_TOKENS
    return _sequence_bytes(geometry, int(1.2 * tokens) + 512)


def least_bytes(geometry: KVGeometry, workload: Workload) -> int:
    """Device bytes without which the longest sequence could not be served at all, a spare extent included."""
    longest = max(
        len(session.first_prompt) + sum(map(len, session.follow_ups)) + session.turn_count * workload.max_new_tokens
        for session in workload.sessions
    )
    return _sequence_bytes(geometry, longest + 8 * BLOCK_TOKENS)


def _sequence_bytes(geometry: KVGeometry, tokens: int) -> int:
    blocks = -(-tokens // geometry.block_tokens)
    return blocks * sum(geometry.full_slot_bytes(group) for group in range(len(geometry.groups)))


def all_held(found: Iterable[promises.Promise]) -> bool:
    return all(promise.held is not False for promise in found)
