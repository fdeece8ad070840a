"""Every part that can fail does, at every place: nothing leaks, other sequences go on, and misses are counted."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from allocator import CapacityError, UsageError
from kvstore import HostTier, LeaseError
from tests.kvstore.conftest import full_geometry
from tests.kvstore.driving import HeldExecutor, check_bytes, compute, run_prompt

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore import KVStore

B = 16
SLOT = full_geometry().full_slot_bytes(0)
ERRORS = [OSError("link down"), MemoryError(), UsageError("no"), RuntimeError("bug")]


def breaking(error: BaseException) -> Callable[..., Any]:
    def call(*_: object, **__: object) -> Any:
        raise error

    return call


def empty(store: KVStore) -> None:
    """Nothing is left once everything idle is dropped."""
    for _ in range(3):
        store.step()
    store.check_invariants()
    store.pool.drop_all_idle()
    assert store._parts.upkeep.mover.in_flight_blocks == 0
    assert store.usage().used_bytes == 0


@pytest.mark.parametrize(
    "error", [OSError("link down"), MemoryError(), UsageError("no"), RuntimeError("bug")], ids=repr
)
@pytest.mark.parametrize("where", ["submit_put", "read_buffer"])
def test_a_copy_down_that_cannot_start_is_dropped(
    make_store: Callable[..., KVStore], where: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(blocks=12, host_blocks=12)
    prompt = list(range(4 * B))
    run_prompt(store, "a", prompt)
    run_prompt(store, "b", [*prompt, 1])
    store.abort("b")
    monkeypatch.setattr(store.tiers[0] if where == "submit_put" else store._parts.device, where, breaking(error))
    store.preempt("a")
    assert store.metrics.get("dropped_blocks", tier="host", cause="not_submitted") == 4
    store.step()
    assert store.sequence_ids() == []
    assert store.lookup([*prompt, 1]).tokens == 4 * B
    empty(store)


@pytest.mark.parametrize(
    "error", [OSError("link down"), MemoryError(), UsageError("no"), RuntimeError("bug")], ids=repr
)
@pytest.mark.parametrize("where", ["submit_get", "write_buffer"])
def test_a_copy_up_that_cannot_start_is_a_miss(
    make_store: Callable[..., KVStore], where: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(blocks=12, host_blocks=12, load_always=True)
    prompt = list(range(4 * B + 1))
    run_prompt(store, "a", prompt)
    store.preempt("a")
    store.step()
    store.pool.evict(store.pool.match(0, store.prepare(prompt).hashes)[1:])
    monkeypatch.setattr(store.tiers[0] if where == "submit_get" else store._parts.device, where, breaking(error))
    admission = store.admit("b", prompt)
    assert (admission.reused_tokens, admission.pending_tokens, admission.by_tier) == (B, 0, {"device": B})
    assert store.fetch("b").ready_tokens == B
    assert store.metrics.get("missed_blocks", tier="host", cause="not_submitted") == 3
    compute(store, "b", prompt[B:])
    check_bytes(store, "b", prompt)
    store.finish("b")
    empty(store)


@pytest.mark.parametrize("exact", [False, True])
def test_bytes_that_do_not_reach_the_device_are_a_miss(
    make_store: Callable[..., KVStore], exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(blocks=12, host_blocks=12, load_always=True)
    prompt = list(range(4 * B + 1))
    run_prompt(store, "a", prompt)
    store.preempt("a")
    store.step()
    store.pool.drop_all_idle()
    calls = []

    def second_fails(*arguments: object) -> None:
        calls.append(arguments)
        if len(calls) == 2:
            raise RuntimeError("copy failed")

    monkeypatch.setattr(store._parts.device, "write_back", second_fails)
    store.admit("b", prompt, exact=exact)
    store.step()
    assert store.fetch("b").ready_tokens == B
    assert store.metrics.get("missed_blocks", tier="host", cause="not_written") == 1
    compute(store, "b", prompt[B:])
    check_bytes(store, "b", prompt)
    store.finish("b")
    empty(store)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("bug")], ids=repr)
def test_an_encoder_that_fails_leaves_blocks_raw(make_store: Callable[..., KVStore], error: Exception) -> None:
    store = make_store(blocks=40, codec="int4", residual_tokens=B)
    prompt = list(range(6 * B))
    run_prompt(store, "a", prompt)
    encode = store._parts.device.encode
    store._parts.device.encode = breaking(error)  # type: ignore[method-assign]
    for _ in range(3):
        store.step()
    assert not (store.tables("a")[0] & 1).any()
    assert store.metrics.get("kept_raw_blocks", cause="encode_failed") == 4
    store._parts.device.encode = encode  # type: ignore[method-assign]
    check_bytes(store, "a", prompt)
    assert store.is_exact("a")
    store.finish("a")
    empty(store)


def test_an_interrupt_while_encoding_comes_through_and_leaves_nothing_behind(
    make_store: Callable[..., KVStore],
) -> None:
    store = make_store(blocks=40, codec="int4", residual_tokens=B)
    run_prompt(store, "a", list(range(6 * B)))
    encode = store._parts.device.encode
    store._parts.device.encode = breaking(KeyboardInterrupt())  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        store.step()
    store._parts.device.encode = encode  # type: ignore[method-assign]
    store.finish("a")
    empty(store)


def test_an_executor_that_takes_nothing_leaves_blocks_raw(make_store: Callable[..., KVStore]) -> None:
    store = make_store(blocks=40, codec="int4", residual_tokens=B)
    run_prompt(store, "a", list(range(6 * B)))
    store._parts.upkeep.mover._executor.submit = breaking(UsageError("closed"))  # type: ignore[method-assign]
    store.step()
    store.step()
    assert store.metrics.get("kept_raw_blocks", cause="encode_failed") == 4
    store.finish("a")
    empty(store)


def test_a_tier_whose_executor_takes_nothing_ends_its_transfers() -> None:
    executor = HeldExecutor()
    executor.submit = breaking(UsageError("closed"))  # type: ignore[method-assign]
    tier = HostTier(8 * SLOT, executor)
    from kvstore.copy_key import CopyKey

    key = CopyKey(bytes(32), 0, bytes(31) + b"1", "raw", True, (0, 1), (0, 1))
    tier.submit_put([(key, [bytes(64)])])
    tier.submit_get([(key, bytearray(64))])
    assert [completion.results for completion in tier.poll()] == [("failed",), ("failed",)]
    assert tier.queued_items == 0
    tier.close()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("where", ["copy", "zero_tail"])
def test_growth_that_fails_half_way_changes_nothing(
    make_store: Callable[..., KVStore], where: str, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(blocks=12)
    prompt = list(range(2 * B + 5))
    run_prompt(store, "a", prompt, exact=exact)
    store.fork("a", "child")
    with monkeypatch.context() as patch:
        patch.setattr(store._parts.device, where, breaking(MemoryError()))
        with pytest.raises(MemoryError):
            store.grow("child", 2 * B)
    store.check_invariants()
    for name, extra in (("child", 900), ("a", 901)):
        compute(store, name, [extra])
        check_bytes(store, name, [*prompt, extra])
        store.finish(name)
    empty(store)


def test_compaction_that_fails_half_way_moves_the_rest_later(make_store: Callable[..., KVStore]) -> None:
    store = make_store(blocks=40, codec="int4")
    pool = store.pool
    prompts = {f"s{index}": list(range(index * 1000, index * 1000 + B)) for index in range(30)}
    for name, prompt in prompts.items():
        run_prompt(store, name, prompt)
    calls = []
    copy = store._parts.device.copy

    def second_fails(*arguments: int) -> None:
        calls.append(arguments)
        if len(calls) == 2:
            raise RuntimeError("copy failed")
        copy(*arguments)

    for name in list(prompts)[:11]:
        store.abort(name)
        del prompts[name]
    pool.drop_all_idle()
    census = pool.ledger.census(0)
    room = pool.free_count(0) - census.free
    extent = int(census.extents[((census.busy > 1) & (census.busy <= room)).argmax()])
    pool.plan_compaction = lambda group, form=0: pool._plan_moves(extent)  # type: ignore[method-assign]
    store._parts.device.copy = second_fails  # type: ignore[method-assign]
    store._upkeep.note_shortage(0)
    with pytest.raises(RuntimeError, match="copy failed"):
        store.step()
    store.check_invariants()
    assert not pool.changing
    for name, prompt in prompts.items():
        check_bytes(store, name, prompt)
        store.abort(name)
    empty(store)


@pytest.mark.parametrize("threads", ["inline", "thread"])
def test_closing_with_work_under_way_ends(make_store: Callable[..., KVStore], threads: str) -> None:
    store = make_store(blocks=40, host_blocks=20, codec="int4", residual_tokens=B, io_threads=threads)
    prompt = list(range(12 * B))
    run_prompt(store, "a", prompt)
    run_prompt(store, "b", [*prompt, 1])
    store.preempt("a")
    store.step()
    store.admit("c", [*prompt, 2])
    store.close()
    store.close()
    calls = (store.step, lambda: store.lookup(prompt), lambda: store.admit("d", prompt), lambda: store.finish("b"))
    for call in (*calls, store.reset):
        with pytest.raises(UsageError, match="closed"):
            call()  # type: ignore[operator]
    assert not store.wait(0.0)


def test_admit_takes_a_lease_over(make_store: Callable[..., KVStore]) -> None:
    now = [0.0]
    store = make_store(blocks=10, clock=lambda: now[0], lease_seconds=20)
    other = make_store(blocks=10)
    prompt = list(range(4 * B + 1))
    for one in (store, other):
        run_prompt(one, "a", prompt)
        one.finish("a")
    lease = store.pin(prompt)
    assert lease.expires_at == 20
    foreign = other.pin(prompt, 5)
    with pytest.raises(LeaseError, match="not of this store"):
        store.admit("b", prompt, lease=foreign)
    with pytest.raises(CapacityError):
        store.admit("b", [*prompt, *range(700, 700 + 7 * B - 1)], lease=lease)
    assert lease.active
    assert store.admit("b", prompt, lease=lease).reused_tokens == 4 * B
    assert not lease.active
    store.finish("b")
    assert store.pool.drop_all_idle() == 4, "a pin was left behind"
    assert store.admit("c", prompt, lease=lease).reused_tokens == 0
    for wrong in (0, -1, 20.5, float("nan"), float("inf"), "5", True):
        with pytest.raises(UsageError, match="ttl_seconds"):
            store.pin(prompt, wrong)  # type: ignore[arg-type]


BAD_CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("admit", (5, [1, 2]), {}, "sequence_id: got 5 .int.; expected a text"),
    ("admit", ("", [1, 2]), {}, "sequence_id"),
    ("admit", ("x", 7), {}, "token ids: got int; expected"),
    ("admit", ("x", "text"), {}, "token ids: got str; expected"),
    ("admit", ("x", [1.5]), {}, "token id at index 0"),
    ("admit", ("x", {5, 6}), {}, "token ids: got set; expected a list"),
    ("lookup", ({5: 6},), {}, "token ids: got dict; expected a list"),
    ("pin", (frozenset([5]),), {}, "token ids: got frozenset"),
    ("admit", ("x", [1, 2]), {"private_from": -1}, "private_from: got -1"),
    ("admit", ("x", [1, 2]), {"prompt_tokens": 3}, "prompt_tokens: got 3"),
    ("admit", ("x", [1, 2]), {"identity": "adapter"}, "identity: got str"),
    ("lookup", (None,), {}, "token ids: got NoneType"),
    ("lookup_hashes", (bytes(32), [bytes(32)], 5), {}, "1 hashes for 5 tokens"),
    ("lookup_hashes", (bytes(32), [], 0), {}, "0 tokens"),
    ("grow", ("a", 1.5), {}, "got 1.5 .float."),
    ("grow", ("a", True), {}, "got True"),
    ("grow", ("a", "3"), {}, "got '3'"),
    ("commit_prompt", ("a", 0), {}, "got 0"),
    ("commit_prompt", ("a", 1), {}, "admitted with 0"),
    ("rollback", ("a", -3), {}, "got -3"),
    ("rollback", ("a", 2.0), {}, "got 2.0"),
    ("fork", ("a", ""), {}, "child_id"),
    ("fork", ("a", None), {}, "child_id"),
    ("slot_mapping", ("a", 3, 0, 1), {}, "group: got 3"),
    ("slot_mapping", ("a", "0", 0, 1), {}, "group: got '0' .str.; expected an int"),
    ("slot_mapping", ("a", 0, 32.0, 1), {}, "start: got 32.0 .float."),
    ("slot_mapping", ("a", 0, 0, None), {}, "count: got None"),
    ("check_fits", ("a",), {}, "token_count: got 'a' .str.; expected an int"),
    ("check_fits", (-1,), {}, "token_count: got -1"),
    *(
        (method, ([], *more), {}, r"sequence_id: got \[\] .list.; expected a text")
        for method, more in {
            "grow": (1,),
            "commit": ([1],),
            "commit_prompt": (1,),
            "rollback": (1,),
            "retain": ([],),
            "fork": ("b",),
            "tables": (),
            "slot_mapping": (0, 0, 1),
            "fetch": (),
            "wait_layer": (0, 1.0),
            "prefill_done": (),
            "preempt": (),
            "finish": (),
            "abort": (),
            "is_exact": (),
            "committed_tokens": (),
            "written_tokens": (),
        }.items()
    ),
    ("commit", ("a", [1]), {}, "passes what was written"),
    ("commit", ("a", 5), {}, "token ids: got int"),
]


@pytest.mark.parametrize(("method", "arguments", "keywords", "words"), BAD_CALLS)
def test_bad_arguments_say_what_was_given(
    make_store: Callable[..., KVStore], method: str, arguments: tuple[Any, ...], keywords: dict[str, Any], words: str
) -> None:
    store = make_store(blocks=8)
    prompt = list(range(2 * B))
    run_prompt(store, "a", prompt)
    before = (store.usage(), store.committed_tokens("a"), store.written_tokens("a"), store.sequence_ids())
    with pytest.raises(UsageError, match=words):
        getattr(store, method)(*arguments, **keywords)
    assert before == (store.usage(), store.committed_tokens("a"), store.written_tokens("a"), store.sequence_ids())
    store.check_invariants()
    compute(store, "a", [77])
    check_bytes(store, "a", [*prompt, 77])


def test_threads_that_look_pin_and_admit_beside_the_loop_break_nothing(make_store: Callable[..., KVStore]) -> None:
    """One thread runs forward passes and steps, as the contract says; the others do all else at any moment."""
    store = make_store(
        blocks=40, host_blocks=30, codec="int4", residual_tokens=B, io_threads="thread", load_always=True
    )
    prompts = [list(range(base, base + length * B + 3)) for base in (0, 1000) for length in (3, 6, 9)]
    stop = threading.Event()
    failures: list[BaseException] = []

    def guarded(work: Callable[[int], None]) -> Callable[[], None]:
        def run() -> None:
            turn = 0
            try:
                while not stop.is_set():
                    turn += 1
                    work(turn)
            except BaseException as error:
                failures.append(error)
                stop.set()

        return run

    def looker(turn: int) -> None:
        prompt = prompts[turn % len(prompts)]
        hit = store.lookup(prompt, exact=turn % 3 == 0)
        assert 0 <= hit.device_tokens <= hit.tokens < len(prompt)
        store.usage()
        store.metrics.snapshot()

    def pinner(turn: int) -> None:
        lease = store.pin(store.prepare(prompts[turn % len(prompts)]), 5)
        try:
            store.admit(f"p{turn}", prompts[turn % len(prompts)], lease=lease)
        except CapacityError:
            store.unpin(lease)
        else:
            store.abort(f"p{turn}")

    threads = [threading.Thread(target=guarded(work)) for work in (looker, pinner)]
    for thread in threads:
        thread.start()
    try:
        for turn in range(60):
            if stop.is_set():
                break
            prompt = prompts[(turn * 5) % len(prompts)]
            try:
                store.admit("loop", prompt, exact=turn % 4 == 0)
                while not store.fetch("loop").done:
                    store.step()
                    store.wait(0.05)
                ready = store.fetch("loop").ready_tokens
                compute(store, "loop", prompt[ready:])
                store.prefill_done("loop")
                check_bytes(store, "loop", prompt)
                (store.preempt if turn % 2 else store.finish)("loop")
            except CapacityError:
                if "loop" in store.sequence_ids():
                    store.abort("loop")
            store.step()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failures
    for _ in range(200):
        store.step()
        if not store.wait(0.02) and not store._parts.upkeep.mover.in_flight_blocks:
            break
    empty(store)
