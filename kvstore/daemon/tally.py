"""What lookups and reads came to: by tenant, by tier, by cause of the miss, and which prefixes are used again.

Sessions count here, each lookup in one call under one short lock of its own, so that what is read together belongs
together: hits never exceed what was asked for, and no count goes back. Everything is bounded. Any thread.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstore.daemon.forms import Form
    from kvstore.daemon.holder import Holder

OTHERS = "(others)"
MISS_CAUSES = ("never_stored", "evicted", "still_looking", "tier_down")
"""Why a lookup ended where it did; all blocks behind count under the cause of the first."""
_MOST_TENANTS = 1024
_MOST_PREFIXES, _KEPT_PREFIXES = 1024, 256
_EVICTED_PLACES = 1 << 16
_SHOWN_BYTES = 6  # of a root or hash: whoever knows one whole may ask for the copies


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


@dataclass(slots=True)
class _Prefix:
    tenant: str
    lookups: int = 0
    hit_blocks: int = 0
    longest_blocks: int = 0
    block_tokens: int = 0
    last_seconds: float = 0.0


class Tally:
    """See the module."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tenants: dict[str, Counter[str]] = {}
        self._hit_blocks: Counter[str] = Counter()
        self._missed_blocks: Counter[str] = Counter()
        self._totals: Counter[str] = Counter()
        self._saved_seconds = 0.0
        self._prefixes: dict[tuple[bytes, bytes], _Prefix] = {}

    def looked_up(
        self, form: Form, hashes: tuple[bytes, ...], found: int, below: Mapping[str, int], cause: str
    ) -> None:
        """`found` leading blocks of `hashes`, of which `below` by lower tier; the rest were missed by one cause."""
        missed = len(hashes) - found
        with self._lock:
            counts = self._counts(form.tenant)
            counts["lookups"] += 1
            counts["hit_blocks"] += found
            counts["missed_blocks"] += missed
            self._totals["lookups"] += 1
            if missed:
                self._missed_blocks[cause] += missed
            if found:
                for tier, blocks in below.items():
                    self._hit_blocks[tier] += blocks
                self._hit_blocks["host"] += found - sum(below.values())
                self._note_prefix(form, hashes[0], found)

    def read(self, holder: Holder, form: Form, blocks: int, byte_count: int) -> None:
        """Copies that were given out to be read. Time saved is counted where the client has told its speed."""
        with self._lock:
            self._counts(form.tenant)["read_blocks"] += blocks
            self._totals["read_bytes"] += byte_count
            one = form.template
            if one.group == 0 and one.heads[0] == 0 and one.layers[0] == 0:  # once a token, not once a shard or group
                tokens = blocks * form.block_tokens
                self._totals["reused_tokens"] += tokens
                if holder.prefill_tokens_per_second:
                    self._saved_seconds += tokens / holder.prefill_tokens_per_second

    def stored(self, byte_count: int) -> None:
        """Copies that were published by clients."""
        with self._lock:
            self._totals["stored_bytes"] += byte_count

    def snapshot(self) -> dict[str, Any]:
        """Counts that only rise; `asked_blocks` is the sum of hits and misses."""
        with self._lock:
            hits, misses = dict(self._hit_blocks), dict(self._missed_blocks)
            return {
                "lookups": self._totals["lookups"],
                "asked_blocks": sum(hits.values()) + sum(misses.values()),
                "hit_blocks": hits,
                "missed_blocks": misses,
                "stored_bytes": self._totals["stored_bytes"],
                "read_bytes": self._totals["read_bytes"],
                "reused_tokens": self._totals["reused_tokens"],
                "saved_prefill_seconds": self._saved_seconds,
            }

    def tenants(self) -> dict[str, dict[str, int]]:
        with self._lock:
            return {name: dict(counts) for name, counts in self._tenants.items()}

    def top_prefixes(self, count: int = 20) -> list[dict[str, Any]]:
        """By blocks that were found again. Roots and hashes are cut short: the whole ones are what opens the cache."""
        with self._lock:
            best = sorted(self._prefixes.items(), key=lambda pair: -pair[1].hit_blocks)[:count]
            return [
                {
                    "root": root[:_SHOWN_BYTES].hex(),
                    "block": hash[:_SHOWN_BYTES].hex(),
                    "tenant": one.tenant,
                    "lookups": one.lookups,
                    "hit_blocks": one.hit_blocks,
                    "longest_tokens": one.longest_blocks * one.block_tokens,
                    "last_seconds": one.last_seconds,
                }
                for (root, hash), one in best
            ]

    def _counts(self, tenant: str) -> Counter[str]:
        counts = self._tenants.get(tenant)
        if counts is None:
            if len(self._tenants) >= _MOST_TENANTS:
                tenant = OTHERS
            counts = self._tenants.setdefault(tenant, Counter())
        return counts

    def _note_prefix(self, form: Form, hash: bytes, found: int) -> None:
        name = form.template.root, hash
        one = self._prefixes.get(name)
        if one is None:
            if len(self._prefixes) >= _MOST_PREFIXES:
                kept = sorted(self._prefixes.items(), key=lambda pair: -pair[1].hit_blocks)[:_KEPT_PREFIXES]
                self._prefixes = dict(kept)
            one = self._prefixes[name] = _Prefix(form.tenant, block_tokens=form.block_tokens)
        one.lookups += 1
        one.hit_blocks += found
        one.longest_blocks = max(one.longest_blocks, found)
        one.last_seconds = time.time()
