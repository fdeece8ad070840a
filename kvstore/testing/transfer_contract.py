"""The first half of the tier contract: bytes in, bytes out, and the life of a transfer. Subclass TierContract.

Payloads are derived from the key, so a wrong byte is seen wherever it comes from.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

import numpy as np

from allocator.errors import UsageError
from kvstore.copy_key import CopyKey
from kvstore.executor import Executor, InlineExecutor
from kvstore.testing.executor import SteppedExecutor
from kvstore.tier import ByteRow, Completion, GetItem, PutItem, ResultCode, Tier

OK, MISS, CANCELLED = ResultCode.OK, ResultCode.MISS, ResultCode.CANCELLED


def key_of(number: int, **changes: object) -> CopyKey:
    """The key of block `number` of a fixed chain."""
    fields = {
        "root": b"\x07" * 32,
        "group": 0,
        "hash": number.to_bytes(32, "big"),
        "codec": "raw",
        "exact": True,
        "heads": (0, 2),
        "layers": (0, 4),
        "parameters": b"",
    }
    return CopyKey(**(fields | changes))  # type: ignore[arg-type]


def payload_of(key: CopyKey, size_bytes: int) -> ByteRow:
    """Bytes that belong to this key and no other."""
    seed = int.from_bytes(key.hash[-8:], "big") ^ sum(key.to_bytes()) << 40
    return np.random.default_rng(seed).integers(0, 256, size_bytes, dtype=np.uint8)


class TransferContract:
    """See the module. Class attributes say what the tier promises beyond the contract."""

    payload_bytes: ClassVar[int] = 4096
    capacity_payloads: ClassVar[int] = 32
    """make_tier gets room for at least this many payloads and whatever each needs besides (see overhead_bytes)."""
    overhead_bytes: ClassVar[int] = 0
    evicts: ClassVar[bool] = True
    """A full tier makes room by itself, least recently used first."""
    leaves_first: ClassVar[bool] = False
    pins: ClassVar[bool] = False
    timeout_seconds: ClassVar[float] = 20.0
    fault_rounds: ClassVar[int] = 3
    """Rounds of random work with faults; each has a seed of its own."""

    def make_tier(self, capacity_bytes: int, executor: Executor) -> Tier:
        """A fresh, empty tier with exactly this budget."""
        raise NotImplementedError

    # tools -----------------------------------------------------------------------------------------------------------

    @property
    def capacity_bytes(self) -> int:
        return self.capacity_payloads * (self.payload_bytes + self.overhead_bytes)

    @contextmanager
    def tier(self, executor: Executor | None = None) -> Iterator[Tier]:
        tier = self.make_tier(self.capacity_bytes, executor if executor is not None else InlineExecutor())
        try:
            yield tier
        finally:
            tier.close()

    def wait(self, tier: Tier, count: int = 1) -> list[Completion]:
        """Poll until `count` completions have come."""
        done: list[Completion] = []
        deadline = time.monotonic() + self.timeout_seconds
        while len(done) < count:
            done += tier.poll()
            assert tier.used_bytes <= tier.capacity_bytes
            assert time.monotonic() < deadline, f"{len(done)} of {count} completions came"
        return done

    def put(self, tier: Tier, keys: Sequence[CopyKey], parents: Sequence[bytes | None] = ()) -> list[ResultCode]:
        items = [
            PutItem(key, [payload_of(key, self.payload_bytes)], parents[index] if parents else None)
            for index, key in enumerate(keys)
        ]
        transfer = tier.submit_put(items)
        (done,) = self.wait(tier)
        assert done.transfer is transfer
        return list(done.results)

    def get(self, tier: Tier, keys: Sequence[CopyKey]) -> list[ResultCode]:
        """Read and check: an OK with other bytes than the key's is the worst a tier can do."""
        buffers = [np.zeros(self.payload_bytes, np.uint8) for _ in keys]
        tier.submit_get([GetItem(key, buffer) for key, buffer in zip(keys, buffers, strict=True)])
        (done,) = self.wait(tier)
        for key, buffer, code in zip(keys, buffers, done.results, strict=True):
            if code is OK:
                assert np.array_equal(buffer, payload_of(key, self.payload_bytes)), f"wrong bytes for {key}"
        return list(done.results)

    @staticmethod
    def refused(call: Callable[[], object]) -> None:
        message = ""
        try:
            call()
        except UsageError as error:
            message = str(error)
        assert len(message) > 10, "expected a UsageError that says what was wrong"

    # bytes in, bytes out ---------------------------------------------------------------------------------------------

    def test_what_was_put_comes_back(self) -> None:
        with self.tier() as tier:
            keys = [key_of(n) for n in range(8)]
            assert tier.contains(keys) == [False] * 8
            assert self.put(tier, keys) == [OK] * 8
            assert tier.contains(keys) == [True] * 8
            assert self.get(tier, keys) == [OK] * 8
            assert 8 * self.payload_bytes <= tier.used_bytes <= tier.capacity_bytes

    def test_pieces_are_joined_and_buffers_of_every_kind_are_taken(self) -> None:
        with self.tier() as tier:
            size = self.payload_bytes
            for number, cut in enumerate((1, size // 3, size - 1)):
                key = key_of(number)
                whole = payload_of(key, size)
                pieces: list[object] = [bytearray(whole[:cut]), whole.data[cut:], b""]
                tier.submit_put([PutItem(key, pieces, None)])
                assert self.wait(tier)[0].results == (OK,)
                assert self.get(tier, [key]) == [OK]
                parts = np.zeros((4, size // 4), np.float32 if size % 16 == 0 else np.uint8).view(np.uint8)
                if parts.nbytes == 4 * size:
                    parts = parts[:, : size // 4].copy()
                tier.submit_get([GetItem(key, [parts[0], parts[1], parts[2], parts[3]])])
                assert self.wait(tier)[0].results == (OK,)
                assert np.array_equal(parts.reshape(-1), whole)

    def test_case_029_every_batch_length_keeps_bytes_and_order(self) -> None:
        with self.tier() as tier:
            for count in {1, 2, 3, self.capacity_payloads // 2 - 1, self.capacity_payloads // 2}:
                keys = [key_of(1000 * count + n) for n in range(count)]
                assert self.put(tier, keys) == [OK] * count
                assert self.get(tier, list(reversed(keys))) == [OK] * count

    def test_an_absent_copy_is_a_miss_and_its_neighbours_are_not(self) -> None:
        with self.tier() as tier:
            self.put(tier, [key_of(0), key_of(2)])
            assert self.get(tier, [key_of(0), key_of(1), key_of(2)]) == [OK, MISS, OK]

    def test_every_field_of_the_key_counts(self) -> None:
        with self.tier() as tier:
            self.put(tier, [key_of(1)])
            others = [
                key_of(1, root=b"\x08" * 32),
                key_of(1, group=1),
                key_of(2),
                key_of(1, codec="int4"),
                key_of(1, exact=False),
                key_of(1, heads=(0, 1)),
                key_of(1, layers=(0, 3)),
                key_of(1, parameters=b"k5"),
            ]
            assert tier.contains(others) == [False] * len(others)
            assert self.get(tier, others) == [MISS] * len(others)
            assert self.put(tier, others) == [OK] * len(others)
            assert self.get(tier, [key_of(1), *others]) == [OK] * (len(others) + 1)

    def test_a_second_put_of_a_key_is_ok_and_takes_no_room(self) -> None:
        with self.tier() as tier:
            self.put(tier, [key_of(1)])
            used = tier.used_bytes
            assert self.put(tier, [key_of(1), key_of(1)]) == [OK, OK]
            assert tier.used_bytes == used
            assert self.get(tier, [key_of(1)]) == [OK]

    def test_a_buffer_of_another_length_is_never_ok(self) -> None:
        with self.tier() as tier:
            self.put(tier, [key_of(1)])
            for size in (0, self.payload_bytes - 1, self.payload_bytes + 1, 4 * self.payload_bytes):
                tier.submit_get([GetItem(key_of(1), bytearray(size))])
                assert self.wait(tier)[0].results[0] not in (OK, CANCELLED)

    def test_leading_run_counts_to_the_first_gap(self) -> None:
        with self.tier() as tier:
            hashes = [key_of(n).hash for n in range(6)]
            self.put(tier, [key_of(n) for n in (0, 1, 2, 4)])
            assert tier.leading_run(key_of(9), hashes) == 3
            assert tier.leading_run(key_of(9), hashes[3:]) == 0
            assert tier.leading_run(key_of(9), hashes[4:]) == 1
            assert tier.leading_run(key_of(9), []) == 0
            assert tier.leading_run(key_of(9, codec="int4"), hashes) == 0

    # transfers -------------------------------------------------------------------------------------------------------

    def test_each_transfer_ends_once_and_poll_does_not_wait(self) -> None:
        executor = SteppedExecutor()
        with self.tier(executor) as tier:
            first = tier.submit_put([PutItem(key_of(1), [payload_of(key_of(1), self.payload_bytes)], None)])
            second = tier.submit_get([GetItem(key_of(1), bytearray(self.payload_bytes))])
            assert tier.poll() == []
            assert [first.done, second.done] == [False, False]
            executor.run_all()
            assert [first.done, second.done] == [True, True]
            done = self.wait(tier, 2)
            assert {completion.transfer for completion in done} == {first, second}
            assert tier.poll() == []
            assert first.total_bytes == self.payload_bytes

    def test_an_empty_batch_ends_too(self) -> None:
        with self.tier() as tier:
            for submit in (tier.submit_put, tier.submit_get):
                transfer = submit([])
                (done,) = self.wait(tier)
                assert done.transfer is transfer
                assert done.results == ()

    def test_case_052_a_copy_is_not_there_before_it_is_whole(self) -> None:
        executor = SteppedExecutor()
        with self.tier(executor) as tier:
            tier.submit_put([PutItem(key_of(1), [payload_of(key_of(1), self.payload_bytes)], None)])
            assert tier.contains([key_of(1)]) == [False]
            buffer = bytearray(self.payload_bytes)
            executor.run_all()
            assert tier.contains([key_of(1)]) == [True]
            tier.submit_get([GetItem(key_of(1), buffer)])
            executor.run_all()
            assert [done.results for done in self.wait(tier, 2)] == [(OK,), (OK,)]

    def test_cancelled_before_it_ran(self) -> None:
        executor = SteppedExecutor()
        with self.tier(executor) as tier:
            put = tier.submit_put([PutItem(key_of(1), [payload_of(key_of(1), self.payload_bytes)], None)])
            assert put.cancel()
            assert self.wait(tier)[0].results == (CANCELLED,)
            executor.run_all()
            assert tier.poll() == []
            assert tier.contains([key_of(1)]) == [False]
            assert not put.cancel()

    def test_case_051_abort_completion_and_cleanup_in_every_order(self) -> None:
        for order in ("run poll cancel", "run cancel poll", "cancel run poll", "cancel poll run"):
            executor = SteppedExecutor()
            with self.tier(executor) as tier:
                tier.submit_put([PutItem(key_of(1), [payload_of(key_of(1), self.payload_bytes)], None)])
                executor.run_all()
                self.wait(tier)
                transfer = tier.submit_get([GetItem(key_of(1), bytearray(self.payload_bytes))])
                done: list[Completion] = []
                for action in order.split():
                    if action == "run":
                        executor.run_all()
                    elif action == "poll":
                        done += tier.poll()
                    else:
                        transfer.cancel()
                executor.run_all()
                done += tier.poll()
                assert [completion.transfer for completion in done] == [transfer], order
                assert tier.delete([key_of(1)]) == 1, f"{order}: the copy is still held"
                executor.run_all()
                assert tier.used_bytes == 0, order

    def test_case_077_buffers_are_let_go_with_the_completion(self) -> None:
        executor = SteppedExecutor()
        with self.tier(executor) as tier:
            source, target = bytearray(self.payload_bytes), bytearray(self.payload_bytes)
            before = sys.getrefcount(source), sys.getrefcount(target)
            tier.submit_put([PutItem(key_of(1), [source], None)])
            executor.run_all()
            self.wait(tier)
            tier.submit_get([GetItem(key_of(1), target)])
            executor.run_all()
            self.wait(tier)
            cancelled = tier.submit_put([PutItem(key_of(2), [source], None)])
            cancelled.cancel()
            self.wait(tier)
            assert (sys.getrefcount(source), sys.getrefcount(target)) == before
            source.extend(b"resizable again: no view is left")

    def test_case_028_changing_the_source_afterwards_changes_nothing_stored(self) -> None:
        with self.tier() as tier:
            source = payload_of(key_of(1), self.payload_bytes)
            tier.submit_put([PutItem(key_of(1), [source], None)])
            self.wait(tier)
            source[:] = 0
            assert self.get(tier, [key_of(1)]) == [OK]

    def test_the_waker_is_called_for_every_completion(self) -> None:
        with self.tier() as tier:
            calls: list[int] = []
            tier.set_waker(lambda: calls.append(1))
            self.put(tier, [key_of(1)])
            self.get(tier, [key_of(1), key_of(2)])
            assert len(calls) == 2
            tier.set_waker(None)
            self.get(tier, [key_of(1)])
            assert len(calls) == 2

    def test_misuse_is_refused_at_once_and_queues_nothing(self) -> None:
        executor = SteppedExecutor()
        with self.tier(executor) as tier:
            good = payload_of(key_of(1), self.payload_bytes)
            gap = np.zeros((8, 8), np.uint8)[:, ::2]
            self.refused(lambda: tier.submit_put([("no key", [good], None)]))
            self.refused(lambda: tier.submit_put([(key_of(1), [good], b"short parent")]))
            self.refused(lambda: tier.submit_put([(key_of(1), [good], key_of(1).hash)]))
            self.refused(lambda: tier.submit_put([(key_of(0), [good], None), (key_of(1), [3.5], None)]))
            self.refused(lambda: tier.submit_put([(key_of(1), [gap], None)]))
            self.refused(lambda: tier.submit_get([(key_of(1), bytes(good))]))
            self.refused(lambda: tier.submit_get([(key_of(1), bytearray(good)), (key_of(2), "text")]))
            self.refused(lambda: tier.submit_get([(key_of(1),)]))
            assert executor.waiting_count == 0
            assert tier.poll() == []
            assert tier.used_bytes == 0
