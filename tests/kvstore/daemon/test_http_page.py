"""The live page in a real headless browser: real figures, live, a tier that goes down, and nothing that runs or loads
from elsewhere."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from kvstore import Identity, KVStore, KVStoreConfig
from kvstore.daemon.http_page import content_security_policy, live_page
from kvstore.executor import ThreadExecutor
from kvstore.frame.specs import geometry_specs
from kvstore.testing.transfer_contract import key_of
from kvstore.tier import CopyKey, ResultCode
from tests.kvstore.conftest import full_geometry
from tests.kvstore.daemon.browser import Browser
from tests.kvstore.daemon.http_kit import served
from tests.kvstore.daemon.kit import get, look_up, put, tier_at, until
from tests.kvstore.driving import run_prompt
from tests.servers import Server

OK = ResultCode.OK
HOSTILE = '<img src=x onerror="window.hit=1">'


def prompt(number: int) -> list[int]:
    return list(range(1000 * number, 1000 * number + 165))


def engine(path: str, tenant: str) -> KVStore:
    """A whole store over the daemon, as an engine has it."""
    geometry = full_geometry()
    specs = geometry_specs(geometry)
    tier = tier_at(path, ThreadExecutor("daemon"), tenant=tenant, fetch_seconds=0.2, specs=specs)
    config = KVStoreConfig(device_bytes="4 MiB", share=True, codec="raw", load_always=True)
    store = KVStore(geometry, Identity(model="toy", weights="w0", geometry=geometry), config, tiers=[tier])
    store.observe_prefill(500, 1.0)
    return store


@contextmanager
def working(path: str, tenant: str) -> Iterator[None]:
    """Engines that start, answer some prompts and end, all the while."""
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            with engine(path, tenant) as store:
                for number in range(6):
                    run_prompt(store, str(number), prompt(number))
                    store.finish(str(number))
                    store.step()
                    time.sleep(0.01)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def text_of(browser: Browser, part: str) -> str:
    return str(browser.value(f"document.querySelector('#{part}')?.innerText || ''"))


def test_the_page_shows_what_happens_in_a_real_browser(tmp_path: Path) -> None:
    remote = Server()
    with (
        served(tmp_path, redis_url=remote.unix_url, quotas={HOSTILE: "1 MiB"}) as (daemon, client),
        Browser() as browser,
    ):
        with working(daemon.settings.socket_path, HOSTILE):
            browser.open(client.url)
            browser.wait("document.querySelector('#state')?.innerText === 'ready'")
            browser.wait("document.querySelectorAll('svg polygon.area.full').length > 0")
            assert "Nothing is wrong" in browser.text()
            assert HOSTILE in text_of(browser, "tenants"), "a name is text"
            assert "1 MiB" in text_of(browser, "tenants")
            browser.wait("/remote\\s+up/.test(document.querySelector('#tiers').innerText)")
            browser.wait("/of TTFT saved/.test(document.body.innerText)")
            with engine(daemon.settings.socket_path, HOSTILE) as store:
                first = store.prepare(prompt(0)).hashes[0].hex()[:12]
            browser.wait(f"document.querySelector('#prefixes').innerText.includes('{first}')")
            browser.wait("document.body.innerText.includes('never stored here')")
            before = browser.value("stats.lookups.lookups")
            browser.wait(f"stats.lookups.lookups > {before}", 10)
            browser.wait("document.querySelector('#clients').innerText.includes('500 tokens/s')")
            remote.kill()
            browser.wait("/remote\\s+down/.test(document.querySelector('#tiers').innerText)")
            assert "Tier remote is down" in browser.text()
        assert browser.value("window.hit") is None
        assert browser.faults == [], "nothing failed, nothing was asked of others"
        assert client.admin("drop-tier", tier="remote")[0] == 200
        browser.wait("/remote\\s+dropped/.test(document.querySelector('#tiers').innerText)")
        assert browser.value("document.querySelectorAll('svg[role=img][aria-label]').length") >= 4


def test_a_phone_in_the_dark_and_a_daemon_that_goes(tmp_path: Path) -> None:
    with Browser(390, 800, dark=True, mobile=True) as browser:
        with served(tmp_path) as (daemon, client), working(daemon.settings.socket_path, ""):
            browser.open(client.url)
            browser.wait("document.querySelectorAll('svg').length >= 3")
            assert browser.value("document.documentElement.scrollWidth") <= 390, "nothing is wider than the phone"
            colour = browser.value("getComputedStyle(document.body).backgroundColor")
            assert max(int(part) for part in colour[4:-1].split(",")) < 40, colour
            smallest = browser.value(
                "Math.min(...[...document.querySelectorAll('p,td,th,b,span,li')].map("
                "one => parseFloat(getComputedStyle(one).fontSize)))"
            )
            assert smallest >= 12
        browser.wait("document.querySelector('#state').innerText === 'no answer'", 10)


def test_beyond_loopback_the_page_asks_for_the_token(tmp_path: Path) -> None:
    token = "a-token-of-its-own-1234"
    with served(tmp_path, http="0.0.0.0:0", http_token=token) as (_, client), Browser() as browser:
        browser.open(client.url.replace("0.0.0.0", "127.0.0.1"))
        browser.wait("!!document.querySelector('form input')")
        assert "hit ratio" not in browser.text()
        browser.value(
            f"document.querySelector('form input').value = '{token}', document.querySelector('form button').click()"
        )
        browser.wait("document.querySelector('#state')?.innerText === 'ready'")


def test_the_page_is_one_file_and_lets_nothing_else_run(tmp_path: Path) -> None:
    page = live_page()
    for outside in ("http://", "https://", "src=", "@import", "url(", "innerHTML", "eval(", "document.write"):
        found = page.replace("http://www.w3.org/2000/svg", "")
        assert outside not in found, outside
    assert len(page) < 64 << 10
    policy = content_security_policy()
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    with served(tmp_path) as (_, client):
        status, headers, _ = client.ask("GET", "/")
        assert (status, headers["content-security-policy"]) == (200, policy)
        assert headers["x-frame-options"] == "DENY"


def test_a_lower_tier_that_is_down_costs_readers_no_wait(tmp_path: Path) -> None:
    """Found with the page: copies that only the dead server had were asked for until the reader's deadline."""
    remote = Server()
    with served(tmp_path, redis_url=remote.unix_url, host_bytes=1 << 20, segment_bytes=64 << 10) as (daemon, _):
        tier = tier_at(daemon.settings.socket_path, fetch_seconds=60.0)
        keys, below = [key_of(n) for n in range(400)], daemon.core.lowers[0].tier

        def is_below(batch: list[CopyKey]) -> bool:
            """A busy machine may time the server out; what is stored again is offered again."""
            put(tier, batch)
            return all(below.contains(batch))

        for at in range(0, 400, 8):
            until(partial(is_below, keys[at : at + 8]))
        until(lambda: look_up(tier, keys[:8]) == 8)
        remote.kill()
        get(tier, keys[:1])
        until(lambda: daemon.core.lowers[0].state == "down")
        started = time.monotonic()
        rounds: list[Any] = [get(tier, keys[8 * n : 8 * n + 8]) for n in range(4)]
        assert rounds == [[ResultCode.MISS] * 8] * 4
        assert time.monotonic() - started < 60, "four times the deadline would be 240 s"
        until(lambda: look_up(tier, keys[:8]) == 0)
        assert daemon.stats()["lookups"]["missed_blocks"]["tier_down"] >= 8
        remote.start()
        until(lambda: daemon.core.lowers[0].state == "ok", what="a server that came back is found without traffic")
        tier.close()


WIDEST = "Math.max(0, ...[...document.querySelectorAll('.scroll')].map(one => one.scrollWidth - one.clientWidth))"


def test_no_table_is_cut_and_what_is_not_there_is_said(tmp_path: Path) -> None:
    """Found by an operator: at 1200 pixels the tenants' table was cut, at 400 nearly all were, without a sign of it;
    hit ratios were empty cards; a tenant without a quota had a bar; pins were nowhere."""
    long = "research-team-with-a-long-name-in-the-second-region-eu-west-1"
    tiers = {"disk_path": str(tmp_path / "disk"), "disk_bytes": 32 << 20}
    with (
        served(tmp_path, quotas={long: "1 MiB"}, **tiers) as (daemon, client),
        Browser(1200, 900) as wide,
        Browser(400, 800, dark=True, mobile=True) as narrow,
    ):
        for browser in (wide, narrow):
            browser.open(client.url)
            browser.wait("document.querySelector('#state')?.innerText === 'ready'")
            browser.wait("/no lookups yet\\s+hit ratio, last minute/.test(document.body.innerText)")
            assert "no lookups yet" in text_of(browser, "misses")
        asked = [(0, 0, 0), (1, 5, 10), (2, 5, 10)]  # seconds, hits, blocks: in the last second nobody asked
        few = [{"time_seconds": at, "hit_blocks": {"host": hits}, "asked_blocks": all} for at, hits, all in asked]
        ratios = f"rates({json.dumps(few)}, {{}}, one => one.hit_blocks, (a, b) => a.asked_blocks - b.asked_blocks)"
        assert wide.value(f"{ratios}[0].points") == [[1, 0.5], [2, 0.5]], "a ratio does not fall where nobody asks"
        tier = tier_at(daemon.settings.socket_path, tenant="batch")
        keys = [key_of(n) for n in range(24)]
        assert put(tier, keys[:16]) == [OK] * 16
        look_up(tier, keys)
        body = {"root": keys[0].root.hex(), "block": keys[0].hash.hex(), "seconds": 600, "budget_bytes": 1 << 20}
        assert client.admin("pin", name="a-prompt-that-stays", **body)[0] == 200
        for browser in (wide, narrow):
            browser.wait("/a-prompt-that-stays/.test(document.querySelector('#pins').innerText)")
            browser.wait("/66.7 %\\s+hit ratio, last minute/.test(document.body.innerText)")
            assert long in text_of(browser, "tenants")
            assert browser.value(WIDEST) == 0, "a table is cut"
            rows = browser.value("document.querySelectorAll('#tenants tbody tr').length")
            bars = browser.value("document.querySelectorAll('#tenants .track').length")
            assert (rows, bars) == (2, 1), "one has a quota"
            assert browser.faults == []
        tier.close()
