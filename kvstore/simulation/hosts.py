"""Simulated hosts: each a real BlockPool with its policy; below it host memory, below all a shared remote tier.

The device is the pool of the product, with no bytes behind it. A tier below is an LRU of names: what a device evicts is
spilled into it, a hit there is fetched. One thread; used by `kvstore.simulation.replay`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from allocator import BlockPool, EvictionPolicy, ExtentLayout
from allocator.block_marks import NOBODY, PRIORITY_DEFAULT, steps_of
from kvstore.simulation.trace import Keys

_SLOT_BYTES = 64  # of a pretended block: only counts matter


@dataclass(frozen=True, slots=True)
class BlockPrices:
    """Seconds for one block: to compute it, whatever its place, since its chain goes leaf first; and to fetch it."""

    compute_seconds: float
    host_seconds: float
    remote_seconds: float


class LowerTier:
    """Names of the blocks a tier below holds, the longest unused goes first. None below: what it drops is gone."""

    def __init__(self, capacity_blocks: int, below: LowerTier | None) -> None:
        self._capacity = capacity_blocks
        self._held: OrderedDict[bytes, None] = OrderedDict()
        self._below = below
        self.stored_count = 0

    def put(self, names: Sequence[bytes]) -> None:
        """Takes in blocks, children before their parents."""
        held = self._held
        for name in names:
            if name in held:
                held.move_to_end(name)
                continue
            held[name] = None
            self.stored_count += 1
        while len(held) > self._capacity:
            name, _ = held.popitem(last=False)
            if self._below is not None:
                self._below.put([name])

    def holds(self, name: bytes) -> bool:
        """Whether the block is here."""
        return name in self._held

    def leading_run(self, names: Sequence[bytes]) -> int:
        """How many of the leading names are here; they count as used."""
        held = self._held
        count = 0
        for name in names:
            if name not in held:
                break
            count += 1
        for name in reversed(names[:count]):
            held.move_to_end(name)
        return count


class Host:
    """One device and the host memory beside it."""

    def __init__(
        self,
        capacity_blocks: int,
        policy: Callable[[int], EvictionPolicy],
        host_blocks: int = 0,
        remote: LowerTier | None = None,
        quota_blocks: float = 0,
    ) -> None:
        self._own = LowerTier(host_blocks, remote) if host_blocks else None
        self._remote = remote
        spill = self._own or remote
        layout = ExtentLayout(_SLOT_BYTES * capacity_blocks, (_SLOT_BYTES,), (), _SLOT_BYTES)
        on_evict = None if spill is None else lambda group, ids, names, exact, form: spill.put(names)
        self.pool = BlockPool(layout, policy, on_evict)
        self._index = self.pool.index(0)
        self._quota_bytes = int(quota_blocks * _SLOT_BYTES)
        self.request_count = 0

    @property
    def spilled_count(self) -> int:
        """Blocks that were written to this host's own memory."""
        return 0 if self._own is None else self._own.stored_count

    def holds(self, name: bytes) -> bool:
        """Whether the device has the block."""
        return name in self._index.exact

    def request(
        self,
        keys: Keys,
        names: list[bytes],
        prices: BlockPrices | None = None,
        *,
        tenant: int = NOBODY,
        priority: int = PRIORITY_DEFAULT,
    ) -> tuple[int, int, int]:
        """One request for these full blocks: how many leading ones came from device, host memory and remote.

        What was missing is computed and kept while there is room, within the tenant's quota, beside this request's own
        blocks.
        """
        pool = self.pool
        self.request_count += 1
        ids = self._index.match(names)
        device = len(ids)
        if device:
            pool.share(ids)
        own, remote = self._below(names[device:])
        wanted = len(names) - device
        if wanted:
            wanted = min(self._within_quota(tenant, device, wanted), pool.available(0))
            fresh = pool.allocate(0, wanted)
            pool.seal_many(fresh, names[device : device + wanted], True)
            ids += fresh.tolist()
        steps = steps_of(priority)
        pool.keep(ids[:device], steps, tenant=tenant)
        pool.keep(ids[device:], steps, tenant=tenant, first_use=True)
        pool.policies[0].observe(keys, (ids,), None if prices is None else self._priced(names, prices))
        pool.release(ids[::-1])
        pool.policies[0].settle()
        return device, own, remote

    def _within_quota(self, tenant: int, device: int, wanted: int) -> int:
        """How many blocks more a tenant may have that uses `device` now; its idle ones give way."""
        if not self._quota_bytes or tenant == NOBODY:
            return wanted
        room = self._quota_bytes - (device + wanted) * _SLOT_BYTES
        self.pool.evict_of(tenant, self.pool.idle_bytes_of(tenant) - max(0, room))
        return max(0, min(wanted, self._quota_bytes // _SLOT_BYTES - device))

    def _priced(self, names: list[bytes], prices: BlockPrices) -> npt.NDArray[np.float64]:
        """What losing each block would cost: a fetch from the nearest tier that has it, else computing it again."""
        found = np.full(len(names), prices.compute_seconds)
        for tier, fetch_seconds in ((self._remote, prices.remote_seconds), (self._own, prices.host_seconds)):
            if tier is not None:
                held = np.fromiter(map(tier.holds, names), bool, len(names))
                found[held] = np.minimum(found[held], fetch_seconds)
        return found

    def _below(self, names: list[bytes]) -> tuple[int, int]:
        own = remote = 0
        while own + remote < len(names):
            rest = names[own + remote :]
            more = 0 if self._own is None else self._own.leading_run(rest)
            own += more
            further = 0 if self._remote is None else self._remote.leading_run(rest[more:])
            remote += further
            if not more + further:
                break
        return own, remote


class Router:
    """Which host a request goes to."""

    def __init__(self, routing: str, hosts: Sequence[Host], seed: int) -> None:
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
