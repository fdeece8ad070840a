"""The namespace of a remote tier as a whole: survey, emptying, epoch, and words for operators.

These calls wait for the servers, each batch within its timeout; any thread. SCAN only, never KEYS.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress

from allocator.errors import TierError
from kvstore.redis_tier.dispatch import Lost, Order, dispatch
from kvstore.redis_tier.frames import KeyNames
from kvstore.redis_tier.links import Links, Node, NodeDownError
from kvstore.redis_tier.protocol import ErrorReply, Reply, WireError

_SCAN_COUNT = b"500"
_EPOCH_TTL_MS = 400 * 86400 * 1000
_PASSES = 3


def _fresh_epoch() -> int:
    """Below 2^62, larger than any made earlier while wall clocks go forward, and unlike any other."""
    return int(time.time() * 1000) << 20 | secrets.randbits(20)


class Namespace:
    def __init__(self, links: Links, names: KeyNames, ttl_ms: int) -> None:
        self._links = links
        self._names = names
        self._ttl_ms = ttl_ms
        self._lock = threading.Lock()
        self._descriptions: dict[bytes, tuple[bytes, float]] = {}  # root -> text, when last written

    # copies ----------------------------------------------------------------------------------------------------------

    def survey(self, adopt: Callable[[list[tuple[bytes, int]]], None]) -> None:
        """Hand every copy's name and bytes to `adopt`, a page at a time. TierError when a node cannot be reached."""
        for node in self._nodes():
            for page in self._pages(node):
                sizes = self._call(node, [[b"STRLEN", name] for name in page])
                adopt([(name, size) for name, size in zip(page, sizes, strict=True) if isinstance(size, int) and size])

    def unlink_copies(self) -> int:
        """Drop every copy; how many. TierError when a node cannot be reached or does not let go of one."""
        count = 0
        for attempt in range(_PASSES):
            refused: list[str] = []
            for node in self._nodes():
                for page in self._pages(node):
                    orders = [Order(name) for name in page]
                    dispatch(
                        self._links,
                        orders,
                        lambda wire, _, window, asking: wire.call([[b"UNLINK", one.name] for one in window], asking),
                    )
                    count += sum(order.reply == 1 for order in orders)
                    refused += [str(order.reply) for order in orders if not isinstance(order.reply, int)]
            if not refused:
                return count
            if attempt + 1 == _PASSES:
                raise TierError(f"{self._links.address}: {len(refused)} copies could not be dropped: {refused[0]}")
            self._links.refresh()
        return count

    def _nodes(self) -> list[Node]:
        try:
            return self._links.nodes()
        except NodeDownError as error:
            raise TierError(f"{self._links.address}: {error}") from None

    def _pages(self, node: Node) -> Iterator[list[bytes]]:
        cursor = b"0"
        beside = (self._names.epoch, self._names.root(b""))
        pattern = f"{self._names.namespace}:*".encode("ascii")
        while True:
            (found,) = self._call(node, [[b"SCAN", cursor, b"MATCH", pattern, b"COUNT", _SCAN_COUNT]])
            if isinstance(found, ErrorReply) or not isinstance(found, list) or len(found) != 2:
                raise TierError(f"{node.name}: SCAN gave {found!r}")
            cursor, names = found  # type: ignore[assignment]
            assert isinstance(names, list)
            page = [one for one in names if isinstance(one, bytes) and not one.startswith(beside)]
            if page:
                yield page
            if cursor == b"0":
                return

    def _call(self, node: Node, commands: list[list[bytes]]) -> list[Reply]:
        try:
            return node.run(lambda wire: wire.call(commands), force=True)
        except (NodeDownError, WireError) as error:
            self._links.refresh()
            raise TierError(f"{node.name} cannot be reached: {error}") from None

    # epoch -----------------------------------------------------------------------------------------------------------

    def read_epoch(self) -> int:
        """An epoch that was evicted or never set is made anew and unlike any before: old copies must not come back."""
        ttl = b"%d" % max(_EPOCH_TTL_MS, 4 * self._ttl_ms)
        name = self._names.epoch
        value = self._ask(name, [b"GET", name])
        if value is None:
            self._ask(name, [b"SET", name, b"%d" % _fresh_epoch(), b"NX", b"PX", ttl])
            value = self._ask(name, [b"GET", name])
        with suppress(TierError):  # a server that takes no writes can still be read
            self._ask(name, [b"PEXPIRE", name, ttl])
        if not isinstance(value, bytes) or not value.isdigit() or len(value) > 19:
            raise TierError(
                f"{self._links.address}: the epoch is {value!r}; expected a number (raise_epoch repairs it)"
            )
        return int(value)

    def raise_epoch(self, least: int) -> int:
        try:
            old = self.read_epoch()
        except TierError:
            old = 0  # unreadable; when unreachable, the write below says so
        new = max(old + 1, least, _fresh_epoch())
        name = self._names.epoch
        reply = self._ask(name, [b"SET", name, b"%d" % new, b"PX", b"%d" % max(_EPOCH_TTL_MS, 4 * self._ttl_ms)])
        if reply != b"OK":
            raise TierError(f"{self._links.address}: the epoch could not be raised: {reply!r}")
        return new

    def _ask(self, name: bytes, command: list[bytes]) -> Reply:
        order = Order(name)
        dispatch(self._links, [order], lambda wire, _, window, asking: wire.call([command] * len(window), asking))
        if isinstance(order.reply, Lost | ErrorReply):
            raise TierError(f"{self._links.address}: {command[0].decode()} failed: {order.reply}")
        return order.reply

    # words for operators ---------------------------------------------------------------------------------------------

    def describe(self, root: bytes, description: Mapping[str, str]) -> None:
        """Remember words for a root; they are written with its next copies."""
        text = json.dumps(dict(description), sort_keys=True).encode()
        with self._lock:
            if len(self._descriptions) >= 4096:
                self._descriptions.pop(next(iter(self._descriptions)))
            self._descriptions[root] = (text, -1e9)

    def renew_descriptions(self, roots: Iterable[bytes]) -> None:
        """Write those that are due; runs on the executor. A failure leaves them due."""
        now = self._links.options.clock()
        with self._lock:
            due = [
                (root, self._descriptions[root][0])
                for root in roots
                if root in self._descriptions and now - self._descriptions[root][1] > self._ttl_ms / 8000
            ]
        ttl = b"%d" % self._ttl_ms
        orders = [Order(self._names.root(root), 0, (root, text)) for root, text in due]
        if not orders:
            return
        dispatch(
            self._links,
            orders,
            lambda wire, _, window, asking: wire.call(
                [[b"SET", one.name, one.item[1], b"PX", ttl] for one in window], asking
            ),
        )
        with self._lock:
            for order in orders:
                if order.reply == b"OK":
                    root, text = order.item
                    self._descriptions[root] = (text, now)
