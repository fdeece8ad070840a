"""The tests that every tier passes. Subclass TierContract in a test file and say how to make the tier.

The tests use plain asserts and no fixtures; pytest collects the subclass, or call the methods yourself.
"""

from __future__ import annotations

import random
import time

import numpy as np

from kvstore.copy_key import CopyKey
from kvstore.executor import ThreadExecutor
from kvstore.testing.executor import SteppedExecutor
from kvstore.testing.faulty_tier import Faults, FaultyTier
from kvstore.testing.transfer_contract import CANCELLED, MISS, OK, TransferContract, key_of, payload_of
from kvstore.tier import ByteRow, GetItem, PutItem, ResultCode, Tier


class TierContract(TransferContract):
    """Room, ends and load; inherits the life of a transfer and the tools. Override make_tier and the promises."""

    # room ------------------------------------------------------------------------------------------------------------

    def test_case_077_three_times_the_capacity_goes_through(self) -> None:
        if not self.evicts:
            return
        with self.tier() as tier:
            count = 3 * self.capacity_payloads
            for number in range(count):
                assert self.put(tier, [key_of(number)]) == [OK]
                assert tier.contains([key_of(number)]) == [True]
                assert tier.used_bytes <= tier.capacity_bytes
            stored = tier.contains([key_of(n) for n in range(count)])
            assert sum(stored) >= self.capacity_payloads // 2
            assert self.get(tier, [key_of(n) for n in range(count)]) == [OK if one else MISS for one in stored]

    def test_more_than_could_ever_fit_is_too_large(self) -> None:
        with self.tier() as tier:
            self.put(tier, [key_of(0)])
            tier.submit_put([PutItem(key_of(1), [bytes(tier.capacity_bytes + 1)], None)])
            assert self.wait(tier)[0].results == (ResultCode.TOO_LARGE,)
            assert self.get(tier, [key_of(0), key_of(1)]) == [OK, MISS]

    def test_case_142_a_fresh_copy_is_not_the_oldest(self) -> None:
        if not self.evicts:
            return
        with self.tier() as tier:
            old = [key_of(n) for n in range(self.capacity_payloads)]
            self.put(tier, old)
            self.get(tier, old)
            half = self.capacity_payloads // 2
            fresh = [key_of(1000 + n) for n in range(half)]
            self.put(tier, fresh)
            assert tier.contains(fresh) == [True] * half

    def test_what_is_touched_stays_longest(self) -> None:
        if not self.evicts:
            return
        with self.tier() as tier:
            count = self.capacity_payloads
            self.put(tier, [key_of(n) for n in range(count)])
            stored = [n for n in range(count) if tier.contains([key_of(n)])[0]]
            kept = stored[: max(1, len(stored) // 8)]
            for number in range(count):
                tier.touch([key_of(n) for n in kept] + [key_of(10_000)])
                self.put(tier, [key_of(2000 + number)])
            assert tier.contains([key_of(n) for n in kept]) == [True] * len(kept)

    def test_case_124_a_suffix_goes_before_its_prefix(self) -> None:
        if not (self.evicts and self.leaves_first):
            return
        with self.tier() as tier:
            length = self.capacity_payloads // 2
            chain = [key_of(n) for n in range(length)]
            self.put(tier, chain, [None, *(key.hash for key in chain[:-1])])
            tier.touch(chain[length // 2 :])  # the suffix was used last
            for number in range(4 * self.capacity_payloads):
                self.put(tier, [key_of(500 + number)])
                stored = tier.contains(chain)
                assert stored == sorted(stored, reverse=True), "a block is stored without its parent"
                if number == length or not any(stored):
                    tier.touch(chain[length // 4 :])
            assert not any(tier.contains(chain)), "old copies stay for ever"

    def test_case_048_and_079_pins_hold_and_are_given_back_once(self) -> None:
        if not self.pins:
            return
        with self.tier() as tier:
            keys = [key_of(n) for n in range(3)]
            self.put(tier, keys)
            assert tier.pin([*keys, key_of(77)]) == [True, True, True, False]
            tier.pin(keys[:1])
            for number in range(2 * self.capacity_payloads):
                self.put(tier, [key_of(100 + number)])
                assert tier.contains(keys) == [True] * 3
            self.refused(lambda: tier.unpin([keys[0], keys[1], keys[1]]))  # one too many: nothing is unpinned
            tier.unpin([keys[0], keys[0], keys[1], keys[2]])
            self.refused(lambda: tier.unpin(keys[:1]))
            for number in range(2 * self.capacity_payloads):
                self.put(tier, [key_of(300 + number)])
            assert tier.contains(keys) == [False] * 3

    # ends ------------------------------------------------------------------------------------------------------------

    def test_deleted_copies_are_gone_and_can_come_again(self) -> None:
        with self.tier() as tier:
            keys = [key_of(n) for n in range(4)]
            self.put(tier, keys)
            assert tier.delete([keys[1], keys[1], key_of(99)]) == 1
            assert self.get(tier, keys) == [OK, MISS, OK, OK]
            assert self.put(tier, keys) == [OK] * 4
            assert self.get(tier, keys) == [OK] * 4
            assert tier.delete(keys) == 4
            assert tier.used_bytes == 0

    def test_case_110_a_late_cleanup_spares_the_newer_copy(self) -> None:
        executor = SteppedExecutor()
        with self.tier(executor) as tier:
            key = key_of(1)
            old = payload_of(key, self.payload_bytes)
            tier.submit_put([PutItem(key, [old], None)])
            executor.run_all()
            buffer = np.zeros(self.payload_bytes, np.uint8)
            tier.submit_get([GetItem(key, buffer)])
            tier.delete([key])  # while it is being read
            tier.submit_put([PutItem(key, [old], None)])
            executor.run_all()
            results = [done.results[0] for done in self.wait(tier, 3)]
            assert results[0] is OK
            assert results[2] is OK
            assert results[1] is MISS or (results[1] is OK and np.array_equal(buffer, old))
            assert tier.contains([key]) == [True]
            tier.delete([key])
            executor.run_all()
            assert tier.used_bytes == 0

    def test_case_079_a_read_that_waits_never_gets_the_bytes_of_who_came_after(self) -> None:
        for seed in range(8):  # orders in which the read runs before, between and after the copies that need its room
            executor = SteppedExecutor(seed)
            with self.tier(executor) as tier:
                key, others = key_of(1), [key_of(100 + number) for number in range(self.capacity_payloads)]
                old = payload_of(key, self.payload_bytes)
                tier.submit_put([PutItem(key, [old], None)])
                executor.run_all()
                buffer = np.zeros(self.payload_bytes, np.uint8)
                read = tier.submit_get([GetItem(key, buffer)])
                tier.delete([key])
                for other in others:
                    tier.submit_put([PutItem(other, [payload_of(other, self.payload_bytes)], None)])
                executor.run_all()
                for done in self.wait(tier, 2 + len(others)):
                    if done.transfer is read and done.results[0] is OK:
                        assert np.array_equal(buffer, old), f"bytes of another copy, order {seed}"

    def test_clear_leaves_nothing_and_cancels_what_waits(self) -> None:
        executor = SteppedExecutor()
        with self.tier(executor) as tier:
            tier.submit_put([PutItem(key_of(1), [payload_of(key_of(1), self.payload_bytes)], None)])
            executor.run_all()
            waiting = tier.submit_put([PutItem(key_of(2), [payload_of(key_of(2), self.payload_bytes)], None)])
            tier.clear()
            executor.run_all()
            done = self.wait(tier, 2)
            assert [one.results for one in done if one.transfer is waiting] == [(CANCELLED,)]
            assert tier.contains([key_of(1), key_of(2)]) == [False, False]
            assert tier.used_bytes == 0
            tier.submit_put([PutItem(key_of(1), [payload_of(key_of(1), self.payload_bytes)], None)])
            executor.run_all()
            assert self.wait(tier)[0].results == (OK,)

    def test_close_ends_every_transfer_and_refuses_new_ones(self) -> None:
        tier = self.make_tier(self.capacity_bytes, ThreadExecutor("contract"))
        transfers = [
            tier.submit_put([PutItem(key_of(n), [payload_of(key_of(n), self.payload_bytes)], None)]) for n in range(16)
        ]
        tier.close()
        tier.close()
        done = tier.poll()
        assert sorted(one.transfer.id for one in done) == sorted(one.id for one in transfers)
        assert {code for one in done for code in one.results} <= {OK, CANCELLED}
        self.refused(lambda: tier.submit_put([PutItem(key_of(1), [b"x"], None)]))
        self.refused(lambda: tier.submit_get([GetItem(key_of(1), bytearray(1))]))
        assert tier.poll() == []

    # under load ------------------------------------------------------------------------------------------------------

    def test_random_work_on_a_thread_never_gives_wrong_bytes(self) -> None:
        self._random_work(self.make_tier(self.capacity_bytes, ThreadExecutor("contract")), seed=1)

    def test_random_work_with_every_fault_never_gives_wrong_bytes(self) -> None:
        for seed in range(self.fault_rounds):
            inner = self.make_tier(self.capacity_bytes, ThreadExecutor("contract"))
            tier = FaultyTier(inner, Faults.everywhere(0.08), seed=seed)
            self._random_work(tier, seed)
            assert sum(tier.injected.values()) > 20, "the faults did not happen"

    def _random_work(self, tier: Tier, seed: int) -> None:
        draw = random.Random(seed)
        gets: dict[int, list[tuple[CopyKey, ByteRow]]] = {}
        ended: set[int] = set()
        submitted: set[int] = set()

        def drain() -> None:
            for done in tier.poll():
                ended.add(done.transfer.id)
                for (key, buffer), code in zip(gets.pop(done.transfer.id, []), done.results, strict=False):
                    assert code is not OK or np.array_equal(buffer, payload_of(key, self.payload_bytes)), key
            assert tier.used_bytes <= tier.capacity_bytes

        try:
            for _ in range(400):
                keys = [key_of(draw.randrange(3 * self.capacity_payloads)) for _ in range(draw.randrange(1, 5))]
                choice = draw.random()
                if choice < 0.45:
                    items = [PutItem(key, [payload_of(key, self.payload_bytes)], None) for key in keys]
                    submitted.add(tier.submit_put(items).id)
                elif choice < 0.85:
                    wanted = [(key, np.zeros(self.payload_bytes, np.uint8)) for key in keys]
                    transfer = tier.submit_get([GetItem(key, buffer) for key, buffer in wanted])
                    submitted.add(transfer.id)
                    gets[transfer.id] = wanted
                    if draw.random() < 0.2:
                        transfer.cancel()
                elif choice < 0.95:
                    tier.touch(keys)
                else:
                    tier.delete(keys)
                drain()
            deadline = time.monotonic() + self.timeout_seconds
            while ended != submitted:
                drain()
                assert time.monotonic() < deadline, "a transfer never ended"
            check = getattr(getattr(tier, "inner", tier), "check_invariants", None)
            if check is not None:
                check()
        finally:
            tier.close()
