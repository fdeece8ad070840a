"""What lookups and reads came to: by tenant, by tier, by cause of the miss, and which prefixes are used again.

Sessions count here, each message of a client in one call under one short lock of its own, so that what is read together
belongs together: hits never exceed what was asked for, and no count goes back. Everything is bounded. Any thread.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvstore.daemon.settings import OWN_DOMAIN

if TYPE_CHECKING:
    from kvstore.daemon.forms import Form
    from kvstore.daemon.holder import Holder

OTHERS = "(others)"
MISS_CAUSES = ("never_stored", "evicted", "still_looking", "tier_down")
"""Why a lookup ended where it did; all blocks behind count under the cause of the first."""
_MOST_TENANTS, _MOST_OTHER_TENANTS = 1024, 64
_MOST_BLOCK_TOKENS = 1 << 16  # what forms may say is more than any engine has
_MOST_PREFIXES, _KEPT_PREFIXES = 1024, 256
_EVICTED_PLACES = 1 << 16
SHOWN_BYTES = 6  # of a root or hash: whoever knows one whole may ask for the copies


class RecentlyEvicted:
    """Which blocks were evicted not long ago: a table of fixed size in which newer ones replace older ones."""

    def __init__(self) -> None:
        self._table = array("Q", bytes(8 * _EVICTED_PLACES))

    def add(self, hash: bytes) -> None:
        number = int.from_bytes(hash[-8:], "big") or 1
        self._table[number % _EVICTED_PLACES] = number

    def __contains__(self, hash: bytes) -> bool:
        number = int.from_bytes(hash[-8:], "big") or 1
        return self._table[number % _EVICTED_PLACES] == number


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one message said of a lookup. prompt: hash of the prompt's first block. is_counted: the lookup counts here.

    hit_blocks by tier, missed_blocks by cause. reach_blocks: so many blocks into the prompt the last hit ends.
    """

    prompt: bytes
    is_counted: bool
    hit_blocks: Mapping[str, int]
    missed_blocks: Mapping[str, int]
    reach_blocks: int


@dataclass(slots=True)
class _Prefix:
    tenant: str
    lookups: int = 0
    hit_blocks: int = 0
    longest_blocks: int = 0
    block_tokens: int = 0
    last_seconds: float = 0.0


class _Domain:
    """Of one trust domain, so that none can change what is said of another."""

    def __init__(self) -> None:
        self.hit_blocks: Counter[str] = Counter()
        self.missed_blocks: Counter[str] = Counter()
        self.totals: Counter[str] = Counter()
        self.saved_seconds = 0.0
        self.speeds: dict[bytes, float] = {}  # by root, as last told
        self.tenants: dict[str, Counter[str]] = {}
        self.prefixes: dict[tuple[bytes, bytes], _Prefix] = {}

    def snapshot(self) -> dict[str, Any]:
        hits, misses = dict(self.hit_blocks), dict(self.missed_blocks)
        return {
            "lookups": self.totals["lookups"],
            "asked_blocks": sum(hits.values()) + sum(misses.values()),
            "hit_blocks": hits,
            "missed_blocks": misses,
            "stored_bytes": self.totals["stored_bytes"],
            "read_bytes": self.totals["read_bytes"],
            "reused_tokens": self.totals["reused_tokens"],
            "saved_prefill_seconds": self.saved_seconds,
        }


class Tally:
    """See the module."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._domains: dict[str, _Domain] = {"": _Domain()}

    def _of(self, domain: str) -> _Domain:
        found = self._domains.get(domain)
        if found is None:  # as many as the settings allow users
            found = self._domains[domain] = _Domain()
        return found

    def looked_up(self, form: Form, outcome: Outcome) -> None:
        """A client's word on a lookup."""
        hits, missed = sum(outcome.hit_blocks.values()), sum(outcome.missed_blocks.values())
        with self._lock:
            own = self._of(form.domain)
            counts = self._counts(own, form.tenant)
            counts["lookups"] += outcome.is_counted
            counts["hit_blocks"] += hits
            counts["missed_blocks"] += missed
            own.totals["lookups"] += outcome.is_counted
            own.hit_blocks.update(outcome.hit_blocks)
            own.missed_blocks.update(outcome.missed_blocks)
            if hits:
                self._note_prefix(own, form, outcome)

    def reused(self, holder: Holder, form: Form, blocks: int) -> None:
        """A client need not compute these. Time saved is counted by its own speed, or, where it does not know that yet,
        by that of another of its domain with the same model and weights."""
        with self._lock:
            own = self._of(form.domain)
            tokens = blocks * min(form.block_tokens, _MOST_BLOCK_TOKENS)
            own.totals["reused_tokens"] += tokens
            holder.unpriced_tokens += tokens
            holder.root = form.lower_template.root
            self._price(own, holder)

    def told_speed(self, holder: Holder, tokens_per_second: float) -> None:
        """How fast a client computes what it does not find."""
        with self._lock:
            own = self._of(holder.arena.domain)
            holder.prefill_tokens_per_second = tokens_per_second
            if holder.root not in own.speeds and len(own.speeds) >= _MOST_PREFIXES:
                del own.speeds[next(iter(own.speeds))]
            own.speeds[holder.root] = tokens_per_second
            self._price(own, holder)

    def _price(self, own: _Domain, holder: Holder) -> None:
        speed = holder.prefill_tokens_per_second or own.speeds.get(holder.root, 0.0)
        if speed:
            own.saved_seconds += holder.unpriced_tokens / speed
            holder.unpriced_tokens = 0

    def read(self, form: Form, blocks: int, byte_count: int) -> None:
        """Copies that were given out to be read."""
        with self._lock:
            own = self._of(form.domain)
            self._counts(own, form.tenant)["read_blocks"] += blocks
            own.totals["read_bytes"] += byte_count

    def stored(self, domain: str, byte_count: int) -> None:
        """Copies that were published by clients."""
        with self._lock:
            self._of(domain).totals["stored_bytes"] += byte_count

    def snapshot(self) -> dict[str, Any]:
        """Counts that only rise; `asked_blocks` is the sum of hits and misses. Of all, and `domains`: of each."""
        with self._lock:
            parts = {name or OWN_DOMAIN: one.snapshot() for name, one in self._domains.items()}
        whole = _Domain().snapshot()
        for part in parts.values():
            for name, value in part.items():
                if isinstance(value, dict):
                    whole[name] = dict(Counter(whole[name]) + Counter(value))
                else:
                    whole[name] += value
        return whole | {"domains": parts}

    def tenants(self) -> dict[str, dict[str, int]]:
        """By name, see shown_tenant."""
        with self._lock:
            return {
                shown_tenant(name, domain): dict(counts)
                for domain, one in self._domains.items()
                for name, counts in one.tenants.items()
            }

    def top_prefixes(self, count: int = 20) -> list[dict[str, Any]]:
        """By blocks that were found again, the own domain's before others'. Roots and hashes are cut short: the whole
        ones are what opens the cache."""
        with self._lock:
            best = [
                (domain, root, hash, one)
                for domain in sorted(self._domains)
                for (root, hash), one in sorted(
                    self._domains[domain].prefixes.items(), key=lambda pair: -pair[1].hit_blocks
                )[:count]
            ]
            return [
                {
                    "root": root[:SHOWN_BYTES].hex(),
                    "block": hash[:SHOWN_BYTES].hex(),
                    "tenant": shown_tenant(one.tenant, domain),
                    "lookups": one.lookups,
                    "hit_blocks": one.hit_blocks,
                    "longest_tokens": one.longest_blocks * min(one.block_tokens, _MOST_BLOCK_TOKENS),
                    "last_seconds": one.last_seconds,
                }
                for domain, root, hash, one in best[:count]
            ]

    def _counts(self, own: _Domain, tenant: str) -> Counter[str]:
        counts = own.tenants.get(tenant)
        if counts is None:
            if len(own.tenants) >= (_MOST_TENANTS if own is self._domains[""] else _MOST_OTHER_TENANTS):
                tenant = OTHERS
            counts = own.tenants.setdefault(tenant, Counter())
        return counts

    def _note_prefix(self, own: _Domain, form: Form, outcome: Outcome) -> None:
        name = form.template.root, outcome.prompt
        one = own.prefixes.get(name)
        if one is None:
            if len(own.prefixes) >= _MOST_PREFIXES:
                kept = sorted(own.prefixes.items(), key=lambda pair: -pair[1].hit_blocks)[:_KEPT_PREFIXES]
                own.prefixes = dict(kept)
            one = own.prefixes[name] = _Prefix(form.tenant, block_tokens=form.block_tokens)
        one.lookups += outcome.is_counted
        one.hit_blocks += sum(outcome.hit_blocks.values())
        one.longest_blocks = max(one.longest_blocks, outcome.reach_blocks)
        one.last_seconds = time.time()


def shown_tenant(tenant: str, domain: str) -> str:
    """A tenant's name, and whose it is outside the own user's domain: clients say what they are called."""
    return f"{tenant} ({domain})" if domain else tenant
