"""Who is admitted first of those that wait: whoever has least to compute, and nobody is overtaken for ever."""

from __future__ import annotations

from engine_adapter.request import Request
from engine_adapter.scheduler import _OVERTAKEN_LIMIT
from tests.engine_adapter.loop_kit import Kit, KitMaker, prompt


def admitted_order(kit: Kit, *requests: Request) -> list[str]:
    """The requests' ids in the order in which they got their place."""
    kit.loop.least_first = True
    for request in requests:
        kit.loop.submit(request)
    order: list[str] = []
    for _ in range(5000):
        if not kit.loop.busy:
            break
        kit.step()
        scheduler = kit.loop._scheduler
        order += [
            one for one in (s.request.request_id for s in scheduler.running + scheduler.loading) if one not in order
        ]
    kit.check(kit.loop.collect(), requests)
    return order


def test_a_cached_prefix_goes_before_an_older_prompt_that_has_none(make_kit: KitMaker) -> None:
    kit = make_kit(blocks=40, loop={"max_batch_sequences": 1})
    cached = prompt(1, 40)
    kit.run_checked(Request("before", cached, 1))
    order = admitted_order(
        kit,
        Request("runs", prompt(2, 8), 3),
        Request("cold", prompt(3, 40), 3),
        Request("warm", [*cached, 5], 3),
        Request("cold too", prompt(4, 40), 3),
    )
    assert order.index("warm") < order.index("cold") < order.index("cold too")


def test_equal_ones_keep_the_order_of_arrival(make_kit: KitMaker) -> None:
    kit = make_kit(blocks=64, loop={"max_batch_sequences": 1})
    requests = [Request(f"r{number}", prompt(number, 20), 2) for number in range(8)]
    assert admitted_order(kit, *requests) == [one.request_id for one in requests]


def test_nobody_is_overtaken_more_than_a_few_times(make_kit: KitMaker) -> None:
    kit = make_kit(blocks=64, loop={"max_batch_sequences": 1})
    long = Request("long", prompt(0, 60), 2)
    short = [Request(f"s{number}", prompt(number, 5), 2) for number in range(1, 3 * _OVERTAKEN_LIMIT)]
    order = admitted_order(kit, Request("runs", prompt(99, 5), 2), long, *short)
    assert 1 < order.index("long") <= 1 + _OVERTAKEN_LIMIT


def test_the_one_that_does_not_fit_is_not_passed_by_for_ever(make_kit: KitMaker) -> None:
    """Small ones that keep the pool busy may overtake a large one, and then it gets the room that they leave."""
    kit = make_kit(blocks=20, loop={"max_batch_sequences": 4})
    large = Request("large", prompt(0, 64), 2)
    small = [Request(f"s{number}", prompt(number, 9), 6) for number in range(1, 40)]
    order = admitted_order(kit, *small[:4], large, *small[4:])
    assert order.index("large") <= 4 + _OVERTAKEN_LIMIT
