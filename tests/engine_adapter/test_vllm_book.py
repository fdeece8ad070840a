"""The vLLM connector's book without vLLM: what is named when, what is loaded, and what is known as lossy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from engine_adapter.vllm_connector.book import Book, Found, Note
from engine_adapter.vllm_connector.orders import Orders, SaveOrder
from engine_adapter.vllm_connector.prefill_speed import PrefillSpeed
from kvstore import HashChain
from tests.engine_adapter.vllm_kit import BLOCK, identity


class Lookups:
    def __init__(self, answer: Callable[[int, Sequence[bytes], int], Found]) -> None:
        self.answer = answer
        self.notes: list[tuple[int, Note]] = []

    def note(self, epoch: int, root: bytes, hashes: Sequence[bytes], local_blocks: int, note: Note) -> None:
        self.notes.append((local_blocks, note))

    def find(self, epoch: int, root: bytes, hashes: Sequence[bytes], local_blocks: int) -> Found:
        return self.answer(epoch, hashes, local_blocks)


class Request(SimpleNamespace):
    def __init__(self, name: str, token_ids: Sequence[int], **given: Any) -> None:
        super().__init__(request_id=name, all_token_ids=list(token_ids), num_prompt_tokens=len(token_ids), **given)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


def book(answer: Callable[[int, Sequence[bytes], int], Found], **given: Any) -> Book:
    return Book(identity(), BLOCK, Lookups(answer), **{"deadline_seconds": 1.0, **given})


def nothing(epoch: int, hashes: Sequence[bytes], local_blocks: int) -> Found:
    return Found(0, False, epoch)


def everything(epoch: int, hashes: Sequence[bytes], local_blocks: int) -> Found:
    return Found(len(hashes), False, epoch)


def saves(made: Book, request: str, tokens: int) -> list[SaveOrder]:
    return made.step([(request, tokens)], lambda name: [[1, 2, 3, 4]]).saves


def test_only_full_blocks_of_known_tokens_are_stored_and_once() -> None:
    made, request = book(nothing), Request("r", range(18))
    assert made.matched_tokens(request, 0) == 0
    chain = HashChain(identity().root(), BLOCK)
    hashes = chain.extend(list(range(18)))
    (first,) = saves(made, "r", 10)
    assert (first.start, first.hashes, first.parent) == (0, hashes[:2], None)
    assert saves(made, "r", 11) == []
    (second,) = saves(made, "r", 40)  # drafts: written, and not among the tokens yet
    assert (second.start, second.hashes, second.parent) == (2, hashes[2:4], hashes[1])
    request.all_token_ids += [7, 8]
    (third,) = saves(made, "r", 20)
    assert third.hashes == chain.extend([7, 8])


def test_a_hit_leaves_a_token_and_loads_what_vllm_lacks() -> None:
    made, request = book(everything), Request("r", range(16))
    assert made.matched_tokens(request, 0) == 12
    assert made.matched_tokens(request, 8) == 4
    made.allocated(request, [[5, 6]], 4)
    orders = made.step([], lambda name: [])
    (load,) = orders.loads
    assert (load.request_id, load.start, len(load.hashes), load.tables) == ("r", 2, 3, [[5, 6]])
    assert made.step([], lambda name: []).loads == []


def test_what_was_loaded_is_not_stored_again_unless_it_failed() -> None:
    made, request = book(everything), Request("r", range(17))
    assert made.matched_tokens(request, 0) == 16
    made.allocated(request, [[5, 6]], 16)
    made.load_failed(["r", "unknown"])
    assert made.matched_tokens(request, 0) == 0  # asks no more: it computes
    (order,) = saves(made, "r", 17)
    assert order.start == 0
    other = Request("s", range(21))
    made.matched_tokens(other, 0)
    made.allocated(other, [[5, 6]], 20)
    assert saves(made, "s", 21) == []


def test_asks_again_until_the_deadline() -> None:
    now = [0.0]
    made = book(lambda epoch, hashes, local: Found(1, True, epoch), clock=lambda: now[0])
    request = Request("r", range(16))
    assert made.matched_tokens(request, 0) is None
    now[0] = 0.9
    assert made.matched_tokens(request, 0) is None
    now[0] = 1.1
    assert made.matched_tokens(request, 0) == 4


def test_an_id_that_is_used_again_is_another_request() -> None:
    made = book(nothing)
    made.matched_tokens(Request("r", range(8)), 0)
    assert saves(made, "r", 8)
    made.finished("r")
    assert saves(made, "r", 8) == []
    made.matched_tokens(Request("r", range(100, 108)), 0)
    (order,) = saves(made, "r", 8)
    assert order.hashes == HashChain(identity().root(), BLOCK).extend(list(range(100, 108)))


def test_an_abort_before_the_step_takes_its_load_back() -> None:
    made, request = book(everything), Request("r", range(16))
    made.matched_tokens(request, 0)
    made.allocated(request, [[5, 6]], 12)
    made.finished("r")
    assert made.step([], lambda name: []).loads == []


def test_a_new_epoch_ends_sharing_for_what_has_begun() -> None:
    epochs = [0]
    made = book(lambda epoch, hashes, local: Found(len(hashes), False, epochs[0]))
    running, waiting = Request("r", range(8)), Request("w", range(16))
    assert made.matched_tokens(running, 0) == 4
    assert saves(made, "r", 4)
    epochs[0] = 3
    assert made.matched_tokens(waiting, 0) is None
    assert made.epoch == 3
    assert made.matched_tokens(waiting, 0) == 12
    assert saves(made, "r", 8) == []
    (order,) = saves(made, "w", 16)
    assert order.root == identity(epoch=3).root()


def test_salt_and_media_are_part_of_the_name() -> None:
    place = SimpleNamespace(offset=1, length=2)
    kinds = [
        Request("a", range(8)),
        Request("b", range(8), cache_salt="x"),
        Request("c", range(8), mm_features=[SimpleNamespace(identifier="image", mm_position=place)]),
        Request("d", range(8), mm_features=[SimpleNamespace(identifier="other", mm_position=place)]),
    ]
    made = book(nothing)
    seen = []
    for one in kinds:
        made.matched_tokens(one, 0)
        seen.append(saves(made, one.request_id, 8)[0].hashes[0])
    assert len(set(seen)) == len(kinds)
    nameless = Request("e", range(8), prompt_embeds=object())
    assert made.matched_tokens(nameless, 0) == 0
    assert saves(made, "e", 8) == []
    adapted = Request("f", range(8), lora_request=SimpleNamespace(lora_name="l", lora_int_id=1, lora_path="/nowhere"))
    assert made.matched_tokens(adapted, 0) == 0  # an adapter whose weights nobody can name
    assert saves(made, "f", 8) == []


# encoded copies: what is read lossy ----------------------------------------------------------------------------------

TAIL = 2 * BLOCK


def lossy_from(position: int) -> Callable[[int, Sequence[bytes], int], Found]:
    return lambda epoch, hashes, local: Found(len(hashes), False, epoch, position if position < len(hashes) else None)


def spans(orders: Sequence[SaveOrder]) -> list[tuple[int, int, bool, bool]]:
    """(first block, end, is exact, is raw) of each."""
    return [(one.start, one.start + len(one.hashes), one.is_exact, one.is_raw) for one in orders]


def after_load(made: Book, request: Request, external_tokens: int, local_tokens: int = 0) -> Orders:
    made.matched_tokens(request, local_tokens)
    made.allocated(request, [[1, 2, 3, 4]], external_tokens)
    return made.step([(request.request_id, request.num_tokens)], lambda name: [[1, 2, 3, 4]])


def test_what_is_computed_after_encoded_copies_is_stored_as_lossy() -> None:
    made, request = book(lossy_from(1), raw_tail_tokens=TAIL), Request("r", range(33))
    found = made.matched_tokens(request, 0)
    assert found == 32
    made.allocated(request, [[1, 2, 3, 4]], 16)  # vLLM had room for half of it
    orders = made.step([("r", 33)], lambda name: [[1, 2, 3, 4]])
    assert orders.loads[0].lossy_at == 1
    # Blocks 4 to 7 were computed; the loaded ones, 1 to 3, are in no order: nothing is encoded twice.
    assert spans(orders.saves) == [(4, 8, False, False), (6, 8, False, True)]


def test_lossy_copies_behind_what_was_loaded_do_not_count() -> None:
    made, request = book(lossy_from(6), raw_tail_tokens=TAIL), Request("r", range(33))
    orders = after_load(made, request, 16)
    assert orders.loads[0].lossy_at is None
    assert spans(orders.saves)[0] == (4, 8, True, False)


def test_lossiness_is_inherited_through_vllms_own_cache() -> None:
    made = book(lossy_from(2), raw_tail_tokens=TAIL)
    after_load(made, Request("first", range(33)), 32)
    made.finished("first", [[1, 2, 3, 4]])
    made._lookups.answer = nothing  # type: ignore[attr-defined]
    again = after_load(made, Request("again", [*range(32), 99, 98, 97, 96, 95]), 0, local_tokens=32)
    assert spans(again.saves) == [(0, 2, True, False), (8, 9, False, False), (8, 9, False, True)]
    short = after_load(made, Request("short", [*range(8), *range(50, 80)]), 0, local_tokens=8)
    assert spans(short.saves)[0] == (0, 9, True, False)  # it parts from the other before the lossy block


def test_more_lossy_ends_than_can_be_remembered_make_all_of_vllms_cache_lossy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine_adapter.vllm_connector.book._LOSSY_LIMIT", 1000)
    made = book(lossy_from(2), raw_tail_tokens=TAIL)
    made._lossy_ends = {bytes([0, 0, *divmod(one, 256)]) * 8 for one in range(1000)}
    after_load(made, Request("first", range(33)), 32)
    made._lookups.answer = nothing  # type: ignore[attr-defined]
    other = after_load(made, Request("other", range(100, 133)), 0, local_tokens=8)
    assert spans(other.saves)[0] == (2, 8, False, False)


def test_the_tails_of_prompt_and_answer_are_stored_raw_too() -> None:
    made, request = book(nothing, raw_tail_tokens=TAIL), Request("r", range(18))
    assert spans(after_load(made, request, 0).saves) == [(0, 4, True, False), (2, 4, True, True)]
    for token in range(12):
        request.all_token_ids.append(token)
        orders = made.step([("r", request.num_tokens)], lambda name: [[1, 2, 3, 4]])
    assert spans(orders.saves) == []
    request.all_token_ids.append(5)  # sampled last: no KV
    made.finished("r", [[1, 2, 3, 4]])
    (ended,) = made.step([], lambda name: []).ended
    assert spans([ended]) == [(5, 7, True, True)]
    assert ended.hashes == HashChain(identity().root(), BLOCK).extend(request.all_token_ids)[5:7]


def test_a_tail_that_was_not_written_is_not_stored() -> None:
    """Preempted, loading again, and then aborted: the pages are new ones, and empty."""
    made, request = book(everything, raw_tail_tokens=TAIL), Request("r", range(33))
    after_load(made, request, 0)
    made.matched_tokens(request, 0)
    made.allocated(request, [[5, 6, 7, 8]], 32)
    made.finished("r", [[5, 6, 7, 8]])
    assert made.step([], lambda name: []).ended == []


def test_rejected_drafts_are_in_no_tail() -> None:
    made, request = book(nothing, raw_tail_tokens=TAIL), Request("r", range(15))
    after_load(made, request, 0)
    made.step([("r", 20)], lambda name: [[1, 2, 3, 4]])  # one token and drafts: 20 are written
    request.all_token_ids += [90, 91]  # one draft was right, and one token was sampled
    made.finished("r", [[1, 2, 3, 4]])
    (ended,) = made.step([], lambda name: []).ended
    assert spans([ended]) == [(2, 4, True, True)]


def test_a_failed_load_is_found_by_its_blocks() -> None:
    made = book(everything)
    for name, table in (("a", [3, 4]), ("b", [5, 6])):
        request = Request(name, range(17))
        made.matched_tokens(request, 0)
        made.allocated(request, [table], 16)
    assert made.loading_into([]) == []
    assert made.loading_into([6, 9]) == ["b"]


def test_a_request_is_told_of_once_it_has_its_blocks() -> None:
    """However often vLLM has asked, and nobody is told where no tier wants to know."""
    made, request = book(everything, tells=True), Request("r", range(16))
    made.prefill_tokens_per_second = 500.0
    notes = made._lookups.notes  # type: ignore[attr-defined]
    for _ in range(3):
        assert made.matched_tokens(request, 4) == 8
    assert notes == []
    made.allocated(request, [[5, 6]], 8)
    made.allocated(request, [[5, 6]], 0)
    assert [(local, note) for local, note in notes] == [(1, Note(3, 16, 500.0))]
    made.load_failed(["r"])
    assert made.matched_tokens(request, 4) == 0
    made.allocated(request, [[5, 6]], 0)
    assert len(notes) == 1, "vLLM says so once more after a load that failed"
    silent = book(everything)
    assert silent.matched_tokens(request, 0) == 12
    silent.allocated(request, [[5]], 12)
    assert silent._lookups.notes == []  # type: ignore[attr-defined]


def test_prefill_speed_is_that_of_steps_that_follow_each_other() -> None:
    now = [0.0]
    speed = PrefillSpeed(clock=lambda: now[0])

    def plan(seconds: float, **tokens: int) -> None:
        speed.step(tokens)
        now[0] += seconds

    plan(1.0, a=1000)  # the next step is planned when this one is over
    plan(0.01, a=1)
    assert speed.tokens_per_second == 0.0
    plan(50.0, a=1)  # then nothing for a long time
    assert speed.tokens_per_second == pytest.approx(1001 / 1.01)
    plan(0.0, b=2000)  # planned ahead: this step is over when the one after next is planned
    plan(2.0, b=1)
    plan(0.01, b=1)
    before = speed.tokens_per_second
    assert before == pytest.approx((0.8 * 1001 + 2001) / (0.8 * 1.01 + 2.0))
    plan(0.01, b=1, c=40)
    plan(0.01, b=1, c=1)
    plan(0.01, b=1, c=1)
    assert speed.tokens_per_second == before, "mostly decode, and too little to tell"
