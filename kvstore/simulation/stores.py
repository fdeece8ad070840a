"""Simulated hosts with tiers below the device: each a real `KVStore` whose device and tiers keep no bytes.

Lookup, admission, eviction, spilling ahead, the policy of slower tiers, bounded queues, load or recompute and deadlines
are the store's own; only bytes and time are made up. A host handles its requests one after the other: it fetches,
computes what is missing (by the model of prefill) and steps as an engine does, so copies are written while it computes
and while it waits for the next request. One thread; used by `kvstore.simulation.replay`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from allocator import CacheGroup, CapacityError, GroupKind, KVGeometry
from allocator.block_marks import PRIORITY_DEFAULT
from allocator.extents import SLOT_ALIGNMENT_BYTES
from kvstore.config import KVStoreConfig
from kvstore.identity import HashChain, Identity
from kvstore.retention import Retention
from kvstore.simulation.policies import POLICIES
from kvstore.simulation.tiers import Link, RemoteRoom, SimulatedHostTier, SimulatedRemoteTier
from kvstore.store import KVStore

if TYPE_CHECKING:
    from allocator import EvictionPolicy
    from kvstore.simulation.setting import Costs, Setting
    from kvstore.simulation.trace import Keys
    from kvstore.tier import Tier

_NAME_WORDS = 4  # a block hash is four times as long as a trace's key
_KEY_BYTES = 8


class Served(NamedTuple):
    """What one request got: blocks by tier and the time that fetching took."""

    device: int
    host: int
    remote: int
    fetching_seconds: float


class TraceChain(HashChain):
    """A prompt whose blocks have names and whose tokens nobody knows. One token more is computed, as always."""

    __slots__ = ("_token_count",)

    def __init__(self, root: bytes, block_tokens: int, names: list[bytes]) -> None:
        super().__init__(root, block_tokens)
        self._hashes = names
        self._token_count = len(names) * block_tokens + 1

    @property
    def token_count(self) -> int:
        return self._token_count

    def fork(self) -> HashChain:
        return self  # never changed: its tokens are committed as a prompt's


class SimulatedStore(KVStore):
    """A store over counted blocks. `policy`: of its device; None: as its settings say."""

    def __init__(
        self,
        geometry: KVGeometry,
        config: KVStoreConfig,
        tiers: Sequence[Tier],
        policy: Callable[[int], EvictionPolicy] | None,
        clock: Callable[[], float],
    ) -> None:
        self._eviction = policy
        super().__init__(geometry, identity_of(geometry), config, device="absent", tiers=list(tiers), clock=clock)

    def price_all_alike(self) -> None:
        """Have the device's policy weigh hits alike, whatever losing them would cost."""
        self._upkeep.reuse.prices = None


class StoreHost:
    """One store, its tiers and its clock."""

    _TIERS = ("device", "host", "remote")

    def __init__(
        self,
        setting: Setting,
        capacity_blocks: int,
        block_tokens: int,
        remote: RemoteRoom | None,
    ) -> None:
        costs = setting.costs
        self.now = 0.0
        self.request_count = 0
        self._costs = costs
        self._capacity_blocks = capacity_blocks
        self._deadline_seconds = setting.fetch_deadline_seconds
        geometry = geometry_of(block_tokens, costs, setting.codec)
        self.block_bytes = geometry.full_slot_bytes(0)
        self.links: list[Link] = []
        self.tiers = self._make_tiers(setting, remote)
        config = KVStoreConfig(
            device_bytes=(capacity_blocks + 1) * aligned(self.block_bytes),  # one for the token that is computed
            codec="raw",
            share=True,
            io_threads="inline",
            eviction_policy="lru" if setting.policy == "lru" else "learned",
            spill_policy=setting.admission,
            fetch_deadline_seconds=setting.fetch_deadline_seconds,
            prefill_tokens_per_second=min(1e12, costs.prefill_tokens_per_second),
        )
        self.store = self._make_store(geometry, config, setting)
        self._roots = {0: self.store.identity.root()}  # by owner
        self._index = self.store.pool.index(0)

    def _make_tiers(self, setting: Setting, remote: RemoteRoom | None) -> list[Tier]:
        costs = setting.costs
        tiers: list[Tier] = []
        if setting.host_blocks:
            room = setting.host_blocks * aligned(self.block_bytes)
            link = self._link(costs.host_bytes_per_second)
            tiers.append(SimulatedHostTier(room, link, slot_bytes=self.block_bytes))
        if remote is not None:
            link = self._link(costs.remote_bytes_per_second)
            tiers.append(SimulatedRemoteTier(remote, link, slot_bytes=self.block_bytes))
        return tiers

    def _make_store(self, geometry: KVGeometry, config: KVStoreConfig, setting: Setting) -> KVStore:
        rival = None if setting.policy in ("lru", "default") else POLICIES[setting.policy]
        store = SimulatedStore(geometry, config, self.tiers, rival, self._clock)
        if setting.price == "uniform":
            store.price_all_alike()
        return store

    def _link(self, bytes_per_second: float) -> Link:
        self.links.append(Link(self._clock, bytes_per_second))
        return self.links[-1]

    def _clock(self) -> float:
        return self.now

    def holds(self, name: bytes) -> bool:
        """Whether the device has the block of a trace's key."""
        return name + bytes(_KEY_BYTES * (_NAME_WORDS - 1)) in self._index.exact

    def request(
        self, keys: Keys, seconds: float, tokens: int, *, owner: int = 0, priority: int = PRIORITY_DEFAULT
    ) -> Served:
        """One prompt of `owner` with these full blocks and `tokens` tokens in all that came at `seconds`."""
        self.request_count += 1
        self._pass_time(seconds - self.now, least_steps=1)
        store, number = self.store, str(self.request_count)
        chain = TraceChain(self._root_of(owner), store.geometry.block_tokens, _names(keys[: self._capacity_blocks]))
        before = self._hit_tokens()
        began = self.now
        self._until_room(lambda: store.admit(number, chain))
        late = self.now + self._deadline_seconds  # counted from here: room for it may have come late
        while not store.fetch(number).done:
            self._wait_for_a_transfer(max(late, self.now))
            store.step()
        fetching_seconds = self.now - began
        ready = store.fetch(number).ready_tokens
        self._until_room(lambda: store.grow(number, chain.token_count - ready))
        left = min(ready, tokens - 1)
        computing_seconds = self._costs.prefill_seconds(max(0, left), tokens)
        if tokens > left and computing_seconds > 0:
            store.observe_prefill(tokens - left, computing_seconds)
        self._pass_time(computing_seconds, least_steps=1)
        store.commit_prompt(number, chain.token_count - ready)
        store.prefill_done(number)
        if priority != PRIORITY_DEFAULT:
            store.retain(number, [Retention(priority=priority)])
        store.finish(number)
        after = self._hit_tokens()
        device, host, remote = (
            (now - old) // store.geometry.block_tokens for now, old in zip(after, before, strict=True)
        )
        return Served(device, host, remote, fetching_seconds)

    def _root_of(self, owner: int) -> bytes:
        root = self._roots.get(owner)
        if root is None:
            root = self._roots[owner] = replace(self.store.identity, tenant=str(owner)).root()
        return root

    def finish(self) -> None:
        """The trace is over: let transfers end, then check what must hold."""
        self._pass_time(1.0, least_steps=1)
        self.store.check_invariants()

    def moved_bytes(self, tier: str, kind: str) -> int:
        """Bytes that went to ("put") and came from ("get") a tier."""
        return int(self.store.metrics.get("transfer_bytes", tier=tier, kind=kind))

    def _hit_tokens(self) -> list[int]:
        get = self.store.metrics.get
        return [int(get("hit_tokens", tier=tier)) for tier in self._TIERS]

    def _until_room(self, act: Callable[[], object]) -> None:
        """Do it, once transfers that hold the memory it needs have ended."""
        while True:
            try:
                act()
            except CapacityError as error:
                if not error.transient:
                    raise
                self._wait_for_a_transfer(self.now + self._costs.step_seconds)
                self.store.step()
            else:
                return

    def _wait_for_a_transfer(self, latest: float) -> None:
        """Time passes until something has moved, but not beyond `latest` by more than a moment."""
        ends = [end for link in self.links if (end := link.next_end_seconds) is not None]
        self.now = max(self.now, min([latest + 1e-6, *ends]))
        self._run_links()

    def _pass_time(self, seconds: float, least_steps: int) -> None:
        """The engine steps until that time is over, or, since then nothing would happen any more, all is still.

        A step that began nothing is not repeated until a transfer has ended: it would find what the last one found.
        """
        end, step_seconds = self.now + max(0.0, seconds), self._costs.step_seconds
        steps = 0
        while steps < least_steps or (self.now < end and self._is_moving()):
            self.now = min(end, self.now + step_seconds)
            self._run_links()
            before = self._progress()
            self.store.step()
            steps += 1
            if steps >= least_steps and self._progress() == before:
                next_end = min((one for link in self.links if (one := link.next_end_seconds) is not None), default=end)
                while self.now + step_seconds < min(next_end, end):
                    self.now += step_seconds
        self.now = end
        self._run_links()

    def _progress(self) -> tuple[int, ...]:
        """Differs from what it was when a step has begun anything."""
        return (*(link.submitted_count for link in self.links), *self.store._upkeep.writes.depths().values())

    def _is_moving(self) -> bool:
        return any(link.next_end_seconds is not None for link in self.links)

    def _run_links(self) -> None:
        for link in self.links:
            link.run_due()


def identity_of(geometry: KVGeometry) -> Identity:
    """Whose blocks they are: it only has to be the same for all hosts."""
    return Identity(model="trace", weights="none", geometry=geometry)


def geometry_of(block_tokens: int, costs: Costs, codec: str) -> KVGeometry:
    """One cache group whose blocks have the bytes that the costs say, whatever they are made of."""
    token_bytes = costs.block_token_bytes(codec)
    group = CacheGroup(kind=GroupKind.LATENT, layers=(0,), kv_heads=1, key_dim=token_bytes, value_dim=0)
    return KVGeometry(groups=(group,), block_tokens=block_tokens, dtype="float8_e4m3fn")


def remote_room(setting: Setting, block_tokens: int) -> RemoteRoom | None:
    """What all hosts share; None: there is no remote tier."""
    if not setting.remote_blocks:
        return None
    block_bytes = geometry_of(block_tokens, setting.costs, setting.codec).full_slot_bytes(0)
    return RemoteRoom(setting.remote_blocks * aligned(block_bytes), block_bytes)


def aligned(size_bytes: int) -> int:
    """Bytes of a slot for so many."""
    return -(-size_bytes // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES


def _names(keys: Keys) -> list[bytes]:
    words = np.zeros((len(keys), _NAME_WORDS), dtype="<u8")
    words[:, 0] = keys
    raw = words.tobytes()
    width = _KEY_BYTES * _NAME_WORDS
    return [raw[place : place + width] for place in range(0, len(raw), width)]
