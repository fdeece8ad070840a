"""The store against a plain model, over a tier that loses, tears, delays, reorders and duplicates.

The model knows each live sequence's committed tokens and nothing else. After every step: the store's own invariants
hold, every raw block of every sequence has exactly the bytes that its tokens wrote, every INT4 block decodes to within
the codec's bound of them, and a sequence that claims to be exact has never had a cold block while it computed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from allocator import CannotRollback, CapacityError, KVGeometry
from allocator.eviction_learned import Learned
from kvstore import HostTier, Identity, KVStore, KVStoreConfig, Tier
from kvstore.testing import Faults, FaultyTier, ManualClock, SteppedExecutor
from tests.fickle_reuse import FickleReuse
from tests.kvstore.driving import fill, pattern
from tests.kvstore.writing_kit import DistantTier

B = 16
GEOMETRY = KVGeometry.uniform(layers=1, kv_heads=1, head_dim=8, dtype="float32")
SLOT = GEOMETRY.full_slot_bytes(0)
LONG = list(range(100, 170))
PROMPTS = [LONG, LONG[:40], LONG[:33], [*LONG, 9000, 9001], [*LONG[:50], 9100], list(range(500, 590)), LONG[:16], [1]]


@dataclass
class Expected:
    tokens: list[int]
    prompt: list[int]
    exact: bool
    lossy_at: int | None = None  # first token that was committed while a cold block was in the table
    loading: bool = False
    future: list[int] = field(default_factory=list)


class StoreMachine(RuleBasedStateMachine):
    """Subclass and override `build` to plant a bug."""

    def build(self, codec: str, seed: int, rate: float) -> KVStore:
        self.clock = ManualClock()
        self.executor = SteppedExecutor()
        tiers: list[Tier] = [
            HostTier(8 * SLOT, self.executor),
            DistantTier(12 * SLOT, self.executor, name="disk"),
        ]
        if rate:
            tiers = [FaultyTier(tier, Faults.everywhere(rate), seed=seed + place) for place, tier in enumerate(tiers)]
        config = KVStoreConfig(
            device_bytes=20 * SLOT,
            codec=codec,
            residual_tokens=4,
            io_threads="inline",
            load_always=True,
            fetch_deadline_seconds=5.0,
            spill_policy="everything" if seed % 2 else "reuse",
            eviction_policy="learned" if seed % 4 > 1 else "lru",
        )
        identity = Identity(model="toy", weights="w", geometry=GEOMETRY)
        store = KVStore(GEOMETRY, identity, config, tiers=tiers, clock=self.clock)
        fickle = FickleReuse(store.pool.ledger.id_capacity)
        for policy in store.pool.policies:
            if isinstance(policy, Learned):
                policy._reuse = fickle
        store._upkeep.writes._executor = self.executor  # device blocks are copied into buffers as late as all else
        return store

    @initialize(
        codec=st.sampled_from(["int4", "int4", "raw"]),
        seed=st.integers(0, 2**16),
        rate=st.sampled_from([0.0, 0.0, 0.2]),
    )
    def start(self, codec: str, seed: int, rate: float) -> None:
        torch.set_num_threads(1)
        self.store = self.build(codec, seed, rate)
        self.live: dict[str, Expected] = {}
        self.counter = 0
        self.random = random.Random(seed)

    # -- rules --------------------------------------------------------------------------------------------------

    def pick(self, index: int, ready: bool = True) -> tuple[str, Expected] | None:
        names = [name for name, one in self.live.items() if not (ready and one.loading)]
        if not names:
            return None
        name = names[index % len(names)]
        return name, self.live[name]

    @rule(prompt=st.sampled_from(PROMPTS), exact=st.booleans())
    def admit(self, prompt: list[int], exact: bool) -> None:
        self.counter += 1
        name = f"s{self.counter}"
        assert self.store.lookup(prompt, exact=exact) == self.store.lookup(prompt, exact=exact)
        try:
            self.store.admit(name, prompt, exact=exact)
        except CapacityError:
            assert name not in self.store.sequence_ids()
            return
        self.live[name] = Expected([], list(prompt), exact, loading=True)
        self.notice(name)

    def notice(self, name: str) -> None:
        one = self.live[name]
        state = self.store.fetch(name)
        if one.loading and state.done:
            one.loading = False
            assert state.ready_tokens < len(one.prompt)
            assert state.ready_tokens % B == 0
            one.tokens = one.prompt[: state.ready_tokens]
            one.future = one.prompt[state.ready_tokens :]
            entries = self.store.tables(name)[0]
            assert not (one.exact and (entries & 1).any()), "an exact reader was given an INT4 block"

    @rule(prompt=st.sampled_from(PROMPTS), exact=st.booleans(), answer=st.sampled_from([0, 1, 20, 40]))
    def serve(self, prompt: list[int], exact: bool, answer: int) -> None:
        """What a loop does to one request, to its end or until memory is short."""
        before = set(self.live)
        self.admit(prompt, exact)
        for name in set(self.live) - before:
            for _ in range(8):
                if self.live[name].loading:
                    self.step(2, 0.0)
            while (one := self.live[name]).future and not one.loading and self.advance(name, one, 40, 40):
                pass
            for _ in range(answer):
                if not one.loading and not self.advance(name, one, 1, 1):
                    break
            for _ in range(answer // 10):
                self.step(1, 0.0)

    @rule(
        index=st.integers(0, 7), count=st.sampled_from([1, 2, 7, 16, 17, 40]), committed=st.sampled_from([0, 1, 5, 40])
    )
    def compute(self, index: int, count: int, committed: int) -> None:
        picked = self.pick(index)
        if picked is not None:
            self.advance(*picked, count, committed)

    def advance(self, name: str, one: Expected, count: int, committed: int) -> bool:
        fresh = one.future[:count] or [self.random.randrange(2) + 7000 for _ in range(min(count, 20))]
        written = self.store.written_tokens(name)
        try:
            self.store.grow(name, len(fresh))
        except CapacityError:
            assert self.store.written_tokens(name) == written
            return False
        fill(self.store, name, fresh, written)
        keep = len(fresh) if one.future else min(committed, len(fresh))
        if keep and one.lossy_at is None and (self.store.tables(name)[0] & 1).any():
            one.lossy_at = len(one.tokens)
        if keep:
            self.store.commit(name, fresh[:keep])
        if keep < len(fresh):
            self.store.rollback(name, len(fresh) - keep)
        one.tokens += fresh[:keep]
        if one.future:
            one.future = one.future[keep:]
            if not one.future:
                self.store.prefill_done(name)
        return True

    @rule(index=st.integers(0, 7), cut=st.integers(1, 60))
    def rollback(self, index: int, cut: int) -> None:
        picked = self.pick(index)
        if picked is None or picked[1].future or cut >= len(picked[1].tokens):
            return
        name, one = picked
        try:
            self.store.rollback(name, cut)
        except CannotRollback:
            return
        one.tokens = one.tokens[:-cut]
        if one.lossy_at is not None and one.lossy_at >= len(one.tokens):
            one.lossy_at = None

    @rule(index=st.integers(0, 7))
    def fork(self, index: int) -> None:
        picked = self.pick(index)
        if picked is None or len(self.live) > 6:
            return
        self.counter += 1
        name = f"s{self.counter}"
        self.store.fork(picked[0], name)
        one = picked[1]
        self.live[name] = Expected(list(one.tokens), list(one.prompt), one.exact, one.lossy_at, future=list(one.future))

    @rule(index=st.integers(0, 7), how=st.sampled_from(["finish", "abort", "preempt"]))
    def end(self, index: int, how: str) -> None:
        picked = self.pick(index, ready=False)
        if picked is None:
            return
        getattr(self.store, how)(picked[0])
        del self.live[picked[0]]

    @rule(tasks=st.sampled_from([0, 1, 3, 9]), seconds=st.sampled_from([0.0, 0.1, 6.0]))
    def step(self, tasks: int, seconds: float) -> None:
        for _ in range(tasks):
            self.executor.step()
        self.clock.advance(seconds)
        self.store.step()
        for name in list(self.live):
            self.notice(name)

    @rule(keep=st.sampled_from([0, 0, 1]), copied=st.booleans())
    def clear_device(self, keep: int, copied: bool) -> None:
        """Preempt all but `keep` sequences and evict what is idle: the next hit has to come from below."""
        for name in list(self.live)[keep:]:
            self.store.preempt(name)
            del self.live[name]
        if copied:
            for _ in range(6):
                self.step(9, 0.0)
        self.store.pool.drop_all_idle()

    # -- what must hold -----------------------------------------------------------------------------------------

    @invariant()
    def bookkeeping_is_consistent(self) -> None:
        self.store.check_invariants()
        assert set(self.store.sequence_ids()) == set(self.live)

    @invariant()
    def every_sequence_reads_its_own_bytes(self) -> None:
        for name, one in self.live.items():
            if not one.loading:
                self.check_sequence(name, one)

    def check_sequence(self, name: str, one: Expected) -> None:
        store = self.store
        assert store.slab is not None
        assert store.committed_tokens(name) == len(one.tokens)
        if store.is_exact(name):
            assert one.lossy_at is None or len(one.tokens) <= one.lossy_at, (
                f"{name} claims exactness after it computed over INT4 blocks"
            )
        want = pattern(one.tokens, 0, 1, 1, 8)[:, 0, 0] if one.tokens else torch.empty(0, 8)
        for position, entry in enumerate(store.tables(name)[0].tolist()):
            expected = want[position * B : (position + 1) * B]
            if entry & 1:
                assert not one.exact, f"{name} demands exactness and has INT4 block {position}"
                got = self.decode(entry >> 1)[: len(expected)]
                assert (got - expected).abs().max() < 0.3, f"{name}, INT4 block {position} holds other values"
            else:
                got = store.slab.keys_view(0)[entry >> 1, 0, 0, : len(expected)]
                assert torch.equal(got, expected), f"{name}, block {position} holds other bytes"

    def decode(self, slot: int) -> torch.Tensor:
        from kvstore.device_blocks import block_shapes

        store = self.store
        assert store.cold_codec is not None
        assert store.slab is not None
        payload = store.slab.slot_bytes_view(1, slot)
        keys, _ = store.cold_codec.decode(payload, block_shapes(GEOMETRY)[0], torch.float32)
        return keys[0, 0]

    def teardown(self) -> None:
        if not hasattr(self, "store") or self.store.closed:
            return
        for name in list(self.live):
            self.store.abort(name)
        for _ in range(10):
            self.executor.run_all()
            self.store.step()
            self.store.pool.drop_all_idle()
        self.store.check_invariants()
        assert self.store.usage().used_bytes == 0, "blocks leaked"
        self.store.close(drain_seconds=0)
        assert self.store._upkeep.writes.staged_bytes == 0, "buffers leaked"
