"""Damage below shared memory, an index that was begun anew, and who was refused: wherever an operator looks, it is
said. Found by a newcomer, for whom thirty damaged copies were nowhere but in /v1/stats."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvstore.cli.stats import lines
from kvstore.cli.top import drawn
from kvstore.daemon import Daemon
from kvstore.daemon.http_history import sample
from kvstore.daemon.protocol import Cause
from kvstore.daemon.troubles import DamageLog, damaged_copies
from kvstore.disk_tier.layout import INDEX_NAME
from kvstore.testing.transfer_contract import key_of
from kvstore.tier import ResultCode
from tests.kvstore.daemon.browser import Browser
from tests.kvstore.daemon.http_kit import served
from tests.kvstore.daemon.kit import RawClient, get, look_up, put, tier_at, until
from tests.kvstore.daemon.test_top import STATS
from tests.servers import Server

OK, MISS = ResultCode.OK, ResultCode.MISS
KEYS = [key_of(n) for n in range(6)]
SIZE = 80 << 10
FINE = "Nothing is wrong that this daemon knows of."


def stored_below(daemon: Daemon, name: str) -> None:
    tier = tier_at(daemon.settings.socket_path)
    assert put(tier, KEYS, SIZE) == [OK] * 6
    until(lambda: daemon.stats()["tiers"][name]["counts"].get("spilled") == 6)
    tier.close()


def damage_files(directory: Path) -> None:
    """In every slot's payload."""
    for path in directory.glob("slots-*"):
        row = bytearray(path.read_bytes())
        for at in range(40_000, len(row), 1000):
            row[at] ^= 0xFF
        path.write_bytes(row)


def damage_server(server: Server) -> None:
    for name in server.command("KEYS", "*"):
        with suppress(Exception):  # what is no text
            if server.command("STRLEN", name) > SIZE:
                server.command("SETRANGE", name, "40000", "damaged")


def picture(stats: dict[str, Any], columns: int = 80, rows: int = 24) -> list[str]:
    console = Console(width=columns, height=rows, file=io.StringIO(), force_terminal=True, color_system=None)
    console.set_alt_screen(True)
    found = console.render_lines(drawn(stats, [sample(stats)]), pad=False)
    return ["".join(part.text for part in line).rstrip() for line in found]


@pytest.mark.parametrize("name", ["disk", "remote"])
def test_copies_that_came_back_damaged_are_shown_everywhere(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server()
    disk = tmp_path / "disk"
    where: dict[str, Any] = {"disk_path": str(disk), "disk_bytes": 32 << 20}
    if name == "remote":
        where = {"redis_url": server.unix_url}
    with served(tmp_path, **where) as (daemon, _):
        stored_below(daemon, name)
    damage_files(disk)
    damage_server(server)
    with served(tmp_path, **where) as (daemon, client), Browser() as browser:
        before = client.metrics()
        assert before[f'kvstore_tier_damaged_copies_total{{cause="payload_checksum",tier="{name}"}}'] == 0
        browser.open(client.url)
        browser.wait(f"document.body?.innerText.includes('{FINE}')")
        tier = tier_at(daemon.settings.socket_path, fetch_seconds=30)
        until(lambda: tier.is_up)
        until(lambda: look_up(tier, KEYS) == 6)
        assert get(tier, KEYS, SIZE) == [MISS] * 6
        until(lambda: daemon.stats()["tiers"][name]["counts"].get("fetch_corrupt") == 6)
        until(lambda: client.json("/v1/stats")["tiers"][name]["counts"].get("fetch_corrupt") == 6)
        found = client.metrics()
        damaged = {key: value for key, value in found.items() if key.startswith("kvstore_tier_damaged_copies")}
        assert (
            sum(damaged.values()) == 6 == found[f'kvstore_tier_copies_total{{outcome="fetch_corrupt",tier="{name}"}}']
        )
        assert damaged[f'kvstore_tier_damaged_copies_total{{cause="payload_checksum",tier="{name}"}}'] == 6
        assert damaged.keys() == {key for key in before if key.startswith("kvstore_tier_damaged")}, "all began at 0"
        assert not any("tier_copies" in key and 'outcome="corrupt_' in key for key in found), "series that never move"
        assert not any(value for key, value in found.items() if "kvstore_corrupt_blocks" in key), "not shared memory"
        hits = sum(value for key, value in found.items() if key.startswith("kvstore_lookup_hit_blocks_total"))
        asked = sum(value for key, value in found.items() if key.startswith("kvstore_lookup_blocks_total"))
        assert 0 < hits <= asked
        browser.wait(
            f"document.body?.innerText.includes('Tier {name} gave back 6 damaged copies (payload checksum 6)')"
        )
        browser.wait("/6\\s+wrong copies caught/.test(document.body?.innerText)")
        assert FINE not in browser.text()
        stats = client.json("/v1/stats")
        assert any("6 damaged copies came back, none was served: payload_checksum 6" in line for line in lines(stats))
        assert any(f"wrong copies were caught: {name} 6" in line for line in picture(stats))
        said = [record.getMessage() for record in caplog.records if "damaged copies" in record.getMessage()]
        assert len(said) == 1, said
        assert f"tier {name} gave back damaged copies" in said[0]
        tier.close()
    server.kill()


def test_the_log_says_it_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    class Damaged:
        name = "disk"
        count = 0

        def counters(self) -> dict[str, int]:
            return {
                "corrupt_payload_checksum": self.count,
                "get_corrupt": self.count,
                "read_EIO": 1,
                "size_mismatch": 9,
            }

    tier, now = Damaged(), [0.0]
    log = DamageLog(tier, lambda: now[0])  # type: ignore[arg-type]
    log.tick()
    assert not caplog.records
    for second in range(130):
        now[0], tier.count = float(second), second + 1
        log.note()
        log.tick()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3, said
    assert "122 so far (payload_checksum 121, read_error 1)" in said[-1]


def test_what_is_damage_and_what_is_not() -> None:
    counters = {"corrupt_hash": 2, "fault_hash": 1, "value_gone": 1, "read_EIO": 3, "read_ESTALE": 1, "get_corrupt": 7,
                "reader_holds_room": 5, "size_mismatch": 5, "fault_unsigned": 9, "corrupt_size": 0}  # fmt: skip
    assert damaged_copies("disk", counters) == {"hash": 3, "value_gone": 1, "read_error": 4, "unsigned": 9}
    assert damaged_copies("remote", {"fault_unsigned": 9, "fault_type": 1, "fault_no_secret": 1}) == {"type": 1}


@pytest.mark.parametrize(("spoil", "cause"), [(lambda index: index.write_bytes(bytes(600_000)), "not_lmdb"),
                                              (lambda index: os.truncate(index, 20_000), "damaged")])  # fmt: skip
def test_an_index_that_was_begun_anew_is_shown_everywhere(
    tmp_path: Path, spoil: Callable[[Path], None], cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    where = {"disk_path": str(tmp_path / "disk"), "disk_bytes": 32 << 20}
    with served(tmp_path, **where) as (daemon, client):
        stored_below(daemon, "disk")
        assert not any("index_dropped" in key for key in client.metrics())
        assert not any("anew" in line for line in lines(client.json("/v1/stats")))
    caplog.clear()
    spoil(tmp_path / "disk" / INDEX_NAME)
    with served(tmp_path, **where) as (_, client), Browser() as browser:
        assert client.metrics()[f'kvstore_tier_index_dropped{{cause="{cause}",tier="disk"}}'] == 1
        stats = client.json("/v1/stats")
        assert stats["tiers"]["disk"]["index_dropped"] == {cause: 1}
        assert any(f"began anew, empty, at this start: the index could not be used ({cause})" in one
                   for one in lines(stats))  # fmt: skip
        assert any(f"disk began anew, empty: {cause}" in line for line in picture(stats))
        browser.open(client.url)
        browser.wait("document.body?.innerText.includes('Tier disk began anew, empty, at this start')")
        assert caplog.text.count("the index is begun anew") == 1


def test_who_was_refused_and_delayed_is_shown_everywhere(tmp_path: Path) -> None:
    with served(tmp_path, clients_limit=1) as (daemon, client), Browser() as browser:
        assert not any("refused" in line for line in lines(client.json("/v1/stats")))
        browser.open(client.url)
        browser.wait(f"document.body?.innerText.includes('{FINE}')")
        held = RawClient(daemon.settings.socket_path)
        for _ in range(3):
            refused = RawClient(daemon.settings.socket_path, hello=False)
            assert refused.answer().cause == Cause.CLIENTS
            refused.close()
        with daemon.core.lock:
            daemon.core.counts["accepts_delayed"] += 7
        until(lambda: client.json("/v1/stats")["refused"] == {"clients": 3, "accepts_delayed": 7})
        stats = client.json("/v1/stats")
        assert "refused   accepts_delayed 7, clients 3 since start" in lines(stats)
        assert " refused   accepts_delayed 7  clients 3" in picture(stats)
        browser.wait(
            "document.body?.innerText.includes('Refused or delayed in the last 5 min: accepts delayed 7, clients 3.')"
        )
        shown = browser.value("document.querySelector('#refused').innerText")
        assert shown == "Refused, delayed or slowed since start: accepts delayed 7, clients 3."
        held.close()


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (120, 40), (60, 24)])
def test_a_picture_of_much_trouble_fits_the_terminal(columns: int, rows: int) -> None:
    wrong = {"damaged_copies": {"payload_checksum": 123456}, "index_dropped": {"not_lmdb": 1}}
    tiers = {
        name: one | (wrong if "queues" in one else {})
        for name, one in STATS["tiers"].items()  # type: ignore[attr-defined]
    }
    causes = ("accepts_delayed", "throttled", "uid", "clients", "pace", "garbage", "oversized", "version", "stale")
    stats = STATS | {"tiers": tiers, "refused": dict.fromkeys(causes, 123456), "counts": {"corrupt_hash": 123456}}
    shown = picture(stats, columns, rows)
    assert len(shown) <= rows
    assert max(map(len, shown)) <= columns
    text = " ".join("\n".join(shown).replace("│", " ").split())
    assert "shared memory 123456, disk 123456, remote 123456" in text
    assert "disk began anew, empty: not_lmdb" in text
    assert "accepts_delayed 123456" in text
    assert "more" in text
