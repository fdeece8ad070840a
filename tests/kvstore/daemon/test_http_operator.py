"""What an operator may do over HTTP, and what they are told of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli.stats import lines
from kvstore.daemon import Daemon, DaemonTier
from kvstore.daemon.protocol import Cause
from kvstore.frame.parsing import FrameFault
from kvstore.testing.transfer_contract import key_of
from kvstore.tier import PutItem, ResultCode
from tests.kvstore.daemon.http_kit import Web, served
from tests.kvstore.daemon.kit import put, tier_at, until

OK = ResultCode.OK
ROOT, BLOCK = key_of(0).root.hex(), key_of(0).hash.hex()
PIN = {"root": ROOT, "block": BLOCK, "seconds": 60, "budget_bytes": 1 << 20, "name": "prompt"}
SLOT_BYTES = 4352


@pytest.fixture
def web(tmp_path: Path) -> Iterator[tuple[Daemon, Web, DaemonTier]]:
    with served(tmp_path, domains={"team": [1001]}, allowed_uids=[1002]) as (daemon, web):
        tier = tier_at(daemon.settings.socket_path)
        yield daemon, web, tier
        tier.close()


def store_chain(tier: DaemonTier, count: int) -> None:
    keys = [key_of(n) for n in range(count)]
    tier.submit_put([PutItem(key, [bytes(4096)], keys[n - 1].hash if n else None) for n, key in enumerate(keys)])
    assert [code for done in tier.poll() for code in done.results] == [OK] * count


@pytest.mark.parametrize("way", ["root", "all", "delete"])
def test_what_was_dropped_from_a_dropped_tier_stays_away(tmp_path: Path, way: str) -> None:
    """Found by an operator: flush said 200, left the copies of a dropped tier on disk, and a restart brought them back.
    So did a client's delete."""
    where = {"disk_path": str(tmp_path / "disk"), "disk_bytes": 32 << 20}
    keys = [key_of(n) for n in range(4)]
    with served(tmp_path, **where) as (daemon, client):
        tier = tier_at(daemon.settings.socket_path)
        assert put(tier, keys) == [OK] * 4
        until(lambda: daemon.stats()["tiers"]["disk"]["counts"].get("spilled") == 4)
        assert client.admin("drop-tier", tier="disk")[0] == 200
        if way == "delete":
            assert tier.delete(keys) == 4
        else:
            root = key_of(0).root.hex() if way == "root" else "all"
            assert client.admin("flush", root=root) == (200, {"flushed_copies": 4})
        tier.close()
    with served(tmp_path, **where) as (daemon, _):
        tier = tier_at(daemon.settings.socket_path)
        until(lambda: tier.is_up)
        assert tier.contains(keys) == [False] * 4
        tier.close()


def test_causes_begin_at_0(web: tuple[Daemon, Web, DaemonTier], tmp_path: Path) -> None:
    """Found by an operator: a series that begins with its first event has no rise that increase() could see."""
    _, client, _ = web
    found = client.metrics()
    for cause in (*(one.name.lower() for one in Cause), "throttled", "accepts_delayed"):
        assert found[f'kvstore_refused_total{{cause="{cause}"}}'] == 0, cause
    for fault in FrameFault:
        assert found[f'kvstore_corrupt_blocks_total{{cause="{fault}"}}'] == 0, fault
    assert found['kvstore_evicted_blocks_total{domain="own"}'] == 0
    below = tmp_path / "below"
    below.mkdir()
    with served(below, disk_path=str(below / "disk"), disk_bytes=32 << 20) as (daemon, client):
        daemon.core.lowers[0].counts["corrupt_size"] += 1
        found = client.metrics()
    assert found['kvstore_corrupt_blocks_total{cause="size"}'] == 1, "found on the way down: the same alert"
    assert found['kvstore_tier_copies_total{outcome="spills_corrupt",tier="disk"}'] == 1
    for cause in ("hash", "payload_checksum", "read_error", "value_gone"):
        assert found[f'kvstore_tier_damaged_copies_total{{cause="{cause}",tier="disk"}}'] == 0, cause
    for outcome in ("spills_dropped", "spills_failed", "fetch_failed", "fetches_without_room"):
        assert found[f'kvstore_tier_copies_total{{outcome="{outcome}",tier="disk"}}'] == 0, outcome


def test_pins_are_shown(web: tuple[Daemon, Web, DaemonTier]) -> None:
    """Found by an operator: what they had pinned was shown nowhere, so nobody knew what to unpin."""
    _, client, tier = web
    store_chain(tier, 8)
    assert client.admin("pin", **PIN)[1]["copies"] == 8
    assert client.admin("pin", **PIN | {"name": "few", "seconds": 30, "budget_bytes": 2 * SLOT_BYTES})[1]["copies"] == 2
    until(lambda: len(client.json("/v1/stats")["pins"]) == 2)
    stats = client.json("/v1/stats")
    few, prompt = stats["pins"]
    assert (few["name"], few["copies"], few["pinned_bytes"]) == ("few", 2, 2 * SLOT_BYTES)
    assert (prompt["name"], prompt["copies"], prompt["domain"]) == ("prompt", 8, "")
    assert ROOT.startswith(prompt["root"])
    assert BLOCK.startswith(prompt["block"])
    assert 0 < prompt["seconds_left"] <= 60
    assert ROOT not in json.dumps(stats), "whoever knows a whole root and hash may ask for the copy"
    assert stats["leases"]["pinned_copies"] == 10
    found = client.metrics()
    assert found['kvstore_leases{kind="pin"}'] == 10
    assert found['kvstore_pin_copies{pin="prompt"}'] == 8
    assert found['kvstore_pin_bytes{pin="few"}'] == 2 * SLOT_BYTES
    assert 0 < found['kvstore_pin_seconds_left{pin="few"}'] <= 30
    assert any("pin       few: root" in line and "2 copies" in line for line in lines(stats))
    assert client.admin("flush", root=ROOT)[0] == 200
    until(lambda: {one["copies"] for one in client.json("/v1/stats")["pins"]} == {0})
    assert client.admin("unpin", name="few")[0] == client.admin("unpin", name="prompt")[0] == 200
    until(lambda: client.json("/v1/stats")["pins"] == [])


@pytest.mark.parametrize(
    ("name", "body", "status", "said"),
    [
        ("flush", {"root": ROOT, "domain": "teem"}, 409,
         "domain: got 'teem'; expected '' for the daemon's own user's, or one of 'team', 'uid-1002'"),
        ("flush", {"root": ROOT[:12], "domain": "teem"}, 409, "domain: got 'teem'"),
        ("flush", {"root": "all", "domain": "team"}, 409, "domain: got 'team' with root 'all'"),
        ("flush", {"root": 5}, 400, "root: got 5; expected 8 to 64 hex digits"),
        ("flush", {"root": "zz"}, 400, 'root: got "zz"; expected'),
        ("flush", {}, 400, "flush: 'root' is missing; expected 8 to 64 hex digits"),
        ("pin", PIN | {"domain": "teem"}, 409, "domain: got 'teem'"),
        ("pin", PIN | {"budget_bytes": 10}, 409,
         f"budget_bytes: got 10, less than the first copy takes; expected at least {SLOT_BYTES}"),
        ("pin", PIN | {"name": ""}, 400, 'name: got ""; expected 1 to 64'),
        ("pin", {name: value for name, value in PIN.items() if name != "name"}, 400, "pin: 'name' is missing"),
        ("pin", PIN | {"second": 5}, 400, "pin: unknown key 'second'; did you mean 'seconds'? expected a JSON object"),
        ("pin", PIN | {"seconds": "long"}, 400, 'seconds: got "long"; expected a number above 0'),
        ("unpin", {}, 400, "unpin: 'name' is missing"),
        ("unpin", {"name": "promt"}, 409, "name: got 'promt'; expected a pin that is held: 'prompt'"),
        ("quota", {"tenant": "a", "quota": 5}, 400, "unknown key 'quota'; did you mean 'quota_bytes'?"),
        ("quota", {"tenant": "a", "quota_bytes": "5 MiB"}, 400, 'quota_bytes: got "5 MiB"; expected an int of bytes'),
        ("drop-tier", {"tier": "tape"}, 409, "tier: got 'tape'; expected one of none"),
        ("reload", {"now": True}, 400, "reload: unknown key 'now'; expected a JSON object with nothing in it"),
    ],
)  # fmt: skip
def test_bad_input_changes_nothing_and_is_told_what_was_expected(
    web: tuple[Daemon, Web, DaemonTier], name: str, body: dict[str, Any], status: int, said: str
) -> None:
    daemon, client, tier = web
    store_chain(tier, 3)
    assert client.admin("pin", **PIN)[0] == 200

    def state() -> Any:
        stats = daemon.stats()
        pins = [{name: value for name, value in one.items() if name != "seconds_left"} for one in stats["pins"]]
        return pins, stats["tenants"], stats["tiers"]["host"], list(stats["arenas"])

    before = state()
    found, answer = client.admin(name, **body)
    assert found == status
    assert said in answer["error"]
    assert state() == before


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"[]", "flush: got a JSON array; expected a JSON object with root, domain"),
        (b"{", "flush: "),
        (b"null", "flush: got a JSON null; expected"),
        (b'{"root": "' + b"x" * 9000 + b'"}', "root: got"),
    ],
)
def test_a_body_that_is_none_is_refused(web: tuple[Daemon, Web, DaemonTier], body: bytes, said: str) -> None:
    _, client, _ = web
    headers = {"Authorization": f"Bearer {client.admin_token}", "Content_Type": "application/json"}
    status, _, answer = client.ask("POST", "/v1/admin/flush", body, **headers)
    assert status == 400
    assert said in json.loads(answer)["error"]
    assert len(answer) < 600


def test_a_pin_takes_the_place_of_the_one_of_its_name(web: tuple[Daemon, Web, DaemonTier]) -> None:
    daemon, client, tier = web
    store_chain(tier, 3)
    assert client.admin("pin", **PIN)[1]["copies"] == 3
    assert client.admin("pin", **PIN | {"budget_bytes": SLOT_BYTES})[1]["copies"] == 1
    assert [(one["name"], one["copies"]) for one in daemon.stats()["pins"]] == [("prompt", 1)]
    assert tier.delete([key_of(n) for n in range(3)]) == 2, "what is pinned stays"


def test_every_call_leaves_a_line_that_opens_nothing(
    web: tuple[Daemon, Web, DaemonTier], caplog: pytest.LogCaptureFixture
) -> None:
    """Found by a newcomer: who had flushed, dropped a tier or set a quota was written down nowhere."""
    daemon, client, tier = web
    caplog.set_level("INFO", "kvstore.daemon")
    store_chain(tier, 3)
    who = "from loopback (127.0.0.1) with the token of the socket: "
    for call, body, outcome in (
        ("pin", PIN, "done, name prompt, copies 3"),
        ("unpin", {"name": "prompt"}, "done, unpinned prompt"),
        ("unpin", {"name": "promt"}, "refused: name: got 'promt'"),
        ("quota", {"tenant": "x", "quota_bytes": 5}, "done, tenant x, quota_bytes 5"),
        ("quota", {"tenant": "x", "quota_bytes": 4 << 40}, "done, tenant x, quota_bytes 4398046511104"),
        ("drop-tier", {"tier": "tape"}, "refused: tier: got 'tape'"),
        ("reload", {}, "refused: reload: this daemon was started without settings"),
        ("flush", {"root": ROOT[:60]}, "done, flushed_copies 3"),
        ("flush", {"root": ROOT[:62]}, "refused: root: got"),
        ("flush", {"root": "all", "tokin": client.admin_token}, "refused: a body that is not of its form"),
        ("fluhs", {}, "refused: HTTP 404"),
    ):
        caplog.clear()
        status = client.admin(call, **body)[0]
        (line,) = [record.getMessage() for record in caplog.records]
        assert (status == 200) == ("done" in line)
        assert call in line
        assert f"{who}{outcome}" in line
        for secret in (ROOT[:13], BLOCK[:13], client.admin_token):
            assert secret not in line
    caplog.clear()
    for _ in range(50):
        assert client.admin("flush%0A", token="guess", root="all")[0] == 401
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.isprintable()
    assert "from loopback (127.0.0.1): refused: not the admin token" in line
    assert "guess" not in line
    assert daemon.stats()["pins"] == []
