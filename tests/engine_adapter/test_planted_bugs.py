"""Bugs planted one at a time into the real parts: the random load must find each of them, or it proves little.

Each is a fault that a cache of this kind has been seen to have. The first seeds that meet it must fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from allocator import BlockPool, BlockTable
from allocator.errors import KVError
from engine_adapter.adapter import Reservation, StoreAdapter
from engine_adapter.batch import SequenceSlice
from engine_adapter.decode_loop import DecodeLoop
from engine_adapter.scheduler import PlannedSlice
from kvstore import HashChain, KVStore
from kvstore.admission import Admitter
from kvstore.device_blocks import DeviceBlocks
from kvstore.fetching import Fetcher
from tests.engine_adapter.loop_kit import Kit, KitMaker, geometry, make_store
from tests.engine_adapter.random_load import run_random_mix

Patch = pytest.MonkeyPatch
SEEDS = range(60)


@pytest.fixture
def make_kit() -> Iterator[KitMaker]:
    """As elsewhere, but a store that a bug has broken may say so again when it closes."""
    made: list[Kit] = []

    def make(family: str = "full", *, loop: dict[str, Any] | None = None, **settings: Any) -> Kit:
        made.append(Kit(make_store(geometry(family), **settings), loop or {}))
        return made[-1]

    yield make
    for kit in made:
        with suppress(KVError):
            kit.store.close()


def write_into_shared_tails(patch: Patch) -> None:
    """A fork's first write goes into the block that both share."""
    patch.setattr(BlockTable, "tail_is_shared", lambda self: False)


def copy_no_bytes(patch: Patch) -> None:
    """Copy on write takes a fresh block and forgets the bytes."""
    patch.setattr(DeviceBlocks, "copy", lambda self, group, form, source, target: None)


def keep_tables_between_steps(patch: Patch) -> None:
    """The loop remembers a sequence's first block of each group from an earlier step."""
    real: Callable[..., SequenceSlice] = DecodeLoop._slice
    kept: dict[str, tuple[Any, ...]] = {}

    def stale(self: DecodeLoop, part: PlannedSlice) -> SequenceSlice:
        fresh = real(self, part)
        tables = kept.setdefault(f"{id(self)} {fresh.sequence_id}", fresh.tables)
        if part.stream.computed == 0:
            return fresh
        mixed = tuple(
            np.concatenate([old[:1], new[1:]]) if len(new) > 1 else new
            for old, new in zip(tables, fresh.tables, strict=True)
        )
        return SequenceSlice(
            fresh.sequence_id, fresh.token_ids, fresh.start, fresh.logits_count, mixed, fresh.slot_mappings
        )

    patch.setattr(DecodeLoop, "_slice", stale)


def load_into_the_wrong_blocks(patch: Patch) -> None:
    """What comes from the host is written to the right blocks in the wrong order (case 21)."""
    real = Fetcher._submit

    def crossed(self: Fetcher, tier: Any, copies: list[Any], *rest: Any) -> Any:
        forms = {(copy.group, copy.form) for copy in copies}
        for form in forms:
            alike = [copy for copy in copies if (copy.group, copy.form) == form]
            keys = [copy.key for copy in alike]
            for copy, key in zip(alike, reversed(keys), strict=True):
                copy.key = key
        return real(self, tier, copies, *rest)

    patch.setattr(Fetcher, "_submit", crossed)


def drop_the_window_too_early(patch: Patch) -> None:
    """A block leaves a sliding window while its last tokens are still read."""
    real = BlockTable._window_edge
    patch.setattr(BlockTable, "_window_edge", lambda self, committed: real(self, committed) + 2 * self.block_tokens + 1)


def name_blocks_without_their_past(patch: Patch) -> None:
    """A block's hash covers its own tokens only, not all before it."""

    def rootless(self: HashChain) -> list[bytes]:
        block = self.block_tokens
        starts = range(len(self._hashes) * block, len(self._tokens) // block * block, block)
        fresh = [self._hash_span(b"\x01", self.root, start, start + block) for start in starts]
        self._hashes += fresh
        return fresh

    patch.setattr(HashChain, "_complete", rootless)


def share_without_a_reference(patch: Patch) -> None:
    """A hit or a fork uses blocks without counting."""
    patch.setattr(BlockPool, "share", lambda self, ids: None)


def forget_blocks_on_abort(patch: Patch) -> None:
    """An aborted sequence goes, its blocks stay."""

    def abort(self: KVStore, sequence_id: str) -> None:
        del self._sequences[sequence_id]

    patch.setattr(KVStore, "abort", abort)


def report_a_token_too_many(patch: Patch) -> None:
    """Computing starts one token behind where it should."""
    real = StoreAdapter.reserve

    def reserve(self: StoreAdapter, sequence_id: str, token_ids: Any, **options: Any) -> Reservation:
        given = real(self, sequence_id, token_ids, **options)
        more = int(0 < given.ready_tokens < len(token_ids) - 2 and not given.pending_tokens)
        return Reservation(sequence_id, given.ready_tokens + more, given.pending_tokens, given.by_tier)

    patch.setattr(StoreAdapter, "reserve", reserve)


def leave_no_token_to_compute(patch: Patch) -> None:
    """A prompt that is cached whole is reused whole (case 23)."""
    patch.setattr(Admitter, "usable_hashes", lambda self, hashes, token_count, private_from: hashes)


def forget_rejected_drafts(patch: Patch) -> None:
    """Room of rejected drafts is never given back."""
    patch.setattr(StoreAdapter, "rollback", lambda self, sequence_id, token_count: None)


def commit_what_was_not_fed(patch: Patch) -> None:
    """Blocks are named by other tokens than those they were computed from."""
    real = StoreAdapter.commit
    patch.setattr(
        StoreAdapter, "commit", lambda self, name, tokens: real(self, name, [*tokens[:-1], (tokens[-1] + 1) % 97])
    )


def trust_the_first_draft(patch: Patch) -> None:
    """The first drafted token is taken for the model's own."""
    from engine_adapter import sampling

    real = sampling.Sampler.choose
    last: list[Any] = [None]

    def choose(self: Any, logits: Any, argmax: int, request: Any, branch: int, position: int) -> sampling.Choice:
        made = real(self, logits, argmax, request, branch, position)
        again, last[0] = last[0] == (request.request_id, branch, position - 1), (request.request_id, branch, position)
        return sampling.Choice((made.token_id + 1) % 97, made.argmax_token_id) if again else made

    patch.setattr(sampling.Sampler, "choose", choose)


BUGS = (
    write_into_shared_tails,
    copy_no_bytes,
    keep_tables_between_steps,
    load_into_the_wrong_blocks,
    drop_the_window_too_early,
    name_blocks_without_their_past,
    share_without_a_reference,
    forget_blocks_on_abort,
    report_a_token_too_many,
    leave_no_token_to_compute,
    forget_rejected_drafts,
    commit_what_was_not_fed,
    trust_the_first_draft,
)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_each_planted_bug_is_found(
    make_kit: KitMaker, monkeypatch: pytest.MonkeyPatch, bug: Callable[[Patch], None]
) -> None:
    bug(monkeypatch)
    for seed in SEEDS:
        try:
            run_random_mix(make_kit, seed)
        except Exception as error:
            monkeypatch.undo()
            print(f"{bug.__name__}: seed {seed}: {type(error).__name__}: {str(error)[:160]}")
            return
    pytest.fail(f"{bug.__doc__} ({bug.__name__}) was not found by {len(SEEDS)} random loads")
