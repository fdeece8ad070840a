"""Gets by layers on a real disk and a real server: the order of bytes, what is told, what goes wrong half way."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvstore.disk_tier.tier import DiskTier
from kvstore.frame.layout import Cut, cut_of
from kvstore.host_tier.tier import HostTier
from kvstore.layer_progress import LayerProgress
from kvstore.redis_tier.tier import RedisTier
from kvstore.testing.transfer_contract import key_of, payload_of
from kvstore.tier import CopyKey, ResultCode, Tier, Transfer
from tests.kvstore.redis_kit import options, remote_tier
from tests.servers import shared_server

OK, MISS, CORRUPT, CANCELLED = ResultCode.OK, ResultCode.MISS, ResultCode.CORRUPT, ResultCode.CANCELLED
LAYERS, SIZE = 8, 4 << 20
GROUPS = 4  # of 1 MiB, two layers each
KEYS = [key_of(number, layers=(0, LAYERS)) for number in range(5)]
SECRET = b"a secret of tests, 32 bytes long"


@contextmanager
def disk(path: Path, **settings: object) -> Iterator[DiskTier]:
    tier = DiskTier(path / "tier", 64 << 20, **settings)  # type: ignore[arg-type]
    try:
        yield tier
    finally:
        tier.close()


@pytest.fixture(params=["disk", "redis", "redis_plain"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
    if request.param == "disk":
        with disk(tmp_path) as opened:
            yield opened
    else:
        plain = request.param == "redis_plain"
        with remote_tier(shared_server().unix_url, options=options(5.0, plain=plain)) as opened:
            yield opened


def put(tier: Tier, keys: Sequence[CopyKey] = KEYS, size: int = SIZE) -> None:
    tier.submit_put([(key, [payload_of(key, size)]) for key in keys])
    assert set(tier.poll()[-1].results) == {OK}


def progress_of(transfer: Transfer) -> int:
    return transfer.progress.ready(0)


class Watched:
    """Gets by layers on an inline executor; at each advance, what is told and what the buffers hold."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at_advance: Callable[[int], None] | None = None) -> None:
        self.seen: list[int] = []
        self.buffers: list[np.ndarray] = []
        self.keys: Sequence[CopyKey] = ()
        real = LayerProgress.advance

        def advance(progress: LayerProgress, ready: dict[int, int]) -> None:
            real(progress, ready)
            if self.buffers and (not self.seen or progress.ready(0) != self.seen[-1]):
                self.seen.append(progress.ready(0))
                self.check(progress.ready(0))
                if at_advance is not None:
                    at_advance(progress.ready(0))

        monkeypatch.setattr(LayerProgress, "advance", advance)

    def check(self, layers: int) -> None:
        for key, buffer in zip(self.keys, self.buffers, strict=True):
            end = layers * buffer.nbytes // LAYERS
            assert np.array_equal(buffer[:end], payload_of(key, buffer.nbytes)[:end]), "told before it was there"

    def get(self, tier: Tier, keys: Sequence[CopyKey] = KEYS, size: int = SIZE, pieces: int = 1) -> list[ResultCode]:
        self.keys, self.seen = keys, []
        self.buffers = [np.full(size, 0xA5, np.uint8) for _ in keys]
        items = [(key, np.array_split(buffer, pieces)) for key, buffer in zip(keys, self.buffers, strict=True)]
        self.transfer = tier.submit_get(items, by_layer=True)
        (done,) = tier.poll()
        assert done.transfer is self.transfer
        for key, buffer, code in zip(keys, self.buffers, done.results, strict=True):
            assert code is not OK or np.array_equal(buffer, payload_of(key, size))
        assert self.transfer.progress.failed == (set(done.results) != {OK})
        self.buffers = []
        return list(done.results)


def test_our_frames_are_cut_into_groups_worth_an_io() -> None:
    assert cut_of(KEYS[0], SIZE) == Cut(((0, 2), (2, 4), (4, 6), (6, 8)), (SIZE // 4,) * 4)
    llama = key_of(1, layers=(0, 32))
    assert len(cut_of(llama, 8 << 20).sizes) == len(cut_of(llama, 64 << 20).sizes) == 8
    assert cut_of(key_of(1, layers=(0, 7)), 7 << 20).layers == tuple((n, n + 1) for n in range(7))
    assert len(cut_of(key_of(1, layers=(0, 1)), 64 << 20).sizes) == 1
    for key, size in ((KEYS[0], (2 << 20) - 8), (KEYS[0], SIZE + 1), (key_of(1, parameters=b"table of bits"), SIZE)):
        assert cut_of(key, size).sizes == (size,)


@pytest.mark.parametrize("pieces", [1, 7])
def test_the_first_layers_of_all_come_before_the_next(tier: Tier, monkeypatch: pytest.MonkeyPatch, pieces: int) -> None:
    put(tier)
    watched = Watched(monkeypatch)
    assert watched.get(tier, pieces=pieces) == [OK] * 5
    assert watched.seen == [2, 4, 6, 8]


def test_what_comes_whole_is_told_as_a_whole(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small copies have one segment, and a copy that is absent ends the progress."""
    put(tier, size=9000)
    watched = Watched(monkeypatch)
    assert watched.get(tier, size=9000) == [OK] * 5
    assert watched.seen == [8]
    assert watched.get(tier, [KEYS[0], key_of(99, layers=(0, LAYERS))], size=9000) == [OK, MISS]
    assert watched.seen == [0]


def test_small_and_large_copies_go_together(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    small = [key._replace(group=1) for key in KEYS]
    put(tier)
    put(tier, small, size=9000)
    buffers = [np.zeros(SIZE, np.uint8) for _ in KEYS] + [np.zeros(9000, np.uint8) for _ in small]
    transfer = tier.submit_get(list(zip([*KEYS, *small], buffers, strict=True)), by_layer=True)
    assert set(tier.poll()[0].results) == {OK}
    assert (transfer.progress.ready(0), transfer.progress.ready(1), transfer.progress.ready(2)) == (8, 8, 0)
    assert all(
        np.array_equal(one, payload_of(key, one.nbytes)) for key, one in zip([*KEYS, *small], buffers, strict=True)
    )


def test_a_get_that_is_not_asked_by_layer_tells_at_its_end(tier: Tier) -> None:
    put(tier)
    transfer = tier.submit_get([(KEYS[0], bytearray(SIZE))])
    assert progress_of(transfer) == 8
    transfer = tier.submit_get([(KEYS[0], bytearray(SIZE)), (key_of(77), bytearray(SIZE))])
    assert progress_of(transfer) == 0
    assert transfer.progress.failed
    assert not transfer.progress.wait(0, 1, 0.0)


def test_a_host_tier_delivers_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = HostTier(32 << 20)
    put(tier)
    watched = Watched(monkeypatch)
    assert watched.get(tier) == [OK] * 5
    assert watched.seen == [8]
    tier.close()


def test_it_can_be_cancelled_between_groups(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tier)
    watched = Watched(monkeypatch, lambda layers: layers == 4 and tier.cancel(next(iter(tier._open.values()))))  # type: ignore[attr-defined, func-returns-value]
    assert watched.get(tier) == [CANCELLED] * 5
    assert watched.seen == [2, 4]
    assert watched.get(tier) == [CANCELLED] * 5
    monkeypatch.undo()
    assert Watched(monkeypatch).get(tier) == [OK] * 5


def damage(tier: Tier, key: CopyKey, place: int, byte_count: int = 1) -> None:
    """Flip bits of a stored payload, at its place from the end on."""
    if isinstance(tier, DiskTier):
        with tier._lock:
            entry = tier._index.find(key)
        assert entry is not None
        at = entry.slot * entry.slot_bytes + entry.frame_bytes - place
        with open(next(tier.directory.glob(f"slots-{entry.slot_bytes}")), "r+b") as file:
            before = os.pread(file.fileno(), byte_count, at)
            os.pwrite(file.fileno(), bytes(one ^ 1 for one in before), at)
    else:
        assert isinstance(tier, RedisTier)
        name = tier._names.of(key)
        client = shared_server().client()
        at = client.strlen(name) - place
        before = client.getrange(name, at, at + byte_count - 1)
        client.setrange(name, at, bytes(one ^ 1 for one in before))


@pytest.mark.parametrize(("place", "told"), [(1, [2, 4, 6]), (SIZE // 2, [2, 4]), (SIZE, [0])])
def test_a_torn_group_ends_it_there(tier: Tier, monkeypatch: pytest.MonkeyPatch, place: int, told: list[int]) -> None:
    put(tier)
    damage(tier, KEYS[2], place)
    watched = Watched(monkeypatch)
    assert watched.get(tier) == [OK, OK, CORRUPT, OK, OK]
    assert watched.seen == told
    assert watched.get(tier) == [OK, OK, MISS, OK, OK], "it was dropped"
    put(tier)
    assert watched.get(tier) == [OK] * 5


def test_a_head_that_is_wrong_is_judged_as_ever(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tier)
    damage(tier, KEYS[1], SIZE + 200)
    assert Watched(monkeypatch).get(tier) == [OK, CORRUPT, OK, OK, OK]
    assert any("header_checksum" in cause or "table" in cause for cause in tier.counters())


def test_what_is_damaged_between_two_groups_is_found(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tier)

    def meanwhile(layers: int) -> None:
        if layers == 4:
            damage(tier, KEYS[4], 10)

    watched = Watched(monkeypatch, meanwhile)
    assert watched.get(tier) == [OK] * 4 + [CORRUPT]
    assert watched.seen == [2, 4, 6]


@pytest.mark.parametrize("what", ["same", "foreign", "gone", "shorter", "list"])
def test_a_value_that_is_replaced_between_two_groups(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    client = shared_server().client()
    with remote_tier(shared_server().unix_url, options=options(5.0)) as tier:
        put(tier)
        name, other = tier._names.of(KEYS[3]), tier._names.of(KEYS[0])

        def meanwhile(layers: int) -> None:
            if layers != 2:
                return
            value = client.get(name)
            client.delete(name)
            if what == "list":
                client.rpush(name, b"x")
            elif what != "gone":
                client.set(name, {"same": value, "foreign": client.get(other), "shorter": value[: SIZE // 2]}[what])

        watched = Watched(monkeypatch, meanwhile)
        expected = {"same": OK, "gone": MISS}.get(what, CORRUPT)
        assert watched.get(tier) == [OK, OK, OK, expected, OK]
        assert watched.seen == ([2, 4, 6, 8] if what == "same" else [2])
        assert client.exists(name) == (what == "same"), "what is no copy is taken out"


def test_the_time_to_live_is_set_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    client = shared_server().client()
    with remote_tier(shared_server().unix_url, ttl_seconds=1000, options=options(5.0)) as tier:
        put(tier)
        for key in KEYS:
            client.pexpire(tier._names.of(key), 5000)
        assert Watched(monkeypatch).get(tier) == [OK] * 5
        assert all(client.pttl(tier._names.of(key)) > 900_000 for key in KEYS)


@pytest.mark.parametrize("store", ["disk", "redis"])
def test_signed_copies_come_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str) -> None:
    made = disk(tmp_path, secret=SECRET) if store == "disk" else remote_tier(shared_server().unix_url, secret=SECRET)
    with made as tier:
        put(tier)
        watched = Watched(monkeypatch)
        assert watched.get(tier) == [OK] * 5
        assert watched.seen == [8]


@pytest.mark.parametrize("store", ["disk", "redis"])
def test_frames_of_one_segment_and_packed_ones_are_still_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str
) -> None:
    """As they were written before layer groups, and by a packer."""
    url = shared_server().unix_url + "?namespace=before"
    for way in ("before", "packed"):

        def make(**settings: object) -> object:
            return disk(tmp_path, **settings) if store == "disk" else remote_tier(url, **settings)

        with monkeypatch.context() as patch, make() as tier:  # type: ignore[attr-defined]
            tier.clear()
            if way == "before":
                for module in ("kvstore.frame.heads", "kvstore.redis_tier.frames"):
                    patch.setattr(f"{module}.cut_of", lambda key, size: Cut((key.layers,), (size,)))
                put(tier)
            else:
                if store == "disk":
                    tier.pack(1)
                else:
                    from kvstore.compression import Packer

                    tier._packer = Packer(1, None)
                patch.setattr("tests.kvstore.test_layer_gets.payload_of", zeros)
                put(tier)
        with monkeypatch.context() as patch, make() as tier:  # type: ignore[attr-defined]
            if way == "packed":
                patch.setattr("tests.kvstore.test_layer_gets.payload_of", zeros)
            watched = Watched(patch)
            assert watched.get(tier) == [OK] * 5, way
            assert watched.seen == [8]
            tier.submit_get([(key, bytearray(SIZE)) for key in KEYS])
            assert set(tier.poll()[0].results) == {OK}


def zeros(key: CopyKey, size: int) -> np.ndarray:
    return np.full(size, key.hash[-1], np.uint8)


def test_progress_grows_only_and_wakes_who_waits() -> None:
    progress = LayerProgress()
    progress.advance({0: 4, 1: 2})
    progress.advance({0: 3})
    assert (progress.ready(0), progress.ready(1), progress.ready(7)) == (4, 2, 0)
    assert progress.wait(0, 4, 0.0)
    assert not progress.wait(0, 5, 0.01)
    progress.fail()
    progress.advance({0: 8})
    assert progress.ready(0) == 4
    assert not progress.wait(0, 4, 1.0), "what has failed is of no use, however far it came"
