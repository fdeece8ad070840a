"""The daemon's sockets and life: one socket path, a thread a connection, a watcher for clients that die.

`start` returns when clients can connect and store; `stop` drains. `stats` and `admin` are what operators see: any
thread. Two daemons on one path are refused by a lock file; a socket that a dead one left is replaced.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allocator.errors import ConfigError, TierError
from kvstore.daemon import protocol
from kvstore.daemon.admin import Admin
from kvstore.daemon.core import Core
from kvstore.daemon.door import Door
from kvstore.daemon.forms import KnownForms
from kvstore.daemon.handover import Handover
from kvstore.daemon.pace import Pace
from kvstore.daemon.protocol import Cause
from kvstore.daemon.recording import from_environment as recording_from
from kvstore.daemon.session import Session, close_heard, has_died
from kvstore.daemon.settings import DaemonSettings
from kvstore.daemon.socket_lock import locked_directory
from kvstore.daemon.stats import snapshot
from kvstore.frame.specs import SpecSource
from kvstore.tier import Tier

if TYPE_CHECKING:
    from kvstore.daemon.notify import NotifySocket
    from kvstore.event_feed import EventFeed

_PEER_PID_FD = 77  # SO_PEERPIDFD, Linux 6.5
_SHORT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_BACKLOG = 48  # a flood fills it: who connects then waits as long as the door needs for so many
_SHARE_SECONDS = 0.1  # until who asks much has no more of the rate than its part
_TICK_SECONDS = 0.05
_LISTEN_BUFFER_BYTES = 4 * protocol.LONGEST_BYTES


class Daemon:
    """See the module. lowers: tiers below the arena, fast to slow; None: those that the settings name.

    notify: who keeps shared memory over a restart, and `found` what it gave back: descriptors by name.
    """

    def __init__(
        self,
        settings: DaemonSettings,
        lowers: Sequence[Tier] | None = None,
        *,
        notify: NotifySocket | None = None,
        found: Mapping[str, list[int]] | None = None,
    ) -> None:
        self.settings = settings
        self.path = Path(settings.socket_path)
        self.is_ready = False
        self.started_seconds = time.monotonic()
        self._sessions: dict[Session, threading.Thread] = {}
        self._sessions_lock = threading.Lock()
        self._by_uid: Counter[int] = Counter()
        self._door = Door()
        self._pace = Pace(settings.requests_per_second)
        self._stopping = threading.Event()
        self._listener: socket.socket | None = None
        self._feed: EventFeed | None = None
        self._threads: list[threading.Thread] = []
        self._lock_fd = locked_directory(self.path, settings)
        try:
            forms = KnownForms()
            lowers = own_tiers(settings, forms) if lowers is None else lowers
            handover = None if notify is None else Handover(settings, notify, found or {})
            self.core = Core(settings, lowers, forms, handover=handover)
        except BaseException:
            os.close(self._lock_fd)
            raise
        self.admin = Admin(self.core)

    def start(self) -> None:
        """Listen. TierError when the socket cannot be made."""
        self.path.unlink(missing_ok=True)  # ours by the lock: whoever made it is dead
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listener.bind(str(self.path))
            os.chmod(self.path, 0o600 if self.settings.is_private else 0o666)
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise TierError(f"socket {self.path}: cannot be made ({error.strerror})") from error
        self._listener = listener
        self.core.recording = recording_from(os.environ)
        self._feed = event_feed(self.core, self.settings)
        for work in (self._accept, self._watch):
            thread = threading.Thread(target=work, name=f"kvstore-{work.__name__.strip('_')}", daemon=True)
            thread.start()
            self._threads.append(thread)
        self.is_ready = True

    def stop(self, drain_seconds: float | None = None) -> bool:
        """Refuse new clients, end the others, write down what waits; whether all of it was. Idempotent."""
        if self._stopping.is_set():
            return True
        self._stopping.set()
        self.is_ready = False
        if self._listener is not None:
            self.path.unlink(missing_ok=True)
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        with self._sessions_lock:
            sessions = dict(self._sessions)
        for session in sessions:
            session.interrupt()
        for thread in [*self._threads, *sessions.values()]:
            thread.join(5.0)
        if self._feed is not None:
            self._feed.close()
        if self.core.recording is not None:
            self.core.recording.close()
        drained = self.core.close(self.settings.drain_seconds if drain_seconds is None else drain_seconds)
        os.close(self._lock_fd)
        return drained

    def stats(self) -> dict[str, Any]:
        """A snapshot for dashboards: tiers, arenas, clients, leases, pins, tenants, counts. Plain values only."""
        with self._sessions_lock:
            sessions = list(self._sessions)
        found, pins = snapshot(self.core, sessions), self.admin.pins()
        found["leases"]["pinned_copies"] += sum(one["copies"] for one in pins)
        return found | {
            "pins": pins,
            "ready": self.is_ready,
            "uptime_seconds": time.monotonic() - self.started_seconds,
        }

    # connections -----------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        listener = self._listener
        assert listener is not None
        while not self._stopping.is_set():
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if self._stopping.is_set():
                    return
                self._count(f"accept_failed_{error.errno}")  # out of descriptors, say: those we have go on
                time.sleep(0.05)
                continue
            delay = self._door.delay_seconds(time.monotonic())
            if delay:  # a flood waits in the backlog, not on everybody's time
                self._count("accepts_delayed")
                time.sleep(delay)
            self._welcome(sock)

    def _welcome(self, sock: socket.socket) -> None:
        try:
            pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            uid &= 0xFFFFFFFF
            cause = self._why_not(uid, pid)
            if cause is not None:
                self._count(f"refused_{cause.name.lower()}")
                sock.setblocking(False)
                sock.send(protocol.encode(protocol.Refused(0, cause)))
                close_heard(sock)
                return
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LISTEN_BUFFER_BYTES)
            session = Session(self.core, sock, uid, pid, _pid_fd(sock, pid), self._pace)
        except OSError as error:
            self._count(f"accept_failed_{error.errno}")
            sock.close()
            return
        thread = threading.Thread(target=self._serve, args=(session,), name="kvstore-client", daemon=True)
        with self._sessions_lock:
            self._sessions[session] = thread
            self._by_uid[uid] += 1
        try:
            thread.start()
        except RuntimeError:  # the system has no more threads for us
            self._count("accept_failed_thread")
            self._forget(session)
            session.end()

    def _why_not(self, uid: int, pid: int) -> Cause | None:
        if not self.settings.may_connect(uid):
            return Cause.UID
        if self._stopping.is_set():
            return Cause.STOPPING
        with self._sessions_lock:
            full = len(self._sessions) >= self.settings.clients_limit
            if full or self._by_uid[uid] >= self.settings.clients_per_uid:
                return Cause.CLIENTS
        return None if self._door.lets_in(pid, time.monotonic()) else Cause.PACE

    def _serve(self, session: Session) -> None:
        try:
            session.serve()
        finally:
            if session.was_cut_off:
                self._door.punish(session.pid)
            self._forget(session)

    def _forget(self, session: Session) -> None:
        with self._sessions_lock:
            self._sessions.pop(session, None)
            self._pace.ended(session)
            self._by_uid[session.uid] -= 1
            if not self._by_uid[session.uid]:
                del self._by_uid[session.uid]

    def _watch(self) -> None:
        """Clients that died while another process keeps their socket open, leases whose time is up, shares of rate."""
        settled = time.monotonic()
        while not self._stopping.wait(_TICK_SECONDS):
            with self._sessions_lock:
                sessions = list(self._sessions)
            dead = set(_dead_of([one.holder.pid_fd for one in sessions if one.holder is not None]))
            for session in sessions:
                if session.holder is not None and session.holder.pid_fd in dead:
                    session.interrupt()
            self.core.reap(lambda holder: has_died(holder.pid_fd))
            self.core.tick()
            self.admin.tick()
            now = time.monotonic()
            if now >= settled + _SHARE_SECONDS:
                self._pace.settle(sessions, now - settled)
                settled = now

    def _count(self, cause: str) -> None:
        with self.core.lock:
            self.core.counts[cause] += 1


def event_feed(core: Core, settings: DaemonSettings) -> EventFeed | None:
    """The publisher of KV events, where the settings ask for one. ConfigError when it cannot be had."""
    if not settings.events_endpoint:
        return None
    try:
        from kvstore.event_feed import EventFeed
    except ImportError as error:
        raise ConfigError(f"events_endpoint: {error}; expected pyzmq (the extra `daemon`)") from error
    return EventFeed(
        core.events,
        settings.events_endpoint,
        replay_endpoint=settings.events_replay_endpoint,
        snapshot=core.everything,
    )


def own_tiers(settings: DaemonSettings, specs: SpecSource) -> list[Tier]:
    """Disk and remote as the settings name them. What was opened is closed again when a later one cannot be."""
    store, tiers = settings.store, list[Tier]()
    try:
        if store.disk_path:
            from kvstore.disk_tier.tier import DiskTier
            from kvstore.executor import ThreadExecutor

            executor = ThreadExecutor("kvstore-disk")
            secret = store.secret.encode() or None
            tiers.append(
                DiskTier(store.disk_path, store.disk_bytes, executor, sync=store.disk_sync, specs=specs, secret=secret)
            )
        if store.redis_url:
            from kvstore.executor import ThreadExecutor
            from kvstore.redis_tier.tier import RedisOptions, RedisTier

            options = RedisOptions(lookup_executor=ThreadExecutor("kvstore-lookup"))
            tiers.append(
                RedisTier(
                    store.redis_url,
                    ThreadExecutor("kvstore-redis"),
                    capacity_bytes=store.redis_bytes,
                    ttl_seconds=store.redis_ttl_seconds,
                    secret=store.secret.encode() or None,
                    spec_of=specs,
                    options=options,
                )
            )
    except BaseException:
        for tier in tiers:
            tier.close()
        raise
    return tiers


def _pid_fd(sock: socket.socket, pid: int) -> int:
    """The peer as a descriptor that cannot come to mean another process; -1 where there is none. OSError when none is
    free: who is let in without one would be taken for dead when its connection ends."""
    try:
        return sock.getsockopt(socket.SOL_SOCKET, _PEER_PID_FD)
    except OSError as error:
        if error.errno in _SHORT_OF_DESCRIPTORS:
            raise
        if error.errno != errno.ENOPROTOOPT or pid <= 0:
            return -1  # it is dead already: its number may be another's by now
    try:
        found = os.pidfd_open(pid)
    except OSError as error:
        if error.errno in _SHORT_OF_DESCRIPTORS:
            raise
        return -1
    poller = select.poll()
    poller.register(sock, select.POLLRDHUP)
    if poller.poll(0):  # died meanwhile, so this may be another one
        os.close(found)
        return -1
    return found


def _dead_of(pid_fds: Sequence[int]) -> list[int]:
    poller = select.poll()
    for descriptor in pid_fds:
        if descriptor >= 0:
            poller.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, event in poller.poll(0) if not event & select.POLLNVAL]
