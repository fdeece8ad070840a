"""What an operator may do to a running daemon. Each call is whole when it returns; any thread. No socket here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from allocator.errors import UsageError
from kvstore.copy_key import CopyKey
from kvstore.daemon.dropping import clear
from kvstore.daemon.forms import lower_root

if TYPE_CHECKING:
    from kvstore.daemon.core import Core
    from kvstore.daemon.holder import Holder


class Admin:
    """See the module. domain: a trust domain's name, "" for the daemon's own user's."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._pins: dict[str, tuple[float, Holder]] = {}  # name -> its end, by the core's clock

    def flush(self, root: bytes, *, domain: str = "") -> int:
        """Drop every copy of a namespace (identity root) from every tier; how many went from the arena."""
        core = self._core
        with core.lock:
            arena = core.arenas.get(domain)
        if arena is not None:
            return clear(core, arena, {root}, all_allowed=False)
        for lower in core.lowers:  # it may lie below only
            lower.clear({lower_root(root, domain)}, all_allowed=False)
        return 0

    def flush_all(self) -> int:
        """Drop every copy of every domain from every tier."""
        core, total = self._core, 0
        for arena in list(core.arenas.values()):
            with core.lock:
                arena.note_cleared(None)
                roots = {one.key.root for one in arena.linked()}
            total += clear(core, arena, roots, all_allowed=True)
        for lower in core.lowers:
            if not lower.is_dropped:
                lower.tier.clear()
        return total

    def pin(
        self, keys: Sequence[CopyKey], *, seconds: float, budget_bytes: int, name: str = "", domain: str = ""
    ) -> dict[str, Any]:
        """Keep a prefix in the arena for a while, as much of it as fits the budget. `name` is for unpin."""
        if not 0 < seconds <= 30 * 86400 or budget_bytes < 0:
            raise UsageError(f"pin: got {seconds!r} seconds and {budget_bytes!r} bytes; expected up to 30 days, >= 0")
        core, total = self._core, 0
        self.unpin(name)
        with core.lock:
            holder, fitting = core.stranger(domain, "operator"), list[CopyKey]()
            for key in keys:
                entry = holder.arena.find(key)
                if entry is None or total + entry.slot_bytes > budget_bytes:
                    break
                fitting.append(key)
                total += entry.slot_bytes
            core.book.pin(holder, fitting)
            self._pins[name] = core.clock() + seconds, holder
        return {"name": name, "copies": len(fitting), "pinned_bytes": total, "seconds": seconds}

    def unpin(self, name: str = "") -> bool:
        """Give pins back early; False when none of that name are held."""
        core = self._core
        with core.lock:
            _, holder = self._pins.pop(name, (0.0, None))
            if holder is not None:
                core.book.end(holder, is_dead=True)
        return holder is not None

    def tick(self) -> None:
        """Pins whose time is up. Called a few times a second."""
        now = self._core.clock()
        for name, (until, _) in list(self._pins.items()):
            if until <= now:
                self.unpin(name)

    def set_quota(self, tenant: str, quota_bytes: int) -> None:
        """0: none. What is over it goes when the tenant stores next."""
        if isinstance(quota_bytes, bool) or not isinstance(quota_bytes, int) or quota_bytes < 0:
            raise UsageError(f"quota: got {quota_bytes!r}; expected an int >= 0")
        core = self._core
        with core.lock:
            core.quotas[tenant] = quota_bytes
            for arena in core.arenas.values():
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
        """What may change while it runs: quotas. Those that are not named have none any more."""
        for tenant in {*self._core.quotas, *quotas}:
            self.set_quota(tenant, quotas.get(tenant, 0))
