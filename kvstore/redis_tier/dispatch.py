"""A batch over many servers: grouped by node, cut into windows, redirected where a slot has moved.

One dead node costs only its keys. Runs on the thread that calls; imports no client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from kvstore.redis_tier.links import Links, Node, NodeDownError
from kvstore.redis_tier.protocol import ErrorReply, InterruptedCallError, Reply, Wire

_ROUNDS = 3  # the first, and two after a redirection or a failover
_WINDOW_BYTES = (16 << 20) + (64 << 10)  # what a lost connection loses, and its deadline allows for
_WINDOW_ORDERS = 512

INTERRUPTED = "interrupted"
BREAKER_OPEN = "breaker_open"


class Lost(NamedTuple):
    """In place of a reply: the server did not give one."""

    cause: str


@dataclass(slots=True)
class Order:
    """One command for one key. `reply` is set by dispatch."""

    name: bytes
    size_bytes: int = 0
    item: Any = None
    reply: Reply | Lost = None
    asked: Node | None = None


Work: TypeAlias = Callable[[Wire, Node, Sequence[Order], bool], list[Reply]]
"""(wire, node, orders, asking) -> a reply each. May run twice for the same orders."""


def dispatch(links: Links, orders: Sequence[Order], work: Work, stopped: Callable[[], bool] | None = None) -> None:
    """Set the reply of every order. Raises nothing for a server that is down: see Lost."""
    waiting = list(orders)
    for attempt in range(_ROUNDS):
        groups: dict[tuple[Node, bool], list[Order]] = {}
        for order in waiting:
            asked, order.asked = order.asked, None
            try:
                node = asked or links.node_for(order.name)
            except NodeDownError as error:
                order.reply = Lost(error.cause)
            else:
                groups.setdefault((node, asked is not None), []).append(order)
        waiting = []
        for (node, asking), members in groups.items():
            for window in _windows(members):
                _run(links, node, asking, window, work, stopped)
                if attempt + 1 < _ROUNDS:
                    waiting += [order for order in window if _goes_again(links, node, order)]
        if not waiting:
            return


def command_each(links: Links, orders: Sequence[Order], command: Callable[[Order], list[bytes]]) -> None:
    """One plain command an order, `command(order)`."""
    if orders:
        dispatch(links, orders, lambda wire, _, window, asking: wire.call([command(one) for one in window], asking))


def _windows(orders: Sequence[Order]) -> Iterator[list[Order]]:
    window: list[Order] = []
    size = 0
    for order in orders:
        if window and (size + order.size_bytes > _WINDOW_BYTES or len(window) >= _WINDOW_ORDERS):
            yield window
            window, size = [], 0
        window.append(order)
        size += order.size_bytes
    if window:
        yield window


def _run(
    links: Links, node: Node, asking: bool, window: list[Order], work: Work, stopped: Callable[[], bool] | None
) -> None:
    lost = None
    if stopped is not None and stopped():
        lost = Lost(INTERRUPTED)
    else:
        try:
            replies = node.run(lambda wire: work(wire, node, window, asking), stopped=stopped)
        except InterruptedCallError:
            lost = Lost(INTERRUPTED)
        except NodeDownError as error:
            lost = Lost(error.cause)
            if error.cause != BREAKER_OPEN:
                links.refresh()
    for place, order in enumerate(window):
        order.reply = replies[place] if lost is None else lost


def _goes_again(links: Links, node: Node, order: Order) -> bool:
    """Whether another server may answer. Told to the topology on the way."""
    reply = order.reply
    try:
        if isinstance(reply, Lost):
            return reply.cause != INTERRUPTED and links.node_for(order.name) is not node
        if not isinstance(reply, ErrorReply):
            return False
        if reply.code in ("MOVED", "ASK"):
            order.asked = links.redirected(reply)
            return True
        if reply.code == "READONLY":  # a master that has become a replica
            node.forget_connections()
            links.refresh()
            return True
    except NodeDownError as error:
        order.reply = Lost(error.cause)
    return False
