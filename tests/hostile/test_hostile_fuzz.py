"""The protocol under fuzzed messages: bytes changed, and messages of the right form whose numbers the state gives."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvstore.daemon import Daemon, protocol
from kvstore.testing.transfer_contract import key_of
from kvstore.tier import ResultCode
from tests.kvstore.daemon.kit import RawClient, checked_daemon, counts, get, put, settings, tier_at, until

OK = ResultCode.OK
FUZZ_INPUTS = 10_000
FUZZ_INPUTS_LONG = 120_000


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with checked_daemon(
        settings(tmp_path, segment_bytes=256 << 10, leases_per_client=512, clients_per_uid=24)
    ) as daemon:
        yield daemon


def fuzz(daemon: Daemon, inputs: int, seed: int) -> None:
    """Messages that were good, changed a little or much, over connections that have said hello, and some that not."""
    draw = random.Random(seed)
    hashes = [key_of(n).hash for n in range(64)]
    some = b"".join(hashes[:16])
    key = key_of(0)
    form = (key.root, 0, "raw", True, (0, 2), (0, 4), b"", 1, 1, 0, "bytes", "")
    seeds = [
        protocol.Hello(1, protocol.MAGIC, 1, "fuzz"), protocol.Form(1, 1, *form), protocol.Run(1, 0, some),
        protocol.Contains(1, 0, some), protocol.Acquire(1, 0, some, [4096] * 16), protocol.Release(1, [1, 2, 3]),
        protocol.Reserve(1, 0, some, key.root * 16, [5000] * 16), protocol.Publish(1, [1, 2, 3]),
        protocol.Abandon(1, [1, 2, 3]), protocol.Touch(1, 0, some), protocol.Delete(1, 0, some), protocol.Clear(1),
        protocol.Pin(1, 0, some), protocol.Unpin(1, 0, some), protocol.Suspect(1, 0, some),
        protocol.Return(1, [1, 2, 3]), protocol.Ping(1), protocol.Disown(1, bytes(16)), protocol.Map(1, [1, 2], True),
        protocol.Epoch(1, 1, False), protocol.Speed(1, 100.0),
        protocol.Looked(1, 0, hashes[0], 0, some, bytes([2] * 6 + [1, 1] + [0] * 8), (0,), 300, 3, True),
        protocol.Reused(1, 0, 5),
    ]  # fmt: skip
    packets = [protocol.encode(one) for one in seeds]
    structs = [msgspec.msgpack.decode(packet) for packet in packets]
    leases = [1]
    client: RawClient | None = None
    for _ in range(inputs):
        if client is None:
            client = RawClient.beside(daemon, hello=draw.random() < 0.95)
            if client.welcome is not None:
                client.form()
        structured = draw.random() < 0.5
        try:
            client.sock.send(well_formed(draw, structs, leases, hashes) if structured else mutated(draw, packets))
            client.seq = 10**9
            answer = client.ask(protocol.Ping)  # so that every input has been looked at before the next one
            while answer is not None and answer.seq != client.seq:
                note_leases(answer, leases)
                answer = client.answer()
        except OSError:
            answer = None
        if answer is None:
            client.close()
            client = None
    if client is not None:
        client.close()


def note_leases(answer: object, leases: list[int]) -> None:
    """What was granted is used, used again, given back twice: numbers that mean something take a message further."""
    if isinstance(answer, protocol.Places):
        leases.append(answer.lease)
        leases += [
            place[3] for place in protocol.PLACE.iter_unpack(answer.places) if place[0] == protocol.Place.GRANTED
        ]
        del leases[:-64]


def well_formed(draw: random.Random, structs: list[Any], leases: list[int], hashes: list[bytes]) -> bytes:
    """A message of the right form whose fields are what the state makes interesting, or at the edge of their type."""
    numbers: tuple[Any, ...] = (
        0, 1, -1, 63, 64, 65, 512, 1024, 4095, 2**16, 2**31, 2**32, 2**47, 2**48 - 1, 2**48, 2**63 - 1, 2**63,
        2**64 - 1, -(2**63), 0.5, float("nan"), float("inf"), -0.0, True, None, "", b"",
    )  # fmt: skip

    def field(old: Any, depth: int) -> Any:
        if isinstance(old, list):
            kind = draw.randrange(6)
            if kind == 0:
                return [draw.choice(leases) for _ in range(draw.choice((0, 1, 2, 16, 512, 513)))]
            if kind == 1:
                return old * draw.choice((0, 2, 40))
            return [field(one, depth + 1) for one in old] if depth < 2 else old
        if isinstance(old, bytes) and len(old) >= 32:
            some = b"".join(draw.choices(hashes, k=draw.choice((0, 1, 2, 16, 16, 64, 512, 1024, 1025))))
            return draw.choice((old, some, old[:-1], old + b"x", old * 2))
        if draw.random() < 0.7:
            return old
        return draw.choice((*numbers, draw.choice(leases), draw.randrange(1 << 20)))

    message = [field(one, 0) if place else one for place, one in enumerate(draw.choice(structs))]
    if draw.random() < 0.1:
        message = message[: draw.randrange(len(message) + 1)] + draw.choice(([], [0], [[[]]]))
    return msgspec.msgpack.encode(message)


def mutated(draw: random.Random, packets: list[bytes]) -> bytes:
    packet = bytearray(draw.choice(packets))
    kind = draw.randrange(8)
    if kind == 0:
        return bytes(packet)
    if kind == 1:
        return bytes(packet[: draw.randrange(1, len(packet) + 1)])
    if kind == 2:
        return draw.randbytes(draw.randrange(1, 300))
    if kind == 3:
        other = draw.choice(packets)
        return bytes(packet[: draw.randrange(len(packet))]) + other[draw.randrange(len(other)) :] or b"x"
    for _ in range(draw.choice((1, 1, 2, 8))):
        place = draw.randrange(min(len(packet), draw.choice((4, 16, 600))))
        packet[place] = draw.choice((0, 1, 0x7F, 0x80, 0xC0, 0xC1, 0xCF, 0xD9, 0xDD, 0xFF, draw.randrange(256)))
    return bytes(packet)


def check_fuzz(daemon: Daemon, inputs: int) -> None:
    tier = tier_at(daemon.settings.socket_path)
    good = [key_of(n, root=b"\x09" * 32) for n in range(8)]
    assert put(tier, good) == [OK] * 8
    for seed in range(4):
        fuzz(daemon, inputs // 4, seed)
        assert get(tier, good) == [OK] * 8
        for arena in daemon.core.arenas.values():
            with daemon.core.lock:
                arena.check()
    found = counts(daemon)
    assert found["refused_garbage"] > inputs // 10
    assert found["refused_stale"] > 0
    assert not [cause for cause in found if cause.startswith("failed_")], found
    tier.close()
    until(lambda: not daemon.stats()["clients"], what="no client is left")
    left = daemon.stats()["leases"]
    assert (left["read_copies"], left["write_slots"], left["pinned_copies"]) == (0, 0, 0)


def test_fuzzed_messages(daemon: Daemon) -> None:
    check_fuzz(daemon, FUZZ_INPUTS)


@pytest.mark.faults
def test_fuzzed_messages_for_long(daemon: Daemon) -> None:
    check_fuzz(daemon, FUZZ_INPUTS_LONG)
