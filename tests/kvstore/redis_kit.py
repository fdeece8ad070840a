"""What the tests of the remote tier share: a tier of one's own namespace, and puts and gets that check their bytes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from kvstore.copy_key import CopyKey
from kvstore.redis_tier.links import LinkOptions
from kvstore.redis_tier.tier import RedisOptions, RedisTier
from kvstore.testing.transfer_contract import payload_of
from kvstore.tier import ResultCode, Transfer
from tests.stopwatch import Stopwatch

NUMBERS = itertools.count()
SIZE_BYTES = 2000


PATIENT_SECONDS = 10.0  # where no timeout is meant: a busy machine is slow, and may stand still for a moment


def options(timeout_seconds: float = PATIENT_SECONDS, **changes: Any) -> RedisOptions:
    links = {name: changes.pop(name) for name in ("clock", "plain", "pause_seconds") if name in changes}
    if timeout_seconds >= PATIENT_SECONDS:
        links["connect_timeout_seconds"] = PATIENT_SECONDS
    return RedisOptions(links=LinkOptions(timeout_seconds=timeout_seconds, **links), **changes)


@contextmanager
def remote_tier(url: str, **settings: Any) -> Iterator[RedisTier]:
    if "namespace=" not in url:
        url += f"{'&' if '?' in url else '?'}namespace=test{next(NUMBERS)}"
    settings.setdefault("options", options())
    tier = RedisTier(url, **settings)
    try:
        yield tier
    finally:
        tier.close()


def ended(tier: RedisTier, transfer: Transfer, seconds: float = 60.0) -> list[ResultCode]:
    deadline = time.monotonic() + seconds
    while True:
        for done in tier.poll():
            if done.transfer is transfer:
                return list(done.results)
        assert time.monotonic() < deadline, "the transfer did not end"
        time.sleep(0.001)


def put(tier: RedisTier, keys: Sequence[CopyKey], size_bytes: int = SIZE_BYTES) -> list[ResultCode]:
    return ended(tier, tier.submit_put([(key, [payload_of(key, size_bytes)]) for key in keys]))


def get(tier: RedisTier, keys: Sequence[CopyKey], size_bytes: int = SIZE_BYTES) -> list[ResultCode]:
    """An OK with other bytes than the key's fails here."""
    buffers = [np.zeros(size_bytes, np.uint8) for _ in keys]
    results = ended(tier, tier.submit_get(list(zip(keys, buffers, strict=True))))
    for key, buffer, code in zip(keys, buffers, results, strict=True):
        assert code is not ResultCode.OK or np.array_equal(buffer, payload_of(key, size_bytes)), f"wrong bytes: {key}"
    return results


def until_ok(tier: RedisTier, keys: Sequence[CopyKey], seconds: float = 15.0) -> float:
    """Put until all are stored; how long it took. For recoveries."""
    with Stopwatch() as watch:
        while True:
            results = put(tier, keys)
            if set(results) == {ResultCode.OK}:
                return watch.seconds
            assert watch.seconds < seconds, (results, tier.counters())
            time.sleep(0.05)
