"""KV events over ZMQ: what vLLM's own classes read of them, and public case 117 over real sockets."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from allocator.errors import ConfigError
from benchmarks.peers import peer_python
from kvstore import AllCleared, BlockRemoved, BlockStored, KVStore
from kvstore.daemon import Daemon
from kvstore.event_feed import EventFeed, EventFollower, wire_form
from kvstore.events import EventStream
from kvstore.testing.transfer_contract import key_of
from kvstore.tier import ResultCode
from tests.kvstore.daemon.kit import put, settings, tier_at, until
from tests.kvstore.driving import run_prompt

B = 16
HASHES = [bytes([number]) * 32 for number in range(200)]
READ_BY_VLLM = """
import json, sys
import msgspec
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
for line in sys.stdin:
    batch = msgspec.msgpack.decode(bytes.fromhex(line), type=KVEventBatch)
    for event in batch.events:
        fields = {name: getattr(event, name) for name in event.__struct_fields__}
        print(json.dumps([type(event).__name__, fields], default=bytes.hex))
"""


def stored(*numbers: int, tier: str = "host") -> BlockStored:
    parent = HASHES[numbers[0] - 1] if numbers[0] else None
    tokens = tuple(range(B * len(numbers)))
    return BlockStored(tier, 0, tuple(HASHES[one] for one in numbers), parent, "raw", True, B, tokens)


def removed(*numbers: int) -> BlockRemoved:
    return BlockRemoved("host", 0, tuple(HASHES[one] for one in numbers), "raw", True)


@pytest.fixture
def ends(tmp_path: Path) -> tuple[str, str]:
    return f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"


@pytest.fixture
def follower(ends: tuple[str, str]) -> Iterator[EventFollower]:
    follower = EventFollower(*ends, timeout_seconds=20)
    yield follower
    follower.close()


def known(follower: EventFollower) -> set[int]:
    follower.poll(0.05)
    return {number for number, hash in enumerate(HASHES) if follower.has(hash)}


def agree(follower: EventFollower, stream: EventStream, expected: set[int]) -> None:
    """In the end: its socket may not be connected yet, so what is there already is told again and again."""

    def does() -> bool:
        stream.publish(stored(min(expected)))
        return known(follower) == expected

    until(does, 30, f"{known(follower)} instead of {expected}")


def test_case_117_a_follower_converges_over_a_restart_lost_messages_and_a_reset(
    ends: tuple[str, str], follower: EventFollower
) -> None:
    stream = EventStream()
    feed = EventFeed(stream, ends[0], replay_endpoint=ends[1])
    stream.publish(stored(5, 6))  # before its parent, and before the follower is there
    stream.publish(stored(0, 1, 2, 3, 4))
    until(lambda: feed.counts["events"] == 3)
    stream.publish(removed(6))
    agree(follower, stream, set(range(6)))
    assert follower.run(HASHES) == 6
    follower._subscriber.disconnect(ends[0])  # what is published meanwhile is lost
    stream.publish(removed(5))
    stream.publish(stored(7, 8))
    time.sleep(0.1)
    gaps = follower.counts["gaps"]
    follower._subscriber.connect(ends[0])
    agree(follower, stream, {0, 1, 2, 3, 4, 7, 8})
    assert follower.counts["gaps"] == gaps + 1
    stream.begin_epoch(3)
    agree(follower, stream, {1})
    feed.close()

    again = EventStream()  # the process was killed: a new one begins with sequence 0 and other content
    feed = EventFeed(again, ends[0], replay_endpoint=ends[1])
    again.publish(stored(21))
    agree(follower, again, {20, 21})
    assert follower.counts["restarts"] == 1
    feed.close()


def test_what_is_too_old_to_be_replayed_is_made_up_for_by_all_there_is(
    ends: tuple[str, str], follower: EventFollower
) -> None:
    stream, content = EventStream(), list[BlockStored]()
    feed = EventFeed(stream, ends[0], replay_endpoint=ends[1], replay_batches=2, snapshot=lambda: content)
    for number in range(10):
        content.append(stored(number))
        stream.publish(content[-1])
        until(lambda wanted=number + 2: feed.counts["events"] == wanted)
    content.pop(3)
    assert follower.sync()
    assert known(follower) == set(range(10)) - {3}
    assert feed.counts["snapshots"] == 1
    lossy = EventFollower(ends[0], ends[1].replace("replay", "nobody"), timeout_seconds=0.1)

    def hears() -> int:
        stream.publish(stored(50))
        return lossy.poll(0.05)

    until(hears)
    assert lossy.run(HASHES) == 0, "nobody answered: what was missed is unknown"
    assert lossy.has(HASHES[50])
    lossy.close()
    feed.close()


def test_a_followers_memory_is_bounded_and_garbage_is_counted(ends: tuple[str, str]) -> None:
    follower = EventFollower(*ends, limit=10, timeout_seconds=20)
    stream = EventStream()
    feed = EventFeed(stream, ends[0], replay_endpoint=ends[1])
    with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        sock.setsockopt(zmq.LINGER, 0)
        sock.connect(ends[1])
        for wrong in ((b"",), (b"", b"1"), (b"", b"", b"", b"cos\nsystem\n(S'id'\ntR.")):
            sock.send_multipart(wrong)
        until(lambda: feed.counts["refused"] == 3)
    for number in range(50):
        stream.publish(stored(number))
    until(lambda: feed.counts["events"] == 51)
    assert follower.sync()
    assert len(follower) == 10
    assert known(follower) == set(range(40, 50))
    follower._take([b"", b"\0" * 8, b"\x80\x04garbage"])
    follower._take([b"", b"\0" * 8])
    assert follower.counts["refused"] == 2
    with pytest.raises(ConfigError, match="cannot be bound"):
        EventFeed(stream, "ipc:///nowhere/at/all")
    follower.close()
    feed.close()
    feed.close()


def test_subscribers_that_mean_ill_cost_bounded_memory_and_time(
    ends: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flood of replays kept the feed from publishing, and what was kept for them had no limit in bytes."""
    monkeypatch.setattr("kvstore.event_feed._PAST_BYTES", 256 << 10)
    stream = EventStream()
    feed = EventFeed(stream, ends[0], replay_endpoint=ends[1])
    for number in range(200):
        stream.publish(stored(*range(100)))
        if number % 10 == 9:
            until(lambda wanted=number + 2: feed.counts["events"] == wanted)
    assert sum(len(payload) for _, payload in feed._past) == feed._past_bytes <= 256 << 10
    with zmq.Context() as context, context.socket(zmq.DEALER) as sock, context.socket(zmq.DEALER) as endless:
        for one in (sock, endless):
            one.setsockopt(zmq.LINGER, 0)
            one.connect(ends[1])
        for _ in range(2000):
            sock.send_multipart((b"", bytes(8)))
        until(lambda: feed.counts["replays_refused"] > 0)
        endless.send_multipart((b"", bytes(4 << 20)))
        stream.publish(stored(150))
        until(lambda: feed.counts["events"] == 202, what="it goes on publishing")
        until(lambda: feed.counts["replays_refused"] + feed.counts["replays"] >= 2000)
        assert feed.counts["refused"] == 0, "what was too long did not reach it"
    feed.close()


def test_a_daemons_events_are_what_its_arena_holds(tmp_path: Path, ends: tuple[str, str]) -> None:
    daemon = Daemon(settings(tmp_path, events_endpoint=ends[0], events_replay_endpoint=ends[1]))
    daemon.start()
    follower = EventFollower(*ends, timeout_seconds=20)
    tier = tier_at(daemon.settings.socket_path)
    keys = [key_of(number) for number in range(2000)]

    def held() -> bool:
        follower.poll(0.05)
        arena = daemon.core.arenas[""]
        return {key.hash for key in keys if follower.has(key.hash)} == {one.key.hash for one in arena.linked()}

    for at in range(0, 2000, 50):
        assert put(tier, keys[at : at + 50])[0] is ResultCode.OK
    assert follower.sync()
    until(held)
    assert 500 < len(follower) < 1900, "what was evicted is gone"
    tier.delete(keys[1900:])
    until(held)
    tier.raise_epoch(0)
    until(lambda: follower.poll(0.05) is not None and len(follower) == 0)
    tier.close()
    follower.close()
    daemon.stop()


def test_case_117_vllms_own_classes_decode_what_a_store_and_a_daemon_publish(
    make_store: Callable[..., KVStore], vllm_python: str
) -> None:
    store = make_store(blocks=12)
    reader = store.events.subscribe()
    prompt = list(range(3 * B + 1))
    hashes = store.prepare(prompt).hashes
    run_prompt(store, "a", prompt, exact=True)
    store.finish("a")
    store.pool.drop_all_idle()
    events = [one.event for one in reader.drain()] + [stored(1), AllCleared()]
    payload = msgspec.msgpack.encode([1.5, [wire_form(one) for one in events], None, b"boot", 3])
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(
        [vllm_python, "-c", READ_BY_VLLM],
        input=payload.hex(),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    read = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    kinds = [kind for kind, _ in read]
    assert kinds[0] == "BlockStored"
    assert kinds[-1] == "AllBlocksCleared"
    assert "BlockRemoved" in kinds
    first = read[0][1]
    assert first["block_hashes"] == [one.hex() for one in hashes[: len(first["block_hashes"])]]
    assert (first["parent_block_hash"], first["block_size"], first["medium"]) == (None, B, "GPU")
    told = [token for kind, event in read[:-2] if kind == "BlockStored" for token in event["token_ids"]]
    assert told == prompt[: 3 * B]
    assert read[-2][1]["medium"] == "CPU"
    gone = {one for kind, event in read if kind == "BlockRemoved" for one in event["block_hashes"]}
    assert gone == {one.hex() for one in hashes}


@pytest.fixture
def vllm_python() -> str:
    """A Python that has vLLM: of `make bench-peers`, or as KVSTORE_VLLM_PYTHON says."""
    python = peer_python("KVSTORE_VLLM_PYTHON", ".venv-vllm")
    if python is None:
        pytest.skip("no vLLM here (make bench-peers, or KVSTORE_VLLM_PYTHON=PATH)")
    return str(python)
