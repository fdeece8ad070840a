"""KV events over ZMQ, as vLLM publishes them, so that KV-aware routers can follow a store or a daemon. Needs pyzmq.

`EventFeed` publishes an EventStream: PUB messages of three frames (topic, sequence, batch), and past ones on demand
from a ROUTER. `EventFollower` is the other side: it knows at any time what the publisher holds. docs/formats/events.md
specifies both. Nothing that arrives here is trusted: a message that does not decode is dropped and counted.

A feed has one thread, and no lock of a store or daemon but for the moment of a snapshot.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq

from allocator.errors import ConfigError
from kvstore.events import AllCleared, BlockStored, Event, EventStream

_POLL_SECONDS = 0.01
_BATCH_EVENTS = 256
_QUEUE_EVENTS = 1 << 16
_HIGH_WATER = 100_000
_PAST_BYTES = 64 << 20
_LONGEST_REQUEST_BYTES = 1024  # of subscribers, who may be anybody
_REPLAYS_PER_SECOND = 20
_MEDIA = {"device": "GPU", "host": "CPU"}
_END = (-1).to_bytes(8, "big", signed=True)
_encode = msgspec.msgpack.Encoder().encode


class WireEvent(msgspec.Struct, frozen=True):
    """An event as it travels, as far as a follower needs it."""

    type: str
    block_hashes: list[bytes] = []
    parent_block_hash: bytes | None = None
    medium: str | None = None
    group_idx: int | None = None


class WireBatch(msgspec.Struct, array_like=True, frozen=True):
    """Events that happened together. boot: new with every feed; a larger epoch makes what was known before void."""

    ts: float
    events: list[WireEvent]
    rank: int | None = None
    boot: bytes = b""
    epoch: int = 0


_decode = msgspec.msgpack.Decoder(WireBatch).decode


def wire_form(event: Event) -> dict[str, Any]:
    """The map that vLLM's classes decode; `codec` and `exact` are ours beside it."""
    if isinstance(event, AllCleared):
        return {"type": "AllBlocksCleared"}
    form: dict[str, Any] = {
        "block_hashes": list(event.hashes),
        "medium": _MEDIA.get(event.tier, "STORAGE"),
        "group_idx": event.group,
        "codec": event.codec,
        "exact": event.exact,
    }
    if not isinstance(event, BlockStored):
        return {"type": "BlockRemoved", **form}
    form |= {"parent_block_hash": event.parent, "token_ids": list(event.token_ids), "block_size": event.block_tokens}
    return {"type": "BlockStored", **form, "lora_id": None, "lora_name": None}


class EventFeed:
    """See the module. Publishes from construction until close.

    endpoint, replay_endpoint: bound, e.g. "tcp://127.0.0.1:5557" and "ipc:///run/kvstore/replay"; "": no replay.
    snapshot: all that is stored now, as events, for who has missed more than the last `replay_batches`; None: such a
    follower begins with nothing.
    """

    def __init__(
        self,
        stream: EventStream,
        endpoint: str,
        *,
        replay_endpoint: str = "",
        topic: str = "",
        replay_batches: int = 10_000,
        snapshot: Callable[[], Sequence[Event]] | None = None,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._stream = stream
        self._topic = topic.encode()
        self._snapshot = snapshot
        self._boot = os.urandom(8)
        self._sequence = 0
        self._past: deque[tuple[int, bytes]] = deque(maxlen=replay_batches)
        self._past_bytes = 0
        self._replays = deque[float](maxlen=_REPLAYS_PER_SECOND)  # when the last ones were
        self._context = zmq.Context()
        self._publisher = self._bound(zmq.PUB, endpoint)
        self._replay = self._bound(zmq.ROUTER, replay_endpoint) if replay_endpoint else None
        self._subscription = stream.subscribe(_QUEUE_EVENTS)
        self._lost_count = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstore-events", daemon=True)
        self._thread.start()

    def _bound(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        sock = self._context.socket(kind)
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.SNDHWM, _HIGH_WATER)
        sock.setsockopt(zmq.MAXMSGSIZE, _LONGEST_REQUEST_BYTES)
        try:
            sock.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"events endpoint: got {endpoint!r}, which cannot be bound ({error})") from error
        return sock

    def close(self) -> None:
        """What was published until now goes out first. Idempotent."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join()
        self._subscription.close()
        self._context.destroy(linger=200)

    def _run(self) -> None:
        self._publish([AllCleared(), *self._everything()], self._stream.epoch)  # a restart voids what was known
        while not self._stop.is_set():
            if self._replay is None:
                self._stop.wait(_POLL_SECONDS)
            elif self._replay.poll(int(_POLL_SECONDS * 1000)):
                self._answer(self._replay)
            self._publish_new()
        self._publish_new()

    def _everything(self) -> Sequence[Event]:
        return () if self._snapshot is None else self._snapshot()

    def _publish_new(self) -> None:
        published = self._subscription.drain()
        if self._subscription.lost_count > self._lost_count:  # more than the queue holds: begin anew
            self.counts["begun_anew"] += 1
            self._lost_count = self._subscription.lost_count
            self._publish([AllCleared(), *self._everything()], self._stream.epoch)
        at = 0
        while at < len(published):
            epoch, events = published[at].epoch, list[Event]()
            while at < len(published) and published[at].epoch == epoch:
                events.append(published[at].event)
                at += 1
            self._publish(events, epoch)

    def _publish(self, events: Sequence[Event], epoch: int) -> None:
        for payload in self._batches(events, epoch):
            sequence, self._sequence = self._sequence, self._sequence + 1
            self._keep(sequence, payload)
            self._publisher.send_multipart((self._topic, sequence.to_bytes(8, "big"), payload))
            self.counts["batches"] += 1
        self.counts["events"] += len(events)

    def _keep(self, sequence: int, payload: bytes) -> None:
        past = self._past
        self._past_bytes += len(payload)
        while past and (len(past) == past.maxlen or self._past_bytes > _PAST_BYTES):
            self._past_bytes -= len(past.popleft()[1])
        past.append((sequence, payload))

    def _batches(self, events: Sequence[Event], epoch: int) -> list[bytes]:
        now, forms = time.time(), [wire_form(one) for one in events]
        pages = [forms[at : at + _BATCH_EVENTS] for at in range(0, len(forms), _BATCH_EVENTS)]
        return [_encode([now, page, None, self._boot, epoch]) for page in pages]

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        """Past batches from the sequence asked for; what is no longer kept is made up for by all there is now."""
        frames = replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            self.counts["refused"] += 1
            return
        now = time.monotonic()
        if len(self._replays) == _REPLAYS_PER_SECOND and now - self._replays[0] < 1:
            self.counts["replays_refused"] += 1  # whoever waits for it asks again
            return
        self._replays.append(now)
        self._publish_new()
        client, start = frames[0], int.from_bytes(frames[2], "big")
        kept = [one for one in self._past if one[0] >= start]
        if start < self._sequence and (not kept or kept[0][0] > start):
            last = self._sequence - 1
            everything = [AllCleared(), *self._everything()]
            kept = [(last, payload) for payload in self._batches(everything, self._stream.epoch)]
            self.counts["snapshots"] += 1
        for sequence, payload in kept:
            replay.send_multipart((client, b"", self._topic, sequence.to_bytes(8, "big"), payload))
        replay.send_multipart((client, b"", b"", _END, b""))
        self.counts["replays"] += 1


class EventFollower:
    """What a feed's publisher holds: `has`, `run`. One thread. limit: most hashes remembered; beyond it the oldest go.

    timeout_seconds: longest wait for a replay; without one what was missed makes everything void.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str = "",
        *,
        topic: str = "",
        limit: int = 1 << 20,
        timeout_seconds: float = 2,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._limit, self._timeout_ms = limit, int(timeout_seconds * 1000)
        self._known: dict[tuple[str | None, int | None, bytes], None] = {}
        self._next, self._boot, self._epoch = 0, b"", 0
        self._replay_endpoint = replay_endpoint
        self._context = zmq.Context()
        self._subscriber = self._context.socket(zmq.SUB)
        self._subscriber.setsockopt(zmq.RCVHWM, _HIGH_WATER)
        self._subscriber.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self._subscriber.connect(endpoint)

    def close(self) -> None:
        self._context.destroy(linger=0)

    def __len__(self) -> int:
        return len(self._known)

    def has(self, hash: bytes, medium: str = "CPU", group: int = 0) -> bool:
        return (medium, group, hash) in self._known

    def run(self, hashes: Sequence[bytes], medium: str = "CPU", group: int = 0) -> int:
        """How many of these, from the first on, are held."""
        return next((place for place, one in enumerate(hashes) if not self.has(one, medium, group)), len(hashes))

    def poll(self, seconds: float = 0.0) -> int:
        """Take in what has come, after waiting for it at most so long; how many messages."""
        count = 0
        while self._subscriber.poll(int(seconds * 1000) if not count else 0):
            self._take(self._subscriber.recv_multipart())
            count += 1
        return count

    def sync(self) -> bool:
        """Ask for everything that is not known yet, as after connecting. False when nobody answered."""
        return self._ask(self._next)

    def _take(self, frames: list[bytes]) -> None:
        read = self._read(frames[1:])
        if read is None:
            return
        sequence, batch = read
        if batch.boot != self._boot:  # another publisher process, or the first
            self.counts["restarts"] += bool(self._boot)
            self._begin(batch.boot)
        if sequence > self._next:
            self.counts["gaps"] += 1
            if not self._ask(self._next):
                self._known.clear()
                self._next = sequence
        if sequence == self._next:
            self._apply(sequence, batch)

    def _begin(self, boot: bytes) -> None:
        self._known.clear()
        self._boot, self._next, self._epoch = boot, 0, 0

    def _ask(self, start: int) -> bool:
        if not self._replay_endpoint:
            return False
        self.counts["replays"] += 1
        with self._context.socket(zmq.DEALER) as sock:
            sock.setsockopt(zmq.LINGER, 0)
            sock.connect(self._replay_endpoint)
            sock.send_multipart((b"", start.to_bytes(8, "big")))
            while sock.poll(self._timeout_ms):
                frames = sock.recv_multipart()
                if len(frames) == 4 and frames[2] == _END:
                    return True
                read = self._read(frames[2:])
                if read is None:
                    continue
                if read[1].boot != self._boot:
                    self._begin(read[1].boot)
                self._apply(*read)
        return False

    def _read(self, frames: list[bytes]) -> tuple[int, WireBatch] | None:
        try:
            sequence, payload = frames
            return int.from_bytes(sequence, "big"), _decode(payload)
        except (ValueError, msgspec.DecodeError):
            self.counts["refused"] += 1
            return None

    def _apply(self, sequence: int, batch: WireBatch) -> None:
        if batch.epoch > self._epoch:
            self._known.clear()
            self._epoch = batch.epoch
        self._next = max(self._next, sequence + 1)
        for event in batch.events:
            if event.type == "AllBlocksCleared":
                self._known.clear()
                continue
            for hash in event.block_hashes:
                place = (event.medium, event.group_idx, hash)
                self._known.pop(place, None)
                if event.type == "BlockStored":
                    self._known[place] = None
        while len(self._known) > self._limit:
            del self._known[next(iter(self._known))]
            self.counts["forgotten"] += 1
