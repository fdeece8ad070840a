"""HTTP of a daemon: what it tells, to whom, and what it lets whom do."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from allocator.errors import ConfigError, TierError
from kvstore.cli import main
from kvstore.config import KVStoreConfig
from kvstore.daemon import Daemon, DaemonSettings, DaemonTier
from kvstore.daemon.http_app import BODY_BYTES_LIMIT
from kvstore.daemon.http_server import HttpServer
from kvstore.executor import ThreadExecutor
from kvstore.frame.specs import geometry_specs
from kvstore.http_access import is_loopback, names_loopback, read_address
from kvstore.testing.transfer_contract import key_of
from kvstore.tier import PutItem, ResultCode
from tests.kvstore.conftest import full_geometry
from tests.kvstore.daemon.http_kit import Web, served
from tests.kvstore.daemon.kit import ROOT, ServeProcess, get, look_up, put, tier_at, until
from tests.kvstore.driving import run_prompt

if TYPE_CHECKING:
    from kvstore import KVStore

OK = ResultCode.OK
TOKEN = "a-token-of-its-own-1234"


@pytest.fixture
def web(tmp_path: Path) -> Iterator[tuple[Daemon, Web, DaemonTier]]:
    with served(tmp_path, disk_path=str(tmp_path / "disk"), disk_bytes=32 << 20, quotas={"batch": "1 MiB"}) as (
        daemon,
        web,
    ):
        tier = tier_at(daemon.settings.socket_path)
        yield daemon, web, tier
        tier.close()


def own_domain(found: dict[str, float]) -> dict[str, float]:
    """Series with the label that says whose clients they are of left out, where those are the daemon's own user's."""
    return {name.replace('{domain="own"}', "").replace('domain="own",', ""): one for name, one in found.items()}


def test_what_is_told_is_what_was_done(web: tuple[Daemon, Web, DaemonTier]) -> None:
    daemon, client, tier = web
    keys = [key_of(n) for n in range(24)]
    tier.note_prefill_speed(1000.0)
    assert put(tier, keys[:16]) == [OK] * 16
    assert look_up(tier, keys) == 16
    assert get(tier, keys[:16]) == [OK] * 16
    until(lambda: daemon.stats()["tiers"]["disk"]["counts"].get("spilled") == 16)
    time.sleep(0.25)  # a snapshot is kept for 0.2 s
    found = own_domain(client.metrics())
    assert found['kvstore_lookup_hit_blocks_total{tier="host"}'] == 16
    assert found['kvstore_lookup_missed_blocks_total{cause="never_stored",domain="own"}'] == 8
    assert found["kvstore_lookup_blocks_total"] == 24
    assert found["kvstore_reused_tokens_total"] == 16
    assert found["kvstore_saved_prefill_seconds_total"] == pytest.approx(0.016)
    assert found['kvstore_tier_copies_total{outcome="spilled",tier="disk"}'] == 16
    assert found['kvstore_tier_bytes_total{kind="spilled",tier="disk"}'] == 16 * 4096
    assert (
        found['kvstore_client_bytes_total{kind="read"}']
        == found['kvstore_client_bytes_total{kind="stored"}']
        > 16 * 4096
    )
    assert found['kvstore_tenant_blocks_total{kind="hit",tenant=""}'] == 16
    assert found['kvstore_tenant_quota_bytes{tenant="batch"}'] == 1 << 20
    assert found['kvstore_tier_up{tier="disk"}'] == found["kvstore_ready"] == found["kvstore_clients"] == 1
    assert found['kvstore_class_used_bytes{codec="raw"}'] == found['kvstore_tier_used_bytes{tier="host"}'] > 0
    stats = client.json("/v1/stats")
    assert stats["tiers"]["disk"]["state"] == "ok"
    assert stats["clients"][0]["prefill_tokens_per_second"] == 1000.0
    top = stats["prefixes"][0]
    assert (top["lookups"], top["hit_blocks"], top["longest_tokens"]) == (1, 16, 16)
    assert keys[0].hash.hex().startswith(top["block"])
    assert keys[0].hash.hex() not in json.dumps(stats), "whoever knows a whole hash and root may ask for the copy"
    samples = client.json("/v1/history")
    assert samples[-1]["time_seconds"] > samples[0]["time_seconds"]
    assert client.json(f"/v1/history?after={samples[-1]['time_seconds'] + 60}") == []
    assert client.ask("GET", "/v1/history?after=x")[0] == 400
    assert client.json("/healthz") == {"status": "ok"}
    assert client.json("/readyz") == {"ready": True}
    daemon.is_ready = False
    until(lambda: client.ask("GET", "/readyz")[0] == 503)
    daemon.is_ready = True


def test_time_saved_is_what_the_reading_engine_would_have_taken(
    make_store: Callable[..., KVStore], tmp_path: Path
) -> None:
    """Whole stores: each tells its own prefill speed, however many cache groups, layers or heads a token has."""
    with served(tmp_path) as (daemon, client):

        def store() -> KVStore:
            specs = geometry_specs(full_geometry())
            tier = tier_at(daemon.settings.socket_path, ThreadExecutor("daemon"), specs=specs)
            return make_store(tiers=[tier], blocks=16, share=True, load_always=True, io_threads="thread")

        first, second = store(), store()
        first.observe_prefill(100, 10.0)
        second.observe_prefill(1000, 0.5)
        prompt = list(range(165))
        run_prompt(first, "a", prompt)
        first.preempt("a")
        until(lambda: (first.step(), first.metrics.get("spilled_blocks", tier="daemon") >= 10)[1])
        assert run_prompt(second, "b", prompt) == 160
        until(lambda: client.json("/v1/stats")["lookups"]["reused_tokens"] == 160)
        lookups = client.json("/v1/stats")["lookups"]
        assert lookups["saved_prefill_seconds"] == pytest.approx(160 / 2000)


def test_what_was_evicted_is_missed_by_that_cause(tmp_path: Path) -> None:
    with served(tmp_path, host_bytes=1 << 20, segment_bytes=64 << 10) as (_, client):
        tier = tier_at(tmp_path / "d.sock")
        keys = [key_of(n) for n in range(400)]
        for at in range(0, 400, 8):
            put(tier, keys[at : at + 8])
        assert look_up(tier, keys[:8]) == 0
        assert client.json("/v1/stats")["lookups"]["missed_blocks"] == {"evicted": 8}
        tier.close()


def test_case_145_hits_never_exceed_what_was_asked_for(web: tuple[Daemon, Web, DaemonTier]) -> None:
    """Four clients look up, four scrape: in each scrape and from one to the next hits <= asked, and nothing falls."""
    daemon, client, tier = web
    keys = [key_of(n) for n in range(64)]
    assert put(tier, keys[:48]) == [OK] * 48
    stop = threading.Event()
    faults: list[str] = []
    scrapes = [0] * 4

    def look() -> None:
        own = tier_at(daemon.settings.socket_path)
        while not stop.is_set():
            look_up(own, keys)
        own.close()

    def scrape(number: int) -> None:
        before: dict[str, float] = {}
        while not stop.is_set():
            found = own_domain(client.metrics())
            counters = {name: value for name, value in found.items() if name.partition("{")[0].endswith("_total")}
            hits = sum(value for name, value in found.items() if name.startswith("kvstore_lookup_hit_blocks_total"))
            if hits > found["kvstore_lookup_blocks_total"]:
                faults.append(f"{hits} hits of {found['kvstore_lookup_blocks_total']}")
            faults.extend(f"{name} fell" for name, value in before.items() if counters[name] < value)
            rise = counters["kvstore_lookup_blocks_total"] - before.get("kvstore_lookup_blocks_total", 0)
            risen_hits = hits - sum(v for n, v in before.items() if n.startswith("kvstore_lookup_hit_blocks_total"))
            if risen_hits > rise:
                faults.append(f"{risen_hits} more hits of {rise} more blocks")
            before = counters
            scrapes[number] += 1

    threads = [threading.Thread(target=look) for _ in range(4)]
    threads += [threading.Thread(target=scrape, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(2)
    stop.set()
    for thread in threads:
        thread.join()
    assert faults == []
    assert min(scrapes) > 3
    time.sleep(0.25)
    found = own_domain(client.metrics())
    assert found["kvstore_lookups_total"] * 64 == found["kvstore_lookup_blocks_total"], "no lookup was lost"


def test_admin_calls_do_what_they_say(web: tuple[Daemon, Web, DaemonTier]) -> None:
    daemon, client, tier = web
    keys = [key_of(n) for n in range(12)]
    tier.submit_put([PutItem(key, [bytes(4096)], keys[n - 1].hash if n else None) for n, key in enumerate(keys)])
    assert [code for done in tier.poll() for code in done.results] == [OK] * 12
    root, block = keys[0].root.hex()[:12], keys[4].hash.hex()
    status, pinned = client.admin("pin", root=root, block=block, seconds=60, budget_bytes=1 << 20, name="a")
    assert (status, pinned["copies"]) == (200, 8), "the block and the seven behind it"
    assert tier.delete(keys) == 4, "what is pinned stays"
    assert client.admin("unpin", name="a") == (200, {"unpinned": "a"})
    assert client.admin("unpin", name="a")[0] == 409
    status, small = client.admin("pin", root=root, block=block, seconds=0.5, budget_bytes=3 * 4352, name="b")
    assert (status, small["copies"]) == (200, 3)
    assert tier.delete(keys) == 5
    until(lambda: tier.delete(keys) == 3, what="a pin ends with its time")
    assert put(tier, keys) == [OK] * 12
    assert client.admin("flush", root=root) == (200, {"flushed_copies": 12})
    assert tier.contains(keys) == [False] * 12, "on disk too"
    assert client.admin("quota", tenant="x", quota_bytes=4096)[0] == 200
    assert daemon.core.quotas["x"] == 4096
    assert client.admin("drop-tier", tier="disk") == (200, {"dropped": "disk"})
    until(lambda: client.json("/v1/stats")["tiers"]["disk"]["state"] == "dropped")
    assert client.metrics()['kvstore_tier_up{tier="disk"}'] == 0
    assert client.admin("drop-tier", tier="tape")[0] == 409
    assert client.admin("reload")[0] == 409, "nothing to read again"
    assert client.admin("flush", root="all")[0] == 200


def test_a_root_that_lies_on_disk_only_is_flushed(tmp_path: Path) -> None:
    where = {"disk_path": str(tmp_path / "disk"), "disk_bytes": 32 << 20}
    keys = [key_of(n) for n in range(4)]
    with served(tmp_path, **where) as (daemon, _):
        tier = tier_at(daemon.settings.socket_path)
        assert put(tier, keys) == [OK] * 4
        tier.close()
    with served(tmp_path, **where) as (daemon, client):
        tier = tier_at(daemon.settings.socket_path)
        until(lambda: tier.contains(keys) == [True] * 4)
        assert client.admin("flush", root=keys[0].root.hex())[0] == 200
        assert tier.contains(keys) == [False] * 4
        tier.close()


@pytest.mark.parametrize(
    ("name", "body", "status", "said"),
    [
        ("flush", {"root": "xy" * 32}, 400, "root"),
        ("flush", {"root": "ab" * 8}, 409, "0 roots"),
        ("flush", {}, 400, "root"),
        ("flush", {"root": "all", "extra": 1}, 400, "extra"),
        ("pin", {"root": "07" * 32, "block": "ff" * 32, "seconds": 1, "budget_bytes": 1, "name": "a"}, 409, "0 blocks"),
        ("pin", {"root": "07" * 32, "block": "ff" * 32, "seconds": 1e9, "budget_bytes": 1}, 400, "seconds"),
        ("quota", {"tenant": "t", "quota_bytes": -1}, 400, "quota_bytes"),
        ("quota", {"tenant": "t" * 65, "quota_bytes": 1}, 400, "tenant"),
        ("nothing", {}, 404, "drop-tier"),
    ],
)
def test_admin_calls_that_make_no_sense_do_nothing(
    web: tuple[Daemon, Web, DaemonTier], name: str, body: dict[str, Any], status: int, said: str
) -> None:
    found, answer = web[1].admin(name, **body)
    assert found == status
    assert said in answer["error"]


def test_who_may_call_admin(web: tuple[Daemon, Web, DaemonTier]) -> None:
    """On loopback too only who can read the token's file: every user and every page in a browser reaches loopback."""
    daemon, client, _ = web
    path = Path(daemon.settings.http_token_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert client.admin("flush", token="", root="all")[0] == 401
    assert client.admin("flush", token=client.admin_token[:-1], root="all")[0] == 401
    assert client.admin("flush", token="é", root="all")[0] == 401
    bearer = {"Authorization": f"Bearer {client.admin_token}"}
    body = b'{"root":"all"}'
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        assert client.ask("POST", "/v1/admin/flush", body, Content_Type=kind, **bearer)[0] == 415
    assert client.ask("GET", "/v1/admin/flush", **bearer)[0] == 405
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", ""):
        for method, where in (("GET", "/v1/stats"), ("GET", "/metrics"), ("GET", "/"), ("POST", "/v1/admin/flush")):
            got = client.ask(
                method, where, body if method == "POST" else None, Host=host, Content_Type="application/json", **bearer
            )
            assert got[0] in (421, 400), (host, where, got)
    assert client.ask("GET", "/v1/stats", Host="localhost:8080")[0] == 200, "through a tunnel"
    answered = client.ask("OPTIONS", "/v1/admin/flush", Origin="https://evil.example")
    assert not [name for name in answered[1] if name.startswith("access-control")]


def test_bodies_and_connections_are_bounded(web: tuple[Daemon, Web, DaemonTier]) -> None:
    _, client, _ = web
    headers = {"Authorization": f"Bearer {client.admin_token}", "Content_Type": "application/json"}
    assert client.ask("POST", "/v1/admin/flush", b" " * (BODY_BYTES_LIMIT + 1), **headers)[0] == 413
    assert client.ask("POST", "/v1/admin/flush", b"[" * 60_000, **headers)[0] == 400
    assert client.ask("POST", "/v1/admin/flush", b"\xff{", **headers)[0] == 400
    host, _, port = client.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as endless:
        endless.settimeout(5)
        endless.sendall(b"GET / HTTP/1.1\r\nLong: ")
        with suppress(OSError):
            for _ in range(64):
                endless.sendall(b"x" * 4096)
                time.sleep(0.002)
        with suppress(ConnectionResetError):
            assert b" 400 " in endless.recv(4096)[:20]


def test_beyond_loopback_a_token_is_required_and_admin_is_off(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="http_token"):
        DaemonSettings(store=KVStoreConfig(host_bytes=1 << 20), http="0.0.0.0:0")
    with served(tmp_path, http="0.0.0.0:0", http_token=TOKEN) as (daemon, client):
        for path in ("/v1/stats", "/v1/history", "/metrics"):
            assert client.ask("GET", path)[0] == 401
            assert client.ask("GET", path, Authorization=f"Bearer {TOKEN}x")[0] == 401
            assert client.ask("GET", path, Authorization=f"Bearer {TOKEN}", Host="kv.example")[0] == 200
        for path in ("/", "/healthz", "/readyz"):
            assert client.ask("GET", path)[0] == 200
        assert client.admin("flush", token=TOKEN, root="all")[0] == 403
        assert not Path(daemon.settings.http_token_path).exists()
        assert TOKEN not in repr(daemon.settings)
        assert TOKEN not in json.dumps(daemon.settings.to_mapping())
    with served(tmp_path, http="0.0.0.0:0", http_token=TOKEN, http_admin=True) as (_, client):
        assert client.admin("flush", token=TOKEN, root="all")[0] == 200


def test_every_refusal_is_on_the_page_of_the_daemon(web: tuple[Daemon, Web, DaemonTier]) -> None:
    _, client, _ = web
    page = (ROOT / "docs" / "how-to" / "daemon.md").read_text(encoding="utf-8")
    rows = {int(code) for row in re.findall(r"^\| ([0-9, ]+) \| ", page, re.MULTILINE) for code in row.split(",")}
    source = (ROOT / "kvstore" / "daemon" / "http_app.py").read_text(encoding="utf-8")
    given = {int(code) for code in re.findall(r"refused\(([0-9]{3}), ", source)}
    assert (given | {405}) - {502} == rows
    assert "Only 502 says" in page
    for method, path, code in (("GET", "/v1/admin/flush", 405), ("GET", "/v2", 404), ("POST", "/metrics", 405)):
        status, _, answer = client.ask(method, path)
        assert (status, f"{method} {path}: " in json.loads(answer)["error"]) == (code, True), "told as all refusals are"


def test_a_refused_token_is_told_from_none_and_from_a_file_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong, short = tmp_path / "wrong", tmp_path / "short"
    wrong.write_text(TOKEN[::-1])
    short.write_text("short")
    with served(tmp_path, http_token=TOKEN) as (_, client):
        for command in (("stats",), ("top", "--once")):
            for file, code, said in (
                (None, 1, "answered 401; give --token-file"),
                (wrong, 1, f"answered 401: the token in {wrong} was refused"),
                (short, 2, f"{short} holds no token; expected 16 to 512 characters"),
                (tmp_path / "gone", 2, f"{tmp_path / 'gone'} cannot be read (No such file or directory)"),
            ):
                given = [] if file is None else ["--token-file", str(file)]
                assert main([*command, "--url", client.url, *given]) == code
                assert said.replace(" ", "") in re.sub(r"[\s│]", "", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("9473", ("127.0.0.1", 9473)),
        ("0.0.0.0:1", ("0.0.0.0", 1)),
        ("[::1]:80", ("::1", 80)),
        ("::1:80", None),
        ("localhost", None),
        ("host:70000", None),
        ("", None),
    ],
)
def test_addresses(text: str, address: tuple[str, int] | None) -> None:
    assert read_address(text) == address


def test_names_of_this_machine() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.8.8", "::1", "localhost", "LOCALHOST")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org", "")))
    assert all(map(names_loopback, ("localhost", "localhost:1", "127.0.0.1:9473", "[::1]:1", "[::1]")))
    assert not any(map(names_loopback, ("", "localhost.evil.example", "127.0.0.1.evil.example:1", "evil")))


def test_a_port_that_is_taken_is_said(tmp_path: Path) -> None:
    with served(tmp_path) as (_, client):
        port = client.url.rpartition(":")[2]
        other = tmp_path / "other"
        other.mkdir()
        daemon = Daemon(
            DaemonSettings(store=KVStoreConfig(host_bytes=1 << 20), http=port, socket_path=str(other / "d.sock"))
        )
        with pytest.raises(TierError, match="cannot listen there"):
            HttpServer(daemon)
        daemon.stop()


def test_the_command_serves_it_and_others_show_it(tmp_path: Path) -> None:
    """serve, stats and top as processes; a reload by HTTP reads the settings file; none of it imports torch."""
    config = tmp_path / "kv.toml"
    config.write_text('[kvstore]\nhost_bytes = "4 MiB"\n[daemon]\nhttp = 0\n')
    process = ServeProcess(tmp_path / "d.sock", "--config", str(config), wait=False)
    assert process.process.stdout is not None
    line = process.process.stdout.readline()
    url = line.strip().rpartition(", ")[2]
    client = Web(url, str(tmp_path / "d.sock.token"))
    try:
        config.write_text('[kvstore]\nhost_bytes = "4 MiB"\n[daemon]\nhttp = 0\n[daemon.quotas]\nnew = "1 MiB"\n')
        assert client.admin("reload") == (200, {"quotas": {"new": 1 << 20}})
        assert client.admin("quota", tenant="own", quota_bytes=5)[0] == 200
        process.process.send_signal(signal.SIGHUP)
        assert process.process.stderr is not None
        lines = [process.process.stderr.readline() for _ in range(3)]
        assert lines[0].startswith(
            "kvstore: admin call reload from loopback (127.0.0.1) with the token of the socket: done"
        )
        assert "admin call quota (tenant own, quota_bytes 5)" in lines[1]
        assert "quotas were read again (SIGHUP)" in lines[2]
        assert client.admin("reload") == (200, {"quotas": {"new": 1 << 20, "own": 5}})
        config.write_text("[kvstore]\nhost_bytes = -1\n")
        status, answer = client.admin("reload")
        assert status == 409
        assert "host_bytes" in answer["error"]
        done = run("stats", "--url", url, "--json", "-")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["tenants"]["new"]["quota_bytes"] == 1 << 20
        assert "ready" in run("stats", "--url", url.removeprefix("http://")).stdout
        shown = run("top", "--url", url, "--once").stdout
        assert all(word in shown for word in ("host", "up", "misses", "tenant", "new"))
        maps = Path(f"/proc/{process.process.pid}/maps").read_text()
        assert "libtorch" not in maps
    finally:
        code, said = process.stop()
    assert code == 0
    assert "refused: host_bytes" in said.splitlines()[-1]
    assert not (tmp_path / "d.sock.token").exists()
    gone = run("stats", "--url", url)
    assert gone.returncode == 1
    assert "no daemon answers there" in gone.stderr
    assert run("top", "--url", url).returncode == 1
    assert run("stats", "--url", "ftp://x").returncode == 2


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvstore.cli", *arguments],
        cwd=ROOT, capture_output=True, text=True, check=False, env=os.environ | {"COLUMNS": "120"},
    )  # fmt: skip


def test_a_full_table_of_prefixes_and_tenants_stays_bounded() -> None:
    from types import SimpleNamespace

    from kvstore.daemon.tally import OTHERS, Outcome, Tally

    tally = Tally()
    template = SimpleNamespace(root=bytes(32))
    for n in range(5000):
        form = SimpleNamespace(template=template, tenant=f"t{n}", block_tokens=16, domain="")
        for _ in range(3 if n == 7 else 1):
            tally.looked_up(form, Outcome(n.to_bytes(32, "little"), True, {"host": 1}, {}, 1))
    assert len(tally._domains[""].prefixes) <= 1024
    assert len(tally.tenants()) == 1025
    assert tally.tenants()[OTHERS]["hit_blocks"] == 5000 - 1024
    assert tally.top_prefixes(1)[0]["lookups"] == 3, "what is used most stays"
