"""The public test tools are tested too: faults happen, are found, and can be repeated."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore import CopyKey, GetItem, HostTier, PutItem, ResultCode, UsageError
from kvstore.executor import Executor
from kvstore.testing import Faults, FaultyTier, ManualClock, SteppedExecutor, TierContract
from kvstore.tier import Completion

OK = ResultCode.OK


def key(number: int) -> CopyKey:
    return CopyKey(b"\x07" * 32, 0, number.to_bytes(32, "big"), "raw", True, (0, 1), (0, 1))


def run(
    faults: Faults, seed: int, *, verify: bool = True, extra_get: int | None = None
) -> tuple[FaultyTier, list[str]]:
    """Put and get 200 blocks one by one; what each get gave: the right bytes, wrong ones, or its code."""
    tier = FaultyTier(HostTier(1 << 20, slot_bytes=(256,)), faults, seed=seed, verify=verify)
    outcomes = []
    for number in range(200):
        payload = np.full(256, number % 251, np.uint8)
        tier.submit_put([PutItem(key(number), [payload], None)])
        buffer = np.zeros(256, np.uint8)
        tier.submit_get([GetItem(key(number), buffer)])
        if number == extra_get:
            tier.submit_get([GetItem(key(0), np.zeros(256, np.uint8))])
        results: dict[object, Completion] = {}
        for _ in range(8):
            for done in tier.poll():
                results[done.transfer] = done
        code = next(
            done.results[0]
            for done in results.values()
            if done.transfer.keys == (key(number),) and done.transfer.kind == "get"
        )
        outcomes.append(code.value if code is not OK else "right" if (buffer == payload).all() else "wrong")
    return tier, outcomes


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [("flipped", "corrupt"), ("torn", "corrupt"), ("vanished", "miss"), ("partial", "failed")],
)
def test_a_fault_happens_as_often_as_asked_and_is_found(fault: str, outcome: str) -> None:
    tier, outcomes = run(Faults(**{fault: 0.2}), seed=4)
    assert 20 <= outcomes.count(outcome) <= 90
    assert outcomes.count("wrong") == 0
    assert tier.injected[fault] > 20
    assert tier.counters()[f"injected_{fault}"] == tier.injected[fault]


def test_lost_puts_say_ok_and_are_gone_when_polled() -> None:
    tier = FaultyTier(HostTier(1 << 20), Faults(lost=1.0), seed=1)
    tier.submit_put([PutItem(key(1), [b"x" * 64], None)])
    assert tier.poll()[0].results == (OK,)
    assert tier.contains([key(1)]) == [False]


def test_without_verification_the_damage_is_real() -> None:
    _, outcomes = run(Faults(flipped=0.2), seed=4, verify=False)
    assert outcomes.count("wrong") > 20, "a caller that needs no protection would not notice this tool"


def test_a_seed_repeats_a_run_and_one_more_call_does_not_reshuffle_it() -> None:
    faults = Faults(flipped=0.15, vanished=0.15, partial=0.1)
    _, one = run(faults, seed=7)
    _, two = run(faults, seed=7)
    _, other = run(faults, seed=8)
    _, disturbed = run(faults, seed=7, extra_get=50)
    assert one == two
    assert one != other
    assert one == disturbed


def test_late_duplicated_and_reordered_completions() -> None:
    tier = FaultyTier(HostTier(1 << 20), Faults(late=1.0, late_polls=2), seed=1)
    transfer = tier.submit_put([PutItem(key(1), [b"x" * 64], None)])
    assert [len(tier.poll()) for _ in range(4)] == [0, 0, 0, 1]
    assert transfer.done
    tier = FaultyTier(HostTier(1 << 20), Faults(duplicated=1.0, late_polls=1), seed=1)
    tier.submit_put([PutItem(key(1), [b"x" * 64], None)])
    counts = [len(tier.poll()) for _ in range(5)]
    assert counts[0] == 1
    assert sum(counts) == 2
    tier = FaultyTier(HostTier(1 << 20), Faults(reordered=1.0), seed=1)
    transfers = [tier.submit_put([PutItem(key(n), [b"x" * 64], None)]) for n in range(3)]
    assert [done.transfer for done in tier.poll()] == transfers[::-1]


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_rates_are_probabilities(rate: float) -> None:
    with pytest.raises(UsageError, match="probability"):
        Faults(lost=rate)


def test_the_manual_clock_goes_forward_only() -> None:
    clock = ManualClock(5)
    assert clock() == 5.0
    assert clock.advance(1.5) == clock() == 6.5
    for bad in (-1, float("nan")):
        with pytest.raises(UsageError, match="expected a number >= 0"):
            clock.advance(bad)


def test_the_stepped_executor_waits_and_can_shuffle() -> None:
    ran: list[int] = []
    executor = SteppedExecutor()
    for number in range(5):
        executor.submit(lambda number=number: ran.append(number))  # type: ignore[misc]
    assert ran == []
    assert executor.step(2) == 2
    assert ran == [0, 1]
    assert executor.run_all() == 3
    shuffled: list[list[int]] = []
    for seed in range(6):
        order: list[int] = []
        executor = SteppedExecutor(seed)
        for number in range(5):
            executor.submit(lambda number=number, order=order: order.append(number))  # type: ignore[misc]
        executor.close()
        shuffled.append(order)
    assert any(order != [0, 1, 2, 3, 4] for order in shuffled)
    assert all(sorted(order) == [0, 1, 2, 3, 4] for order in shuffled)
    with pytest.raises(UsageError, match="after close"):
        executor.submit(lambda: None)


# the contract finds bad tiers ----------------------------------------------------------------------------------------


class Contract(TierContract):
    leaves_first = True
    pins = True
    timeout_seconds = 0.5
    tier_class: type[HostTier] = HostTier

    def make_tier(self, capacity_bytes: int, executor: Executor) -> HostTier:
        return self.tier_class(capacity_bytes, executor, slot_bytes=(self.payload_bytes,))


def first_failure(tier_class: type[HostTier]) -> str | None:
    contract = Contract()
    contract.tier_class = tier_class
    for name in dir(contract):
        if name.startswith("test_"):
            try:
                getattr(contract, name)()
            except (AssertionError, UsageError, ValueError):
                return name
    return None


class _Planted:
    """Bugs of the kinds that the case list collects."""

    class ShowsTooEarly(HostTier):
        def submit_put(self, items):  # type: ignore[no-untyped-def]
            self._early = {item[0] for item in items}
            return super().submit_put(items)

        def contains(self, keys):  # type: ignore[no-untyped-def]
            return [there or key in self._early for key, there in zip(keys, super().contains(keys), strict=True)]

        _early: set[CopyKey] = set()  # noqa: RUF012

    class ForgetsTheCodec(HostTier):
        def submit_put(self, items):  # type: ignore[no-untyped-def]
            if all(isinstance(item[0], CopyKey) for item in items):
                items = [(item[0]._replace(codec="raw"), *item[1:]) for item in items]
            return super().submit_put(items)

    class KeepsReadFences(HostTier):
        def _release(self, claims):  # type: ignore[no-untyped-def]
            return

    class ForgetsReadFences(HostTier):
        def _claim(self, jobs):  # type: ignore[no-untyped-def]
            return [self._index.find(job.key) for job in jobs]

        def _release(self, claims):  # type: ignore[no-untyped-def]
            return

    class MissesTheTail(HostTier):
        def _copy_out(self, entry, job):  # type: ignore[no-untyped-def]
            super()._copy_out(entry, job)
            job.rows[-1][-1:] ^= 1

    class KeepsBuffers(HostTier):
        kept: list[object] = []  # noqa: RUF012

        def _put_one(self, job):  # type: ignore[no-untyped-def]
            self.kept.append(job)
            return super()._put_one(job)

    class EndsTwice(HostTier):
        def _finish(self, transfer, results):  # type: ignore[no-untyped-def]
            super()._finish(transfer, results)
            self._completions.append(self._completions[-1])

    class LosesCancelled(HostTier):
        def poll(self):  # type: ignore[no-untyped-def]
            return [done for done in super().poll() if ResultCode.CANCELLED not in done.results]

    class IgnoresParents(HostTier):
        def submit_put(self, items):  # type: ignore[no-untyped-def]
            return super().submit_put([item[:2] for item in items])

    class IgnoresTouch(HostTier):
        def touch(self, keys):  # type: ignore[no-untyped-def]
            return

    class IgnoresPins(HostTier):
        def pin(self, keys):  # type: ignore[no-untyped-def]
            return self.contains(keys)

    class ClearsTheIndexOnly(HostTier):
        def _cancel_all(self):  # type: ignore[no-untyped-def]
            return

    class CountsTooLittle(HostTier):
        @property
        def used_bytes(self) -> int:
            return self._index.used_bytes // 2

    class DropsTheFresh(HostTier):
        def __init__(self, *arguments, **options):  # type: ignore[no-untyped-def]
            super().__init__(*arguments, **options)
            touch = self._index.touch

            def backwards(entry):  # type: ignore[no-untyped-def]
                touch(entry)
                entry.tick = -entry.tick

            self._index.touch = backwards  # type: ignore[method-assign]


PLANTED = {name: bug for name, bug in vars(_Planted).items() if isinstance(bug, type)}


def test_the_contract_passes_the_real_tier() -> None:
    assert first_failure(HostTier) is None


@pytest.mark.parametrize("name", sorted(PLANTED))
def test_the_contract_finds_each_planted_bug(name: str) -> None:
    assert first_failure(PLANTED[name]) is not None, f"{name} passed the contract"
