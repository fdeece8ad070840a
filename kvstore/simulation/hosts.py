"""Simulated hosts without tiers below: each a real BlockPool with its policy. And which host a request goes to.

The device is the pool of the product, with no bytes behind it. Hosts with tiers are `kvstore.simulation.stores`. One
thread; used by `kvstore.simulation.replay`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from allocator import BlockPool, EvictionPolicy, ExtentLayout
from allocator.block_marks import NOBODY, PRIORITY_DEFAULT, steps_of
from kvstore.simulation.trace import Keys

_SLOT_BYTES = 64  # of a pretended block: only counts matter


class Host:
    """One device."""

    def __init__(self, capacity_blocks: int, policy: Callable[[int], EvictionPolicy], quota_blocks: float = 0) -> None:
        layout = ExtentLayout(_SLOT_BYTES * capacity_blocks, (_SLOT_BYTES,), (), _SLOT_BYTES)
        self.pool = BlockPool(layout, policy)
        self._index = self.pool.index(0)
        self._quota_bytes = int(quota_blocks * _SLOT_BYTES)
        self.request_count = 0

    def holds(self, name: bytes) -> bool:
        """Whether the device has the block."""
        return name in self._index.exact

    def request(
        self,
        keys: Keys,
        names: list[bytes],
        *,
        owner: int = 0,
        tenant: int = NOBODY,
        priority: int = PRIORITY_DEFAULT,
    ) -> int:
        """One request of `owner` for these full blocks: how many leading ones were there. tenant: with a quota.

        What was missing is computed and kept while there is room, within the tenant's quota, beside this request's own
        blocks.
        """
        pool = self.pool
        self.request_count += 1
        ids = self._index.match(names)
        hits = len(ids)
        if hits:
            pool.share(ids)
        wanted = len(names) - hits
        if wanted:
            wanted = min(self._within_quota(tenant, hits, wanted), pool.available(0))
            fresh = pool.allocate(0, wanted)
            pool.seal_many(fresh, names[hits : hits + wanted], True)
            ids += fresh.tolist()
        steps = steps_of(priority)
        pool.keep(ids[:hits], steps, tenant=tenant)
        pool.keep(ids[hits:], steps, tenant=tenant, first_use=True)
        pool.policies[0].observe(keys, (ids,), owner=owner)
        pool.release(ids[::-1])
        pool.policies[0].settle()
        return hits

    def _within_quota(self, tenant: int, device: int, wanted: int) -> int:
        """How many blocks more a tenant may have that uses `device` now; its idle ones give way."""
        if not self._quota_bytes or tenant == NOBODY:
            return wanted
        room = self._quota_bytes - (device + wanted) * _SLOT_BYTES
        self.pool.evict_of(tenant, self.pool.idle_bytes_of(tenant) - max(0, room))
        return max(0, min(wanted, self._quota_bytes // _SLOT_BYTES - device))


class Routed(Protocol):
    """What the router looks at."""

    request_count: int

    def holds(self, name: bytes) -> bool: ...


class Router:
    """Which host a request goes to."""

    def __init__(self, routing: str, hosts: Sequence[Routed], seed: int) -> None:
        self._routing = routing
        self._hosts = hosts
        self._numbers = np.random.default_rng(seed)
        self._home: dict[bytes, int] = {}
        self._routed_count = 0

    def choose(self, session: int, keys: Keys, names: list[bytes]) -> int:
        """The host's number. By prefix: where the longest run lies, unless that host has far more than its share."""
        count = len(self._hosts)
        if count == 1:
            return 0
        self._routed_count += 1
        if self._routing == "session":
            if not session:  # not told: what follows the first block, which a system prompt may fill
                session = int(keys[min(1, len(keys) - 1)]) if len(keys) else 0
            return session % count
        if self._routing == "random":
            return int(self._numbers.integers(count))
        chosen = self._by_prefix(names)
        for name in names:
            self._home[name] = chosen
        return chosen

    def _by_prefix(self, names: list[bytes]) -> int:
        fair = self._routed_count / len(self._hosts)
        for name in reversed(names):
            home = self._home.get(name)
            if home is not None and self._hosts[home].holds(name):
                if self._hosts[home].request_count <= 1.5 * fair + 8:
                    return home
                break
        pair = self._numbers.integers(len(self._hosts), size=2).tolist()
        return int(min(pair, key=lambda number: self._hosts[number].request_count))
