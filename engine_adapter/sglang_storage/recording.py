"""Requests, as well as a storage below SGLang can know them, for a trace (docs/how-to/sglang.md says what is not seen).

SGLang asks for a prompt's pages beyond its own caches, and later names what it has computed, with all pages before.
Of these two a line is made. SGLang's threads only leave word (`asked`, `wrote`); a thread of this file's own puts it
together and writes. What it has no room for is dropped and counted. No SGLang here.

The pages that SGLang 0.5.23 gives as a question's prefix lack those of the node that it ends in, and a question at the
start of a prompt looks like one behind a first node. So a prompt's front is taken from what was written before, or from
what is written next.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import time
from array import array
from collections.abc import Callable, Sequence

from allocator import ConfigError
from engine_adapter.sglang_storage.forms import Rank, page_hash
from kvstore.trace_recorder import FILE_VARIABLE, EndedRequest, TraceRecorder

_LOG = logging.getLogger(__name__)
THRESHOLD_TOKENS = 256  # SGLang's own, where nothing else is said
SETTING = "hicache_storage_pass_prefix_keys"
_QUEUE_CALLS = 1024
_TICK_SECONDS = 0.5
_BATCH_PAGES = 128  # SGLang's own cache controller asks for so many at a time
_AGAIN_SECONDS = 10.0  # a request that waits may ask again
_JOIN_SECONDS = 1.0  # pieces of one answer are written one after the other
_HOLD_SECONDS = 600.0  # longest that a request is waited for
_HELD_PAGES = 1 << 20
_KNOWN_PAGES = 1 << 17
_NAME_BYTES = 8

Pages = Sequence[int]


class _Seen:
    """A request. front: the pages before those that were asked for; None while it is not known."""

    __slots__ = ("answer_pages", "arrived", "asked", "front", "is_computed", "last_asked", "last_written")

    def __init__(self, arrived: float, asked: Pages, front: Pages | None) -> None:
        self.arrived = self.last_asked = self.last_written = arrived
        self.asked = array("Q", asked)
        self.front = None if front is None else array("Q", front)
        self.answer_pages = 0
        self.is_computed = False

    @property
    def page_count(self) -> int:
        return len(self.asked) + len(self.front or ())


class Requests:
    """Makes lines of what SGLang asked and wrote. One thread.

    threshold_tokens: SGLang asks for nothing where fewer tokens of a prompt are new to it.
    """

    def __init__(self, recorder: TraceRecorder, page_tokens: int, threshold_tokens: int) -> None:
        self._recorder = recorder
        self._page_tokens = page_tokens
        self._unasked_pages = (max(threshold_tokens, page_tokens) - 1) // page_tokens
        self._held: list[_Seen] = []
        self._held_pages = 0
        self._by_end: dict[int, _Seen] = {}
        self._by_first: dict[int, list[_Seen]] = {}  # not computed yet
        self._before: dict[int, int] = {}  # page -> the one before it; 0: none
        self._last_asked: _Seen | None = None
        self.lost_requests = 0

    def asked(self, before: Pages, pages: Pages, now: float) -> None:
        """A question. before: the pages that SGLang says come first, perhaps not all of them."""
        if not pages:
            return
        last = self._last_asked
        if last is not None and before and before[-1] == last.asked[-1] and len(last.asked) % _BATCH_PAGES == 0:
            self._by_end.pop(last.asked[-1], None)
            self._learn(pages, before[-1])
            last.asked.extend(pages)
            self._held_pages += len(pages)
            self._by_end[pages[-1]] = last
            return
        again = self._by_end.get(pages[-1])
        if again is not None and not again.is_computed and now - again.last_asked < _AGAIN_SECONDS:
            again.last_asked = now
            return
        one = self._last_asked = _Seen(now, pages, self._front_of(pages[0]))
        self._learn(pages, None)
        self._by_first.setdefault(pages[0], []).append(one)
        self._hold(one, pages[-1])

    def wrote(self, before: Pages, pages: Pages, now: float) -> None:
        """Pages that were written. before: all pages that come first."""
        chain = [*before, *pages]
        if self._by_first:
            for place, page in enumerate(chain):
                for one in self._by_first.pop(page, ()):
                    one.is_computed = True
                    if one.front is None:
                        one.front = array("Q", chain[:place])
                        self._held_pages += place
        fresh = next((place for place in range(len(before), len(chain)) if chain[place] not in self._before), None)
        self._learn(pages, before[-1] if before else 0)
        if fresh is not None:
            self._answered(chain, fresh, len(before), now)

    def _answered(self, chain: Pages, fresh: int, own: int, now: float) -> None:
        """Pages from `fresh` on were never heard of; those from `own` on were written together.

        They are an answer, or a prompt that was not asked for: SGLang writes a prompt when it is computed, and its
        answer when that has ended.
        """
        before = chain[fresh - 1] if fresh else 0
        one = self._by_end.get(before)
        if one is None or (one.answer_pages and now - one.last_written >= _JOIN_SECONDS):
            prompt = min(len(chain), fresh + self._unasked_pages)
            one = _Seen(now, chain[fresh:prompt], chain[:fresh])
            one.is_computed = True
            self._hold(one, chain[-1])
        else:
            prompt = fresh
            if fresh > own and not one.answer_pages:  # a prompt of whole pages: the last one is never asked for
                one.asked.append(chain[fresh])
                self._held_pages += 1
                prompt += 1
            self._by_end[chain[-1]] = one
        one.answer_pages += len(chain) - prompt
        one.last_written = now

    def _hold(self, one: _Seen, end: int) -> None:
        self._held.append(one)
        self._held_pages += one.page_count
        self._by_end[end] = one

    def _learn(self, pages: Pages, before: int | None) -> None:
        """before: the page before the first one; None where that is not known."""
        known = self._before
        for page in pages:
            if before is None:
                known.setdefault(page, page)  # heard of; what comes before it is not known
            elif known.get(page, page) == page:
                known[page] = before
            before = page
        while len(known) > _KNOWN_PAGES:
            del known[next(iter(known))]

    def _front_of(self, page: int) -> list[int] | None:
        """All pages before one, head first; None where they are not all known."""
        front: list[int] = []
        while (before := self._before.get(page)) != 0:
            if before is None or before == page:
                return None
            front.append(before)
            page = before
        return front[::-1]

    def end_due(self, now: float, *, all_: bool = False) -> None:
        """Write requests that have been answered, or that were waited for long enough; all at the end."""
        held: list[_Seen] = []
        for one in self._held:
            is_over = all_ or now - one.arrived > _HOLD_SECONDS or self._held_pages > _HELD_PAGES
            is_answered = one.answer_pages and now - one.last_written > _JOIN_SECONDS
            if one.front is not None and (is_over or is_answered):
                self._write(one, now)
            elif is_over:
                self.lost_requests += 1
            else:
                held.append(one)
                continue
            self._held_pages -= one.page_count
            if one is self._last_asked:
                self._last_asked = None
            if not one.is_computed and (others := self._by_first.get(one.asked[0])) is not None:
                others[:] = [other for other in others if other is not one]
                if not others:
                    del self._by_first[one.asked[0]]
        if len(held) < len(self._held):
            kept = set(map(id, held))
            self._by_end = {end: one for end, one in self._by_end.items() if id(one) in kept}
        self._held = held

    def _write(self, one: _Seen, now: float) -> None:
        pages = [*(one.front or ()), *one.asked]
        if not pages:
            return  # less than a page: nothing of it can be shared
        self._recorder.record(
            EndedRequest(
                token_ids=range(len(pages) * self._page_tokens),
                output_tokens=one.answer_pages * self._page_tokens,
                age_seconds=now - one.arrived,
                names=[page.to_bytes(_NAME_BYTES, "little") for page in pages],
            )
        )


class Recording:
    """What the storage tells of its calls, from any thread; `close` once."""

    def __init__(
        self,
        recorder: TraceRecorder,
        page_tokens: int,
        threshold_tokens: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._recorder = recorder
        self._requests = Requests(recorder, page_tokens, threshold_tokens)
        self._clock = clock
        self._ticked = clock()
        self._calls: queue.Queue[tuple[bool, Sequence[str], Sequence[str], float] | None] = queue.Queue(_QUEUE_CALLS)
        self.dropped_calls = 0
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="kvstore-trace", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def asked(self, before: Sequence[str] | None, keys: Sequence[str]) -> None:
        """SGLang looks for `keys`, which follow `before`."""
        self._leave(False, before or (), keys)

    def wrote(self, before: Sequence[str] | None, keys: Sequence[str]) -> None:
        """SGLang hands over pages. before: None where it does not say what comes first; then recording ends."""
        if before is not None:
            self._leave(True, before, keys)
        elif not self._is_over:
            self._is_over = True
            _LOG.error(
                'kvstore: recording ends: pages come without those before them; expected "%s": true in '
                "--hicache-storage-backend-extra-config",
                SETTING,
            )

    def _leave(self, is_written: bool, before: Sequence[str], keys: Sequence[str]) -> None:
        if self._is_over:
            return
        try:
            self._calls.put_nowait((is_written, before, keys, self._clock()))
        except queue.Full:
            self.dropped_calls += 1

    def _run(self) -> None:
        while True:
            try:
                call = self._calls.get(timeout=_TICK_SECONDS)
                if call is None:
                    return
                is_written, before, keys, now = call
                (self._requests.wrote if is_written else self._requests.asked)(_numbers(before), _numbers(keys), now)
            except queue.Empty:
                pass
            if (now := self._clock()) - self._ticked >= _TICK_SECONDS:
                self._ticked = now
                self._requests.end_due(now)
                self._recorder.flush()

    def close(self) -> None:
        """Writes what is known by now. Idempotent."""
        atexit.unregister(self.close)
        self._is_over = True
        if self._thread.is_alive():
            self._calls.put(None)
            self._thread.join()
            self._requests.end_due(self._clock(), all_=True)
        self._recorder.close()
        lost = self._requests.lost_requests
        if lost or self.dropped_calls:
            _LOG.warning(
                "kvstore: the trace lacks %s requests whose first pages were never named, and %s calls that there was "
                "no time for",
                lost,
                self.dropped_calls,
            )


def started(
    rank: Rank, page_tokens: int, model: str, *, in_place: bool, server: tuple[bool, int] | None
) -> Recording | None:
    """What `kvstore record` asked for, or None; of all ranks of a model one records.

    server: whether SGLang passes prefix keys, and from how many tokens on it asks; None where no server says.
    ConfigError where what comes cannot be put together.
    """
    if not os.environ.get(FILE_VARIABLE) or rank.tp_rank or rank.pp_rank or rank.cp_rank:
        return None
    passes, threshold_tokens = server or (True, THRESHOLD_TOKENS)
    for name, is_set, wanted in ((SETTING, passes, "true"), ("interface_v1", in_place, "1")):
        if not is_set:
            raise ConfigError(
                f"recording: {name} is not set, and without it requests cannot be told from their pages; expected "
                f'"{name}": {wanted} in --hicache-storage-backend-extra-config'
            )
    recorder = TraceRecorder.from_environment(b"", page_tokens, model)
    return None if recorder is None else Recording(recorder, page_tokens, threshold_tokens)


def _numbers(keys: Sequence[str]) -> list[int]:
    return [int.from_bytes(page_hash(key)[:_NAME_BYTES], "little") for key in keys]
