"""What an operator may do to a running daemon. Each call is whole when it returns; any thread. No socket here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from allocator.errors import UsageError
from kvstore.copy_key import CopyKey
from kvstore.daemon.dropping import clear, clear_below, empty
from kvstore.daemon.forms import lower_root
from kvstore.daemon.lower import LowerTier
from kvstore.daemon.tally import SHOWN_BYTES

if TYPE_CHECKING:
    from kvstore.daemon.core import Core
    from kvstore.daemon.holder import Holder

MOST_PINS = 128


@dataclass(frozen=True, slots=True)
class _Pin:
    first: CopyKey
    until: float  # by the core's clock
    holder: Holder

    def report(self, name: str, now: float) -> dict[str, Any]:
        """Roots and hashes are cut short. Copies that were flushed meanwhile are in no pin any more. Under the lock."""
        held = [entry for entries in self.holder.pins.values() for entry in entries if entry.is_linked]
        return {
            "name": name,
            "domain": self.holder.arena.domain,
            "root": self.first.root[:SHOWN_BYTES].hex(),
            "block": self.first.hash[:SHOWN_BYTES].hex(),
            "copies": len(held),
            "pinned_bytes": sum(entry.slot_bytes for entry in held),
            "seconds_left": max(0.0, self.until - now),
        }


class Admin:
    """See the module. domain: a trust domain's name, "" for the daemon's own user's. UsageError: nothing was done."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._pins: dict[str, _Pin] = {}
        self._own_quotas: set[str] = set()  # tenants whose quota was set here and not by the settings

    def check_domain(self, domain: str) -> None:
        """UsageError for one that is neither of the settings nor of a user who may connect."""
        settings = self._core.settings
        known = {name for name, _ in settings.domains} | set(map(settings.domain_of, settings.allowed_uids))
        known |= set(self._core.arenas)  # of users who could connect before a restart, too
        if domain and domain not in known:
            others = ", ".join(repr(name) for name in sorted(known - {""}))
            raise UsageError(
                f"domain: got {domain!r}; expected '' for the daemon's own user's{others and f', or one of {others}'}"
            )

    def flush(self, root: bytes, *, domain: str = "") -> int:
        """Drop every copy of a namespace (identity root) from every tier, one that was dropped included, since a
        restart brings that back; how many went from the arena."""
        self.check_domain(domain)
        core = self._core
        with core.lock:
            arena = core.arenas.get(domain)
        if arena is not None:
            return clear(core, arena, {root}, all_allowed=False)
        roots = {lower_root(root, domain)}  # it may lie below only
        clear_below(core.lowers, lambda lower: lower.clear(roots, all_allowed=False))
        return 0

    def flush_all(self) -> int:
        """Drop every copy of every domain from every tier."""
        core = self._core
        total = sum([empty(core, arena, None) for arena in list(core.arenas.values())])
        clear_below(core.lowers, LowerTier.clear_all)
        for arena in list(core.arenas.values()) if core.lowers else ():
            empty(core, arena, None)  # what came up from there meanwhile
        return total

    def pin(
        self, keys: Sequence[CopyKey], *, seconds: float, budget_bytes: int, name: str, domain: str = ""
    ) -> dict[str, Any]:
        """Keep a prefix in the arena for a while, as much of it as fits the budget, in place of what was pinned under
        that name."""
        if not 0 < seconds <= 30 * 86400 or budget_bytes < 0:
            raise UsageError(f"pin: got {seconds!r} seconds and {budget_bytes!r} bytes; expected up to 30 days, >= 0")
        if not name:
            raise UsageError("name: got ''; expected a name, which unpin takes")
        self.check_domain(domain)
        core, total = self._core, 0
        with core.lock:
            if name not in self._pins and len(self._pins) >= MOST_PINS:
                raise UsageError(f"name: got {name!r}, where {MOST_PINS} pins are held; expected one of theirs")
            holder, fitting = core.stranger(domain, "operator"), list[CopyKey]()
            for key in keys:
                entry = holder.arena.find(key)
                if entry is None or total + entry.slot_bytes > budget_bytes:
                    break
                fitting.append(key)
                total += entry.slot_bytes
            if not fitting:
                raise UsageError(_why_nothing_fits(holder, keys, budget_bytes))
            core.book.pin(holder, fitting)
            before = self._pins.get(name)
            self._pins[name] = _Pin(fitting[0], core.clock() + seconds, holder)
            if before is not None:
                core.book.end(before.holder, is_dead=True)
        return {"name": name, "copies": len(fitting), "pinned_bytes": total, "seconds": seconds}

    def unpin(self, name: str) -> bool:
        """Give pins back early; False when none of that name are held."""
        core = self._core
        with core.lock:
            pin = self._pins.pop(name, None)
            if pin is not None:
                core.book.end(pin.holder, is_dead=True)
        return pin is not None

    def pins(self) -> list[dict[str, Any]]:
        """What is pinned by operators, first what ends first."""
        core = self._core
        with core.lock:
            now = core.clock()
            found = [pin.report(name, now) for name, pin in self._pins.items()]
        return sorted(found, key=lambda one: float(one["seconds_left"]))

    def tick(self) -> None:
        """Pins whose time is up. Called a few times a second."""
        now = self._core.clock()
        for name, pin in list(self._pins.items()):
            if pin.until <= now:
                self.unpin(name)

    def set_quota(self, tenant: str, quota_bytes: int) -> None:
        """0: none. What is over it goes when the tenant stores next."""
        if isinstance(quota_bytes, bool) or not isinstance(quota_bytes, int) or quota_bytes < 0:
            raise UsageError(f"quota: got {quota_bytes!r}; expected an int >= 0")
        with self._core.lock:
            self._own_quotas.add(tenant)
            self._set_quota(tenant, quota_bytes)

    def _set_quota(self, tenant: str, quota_bytes: int) -> None:
        """Under the lock."""
        self._core.quotas[tenant] = quota_bytes
        for arena in self._core.arenas.values():
            arena.tenant(tenant).quota_bytes = quota_bytes

    def drop_tier(self, name: str) -> None:
        """Use a lower tier no more until the daemon restarts."""
        for lower in self._core.lowers:
            if lower.tier.name == name:
                lower.drop()
                return
        names = ", ".join(lower.tier.name for lower in self._core.lowers) or "none"
        raise UsageError(f"tier: got {name!r}; expected one of {names}")

    def reload(self, quotas: dict[str, int]) -> None:
        """What may change while it runs: quotas. A tenant that is named has the quota that is said here; another one
        keeps what `set_quota` has said, and has none where that has said nothing."""
        with self._core.lock:
            self._own_quotas.difference_update(quotas)
            for tenant in {*self._core.quotas, *quotas} - self._own_quotas:
                self._set_quota(tenant, quotas.get(tenant, 0))


def _why_nothing_fits(holder: Holder, keys: Sequence[CopyKey], budget_bytes: int) -> str:
    entry = holder.arena.find(keys[0]) if keys else None
    if entry is None:
        return "block: it is not in shared memory any more; expected one that is"
    return f"budget_bytes: got {budget_bytes}, less than the first copy takes; expected at least {entry.slot_bytes}"
