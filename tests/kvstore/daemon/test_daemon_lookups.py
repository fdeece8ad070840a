"""What the daemon says of lookups, with whole stores over it: once a request, whatever was asked before."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from allocator import CacheGroup, GroupKind, KVGeometry
from kvstore.daemon import Daemon, protocol
from kvstore.daemon.core import _MISS, Core, RefusedError
from kvstore.daemon.protocol import Cause
from kvstore.executor import ThreadExecutor
from kvstore.frame.specs import geometry_specs
from kvstore.testing.transfer_contract import key_of
from kvstore.tier import Lookup, ResultCode
from tests.kvstore.conftest import full_geometry, hybrid_geometry
from tests.kvstore.daemon.http_kit import served
from tests.kvstore.daemon.kit import RawClient, checked_daemon, look_up, put, settings, tier_at, until
from tests.kvstore.driving import run_prompt

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore import KVStore

PROMPT = list(range(165))  # 10 blocks and a tail
OK = ResultCode.OK


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with checked_daemon(settings(tmp_path)) as one:
        yield one


@pytest.fixture
def engine(daemon: Daemon, make_store: Callable[..., KVStore]) -> Callable[..., KVStore]:
    def make(**changes: Any) -> KVStore:
        geometry = changes.pop("geometry", None) or full_geometry()
        tier = tier_at(daemon.settings.socket_path, ThreadExecutor("daemon"), specs=geometry_specs(geometry))
        options = {"blocks": 40, "share": True, "load_always": True, "io_threads": "thread", "geometry": geometry}
        return make_store(tiers=[tier], **(options | changes))

    return make


def lookups(daemon: Daemon) -> dict[str, Any]:
    return daemon.stats()["lookups"]["domains"]["own"]  # type: ignore[no-any-return]


def stored(store: KVStore, sequence_id: str, reader: KVStore) -> None:
    """All of the sequence has come to where the other engine finds it."""
    store.preempt(sequence_id)
    until(lambda: (store.step(), reader.lookup(PROMPT).tokens == 160)[1])


def test_a_request_counts_once_whatever_its_store_has_asked(daemon: Daemon, engine: Callable[..., KVStore]) -> None:
    first, second = engine(), engine()
    run_prompt(first, "a", PROMPT)
    until(lambda: lookups(daemon)["lookups"] == 1)
    assert lookups(daemon)["missed_blocks"] == {"never_stored": 10}
    stored(first, "a", second)
    for _ in range(5):
        assert second.lookup(PROMPT).tokens == 160
    assert run_prompt(second, "b", PROMPT) == 160
    until(lambda: lookups(daemon)["reused_tokens"] == 160)
    found = lookups(daemon)
    assert found["lookups"] == 2
    assert (found["asked_blocks"], found["hit_blocks"]) == (20, {"host": 10})
    assert found["missed_blocks"] == {"never_stored": 10}, "what is asked before storing is no lookup"
    top = daemon.stats()["prefixes"]
    assert [(one["lookups"], one["hit_blocks"], one["longest_tokens"]) for one in top] == [(1, 10, 160)]
    assert run_prompt(second, "c", PROMPT) == 160, "all of it is on the device now"
    _ = second.tiers[0].used_bytes
    assert lookups(daemon) == found, "nothing was asked of the daemon"
    assert run_prompt(second, "d", PROMPT[:80] + [7] * 85) == 80
    until(lambda: lookups(daemon)["lookups"] == 3)
    assert lookups(daemon)["missed_blocks"] == {"never_stored": 15}


def test_copies_in_two_forms_are_one_lookup(daemon: Daemon) -> None:
    tier = tier_at(daemon.settings.socket_path)
    raw = [key_of(n) for n in range(8)]
    keys = [key._replace(codec="int4") if n % 2 else key for n, key in enumerate(raw)]
    for key in keys:
        assert put(tier, [key]) == [OK]
    found = Lookup(raw[0], [key.hash for key in raw], dict(enumerate(keys)), range(8, 8), 8)
    tier.note_lookup(found)
    until(lambda: lookups(daemon)["lookups"] == 1)
    assert lookups(daemon)["hit_blocks"] == {"host": 8}
    tier.close()


def test_windows_and_groups_count_a_block_once(daemon: Daemon, engine: Callable[..., KVStore]) -> None:
    geometry = hybrid_geometry()
    first, second = engine(geometry=geometry, blocks=40), engine(geometry=geometry, blocks=40)
    run_prompt(first, "a", PROMPT)
    stored(first, "a", second)
    assert run_prompt(second, "b", PROMPT) == 160
    until(lambda: lookups(daemon)["lookups"] == 2)
    assert lookups(daemon)["hit_blocks"] == {"host": 10}
    assert lookups(daemon)["asked_blocks"] == 20
    until(lambda: lookups(daemon)["reused_tokens"] == 160)


def test_what_no_window_reads_any_more_is_owed_to_what_is_read_instead(
    daemon: Daemon, engine: Callable[..., KVStore]
) -> None:
    """Found with a model of sliding layers alone: a prompt found whole counted as its window's few blocks."""
    sliding = CacheGroup(kind=GroupKind.SLIDING, layers=(0, 1), kv_heads=2, key_dim=64, value_dim=64, window_tokens=40)
    geometry = KVGeometry(groups=(sliding,), dtype="float32")
    first, second = engine(geometry=geometry), engine(geometry=geometry)
    run_prompt(first, "a", PROMPT)
    until(lambda: lookups(daemon)["missed_blocks"] == {"never_stored": 10})
    stored(first, "a", second)
    assert second.lookup(PROMPT).by_tier == {"daemon": 160}
    assert run_prompt(second, "b", PROMPT) == 160
    assert second.metrics.get("hit_tokens", tier="daemon") == 160
    until(lambda: lookups(daemon)["reused_tokens"] == 160)
    assert lookups(daemon)["hit_blocks"] == {"host": 10}


def test_what_was_found_and_gone_before_it_was_read_is_not_reused(
    daemon: Daemon, engine: Callable[..., KVStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = engine(), engine()
    run_prompt(first, "a", PROMPT)
    stored(first, "a", second)
    monkeypatch.setattr(Core, "acquire", lambda *given: (0, _MISS * len(given[3])))
    assert run_prompt(second, "b", PROMPT) == 0
    until(lambda: lookups(daemon)["lookups"] == 2)
    _ = second.tiers[0].used_bytes
    assert (lookups(daemon)["hit_blocks"], lookups(daemon)["reused_tokens"]) == ({"host": 10}, 0)


def test_what_is_quicker_to_compute_was_there_all_the_same(daemon: Daemon, engine: Callable[..., KVStore]) -> None:
    first, second = engine(), engine(load_always=False, prefill_tokens_per_second=1e9)
    run_prompt(first, "a", PROMPT)
    stored(first, "a", second)
    for _ in range(20):
        second._parts.costs.observe_load("daemon", 1 << 20, 10.0)
    assert run_prompt(second, "b", PROMPT) == 0
    until(lambda: lookups(daemon)["lookups"] == 2)
    assert (lookups(daemon)["hit_blocks"], lookups(daemon)["reused_tokens"]) == ({"host": 10}, 0)


def test_time_saved_before_a_client_knows_its_speed_is_counted_when_it_does(daemon: Daemon) -> None:
    tier = tier_at(daemon.settings.socket_path)
    keys = [key_of(n) for n in range(8)]
    put(tier, keys)
    assert look_up(tier, keys) == 8
    assert (lookups(daemon)["reused_tokens"], lookups(daemon)["saved_prefill_seconds"]) == (8, 0.0)
    tier.note_prefill_speed(4.0)
    until(lambda: lookups(daemon)["saved_prefill_seconds"] == 2.0)
    assert look_up(tier, keys[:4]) == 4
    assert lookups(daemon)["saved_prefill_seconds"] == 3.0
    tier.close()
    short_lived = tier_at(daemon.settings.socket_path)  # of the same model, and gone before it has computed anything
    assert look_up(short_lived, keys[:4]) == 4
    assert lookups(daemon)["saved_prefill_seconds"] == 4.0
    short_lived.close()


def test_prompts_longer_than_a_message_are_one_lookup(daemon: Daemon) -> None:
    tier = tier_at(daemon.settings.socket_path)
    keys = [key_of(n) for n in range(2500)]
    assert put(tier, keys[:4], 512) == [OK] * 4
    found = Lookup(keys[0], [key.hash for key in keys], dict(enumerate(keys[:4])), range(4, 2400), 40000)
    tier.note_lookup(found)
    until(lambda: lookups(daemon)["asked_blocks"] == 2400)
    assert lookups(daemon)["hit_blocks"] == {"host": 4}
    assert (lookups(daemon)["lookups"], daemon.stats()["prefixes"][0]["lookups"]) == (1, 1)
    tier.close()


def test_all_behind_the_first_missing_block_counts_under_its_cause(daemon: Daemon) -> None:
    """Found here: each message of a long prompt had a cause of its own."""
    tier = tier_at(daemon.settings.socket_path)
    keys = [key_of(n) for n in range(1500)]
    asked = Lookup(keys[0], [key.hash for key in keys], {}, range(1500), 1500)
    with daemon.core.lock:
        daemon.core.arena("").recently_evicted.add(keys[0].hash)
    tier.note_lookup(asked)
    until(lambda: lookups(daemon)["asked_blocks"] == 1500)
    assert lookups(daemon)["missed_blocks"] == {"evicted": 1500}
    with daemon.core.lock:
        daemon.core.arena("").recently_evicted = type(daemon.core.arena("").recently_evicted)()
    tier.note_lookup(asked)
    until(lambda: lookups(daemon)["asked_blocks"] == 3000)
    assert lookups(daemon)["missed_blocks"] == {"evicted": 1500, "never_stored": 1500}
    tier.close()


def test_a_prompt_whose_first_messages_ask_nothing_is_a_lookup(daemon: Daemon) -> None:
    """Its first 1,024 blocks are in the engine's own memory."""
    tier = tier_at(daemon.settings.socket_path)
    keys = [key_of(n) for n in range(1500)]
    put(tier, keys[1200:1204], 512)
    copies = {place: keys[place] for place in range(1200, 1204)}
    tier.note_lookup(Lookup(keys[0], [key.hash for key in keys], copies, range(1204, 1500), 1500))
    until(lambda: lookups(daemon)["asked_blocks"] == 300)
    assert (lookups(daemon)["lookups"], lookups(daemon)["hit_blocks"]) == (1, {"host": 4})
    assert daemon.stats()["prefixes"][0]["lookups"] == 1
    tier.close()


def test_what_nothing_reads_stands_or_falls_with_what_is_read_behind_it(daemon: Daemon) -> None:
    """A window behind 1,400 blocks: there, and gone between the lookup and the word on it."""
    tier = tier_at(daemon.settings.socket_path)
    keys = [key_of(n) for n in range(1410)]
    put(tier, keys[1400:], 512)
    copies = {place: keys[place] for place in range(1400, 1410)}
    found = Lookup(keys[0], [key.hash for key in keys], copies, range(1410, 1410), 1410, range(1400))
    tier.note_lookup(found)
    until(lambda: lookups(daemon)["hit_blocks"] == {"host": 1410})
    assert tier.delete(keys[1400:]) == 10
    tier.note_lookup(found)
    until(lambda: lookups(daemon)["missed_blocks"] == {"never_stored": 1410})
    assert (lookups(daemon)["lookups"], lookups(daemon)["hit_blocks"]) == (2, {"host": 1410})
    tier.close()


def test_what_a_client_says_to_be_there_is_looked_up(daemon: Daemon) -> None:
    tier = tier_at(daemon.settings.socket_path)
    keys = [key_of(n) for n in range(8)]
    tier.note_lookup(Lookup(keys[0], [key.hash for key in keys], dict(enumerate(keys)), range(8, 8), 8))
    until(lambda: lookups(daemon)["lookups"] == 1)
    found = lookups(daemon)
    assert (found["hit_blocks"], found["missed_blocks"], found["reused_tokens"]) == ({}, {"never_stored": 8}, 0)
    assert daemon.stats()["prefixes"] == []
    tier.close()


def test_clients_of_one_domain_cannot_change_what_is_said_of_another(tmp_path: Path) -> None:
    """Found by a liar: a speed of next to nothing made time saved infinite and /v1/stats an error, for everybody."""
    with served(tmp_path, domains={"theirs": (4_000_000,)}, quotas={"alice": "1 MiB"}) as (daemon, web):
        honest, keys = tier_at(daemon.settings.socket_path, tenant="alice"), [key_of(n) for n in range(8)]
        put(honest, keys)
        assert look_up(honest, keys) == 8
        before, mine = web.json("/v1/stats"), {name: v for name, v in web.metrics().items() if "theirs" not in name}
        liar = RawClient.beside(daemon, uid=4_000_000)
        key = keys[0]
        form = (key.root, key.group, key.codec, key.exact, key.heads, key.layers, key.parameters)
        liar.ask(protocol.Form, 0, *form, (1 << 32) - 1, 1, 0, "bytes", "alice")
        hashes = b"".join(one.hash for one in keys)
        for outcomes in (bytes([2] * 8), bytes(8)):
            liar.tell(protocol.Looked, 0, key.hash, 0, hashes, outcomes, [0], 8)
        liar.tell(protocol.Speed, 0.01)
        liar.tell(protocol.Reused, 0, (1 << 24) - 1)
        liar.ask(protocol.Ping)
        short_lived = tier_at(daemon.settings.socket_path, tenant="alice")  # knows no speed of its own
        assert look_up(short_lived, keys[:1]) == 1
        time.sleep(0.25)  # a snapshot is kept for 0.2 s
        after = web.json("/v1/stats")
        theirs, own = (after["lookups"]["domains"][name] for name in ("theirs", "own"))
        assert theirs["missed_blocks"] == {"never_stored": 16}, "nothing of it was ever evicted"
        assert (own["hit_blocks"], own["missed_blocks"]) == ({"host": 9}, {})
        assert own["saved_prefill_seconds"] == 0.0
        counts = after["tenants"]["alice"]["counts"]
        assert counts["missed_blocks"] == before["tenants"]["alice"]["counts"]["missed_blocks"] == 0
        assert after["tenants"]["alice (theirs)"]["counts"]["missed_blocks"] == 16
        now = web.metrics()
        assert all(now[name] == mine[name] for name in mine if "missed" in name or "saved" in name)
        liar.tell(protocol.Speed, 5e-324)
        assert liar.answer().cause == protocol.Cause.GARBAGE
        for client in (honest, short_lived, liar):
            client.close()


@pytest.mark.parametrize("outcomes", [b"\x00", b"\x00\x03", b"\x02\xff"])
def test_outcomes_that_mean_nothing_end_the_connection(daemon: Daemon, outcomes: bytes) -> None:
    client = RawClient.beside(daemon)
    client.form()
    hashes = key_of(0).hash + key_of(1).hash
    client.tell(protocol.Looked, 0, key_of(0).hash, 0, hashes, outcomes, [0], 2)
    answer = client.answer()
    assert isinstance(answer, protocol.Refused)
    assert answer.cause == protocol.Cause.GARBAGE
    assert client.answer() is None
    assert lookups(daemon)["lookups"] == 0
    client.close()


def test_a_client_without_a_daemon_says_nothing(tmp_path: Path) -> None:
    tier = tier_at(tmp_path / "none.sock")
    assert look_up(tier, [key_of(0)]) == 0
    assert tier.counters()["without_daemon"] >= 2
    tier.close()


LONG = [key_of(number) for number in range(2 * protocol.PAGE_HASHES + 50)]


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon in which all of LONG is stored."""
    with checked_daemon(settings(tmp_path_factory.mktemp("long"), host_bytes=64 << 20)) as daemon:
        tier = tier_at(daemon.settings.socket_path)
        for at in range(0, len(LONG), 256):
            assert set(put(tier, LONG[at : at + 256], 64)) == {OK}
        tier.close()
        yield daemon


@pytest.mark.parametrize("gap", [0, 1, 1023, 1024, 1500, 2047, 2048, 2097, None])
def test_a_lookup_of_several_pages_ends_at_the_gap(long_run: Daemon, gap: int | None) -> None:
    """Pages are asked for ahead of their answers: those behind the gap are not counted, nor left in the way."""
    tier = tier_at(long_run.settings.socket_path)
    hashes = [key.hash for key in LONG]
    if gap is not None:
        hashes[gap] = b"\x07" * 32
    assert tier.leading_run(LONG[0], hashes) == (len(LONG) if gap is None else gap)
    assert tier.contains(LONG[:2]) == [True, True], "the next answer is that of the next request"
    assert tier.counters().get("without_daemon", 0) == 0
    tier.close()


def test_a_refusal_of_one_page_leaves_no_answer_behind(long_run: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = tier_at(long_run.settings.socket_path)
    hashes = [key.hash for key in LONG]
    assert tier.leading_run(LONG[0], hashes) == len(LONG)
    real, asked = Core.run, []

    def run(self: Core, *arguments: Any) -> tuple[int, int]:
        asked.append(len(arguments[-1]))
        if len(asked) == 1:
            raise RefusedError(Cause.PACE, "planted")
        return real(self, *arguments)

    monkeypatch.setattr(Core, "run", run)
    assert tier.leading_run(LONG[0], hashes) == 0
    assert asked == [protocol.PAGE_HASHES] * 2
    assert tier.is_up, "the connection is as good as it was"
    assert tier.leading_run(LONG[0], hashes) == len(LONG)
    tier.close()
