"""Computing while the layers of a prefix still come, from a real disk and a real server: what comes first is shown by
the order of events, and whatever goes wrong with a late layer leaves outputs and memory as without it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from allocator import CacheGroup, GroupKind, KVGeometry
from allocator.errors import UsageError
from engine_adapter import DecodeLoop, HFRunner
from engine_adapter.batch import SliceError, StepBatch
from engine_adapter.request import Request
from engine_adapter.testing import ToyRunner
from kvstore import KVStore
from kvstore.disk_tier.slots import SlotFiles
from kvstore.frame import layout as frame_layout
from kvstore.layer_progress import LayerProgress, LayerRounds
from tests.engine_adapter.loop_kit import VOCAB, Kit, make_store, prompt
from tests.engine_adapter.paged_kit import tiny_model
from tests.kvstore.daemon.kit import until
from tests.servers import shared_server
from tests.tcp_proxy import CuttingProxy

_NUMBERS = itertools.count()
B, LAYERS, BLOCKS = 16, 8, 6
PROMPT = prompt(1, BLOCKS * B + 9)
LAST_ARRIVES, FIRST_COMPUTED, LAST_COMPUTED = "the last layers arrive", "layer 0 is computed", "layer 7 is computed"


def geometry(kind: str) -> KVGeometry:
    """Blocks of 128 KiB in eight groups of layers, or of two cache groups."""
    if kind == "full":
        return KVGeometry.uniform(layers=LAYERS, kv_heads=2, head_dim=64, dtype="float32", block_tokens=B)
    full = CacheGroup(kind=GroupKind.FULL, layers=(1, 3, 5, 7), kv_heads=4, key_dim=64, value_dim=64)
    window = CacheGroup(
        kind=GroupKind.SLIDING, layers=(0, 2, 4, 6), kv_heads=4, key_dim=64, value_dim=64, window_tokens=40
    )
    return KVGeometry(groups=(full, window), block_tokens=B, dtype="float32")


class Gate:
    """Lets the last layers of what is read through only when `opens` is set, and logs it."""

    def __init__(self) -> None:
        self.opens = threading.Event()
        self.events: list[str] = []
        self.at_opening: Callable[[], object] = lambda: None
        self.was_opened = True

    def open(self) -> None:
        if not self.opens.is_set():
            self.at_opening()
            self.opens.set()

    def last_arrives(self) -> None:
        self.was_opened = self.opens.wait(10)
        if LAST_ARRIVES not in self.events:
            self.events.append(LAST_ARRIVES)


class Stage:
    """Two stores over one disk or server: what the first has computed, the second loads by layers, behind a gate."""

    def __init__(
        self, stack: ExitStack, monkeypatch: pytest.MonkeyPatch, place: str, path: Path, kind: str = "full"
    ) -> None:
        monkeypatch.setattr(frame_layout, "_LEAST_SEGMENT_BYTES", 16 << 10)
        self.place, self.kv = place, geometry(kind)
        self.gate = Gate()
        self.proxy = stack.enter_context(CuttingProxy(shared_server().port)) if place == "redis" else None
        self.namespace = f"early{next(_NUMBERS)}"
        self.path = path
        self.settings: dict[str, Any] = {"share": True, "load_always": True, "spill_policy": "everything"}
        with self.open(by_layer=False) as first:
            kit = Kit(first)
            self.expected = kit.run_checked(Request("first", PROMPT, 6))["first"].token_ids
            first.close(drain_seconds=20)
        self.store = stack.enter_context(self.open(by_layer=True, debug_poison=True))
        self.store.fetch_by_layer = True
        self.runner = ToyRunner.over(self.store, vocab_size=VOCAB)
        self.real = self.runner.forward
        self.runner.forward = self.forward  # type: ignore[method-assign]
        self.opens_at = 0  # the layer before whose attention the gate opens; the step's end at the latest
        self.early_batches: list[StepBatch] = []
        self.batches: list[StepBatch] = []
        self.loop = DecodeLoop(self.runner, self.store, max_batch_sequences=4, step_tokens=16)
        self.monkeypatch = monkeypatch

    def open(self, *, by_layer: bool, **more: Any) -> KVStore:
        if self.place == "disk":
            where: dict[str, Any] = {"disk_path": str(self.path / "kv"), "disk_bytes": 64 << 20}
        else:
            port = self.proxy.port if self.proxy is not None and by_layer else shared_server().port
            where = {"redis_url": f"redis://127.0.0.1:{port}?namespace={self.namespace}"}
        deadline = {"fetch_deadline_seconds": 8.0}
        return make_store(self.kv, io_threads="thread", **{**self.settings, **deadline, **where, **more})

    def forward(self, batch: StepBatch) -> Tensor:
        self.batches.append(batch)
        if batch.before_layer is None:
            return self.real(batch)
        assert not self.loop._scheduler.running, "others run: they would wait for its layers"
        self.early_batches.append(batch)
        hook = batch.before_layer

        def before_layer(layer: int) -> None:
            hook(layer)
            self.gate.events.append(f"layer {layer} is computed")
            if layer == self.opens_at:
                self.gate.open()

        logits = self.real(replace(batch, before_layer=before_layer))
        self.gate.open()
        return logits

    def close_gate(self) -> None:
        """From now on the last layers wait for the gate."""
        gate = self.gate
        if self.proxy is not None:
            while not self.store.lookup(PROMPT).by_tier.get("remote"):
                self.store.wait(0.05)
                self.store.step()
            payload_bytes = BLOCKS * sum(self.kv.full_slot_bytes(group) for group in range(len(self.kv.groups)))
            self.proxy.arm(payload_bytes * 6 // 8 + 10_000, until=gate.opens)
            real = LayerProgress.advance

            def advance(progress: LayerProgress, ready: dict[int, int]) -> None:
                if all(place == len(self.kv.groups[group].layers) for group, place in ready.items()):
                    gate.last_arrives()
                real(progress, ready)

            self.monkeypatch.setattr(LayerProgress, "advance", advance)
            return
        read = SlotFiles.read_part
        sizes = {self.kv.full_slot_bytes(group) for group in range(len(self.kv.groups))}

        def read_part(files: SlotFiles, slot: int, size: int, offset: int, rows: list[Any]) -> bytes | None:
            if any(offset + row.nbytes >= least for row in rows for least in sizes):
                gate.last_arrives()
            return read(files, slot, size, offset, rows)

        self.monkeypatch.setattr(SlotFiles, "read_part", read_part)

    def tear_last_layer(self) -> None:
        """Of the last block, in the store: while its first layers are being computed with."""
        if self.place == "disk":
            for file in (self.path / "kv").glob("slots-*"):
                size = int(file.name.split("-")[1])
                with file.open("r+b") as opened:
                    for slot in range(file.stat().st_size // size):
                        opened.seek(slot * size + self.kv.full_slot_bytes(0))
                        opened.write(b"\xee" * 64)
        else:
            client = shared_server().client()
            for name in client.keys(f"{self.namespace}:*"):
                if client.type(name) == b"string" and client.strlen(name) > 10_000:
                    client.setrange(name, client.strlen(name) - 64, b"\xee" * 64)

    def run(self, *requests: Request) -> dict[str, tuple[int, ...]]:
        for request in requests:
            self.loop.submit(request)
        results = self.loop.run()
        assert all(result.error is None for result in results.values())
        self.results = results
        return {name: result.token_ids for name, result in results.items()}

    def nothing_left(self) -> None:
        kit = Kit.__new__(Kit)
        kit.store, kit.loop = self.store, self.loop
        self.store.check_invariants()
        assert self.store.sequence_ids() == []
        until(self.is_empty, what="blocks leak")

    def is_empty(self) -> bool:
        self.store.step()
        self.store.pool.drop_all_idle()
        return self.store.usage().used_bytes == 0


@pytest.fixture(params=["disk", "redis"])
def stage(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Stage]:
    with ExitStack() as stack:
        yield Stage(stack, monkeypatch, request.param, tmp_path)


def test_computing_starts_before_the_last_layer_is_there(stage: Stage) -> None:
    stage.close_gate()
    assert stage.run(Request("again", PROMPT, 6)) == {"again": stage.expected}
    events = stage.gate.events
    assert stage.gate.was_opened
    assert events.index(FIRST_COMPUTED) < events.index(LAST_ARRIVES) < events.index(LAST_COMPUTED)
    assert len(stage.early_batches) == 1
    tier = "disk" if stage.place == "disk" else "remote"
    assert stage.results["again"].reused_tokens == {tier: BLOCKS * B}
    assert stage.results["again"].computed_prefill_tokens == 9, "computed once"
    stage.nothing_left()


def test_a_model_of_two_cache_groups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with ExitStack() as stack:
        stage = Stage(stack, monkeypatch, "disk", tmp_path, "hybrid")
        assert stage.run(Request("again", PROMPT, 6)) == {"again": stage.expected}
        stage.nothing_left()


def test_a_long_prompt_goes_on_behind_its_early_chunk(stage: Stage) -> None:
    long = [*PROMPT, *prompt(2, 50)]
    expected = Kit(make_store(stage.kv)).run_checked(Request("long", long, 4))["long"].token_ids
    stage.close_gate()
    assert stage.run(Request("long", long, 4)) == {"long": expected}
    assert [len(batch.slices[0].token_ids) for batch in stage.early_batches] == [16]
    assert stage.gate.events.index(FIRST_COMPUTED) < stage.gate.events.index(LAST_ARRIVES)
    stage.nothing_left()


def test_a_torn_last_layer_voids_what_was_computed_from_the_first(stage: Stage) -> None:
    stage.close_gate()
    stage.gate.at_opening = stage.tear_last_layer  # once layer 0 is computed
    assert stage.run(Request("again", PROMPT, 6)) == {"again": stage.expected}
    assert FIRST_COMPUTED in stage.gate.events
    assert LAST_COMPUTED not in stage.gate.events, "the hook ended the step"
    assert stage.results["again"].computed_prefill_tokens > 9, "recomputed"
    tier = "disk" if stage.place == "disk" else "remote"
    assert stage.store.metrics.get("missed_blocks", tier=tier, cause="corrupt") > 0
    assert stage.run(Request("once more", PROMPT, 6)) == {"once more": stage.expected}, "nothing wrong was sealed"
    stage.nothing_left()


def test_late_layers_are_given_up_with_the_deadline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with ExitStack() as stack:
        stage = Stage(stack, monkeypatch, "disk", tmp_path)
        object.__setattr__(stage.store.config, "fetch_deadline_seconds", 1.0)
        stage.close_gate()
        stage.opens_at = LAYERS
        timer = threading.Timer(60.0, stage.gate.open)
        timer.start()
        assert stage.run(Request("again", PROMPT, 6)) == {"again": stage.expected}
        assert FIRST_COMPUTED in stage.gate.events
        assert LAST_COMPUTED not in stage.gate.events
        assert not stage.gate.opens.is_set(), "it did not wait for what is late"
        timer.cancel()
        stage.gate.open()
        assert stage.store.metrics.get("missed_blocks", tier="disk", cause="deadline") > 0
        stage.nothing_left()


@pytest.mark.parametrize("when", ["before", "computed"])
def test_abort_in_the_middle(stage: Stage, when: str) -> None:
    stage.close_gate()
    stage.loop.submit(Request("again", PROMPT, 6))
    while not (stage.loop._scheduler.loading if when == "before" else stage.early_batches):
        stage.loop.step()
        stage.store.wait(0.05)
    assert stage.store.fetch("again").done is False
    assert stage.loop.abort("again")
    stage.gate.open()
    stage.loop.run()
    assert stage.run(Request("after", PROMPT, 6)) == {"after": stage.expected}
    stage.nothing_left()


def test_a_step_that_fails_in_the_model_gives_its_room_back(stage: Stage) -> None:
    stage.close_gate()
    real = stage.real

    def failing(batch: StepBatch) -> Tensor:
        if batch.before_layer is not None:
            batch.before_layer(0)
            stage.gate.open()
            raise RuntimeError("a kernel failed")
        return real(batch)

    stage.real = failing
    stage.loop.submit(Request("again", PROMPT, 6))
    with pytest.raises(RuntimeError, match="a kernel failed"):
        stage.loop.run()
    stage.real = real
    assert stage.loop.run()["again"].token_ids == stage.expected
    stage.nothing_left()


def test_a_sequence_that_the_model_refuses_early_ends_with_the_reason_and_alone(stage: Stage) -> None:
    stage.close_gate()
    real, refused = stage.real, []

    def refusing(batch: StepBatch) -> Tensor:
        (part,) = batch
        if batch.before_layer is None and part.sequence_id not in refused:
            return real(batch)
        refused.append(part.sequence_id)
        stage.gate.open()
        raise SliceError([part.sequence_id], "its adapter is not there")

    stage.real = refusing
    stage.loop.submit(Request("refused", PROMPT, 6))
    result = stage.loop.run()["refused"]
    assert result.error == "its adapter is not there"
    assert len(stage.early_batches) == 1
    assert len(refused) == 2, "refused early, and again once it ran"
    stage.nothing_left()
    stage.real = real
    assert stage.run(Request("again", PROMPT, 6)) == {"again": stage.expected}


def test_nobody_who_decodes_waits_for_a_layer(stage: Stage) -> None:
    """While another stream runs nothing is computed early: its steps hold it alone, and go on."""
    other = prompt(9, 5)
    expected = Kit(make_store(stage.kv)).run_checked(Request("other", other, 30))["other"].token_ids
    stage.loop.submit(Request("other", other, 30))
    stage.loop.step()
    stage.close_gate()
    stage.loop.submit(Request("again", PROMPT, 6))
    while stage.loop._scheduler.running:
        assert stage.loop.step().output_tokens >= 1
    results = stage.loop.run()
    assert results["other"].token_ids == expected
    assert results["again"].token_ids == stage.expected
    for batch in stage.early_batches:
        assert [part.sequence_id for part in batch] == ["again"]
    stage.nothing_left()


def test_a_host_tier_has_nothing_to_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(geometry("full"), host_blocks=64, io_threads="thread", load_always=True)
    store.fetch_by_layer = True
    kit = Kit(store)
    expected = kit.run_checked(Request("first", PROMPT, 6))["first"].token_ids
    store.demote(PROMPT)
    while store.lookup(PROMPT).by_tier.get("host", 0) < BLOCKS * B:
        store.wait(0.05)
        store.step()
    seen: list[bool] = []
    real = ToyRunner.forward
    monkeypatch.setattr(
        ToyRunner, "forward", lambda self, batch: (seen.append(batch.before_layer is None), real(self, batch))[1]
    )
    kit = Kit(store)
    assert kit.drive(Request("again", PROMPT, 6))["again"].token_ids == expected
    assert all(seen)
    store.close()


def test_commit_is_refused_before_the_last_layer(stage: Stage) -> None:
    stage.close_gate()
    store = stage.store
    while store.admit("a", PROMPT).ask_again:
        store.wait(0.05)
        store.step()
    assert store.wait_layer("a", 0, 5.0)
    state = store.fetch("a")
    assert not state.done
    assert state.layers_ready > 0
    assert state.expected_tokens == BLOCKS * B
    store.grow("a", 9)
    for misuse in (
        lambda: store.commit("a", PROMPT[BLOCKS * B :]),
        lambda: store.commit_prompt("a", 9),
        lambda: store.prefill_done("a"),
        lambda: store.fork("a", "b"),
        lambda: store.rollback("a", 10),
        lambda: store.slot_mapping("a", 0, BLOCKS * B - 1, 1),
    ):
        with pytest.raises(UsageError):
            misuse()
    assert len(store.slot_mapping("a", 0, BLOCKS * B, 9)) == 9
    store.check_invariants()
    assert not store.wait_layer("a", LAYERS - 1, 0.01), "not there, and not said to be"
    stage.gate.open()
    assert store.wait_layer("a", LAYERS - 1, 10.0)
    while not store.fetch("a").done:
        store.step()
        store.wait(0.05)
    assert store.fetch("a").ready_tokens == store.committed_tokens("a") == BLOCKS * B
    assert store.written_tokens("a") == BLOCKS * B + 9
    store.abort("a")
    stage.nothing_left()


@pytest.mark.parametrize("bug", ["told before it is there", "taken though it failed"])
def test_planted_bugs_are_seen(stage: Stage, bug: str) -> None:
    stage.close_gate()
    stage.opens_at = LAYERS
    if bug == "told before it is there":
        stage.monkeypatch.setattr(LayerProgress, "wait", lambda *_: True)
    else:
        stage.gate.at_opening = stage.tear_last_layer
        stage.monkeypatch.setattr(LayerProgress, "wait", lambda *_: True)
        from kvstore.tier import ResultCode

        finish = type(stage.store._upkeep.mover.fetcher).finish

        def lying(self: Any, completion: Any, now: float) -> int:
            good = replace(completion, results=(ResultCode.OK,) * len(completion.results))
            return finish(self, good, now)

        stage.monkeypatch.setattr(type(stage.store._upkeep.mover.fetcher), "finish", lying)
    assert stage.run(Request("again", PROMPT, 6)) != {"again": stage.expected}


@pytest.mark.parametrize(("family", "codec"), [("llama", "raw"), ("gemma3", "raw"), ("llama", "int4")])
def test_a_real_model_gives_the_same_tokens(monkeypatch: pytest.MonkeyPatch, family: str, codec: str) -> None:
    """Attention over blocks whose later layers are not there yet, INT4 ones among them."""
    monkeypatch.setattr(frame_layout, "_LEAST_SEGMENT_BYTES", 256)
    model, tokens = tiny_model(family), [token % 90 + 1 for token in prompt(3, 16 * B + 7)]
    settings: dict[str, Any] = {"spill_policy": "everything", "io_threads": "thread", "load_always": True}
    settings |= {"share": True, "codec": codec, "error_bound": 1.0, "fetch_deadline_seconds": 8.0}
    settings["redis_url"] = f"redis://127.0.0.1:{shared_server().port}?namespace=early{next(_NUMBERS)}"
    outputs = []
    for turn in ("writes", "loads", "early"):
        runner, opens, events = HFRunner(model), threading.Event(), []
        store = make_store(runner.geometry, **settings)
        store.fetch_by_layer = turn == "early"
        runner.attach(store.slab, store.cold_codec)
        with monkeypatch.context() as patch:
            if turn == "early":
                _gate_behind_the_first_layers(patch, runner, opens, events)
            loop = DecodeLoop(runner, store)
            while turn != "writes" and not store.lookup(tokens).by_tier.get("remote"):
                store.wait(0.05)
                store.step()
            loop.submit(Request("r", tokens, 12))
            result = loop.run()["r"]
        outputs.append(result.token_ids)
        assert (turn == "writes") == (not result.reused_tokens.get("remote"))
        if turn == "early":
            assert events == ["first layers", *range(model.config.num_hidden_layers)]
        store.check_invariants()
        runner.release()
        store.close(drain_seconds=10)
    assert outputs[1] == outputs[2]
    assert codec == "int4" or outputs[0] == outputs[1]


def _gate_behind_the_first_layers(
    patch: pytest.MonkeyPatch, runner: HFRunner, opens: threading.Event, events: list[Any]
) -> None:
    """Nothing is told of what comes behind the first layers before layer 0 was computed."""
    tell, forward = LayerRounds.tell, runner.forward

    def gated(rounds: LayerRounds) -> None:
        if events:
            assert opens.wait(10)
        else:
            events.append("first layers")
        tell(rounds)

    def watched(batch: StepBatch) -> Tensor:
        hook = batch.before_layer
        if hook is None:
            return forward(batch)

        def before_layer(layer: int) -> None:
            hook(layer)
            events.append(layer)
            opens.set()

        return forward(replace(batch, before_layer=before_layer))

    patch.setattr(LayerRounds, "tell", gated)
    patch.setattr(runner, "forward", watched)
