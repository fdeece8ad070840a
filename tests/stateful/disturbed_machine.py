"""The store machine with resets and leases between its steps."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from allocator import CapacityError
from kvstore import HashChain, Lease
from tests.stateful.store_machine import PROMPTS, Expected, StoreMachine


class DisturbedMachine(StoreMachine):
    @initialize()
    def no_leases(self) -> None:
        self.leases: list[Lease] = []
        self.void: list[HashChain] = []

    @rule(prompt=st.sampled_from(PROMPTS), exact=st.booleans(), ttl_seconds=st.sampled_from([1.0, 30.0]))
    def pin(self, prompt: list[int], exact: bool, ttl_seconds: float) -> None:
        try:
            lease = self.store.pin(prompt, ttl_seconds, exact=exact)
        except CapacityError:  # beyond the budget of leases
            return
        assert lease.tokens <= self.store.lookup(prompt, exact=exact).tokens
        self.leases.append(lease)

    @rule(index=st.integers(0, 7), prompt=st.sampled_from(PROMPTS), use=st.booleans())
    def end_lease(self, index: int, prompt: list[int], use: bool) -> None:
        if not self.leases:
            return
        lease = self.leases.pop(index % len(self.leases))
        if not use:
            if lease.active:
                self.store.unpin(lease)
            return
        self.counter += 1
        name = f"s{self.counter}"
        try:
            self.store.admit(name, prompt, lease=lease)
        except CapacityError:
            self.leases.append(lease)
            return
        assert not lease.active
        self.live[name] = Expected([], list(prompt), False, loading=True)
        self.notice(name)

    @rule(arrived=st.sampled_from([0, 9]))
    def reset(self, arrived: int) -> None:
        for _ in range(arrived):  # copies that are there, but not yet seen by the store
            self.executor.step()
        self.void = [self.store.prepare(prompt) for prompt in PROMPTS]
        self.store.reset()

    @invariant()
    def nothing_from_before_a_reset_is_a_hit(self) -> None:
        for chain in getattr(self, "void", []):
            assert self.store.lookup_hashes(chain.root, chain.hashes, chain.token_count).tokens == 0

    def teardown(self) -> None:
        for lease in getattr(self, "leases", []):
            if lease.active:
                self.store.unpin(lease)
        super().teardown()
