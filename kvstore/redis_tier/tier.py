"""Copies on Redis 6+ or Valkey: one value a copy, each a frame, shared by every process that knows the identity.

Transfers run on the executor: windows of pipelined commands, values straight between socket and caller's buffer and
checked while they arrive. `contains` never waits: it answers from what is believed (Ledger) and has the server asked on
the lookup executor; `presence` and `pending_count` tell "being looked up" from "not there". A server that is down costs
a timeout once, then nothing until a probe succeeds; its keys are FAILED, the rest goes on.

capacity_bytes is a hard cap on what this process has written and believes alive, evicting its least recently used; 0
leaves room to the server's maxmemory, whose refusal is FULL. With a cap, the namespace is taken to be this process's
own: copies found in it at the first write are counted and evicted like others.

Formats: docs/formats/redis-keys.md, frame.md. Servers and settings: docs/how-to/redis.md.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from allocator.errors import ConfigError, TierError
from kvstore.compression import Packer
from kvstore.copy_key import CopyKey
from kvstore.executor import Executor
from kvstore.frame.layout import SECRET_BYTES
from kvstore.frame.parsing import FrameFault
from kvstore.frame.specs import SpecSource, plain_specs
from kvstore.layer_progress import LayerRounds
from kvstore.queued_tier import QueuedTier
from kvstore.redis_tier.dispatch import BREAKER_OPEN, INTERRUPTED, Lost, Order, command_each, dispatch
from kvstore.redis_tier.epoch import SharedEpoch
from kvstore.redis_tier.frames import Forms, FrameSink, KeyNames, PartSink, header_of
from kvstore.redis_tier.layers import ask_parts, get_by_layers
from kvstore.redis_tier.ledger import Known, Ledger, LedgerLimits, Presence
from kvstore.redis_tier.links import LinkOptions, Links, Node
from kvstore.redis_tier.protocol import ErrorReply, PutOrder, Reply, Wire
from kvstore.redis_tier.space import Namespace
from kvstore.redis_tier.url import RedisAddress, Topology, parse_redis_url
from kvstore.tier import Job, ResultCode, Transfer

_NAME_BYTES = 256  # what a key's name and the server's own bookkeeping cost, about
_SERVER_LIMIT_BYTES = 512 << 20
_OUR_SECRET_MATTER = (FrameFault.NO_SECRET, FrameFault.UNSIGNED)  # others may read such a value: it stays


@dataclass(frozen=True, slots=True)
class RedisOptions:
    """value_limit_bytes: larger copies are TOO_LARGE; keep it well below the server's maxmemory.

    epoch_seconds: for so long the epoch counts after it was read, and so long a reset waits for others to notice.
    """

    links: LinkOptions = field(default_factory=LinkOptions)
    value_limit_bytes: int = 64 << 20
    lookup_deadline_seconds: float = 1.0
    epoch_seconds: float = 1.0
    lookup_executor: Executor | None = None  # None: the tier's own, behind its transfers
    entries: int = 1 << 18  # beliefs kept, about 400 bytes each
    zstd_level: int = 0  # copies are packed at this level, where that makes them smaller; 0: never


class RedisTier(QueuedTier):
    """The remote tier. `secret` (16 to 64 bytes) signs values and refuses unsigned ones; see the module."""

    def __init__(
        self,
        address: RedisAddress | str,
        executor: Executor | None = None,
        *,
        name: str = "remote",
        capacity_bytes: int = 0,
        ttl_seconds: float = 86400.0,
        secret: bytes | None = None,
        spec_of: SpecSource = plain_specs,
        options: RedisOptions | None = None,
    ) -> None:
        if not 0.01 <= ttl_seconds <= 10 * 366 * 86400:
            raise ConfigError(f"ttl_seconds: got {ttl_seconds!r}; expected 0.01 seconds to ten years")
        if secret is not None and not SECRET_BYTES[0] <= len(secret) <= SECRET_BYTES[1]:
            raise ConfigError(f"secret: got {len(secret)} bytes; expected {SECRET_BYTES[0]} to {SECRET_BYTES[1]}")
        super().__init__(name, executor)
        options = options or RedisOptions()
        self.address = parse_redis_url(address) if isinstance(address, str) else address
        self._options = options
        self._value_limit_bytes = min(options.value_limit_bytes, _SERVER_LIMIT_BYTES - 1)
        self._secret = secret
        self.delivers_layers = secret is None  # nothing signed is good before its end
        self._packer = Packer(options.zstd_level, secret) if options.zstd_level else None
        self._form_of = Forms(spec_of, is_signed=secret is not None).of
        self._ttl_ms = max(1, int(ttl_seconds * 1000))
        self._names = KeyNames(self.address.namespace)
        self.links = Links(self.address, options.links)
        self.space = Namespace(self.links, self._names, self._ttl_ms)
        limits = LedgerLimits(ttl_seconds, options.entries, pending_seconds=options.lookup_deadline_seconds)
        self._ledger = Ledger(capacity_bytes, limits, options.links.clock)
        self._lookups: Executor = options.lookup_executor or self._executor
        self._wanted_lock = threading.Lock()
        self._wanted: list[CopyKey] = []
        self._is_surveyed = not capacity_bytes
        self._generation = 0
        self._epoch = SharedEpoch(self.space, options.epoch_seconds, options.links.clock, self._wake)

    # the contract ----------------------------------------------------------------------------------------------------

    def contains(self, keys: Sequence[CopyKey]) -> list[bool]:
        return [one is Presence.HIT for one in self.presence(keys)]

    def presence(self, keys: Sequence[CopyKey]) -> list[Presence]:
        """What is known now of each; what is not known is asked for and PENDING. Never waits."""
        found, wanted = self._ledger.look(keys)
        if wanted:
            with self._wanted_lock:
                self._wanted += wanted
            self._background(self._look_up, self._lookups)
            found = self._ledger.presence(keys)  # an inline executor has answered already
        return found

    def pending_count(self, keys: Sequence[CopyKey]) -> int:
        return sum(one is Presence.PENDING for one in self._ledger.presence(keys))

    @property
    def is_down(self) -> bool:
        return self.links.is_down

    @property
    def is_resting(self) -> bool:
        return self.links.is_resting

    def delete(self, keys: Sequence[CopyKey]) -> int:
        """The number counts copies believed in; the server is told by the executor."""
        asked = list(dict.fromkeys(keys))
        count = self._ledger.drop(asked)

        def unlink() -> None:
            self._remove(asked)
            if self._ledger.drop(asked):  # a put that was under way has told of them meanwhile
                self._remove(asked)

        self._background(unlink, self._executor)
        return count

    def clear(self) -> None:
        """Every copy of the namespace, on every node, whoever wrote it; waits for the servers."""
        self._generation += 1
        super().clear()
        self._ledger.clear()
        self.space.unlink_copies()  # TierError when a node cannot be reached
        self._ledger.clear()

    def touch(self, keys: Sequence[CopyKey]) -> None:
        due = self._ledger.touch(keys)

        def renew() -> None:
            self._renew(due)

        if due:
            self._background(renew, self._executor)

    @property
    def used_bytes(self) -> int:
        return self._ledger.used_bytes

    @property
    def capacity_bytes(self) -> int:
        """The cap; without one a number that nothing exceeds."""
        return self._ledger.capacity_bytes or sys.maxsize

    def close(self) -> None:
        super().close()
        if self._lookups is not self._executor:
            self._lookups.close()
        self.links.close()

    def check_invariants(self) -> None:
        self._ledger.check()

    # for operators and resets ----------------------------------------------------------------------------------------

    def read_epoch(self) -> int:
        return self._epoch.read()

    def raise_epoch(self, least: int = 0) -> int:
        return self._epoch.rise(least)

    def seen_epoch(self) -> int | None:
        return self._epoch.seen(lambda task: self._background(task, self._lookups))

    def describe_root(self, root: bytes, description: Mapping[str, str]) -> None:
        self.space.describe(root, description)

    # hooks -----------------------------------------------------------------------------------------------------------

    def _put_one(self, job: Job) -> ResultCode:
        raise NotImplementedError  # batches only

    def _get_one(self, job: Job, claim: Any) -> ResultCode:
        raise NotImplementedError

    def _put_batch(self, transfer: Transfer, jobs: Sequence[Job]) -> list[ResultCode]:
        generation = self._generation
        results: dict[CopyKey, ResultCode] = {}
        fresh: list[Job] = []
        still = self._renew([job.key for job in jobs if self._ledger.holds(job.key)])
        for job in {job.key: job for job in jobs}.values():
            reply = still.get(job.key, 0)
            if reply != 0:  # believed in: there, or nobody can say
                results[job.key] = ResultCode.OK if reply == 1 else self._failure(reply)
            elif not job.size_bytes:
                results[job.key] = ResultCode.FAILED
                self._count("empty_payload")
            else:
                fresh.append(job)
        for batch in _by_bytes(fresh):
            results |= self._write(transfer, batch, generation)
        self.space.renew_descriptions({job.key.root for job in fresh})
        return [results[job.key] for job in jobs]

    def _get_batch(self, transfer: Transfer, jobs: Sequence[Job], claims: Sequence[Any]) -> list[ResultCode]:
        orders = [Order(self._names.of(job.key), job.size_bytes, job) for job in jobs]
        sinks: dict[int, FrameSink] = {}

        def work(wire: Wire, node: Node, window: Sequence[Order], asking: bool) -> list[Reply]:
            def ask() -> list[Reply]:
                items = []
                for order in window:  # new ones: this may be the second try
                    job = order.item
                    sink = FrameSink(job, self._form_of(job), self._secret)
                    sinks[id(order)] = sink
                    items.append((order.name, sink))
                return wire.get(items, self._ttl_ms, node.has_getex, asking)

            replies = ask()
            if node.has_getex and any(isinstance(one, ErrorReply) and self._cannot_getex(one) for one in replies):
                node.has_getex = False
                replies = ask()
            return replies

        dispatch(self.links, [order for order in orders if order.size_bytes], work, lambda: transfer.cancelled)
        results, bad = [], []
        for order in orders:
            code = self._read_result(order, sinks.get(id(order)))
            results.append(code)
            if code is ResultCode.CORRUPT:
                bad.append(order.item.key)
        self._remove(bad)
        return results

    def _cannot_getex(self, reply: ErrorReply) -> bool:
        """Redis before 6.2, an ACL without it, or a URL that names a replica, where GETEX is a write."""
        if reply.code == "READONLY":
            return self.address.topology is Topology.SINGLE
        return reply.code == "NOPERM" or "unknown command" in reply.line.lower()

    def _get_layers(self, transfer: Transfer, jobs: Sequence[Job], claims: Sequence[Any]) -> list[ResultCode]:
        orders = [Order(self._names.of(job.key), job.size_bytes, job) for job in jobs]
        forms = [self._form_of(job) if job.size_bytes else None for job in jobs]
        whole = partial(self._get_batch, transfer, claims=())
        rounds = LayerRounds(transfer.progress, jobs, self._waker)
        ask = partial(ask_parts, self.links, transfer, ttl_ms=self._ttl_ms)
        results = get_by_layers(rounds, orders, forms, ask, whole, self._read_result)
        self._remove([job.key for job, code in zip(jobs, results, strict=True) if code is ResultCode.CORRUPT])
        return results

    def _read_result(self, order: Order, sink: FrameSink | PartSink | None) -> ResultCode:
        reply, key = order.reply, order.item.key
        if reply is None or not order.size_bytes:
            self._ledger.missed(key)
            return ResultCode.MISS
        is_wrong_type = isinstance(reply, ErrorReply) and reply.code == "WRONGTYPE"
        if not is_wrong_type and (sink is None or not isinstance(reply, int)):
            return self._failure(reply)
        fault = "type" if is_wrong_type or sink is None else sink.fault
        if fault is None and isinstance(reply, int):
            self._ledger.renewed(key, reply + _NAME_BYTES)
            return ResultCode.OK
        self._count(f"fault_{fault}")
        if fault in _OUR_SECRET_MATTER:
            self._ledger.missed(key)
            return ResultCode.MISS
        self._ledger.drop([key])
        return ResultCode.CORRUPT

    # writing ---------------------------------------------------------------------------------------------------------

    def _write(self, transfer: Transfer, jobs: Sequence[Job], generation: int) -> dict[CopyKey, ResultCode]:
        """Store copies that are not there. Room is made first: the cap holds at every moment."""
        results: dict[CopyKey, ResultCode] = {}
        orders: list[Order] = []
        if not self._is_surveyed:
            self._survey()
        limit = self._ledger.capacity_bytes or sys.maxsize
        for job in jobs:
            form = self._form_of(job)
            packed = None if self._packer is None else self._packer.pack(form.spec_of(job.key), job.rows)
            size = (form.stamp.header_bytes + job.size_bytes if packed is None else len(packed)) + _NAME_BYTES
            if size > min(limit, self._value_limit_bytes):
                results[job.key] = ResultCode.TOO_LARGE
                continue
            victims = self._ledger.pick_victims(size)
            if victims:
                self._evict(victims)
            if transfer.cancelled:
                results[job.key] = ResultCode.CANCELLED
                continue
            if not self._ledger.reserve(size):
                if orders:  # what is about to be written holds the room: write it, then it may be evicted
                    results |= self._send(transfer, orders, generation)
                    orders = []
                    self._evict(self._ledger.pick_victims(size))
                if not self._ledger.reserve(size):
                    results[job.key] = ResultCode.FULL
                    continue
            orders.append(Order(self._names.of(job.key), size, (job, form, packed)))
        return results | self._send(transfer, orders, generation)

    def _send(self, transfer: Transfer, orders: Sequence[Order], generation: int) -> dict[CopyKey, ResultCode]:
        def work(wire: Wire, node: Node, window: Sequence[Order], asking: bool) -> list[Reply]:
            return wire.put(map(self._put_order, window), self._ttl_ms, asking)

        dispatch(self.links, orders, work, lambda: transfer.cancelled)
        results = {}
        cleared = generation != self._generation
        for order in orders:
            key = order.item[0].key
            if order.reply == b"OK" and not cleared:
                self._ledger.stored(key, order.name, order.size_bytes)
                results[key] = ResultCode.OK
                continue
            self._ledger.unreserve(order.size_bytes)
            results[key] = ResultCode.CANCELLED if cleared else self._failure(order.reply)
        is_capped = self._ledger.capacity_bytes > 0
        unsure = [order for order in orders if cleared or (is_capped and _may_have_come(order.reply))]
        gone = self._unlink(order.item[0].key for order in unsure)
        for order in unsure if is_capped else ():  # written or not: what may be there is counted
            if not gone[order.item[0].key]:
                self._ledger.doubt(order.item[0].key, order.name, order.size_bytes)
        return results

    def _put_order(self, order: Order) -> PutOrder:
        job, form, packed = order.item
        pieces = [header_of(job, form, self._secret), *job.rows] if packed is None else [packed]
        return order.name, pieces, order.size_bytes - _NAME_BYTES

    def _survey(self) -> None:
        """Count what an earlier life of this process left; what is over the cap goes. TierError: try again later."""

        def adopt(found: list[tuple[bytes, int]]) -> None:
            sizes = [(name, size + _NAME_BYTES) for name, size in found]
            self._evict(self._ledger.pick_victims(sum(size for _, size in sizes)))
            over: list[Known] = [name for name, size in sizes if not self._ledger.adopt(name, size)]
            self._unlink(over)

        self.space.survey(adopt)
        self._is_surveyed = True

    def _evict(self, victims: Sequence[Known]) -> None:
        if victims:
            self._count("evicted", self._remove(victims))

    def _remove(self, leaving: Sequence[Known]) -> int:
        """Unlink what the ledger has as leaving; how many the server confirms. The others stay counted."""
        done = self._unlink(leaving) if leaving else {}
        self._ledger.gone(one for one in leaving if done[one])
        self._ledger.stay(one for one in leaving if not done[one])
        return sum(done.values())

    def _unlink(self, keys: Iterable[Known]) -> dict[Known, bool]:
        """Which of them the server confirms to be gone."""
        orders = [Order(one if isinstance(one, bytes) else self._names.of(one), 0, one) for one in keys]
        command_each(self.links, orders, lambda order: [b"UNLINK", order.name])
        return {order.item: isinstance(order.reply, int) for order in orders}

    def _renew(self, keys: Sequence[CopyKey]) -> dict[CopyKey, Reply | Lost]:
        """Set times to live anew; 1 where a copy is there, 0 where it is gone."""
        orders = [Order(self._names.of(key), 0, key) for key in keys]
        command_each(self.links, orders, lambda order: [b"PEXPIRE", order.name, b"%d" % self._ttl_ms])
        for order in orders:
            if order.reply == 1:
                self._ledger.renewed(order.item)
            elif order.reply == 0:
                self._ledger.missed(order.item)
        return {order.item: order.reply for order in orders}

    def _look_up(self) -> None:
        with self._wanted_lock:
            keys, self._wanted = self._wanted, []
        orders = [Order(self._names.of(key), 0, key) for key in keys]
        command_each(self.links, orders, lambda order: [b"STRLEN", order.name])
        for order in orders:
            if isinstance(order.reply, int):
                self._ledger.answer(order.item, order.reply + _NAME_BYTES if order.reply > 0 else None)
            else:
                self._ledger.unanswered(order.item)
                self._count("lookup_failed")
        self._wake()

    def _wake(self) -> None:
        """Something that was asked for in the background is known now."""
        waker = self._waker
        if waker is not None:
            waker()

    def _failure(self, reply: Reply | Lost) -> ResultCode:
        if isinstance(reply, Lost):
            if reply.cause == INTERRUPTED:
                return ResultCode.CANCELLED
            self._count(f"down_{reply.cause}")
        elif isinstance(reply, ErrorReply):
            self._count(f"refused_{reply.code}")
            if reply.code == "OOM":
                return ResultCode.FULL
        else:
            self._count("refused_unexpected")
        return ResultCode.FAILED

    def _background(self, task: Callable[[], None], executor: Executor) -> None:
        """Work that nobody waits for. A closed tier lets it be."""
        if not self._closed:
            try:
                executor.submit(task)
            except Exception as error:  # counted by cause: beliefs stay as they are
                self._count(f"failed_{type(error).__name__}")


def _may_have_come(reply: Reply | Lost) -> bool:
    """Whether a server that gave no answer may have taken the command all the same."""
    return isinstance(reply, Lost) and reply.cause != BREAKER_OPEN


def _by_bytes(jobs: Sequence[Job], limit_bytes: int = 16 << 20) -> Iterable[list[Job]]:
    """Parts of at most `limit_bytes`, so that room is made for a part at a time."""
    part: list[Job] = []
    size = 0
    for job in jobs:
        if part and size + job.size_bytes > limit_bytes:
            yield part
            part, size = [], 0
        part.append(job)
        size += job.size_bytes
    if part:
        yield part


__all__ = ["RedisOptions", "RedisTier", "TierError"]
