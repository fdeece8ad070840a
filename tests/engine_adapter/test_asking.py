"""A stream whose prefix a slow tier is still looking up waits in the queue; the others run on."""

from __future__ import annotations

import time

from engine_adapter.adapter import StoreAdapter
from engine_adapter.request import Request
from tests.engine_adapter.loop_kit import KitMaker, prompt
from tests.servers import Server, shared_server
from tests.stopwatch import Stopwatch


def test_others_run_on_while_a_server_hangs_and_the_deadline_ends_the_waiting(make_kit: KitMaker) -> None:
    with Server() as server, Stopwatch() as watch:  # the store's clock too: a machine that stands still ends no waiting
        settings = {"io_threads": "thread", "fetch_deadline_seconds": 0.4, "clock": lambda: watch.seconds}
        kit = make_kit(blocks=160, redis_url=server.unix_url, **settings)
        running = Request("running", prompt(1, 20), 400)
        kit.loop.submit(running)
        while not kit.loop._scheduler.running:
            kit.step()
        stream = kit.loop._scheduler.running[0]
        with server.hung():
            asking = Request("asking", prompt(2, 30), 3)
            kit.loop.submit(asking)
            kit.loop.submit(Request("later", running.token_ids, 3))  # needs no lookup: the device has its prompt
            before, started = stream.output_count, watch.seconds
            while kit.loop._scheduler.waiting:
                kit.step()
                time.sleep(0.002)
            waited = watch.seconds - started
            assert 0.1 < waited < 1.5
            assert "later" in kit.loop._results, "it came after and was done before"
            assert stream.output_count > before + 20, "it ran on meanwhile"
            results = kit.drive()
        kit.check(results, [running, asking])


def test_a_loop_with_nothing_else_to_do_takes_the_prefix_that_was_found(make_kit: KitMaker) -> None:
    url = shared_server().unix_url + "?namespace=loops"
    settings = {"blocks": 64, "redis_url": url, "io_threads": "thread", "load_always": True}
    tokens = prompt(5, 41)
    first = make_kit(**settings)
    first.run_checked(Request("first", tokens, 2))
    adapter = StoreAdapter(first.store)
    while adapter.reserve("again", tokens).ask_again:
        first.store.step()
    adapter.preempt("again")  # copies of what it holds go down
    deadline = time.monotonic() + 60
    while first.store.metrics.get("spilled_blocks", tier="remote") < 10:
        assert time.monotonic() < deadline
        first.store.wait(0.05)
        first.store.step()
    second = make_kit(**settings)
    request = Request("second", tokens, 5)
    second.loop.submit(request)
    results = second.loop.run()
    second.check(results, [request])
    assert results["second"].reused_tokens == {"remote": 40}
