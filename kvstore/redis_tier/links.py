"""The one file that imports redis-py: it owns authentication, TLS, Sentinel and Cluster topology; we own the bytes.

A Node is one server that takes commands: the server, the service's present master, or one primary of a cluster. It
keeps connections of redis-py's pool, wraps their sockets (DirectWire) and drops a connection after anything that was
not a whole, expected reply. Outside the tested range of redis-py, or where its connections look strange, commands go
through its public calls (PlainWire): slower, same results.

Any thread: a connection is used by one call at a time; topology calls hold redis-py's own locks.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.crc import key_slot
from redis.exceptions import AskError, MovedError, RedisClusterException, RedisError
from redis.retry import Retry
from redis.sentinel import Sentinel

from kvstore.circuit_breaker import CircuitBreaker
from kvstore.redis_tier.plain import PlainWire
from kvstore.redis_tier.protocol import ErrorReply, InterruptedCallError, Wire, WireError, WireTimeoutError
from kvstore.redis_tier.url import RedisAddress, Topology
from kvstore.redis_tier.wire import DirectWire

TESTED = ((6, 0), (9, 0))
"""From, and below: versions of redis-py whose connections are used directly."""

_REFRESH_SECONDS = 0.5
_T = TypeVar("_T")


class NodeDownError(Exception):
    """This server cannot be used now. `cause` is a word to count by."""

    def __init__(self, cause: str, detail: str = "") -> None:
        super().__init__(f"{cause}: {detail}" if detail else cause)
        self.cause = cause


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """timeout_seconds: of one batch on a server that answers nothing; plain: never use connections directly."""

    timeout_seconds: float = 0.5
    connect_timeout_seconds: float = 0.25
    pause_seconds: float = 0.25  # for which a server that failed is left alone; doubles up to 1.5 seconds
    plain: bool = False
    clock: Callable[[], float] = time.monotonic


def is_tested(version: str) -> bool:
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    return TESTED[0] <= numbers < TESTED[1]


def _cause(error: Exception) -> str:
    if isinstance(error, redis.AuthenticationError | redis.exceptions.NoPermissionError):
        return "auth"
    if isinstance(error, redis.TimeoutError | TimeoutError):
        return "timeout"
    if isinstance(error, redis.ConnectionError | OSError):
        text = str(error).lower()
        return "auth" if "password" in text or "noauth" in text else "unreachable"
    return type(error).__name__.lower()


def _is_parser_empty(parser: object) -> bool:
    """Nothing read ahead. AttributeError when this parser cannot say."""
    reader = getattr(parser, "_reader", None)
    if reader is not None:
        return not reader.has_data()
    return parser._buffer.unread_bytes() == 0  # type: ignore[attr-defined,no-any-return]


@dataclass(slots=True)
class _Held:
    wire: Wire
    connection: Any = None
    pool: Any = None

    @property
    def is_quiet(self) -> bool:
        return not isinstance(self.wire, DirectWire) or self.wire.is_quiet

    def drop(self) -> None:
        if isinstance(self.wire, DirectWire):
            self.wire.close()
        if self.connection is not None:
            self.connection.disconnect()
            self.pool.release(self.connection)


@dataclass(eq=False)
class Node:
    """See the module. `client` is redis-py's client of this server."""

    name: str
    client: Any
    options: LinkOptions
    has_getex: bool = True
    breaker: CircuitBreaker = field(init=False)
    _idle: deque[_Held] = field(init=False, default_factory=deque)

    def __post_init__(self) -> None:
        self.breaker = CircuitBreaker(first_pause_seconds=self.options.pause_seconds, clock=self.options.clock)
        self.client.connection_pool.connection_kwargs["retry"] = Retry(NoBackoff(), 0)

    def run(self, work: Callable[[Wire], _T], *, stopped: Callable[[], bool] | None = None, force: bool = False) -> _T:
        """Do `work` on a connection. NodeDownError: it cannot be used now; InterruptedCallError: `stopped` said so.

        A kept connection that turns out to be closed is replaced once: every command here may be sent twice.
        """
        if not (force or self.breaker.allow()):
            raise NodeDownError("breaker_open")
        for last in (False, True):
            held = None
            try:
                probe = self.breaker.is_open
                held, fresh = self._borrow()
                if isinstance(held.wire, DirectWire):
                    held.wire.stopped = stopped
                if probe:
                    held.wire.call([[b"PING"]])
                result = work(held.wire)
            except InterruptedCallError:
                self._end(held)
                self.breaker.left()
                raise
            except WireError as error:
                self._end(held)
                if not (last or fresh or isinstance(error, WireTimeoutError)):
                    self.forget_connections()
                    continue
                self.breaker.failed()
                raise NodeDownError(error.cause, str(error)) from None
            except NodeDownError:
                self.breaker.failed()
                raise
            except BaseException:
                self._end(held)
                self.breaker.left()
                raise
            self.breaker.succeeded()
            self._idle.append(held)
            return result
        raise AssertionError("unreachable: the second try returns or raises")

    def forget_connections(self) -> None:
        """Drop what is kept: after a failover, or when one of them was closed."""
        while self._idle:
            self._idle.pop().drop()

    def close(self) -> None:
        self.forget_connections()
        self.client.close()
        self.client.connection_pool.disconnect()

    def _end(self, held: _Held | None) -> None:
        if held is not None:
            held.drop()

    def _borrow(self) -> tuple[_Held, bool]:
        while self._idle:
            held = self._idle.pop()
            if held.is_quiet:
                return held, False
            held.drop()
        return self._connect(), True

    def _connect(self) -> _Held:
        if self.options.plain:
            return _Held(PlainWire(self.client))
        pool = self.client.connection_pool
        try:
            connection = pool.get_connection()
        except (RedisError, OSError) as error:
            raise NodeDownError(_cause(error), f"{self.name}: {error}") from None
        sock = getattr(connection, "_sock", None)
        try:
            clean = _is_parser_empty(connection._parser)
        except AttributeError:
            sock = None
        if not isinstance(sock, socket.socket):
            pool.release(connection)
            return _Held(PlainWire(self.client))
        if not clean:
            connection.disconnect()
            pool.release(connection)
            raise NodeDownError("out_of_step", f"{self.name}: unread bytes on a new connection")
        wire = DirectWire(sock, self.options.timeout_seconds, clock=self.options.clock)
        return _Held(wire, connection, pool)


class Links:
    """All servers behind one address. Connects on first use, so that making it never waits."""

    def __init__(self, address: RedisAddress, options: LinkOptions) -> None:
        self.address = address
        self.options = options if is_tested(redis.__version__) else replace(options, plain=True)
        self._lock = threading.Lock()
        self._front = CircuitBreaker(first_pause_seconds=options.pause_seconds, clock=options.clock)
        self._cluster: Any = None  # a RedisCluster, whose methods have no types
        self._nodes: dict[str, Node] = {}
        self._refreshed_seconds = -1e9
        self._closed = False

    @property
    def is_plain(self) -> bool:
        return self.options.plain

    @property
    def is_down(self) -> bool:
        """The server, or the cluster's topology, could not be reached when it was last tried."""
        return any(one.is_open for one in self._breakers())

    @property
    def is_resting(self) -> bool:
        """No server may be tried now."""
        return any(one.is_resting for one in self._breakers())

    def _breakers(self) -> list[CircuitBreaker]:
        """Those of which each, alone, shuts everybody out."""
        nodes = list(self._nodes.values())
        return [self._front, *[one.breaker for one in nodes if len(nodes) == 1]]

    def node_for(self, key: bytes) -> Node:
        """The server that has this key. NodeDownError when the topology cannot be learned."""
        if self.address.topology is not Topology.CLUSTER:
            return self._only()
        cluster = self._opened_cluster()
        try:
            return self._node_of(cluster.nodes_manager.get_node_from_slot(key_slot(key)))
        except (RedisClusterException, RedisError, KeyError, IndexError) as error:
            self.refresh()
            raise NodeDownError("slot_uncovered", str(error)) from None

    def nodes(self) -> list[Node]:
        """Every server that has keys. NodeDownError when the topology cannot be learned."""
        if self.address.topology is not Topology.CLUSTER:
            return [self._only()]
        return [self._node_of(node) for node in self._opened_cluster().get_primaries()]

    def redirected(self, reply: ErrorReply) -> Node | None:
        """Tell the topology of MOVED; the node to ask for ASK, None to look the key up again."""
        cluster = self._opened_cluster()
        text = reply.line.partition(" ")[2]
        try:
            if reply.code == "ASK":
                asked = AskError(text)
                node = cluster.get_node(asked.host, asked.port)
                if node is None:
                    node = ClusterNode(asked.host, asked.port, "primary")
                    cluster.nodes_manager.nodes_cache[node.name] = node
                return self._node_of(node)
            moved = MovedError(text)
            if hasattr(cluster.nodes_manager, "move_slot"):
                cluster.nodes_manager.move_slot(moved)
            else:  # before redis-py 7
                cluster.nodes_manager.update_moved_exception(moved)
        except (RedisError, ValueError, IndexError):
            self.refresh()
        return None

    def refresh(self) -> None:
        """Learn the topology anew, at most every half second: after a node was lost."""
        for node in list(self._nodes.values()) if self.address.topology is Topology.SENTINEL else ():
            node.forget_connections()
        if self._cluster is None:
            return
        now = self.options.clock()
        with self._lock:
            if now - self._refreshed_seconds < _REFRESH_SECONDS:
                return
            self._refreshed_seconds = now
        with suppress(RedisClusterException, RedisError, OSError):  # the old topology stays; its nodes answer or not
            self._cluster.nodes_manager.initialize()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            nodes, self._nodes = list(self._nodes.values()), {}
            cluster, self._cluster = self._cluster, None
        for node in nodes:
            node.close()
        if cluster is not None:
            cluster.close()
            cluster.disconnect_connection_pools()

    # making clients --------------------------------------------------------------------------------------------------

    def _settings(self) -> dict[str, Any]:
        address, options = self.address, self.options
        settings: dict[str, Any] = {
            "username": address.username,
            "password": address.password,
            "socket_timeout": options.timeout_seconds,
            "socket_connect_timeout": options.connect_timeout_seconds,
            "protocol": 2,
        }
        if address.tls:
            settings |= {
                "ssl": True,
                "ssl_cert_reqs": "required" if address.tls_verify else "none",
                "ssl_check_hostname": address.tls_verify,
                "ssl_ca_certs": address.tls_ca,
                "ssl_certfile": address.tls_cert,
                "ssl_keyfile": address.tls_key,
            }
        return settings

    def _only(self) -> Node:
        with self._lock:
            if self._closed:
                raise NodeDownError("closed")
            node = self._nodes.get("")
            if node is None:
                node = self._nodes[""] = Node(str(self.address), self._make_client(), self.options)
            return node

    def _make_client(self) -> Any:
        address, settings = self.address, self._settings()
        settings |= {"db": address.database, "retry": Retry(NoBackoff(), 0)}
        if address.topology is Topology.SENTINEL:
            limits = ("socket_timeout", "socket_connect_timeout", "protocol", *(k for k in settings if k[:3] == "ssl"))
            asked = {name: settings[name] for name in limits} | {"retry": Retry(NoBackoff(), 0)}
            asked |= {"username": address.sentinel_user, "password": address.sentinel_password}
            return Sentinel(list(address.hosts), sentinel_kwargs=asked).master_for(address.service or "", **settings)
        if address.path is not None:
            return redis.Redis(unix_socket_path=address.path, **settings)
        host, port = address.hosts[0]
        return redis.Redis(host=host, port=port, **settings)

    def _opened_cluster(self) -> Any:
        with self._lock:
            if self._closed:
                raise NodeDownError("closed")
            if self._cluster is None:
                if not self._front.allow():
                    raise NodeDownError("breaker_open")
                try:
                    nodes = [ClusterNode(host, port) for host, port in self.address.hosts]
                    self._cluster = RedisCluster(
                        startup_nodes=nodes,
                        require_full_coverage=False,
                        **{name: value for name, value in self._settings().items() if value is not None},
                    )
                except (RedisClusterException, RedisError, OSError) as error:
                    self._front.failed()
                    raise NodeDownError(_cause(error), str(error)) from None
                self._front.succeeded()
            return self._cluster

    def _node_of(self, cluster_node: Any) -> Node:
        client = self._opened_cluster().get_redis_connection(cluster_node)
        with self._lock:
            node = self._nodes.get(cluster_node.name)
            if node is None or node.client is not client:
                if node is not None:
                    node.forget_connections()
                made = Node(cluster_node.name, client, self.options)
                if node is not None:
                    made.breaker, made.has_getex = node.breaker, node.has_getex
                node = self._nodes[cluster_node.name] = made
            return node
