"""Pages to and from the tiers, with a deadline on everything.

SGLang's threads come here: one asks what is stored, one reads, one writes. A call returns by its deadline whatever a
tier does, so bytes move between a tier and the host pool's pages directly only where a tier ends a cancelled transfer
by itself within its own timeouts (the daemon's client). A disk or a server may hang with a buffer in its hands: those
get a buffer of ours, and a page of SGLang's is never touched after the call that named it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from allocator import TierError
from engine_adapter.sglang_storage.pages import Page, cut, gather, scatter
from engine_adapter.tiers_below import TiersBelow
from kvstore.staging import Staging
from kvstore.tier import Lookup, ResultCode, Tier

if TYPE_CHECKING:
    from kvstore.copy_key import CopyKey
    from kvstore.tier import ByteRow, Transfer

_LOG = logging.getLogger(__name__)
_CHUNK_BYTES = 4 << 20  # staged at once: what was just read is still in the cache when it is put in place
_LOOK_SECONDS = 0.001
WHOLE_SECONDS = 10.0  # of a reset or a close
SAVE_SECONDS = 10.0  # a write that takes longer is reported as failed; nobody waits for it
DIRECT_TIERS = ("daemon", "host")


class Shelf:
    """tiers: fast to slow, closed with the shelf. deadline_seconds: of lookups and reads.

    prefill_tokens_per_second: of the engine, for what the daemon says of time saved; 0: nobody knows. tells: this rank
    says for all what was read.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        staging_bytes: int = 256 << 20,
        deadline_seconds: float = 1.0,
        prefill_tokens_per_second: float = 0.0,
        tells: bool = True,
    ) -> None:
        self.below = TiersBelow(tiers)
        self.deadline_seconds = deadline_seconds
        self._prefill_tokens_per_second = prefill_tokens_per_second
        self._tells = tells
        self._staging = Staging(staging_bytes)

    def until(self) -> float:
        """When a read that begins now is given up."""
        return time.monotonic() + self.deadline_seconds

    def find(self, keys: Sequence[CopyKey], until: float) -> list[Tier | None]:
        """The first tier that has each copy. A tier that still looks is waited for."""
        found: list[Tier | None] = [None] * len(keys)
        for tier in self.below.tiers:
            if None not in found:
                break
            flags = self._present(tier, keys, until)
            found = [one or (tier if flag else None) for one, flag in zip(found, flags, strict=True)]
        return found

    def note_lookup(self, key: CopyKey, before: Sequence[bytes], hashes: Sequence[bytes], run: int) -> None:
        """SGLang goes by it that the first `run` of `hashes` can be had: for tiers that say what use they are.

        key: of one part of the pages; before: the prompt's pages that SGLang has itself.
        """
        with self.below.lock:
            told = [tier for tier in self.below.tiers if type(tier).note_lookup is not Tier.note_lookup]
            if not told or not hashes:
                return
            found = self.find(key.with_hashes(hashes[:run]), 0.0)
            start, prompt = len(before), (before or hashes)[0]
            missed = range(start + run, start + len(hashes))
            for tier in told:
                copies = {start + place: key.with_hash(hashes[place]) for place, one in enumerate(found) if one is tier}
                tier.note_lookup(Lookup(key.with_hash(prompt), hashes, copies, missed, 0, start=start))
                if self._prefill_tokens_per_second:
                    tier.note_prefill_speed(self._prefill_tokens_per_second)

    def _present(self, tier: Tier, keys: Sequence[CopyKey], until: float) -> list[bool]:
        if self.below.is_stuck(tier):
            return [False] * len(keys)
        while True:
            with self.below.lock:
                flags = tier.contains(keys)
                is_looking = not all(flags) and tier.pending_count(keys) > 0
            if not is_looking or time.monotonic() >= until:
                return flags
            time.sleep(_LOOK_SECONDS)

    # load ------------------------------------------------------------------------------------------------------------

    def load(self, pages: Sequence[Page], until: float) -> list[bool]:
        """Bring pages to their rows: which are there, whole and checked. A bad one is looked for in the next tier."""
        loaded = [False] * len(pages)
        for tier in self.below.tiers:
            places = [place for place, one in enumerate(loaded) if not one]
            if not places or time.monotonic() >= until:
                break
            present = self._present(tier, [pages[place].key for place in places], until)
            places = [place for place, flag in zip(places, present, strict=True) if flag]
            wanted = [pages[place] for place in places]
            if not wanted:
                continue
            load = self._load_direct if tier.name in DIRECT_TIERS else self._load_staged
            codes = load(tier, wanted, until)
            for place, code in zip(places, codes, strict=True):
                loaded[place] = code is ResultCode.OK
            self._note_reuse(
                tier, [page.key for page, code in zip(wanted, codes, strict=True) if code is ResultCode.OK]
            )
            self.below.count(f"loaded_pages_{tier.name}", codes.count(ResultCode.OK))
        self.below.count("pages_not_loaded", loaded.count(False))
        return loaded

    def _note_reuse(self, tier: Tier, keys: Sequence[CopyKey]) -> None:
        """Each page once, however many ranks, parts and pools it has."""
        if not self._tells:
            return
        pages = [key for key in keys if key.group == 0 and key.heads[0] == 0]
        if pages and type(tier).note_reuse is not Tier.note_reuse:
            with self.below.lock:
                tier.note_reuse(pages[0], len(pages))

    def _load_direct(self, tier: Tier, pages: Sequence[Page], until: float) -> list[ResultCode]:
        transfer = self.below.begin(lambda: tier.submit_get([(page.key, page.rows) for page in pages]))
        return list(self.below.wait(transfer, until))

    def _load_staged(self, tier: Tier, pages: Sequence[Page], until: float) -> list[ResultCode]:
        """Chunk by chunk, the next one read while the last one is put in place."""
        codes: list[ResultCode] = []
        under_way: deque[tuple[list[Page], ByteRow | None, Transfer | None]] = deque()
        for chunk in _chunks(pages):
            under_way.append((chunk, *self._begin_load(tier, chunk)))
            if len(under_way) > 1:
                codes += self._end_load(*under_way.popleft(), until)
        while under_way:
            codes += self._end_load(*under_way.popleft(), until)
        return codes

    def _begin_load(self, tier: Tier, chunk: Sequence[Page]) -> tuple[ByteRow | None, Transfer | None]:
        row = self._take(tier, chunk)
        if row is None:
            return None, None
        items = [(page.key, part) for page, part in zip(chunk, cut(chunk, row), strict=True)]
        return row, self.below.begin(lambda: tier.submit_get(items))

    def _end_load(
        self, chunk: list[Page], row: ByteRow | None, transfer: Transfer | None, until: float
    ) -> list[ResultCode]:
        if row is None or transfer is None:
            return [ResultCode.FAILED] * len(chunk)
        results = self.below.wait_or_leave(transfer, until, lambda _: self._staging.give_back(row))
        if results is None:
            self.below.count("pages_left_to_a_stuck_tier", len(chunk))
            return [ResultCode.CANCELLED] * len(chunk)
        for page, part, code in zip(chunk, cut(chunk, row), results, strict=True):
            if code is ResultCode.OK:
                scatter(part, page)
        self._give_back(row)
        return list(results)

    # save ------------------------------------------------------------------------------------------------------------

    def save(self, pages: Sequence[Page]) -> list[bool]:
        """Write pages to every tier; which are in one of them now. Their rows are the caller's again."""
        until = time.monotonic() + SAVE_SECONDS
        saved = [False] * len(pages)
        for tier in self.below.tiers:
            if self.below.is_stuck(tier):
                self.below.count(f"saves_dropped_{tier.name}", len(pages))
                continue
            with self.below.lock:
                there = tier.contains([page.key for page in pages])
            fresh = [place for place, flag in enumerate(there) if not flag]
            save = self._save_direct if tier.name in DIRECT_TIERS else self._save_staged
            codes = save(tier, [pages[place] for place in fresh], until)
            good = {place for place, code in zip(fresh, codes, strict=True) if code is ResultCode.OK}
            saved = [one or there[place] or place in good for place, one in enumerate(saved)]
            self.below.count(f"saved_pages_{tier.name}", len(good))
        self.below.count("pages_not_saved", saved.count(False))
        return saved

    def _save_direct(self, tier: Tier, pages: Sequence[Page], until: float) -> list[ResultCode]:
        if not pages:
            return []
        transfer = self.below.begin(lambda: tier.submit_put(list(pages)))
        return list(self.below.wait(transfer, until))

    def _save_staged(self, tier: Tier, pages: Sequence[Page], until: float) -> list[ResultCode]:
        codes: list[ResultCode] = []
        under_way: deque[tuple[int, ByteRow, Transfer]] = deque()
        for chunk in _chunks(pages):
            row = self._take(tier, chunk)
            if row is None:
                while under_way:
                    codes += self._end_save(*under_way.popleft(), until)
                codes += [ResultCode.FULL] * len(chunk)
                continue
            parts = gather(chunk, row)
            items = [(page.key, [part], page.parent) for page, part in zip(chunk, parts, strict=True)]
            under_way.append((len(chunk), row, self.below.begin(partial(tier.submit_put, items))))
            if len(under_way) > 1:
                codes += self._end_save(*under_way.popleft(), until)
        while under_way:
            codes += self._end_save(*under_way.popleft(), until)
        return codes

    def _end_save(self, count: int, row: ByteRow, transfer: Transfer, until: float) -> list[ResultCode]:
        results = self.below.wait_or_leave(transfer, until, lambda _: self._staging.give_back(row))
        if results is None:
            return [ResultCode.CANCELLED] * count
        self._give_back(row)
        return list(results)

    def _take(self, tier: Tier, chunk: Sequence[Page]) -> ByteRow | None:
        """A buffer for the chunk; None where there is no room, or the tier has not given back what it had."""
        if self.below.is_stuck(tier):
            return None
        with self.below.lock:
            row = self._staging.take(sum(page.size_bytes for page in chunk))
        if row is None:
            self.below.count("staging_full")
        return row

    def _give_back(self, row: ByteRow) -> None:
        with self.below.lock:
            self._staging.give_back(row)

    # whole tiers -----------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """A new epoch in every tier, and nothing of the old one in it. TierError where one was not reached in time."""
        _bounded(self.below.reset, "reset")

    def close(self) -> None:
        """What is on its way ends; a tier that hangs is left alone, logged."""
        try:
            _bounded(self.below.close, "close")
        except TierError as error:
            _LOG.warning("kvstore: %s", error)


def _bounded(work: Callable[[], object], name: str) -> None:
    """Run it beside, since a tier that hangs must not take the scheduler along. TierError: its own, or not in time."""
    problems: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except TierError as error:
            problems.append(error)

    thread = threading.Thread(target=run, name=f"kvstore-{name}", daemon=True)
    thread.start()
    thread.join(WHOLE_SECONDS)
    if thread.is_alive():
        raise TierError(f"{name}: a tier has not answered in {WHOLE_SECONDS:g} seconds")
    if problems:
        raise problems[0]


def _chunks(pages: Sequence[Page]) -> Iterator[list[Page]]:
    chunk: list[Page] = []
    size = 0
    for page in pages:
        if chunk and size + page.size_bytes > _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append(page)
        size += page.size_bytes
    if chunk:
        yield chunk
