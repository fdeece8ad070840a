"""A get by layers from a server: the first layer group of every value, then the next, each checked as it arrives.

Only values as our own writers cut them go this way (frame.layout.cut_of, unsigned). Whatever else lies under a name is
read as a whole, in the first round, and judged there. Between two groups a value may be replaced: by the same bytes, or
its checksum does not fit and the copy is a miss. The executor's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from kvstore.layer_progress import LayerRounds
from kvstore.redis_tier.dispatch import Lost, Order, dispatch
from kvstore.redis_tier.frames import Form, PartSink
from kvstore.redis_tier.links import Links, Node
from kvstore.redis_tier.protocol import Reply, Wire
from kvstore.tier import Job, ResultCode, Transfer

Ask: TypeAlias = Callable[[Sequence[Order], Sequence[PartSink]], None]
GetWhole: TypeAlias = Callable[[Sequence[Job]], list[ResultCode]]
Judge: TypeAlias = Callable[[Order, "PartSink | None"], ResultCode]
"""What a reply, and the fault of what it brought, mean for a copy."""


def get_by_layers(
    rounds: LayerRounds, orders: Sequence[Order], forms: Sequence[Form | None], ask: Ask, whole: GetWhole, judge: Judge
) -> list[ResultCode]:
    """orders: one a job, with the job as its item; forms: of each, None for a job without bytes. ask: see ask_parts."""
    jobs: list[Job] = [order.item for order in orders]
    checksums: list[Sequence[bytes]] = [()] * len(jobs)
    number = 0
    while going := rounds.going:
        sinks: dict[int, PartSink] = {}
        for one in going:
            form = forms[one]
            if form is not None and len(form.stamp.cut.sizes) > 1:
                sinks[one] = PartSink(jobs[one], form, number, checksums[one])
        ask([orders[one] for one in sinks], list(sinks.values()))
        strange = [one for one in going if one not in sinks]
        for one, sink in sinks.items():
            order = orders[one]
            if isinstance(order.reply, int) and sink.fault is None:
                checksums[one] = sink.checksums
                if sink.is_last:
                    order.reply = sink.range[1]
                    rounds.end(one, judge(order, sink), good=True)
                else:
                    rounds.got(one, sink.end_layer)
            elif number or isinstance(order.reply, Lost):
                order.reply = order.reply or None  # no bytes: it is gone
                rounds.end(one, judge(order, sink), good=False)
            else:
                strange.append(one)
        for one, result in zip(strange, whole([jobs[one] for one in strange]), strict=True):
            rounds.end(one, result, good=result is ResultCode.OK)
        rounds.tell()
        number += 1
    return [result or ResultCode.FAILED for result in rounds.results]


def ask_parts(
    links: Links, transfer: Transfer, orders: Sequence[Order], sinks: Sequence[PartSink], *, ttl_ms: int
) -> None:
    """Have each sink filled, and the orders' replies set. With the first layer group times to live are set anew."""
    by_order = {id(order): sink for order, sink in zip(orders, sinks, strict=True)}
    for order, sink in zip(orders, sinks, strict=True):
        order.size_bytes, order.reply = sink.size_bytes, None

    def work(wire: Wire, node: Node, window: Sequence[Order], asking: bool) -> list[Reply]:
        items = [(order.name, by_order[id(order)].range, by_order[id(order)]) for order in window]
        return wire.get_parts(items, ttl_ms if any(sink.head_bytes for sink in sinks) else 0, asking)

    dispatch(links, orders, work, lambda: transfer.cancelled)
