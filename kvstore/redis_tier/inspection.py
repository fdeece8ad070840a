"""Inspection of a namespace on Redis or Valkey: what is in it, whether it is whole, and, asked for, deletion.

SCAN, never KEYS; a page of names and some MiB of values at a time, whatever is stored. A key that moves between servers
meanwhile is followed. Reads do not count as uses where the server can be told so (CLIENT NO-TOUCH), and change no time
to live. One thread; waits for the servers.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from allocator.errors import TierError, UsageError
from kvstore.copy_key import CopyKey
from kvstore.frame.inspection import START_BYTES, check_frame, read_statement, stated_spec
from kvstore.frame.parsing import FrameFault
from kvstore.inspection import MOST_WORDS, Advance, Family, Findings, Selection, family_name, printable
from kvstore.redis_tier.dispatch import Lost, Order, dispatch
from kvstore.redis_tier.frames import KeyNames
from kvstore.redis_tier.links import LinkOptions, Links, Node, NodeDownError
from kvstore.redis_tier.protocol import ErrorReply, Reply, Wire, WireError
from kvstore.redis_tier.url import RedisAddress
from kvstore.tier import Buffer

_SCAN_COUNT = b"250"
_MOST_WORDS_BYTES = 4096
_MOST_ROOTS = 4096
_NO_TOUCH = [b"CLIENT", b"NO-TOUCH", b"ON"]
_NAME = re.compile(
    rb"([0-9a-f]{64}):g([0-9]{1,5}):((?:[A-Za-z0-9_.-]|%[0-9a-f]{2}){1,48}):([xl])"
    rb":h([0-9]{1,5})-([0-9]{1,5}):l([0-9]{1,5})-([0-9]{1,5}):p(0|[0-9a-f]{16}):([0-9a-f]{64})"
)


def parse_name(text: bytes) -> tuple[CopyKey, str] | None:
    """A copy's name without its namespace -> its key (parameters unknown) and what stands for the parameters."""
    match = _NAME.fullmatch(text)
    if match is None:
        return None
    root, group, codec, form, *ends, parameters, hash = (part.decode("ascii") for part in match.groups())
    try:
        codec = re.sub("%(..)", lambda found: chr(int(found[1], 16)), codec)
        heads, layers = (int(ends[0]), int(ends[1])), (int(ends[2]), int(ends[3]))
        key = CopyKey(bytes.fromhex(root), int(group), bytes.fromhex(hash), codec, form == "x", heads, layers)
    except UsageError:
        return None
    return key, parameters


class NamespaceInspector:
    """See the module. close() when done."""

    def __init__(self, address: RedisAddress, *, secret: bytes | None, timeout_seconds: float = 5.0) -> None:
        self._address = address
        self._names = KeyNames(address.namespace)
        self._secret = secret
        limits = LinkOptions(timeout_seconds=timeout_seconds, connect_timeout_seconds=min(2.0, timeout_seconds))
        self._links = Links(address, limits)

    def close(self) -> None:
        self._links.close()

    def inspect(self, *, verify: bool, selection: Selection, delete: str, advance: Advance) -> Findings:
        """delete: "none", "corrupt" or "selected". A server that cannot be reached is one of the problems."""
        findings = Findings(f"{self._address} namespace {self._names.namespace}", "redis", verify)
        try:
            nodes = self._links.nodes()
        except NodeDownError as error:
            findings.add_problem(f"{self._address} cannot be reached: {error}")
            return findings
        alive = [node for node in nodes if self._read_words(node, findings)]
        total = sum(self._size(node) for node in alive)
        done = 0
        for node in alive:
            try:
                for page in self._pages(node, b":*"):
                    done += len(page)
                    advance(done, total)
                    self._look(page, verify, selection, delete, findings)
            except TierError as error:
                findings.add_problem(str(error))
        findings.repaired = delete == "corrupt" and findings.deleted_count >= sum(findings.corrupt.values())
        return findings

    # names -----------------------------------------------------------------------------------------------------------

    def _pages(self, node: Node, pattern: bytes) -> Iterator[list[bytes]]:
        cursor, pattern = b"0", self._names.namespace.encode("ascii") + pattern
        while True:
            try:
                (found,) = node.run(
                    lambda wire, at=cursor: wire.call([[b"SCAN", at, b"MATCH", pattern, b"COUNT", _SCAN_COUNT]]),  # type: ignore[misc]
                    force=True,
                )
            except (NodeDownError, WireError) as error:
                raise TierError(f"{node.name} cannot be reached: {error}") from None
            if not isinstance(found, list) or len(found) != 2 or not isinstance(found[1], list):
                raise TierError(f"{node.name}: SCAN gave {printable(str(found))}")
            cursor = found[0]
            if page := [name for name in found[1] if isinstance(name, bytes)]:
                yield page
            if cursor == b"0":
                return

    def _size(self, node: Node) -> int:
        try:
            (size,) = node.run(lambda wire: wire.call([[b"DBSIZE"]]), force=True)
        except (NodeDownError, WireError):
            return 0
        return size if isinstance(size, int) else 0

    def _read_words(self, node: Node, findings: Findings) -> bool:
        """What roots stand for, as their writers said; False when the node cannot be reached."""
        start = self._names.root(b"")
        try:
            for page in self._pages(node, b":root:*"):
                asked = [name for name in page if len(name) == len(start) + 64]
                replies = self._ask(asked, lambda name: [[b"GETRANGE", name, b"0", b"%d" % _MOST_WORDS_BYTES]])
                for name, reply in zip(asked, replies, strict=True):
                    text = reply[0] if isinstance(reply, list) else None
                    words = _words(text) if isinstance(text, bytes) else None
                    root = name[len(start) :].decode("ascii", "replace")
                    if words is not None and len(findings.words) < _MOST_ROOTS:
                        findings.words[root] = words
        except TierError as error:
            findings.add_problem(str(error))
            return False
        return True

    # copies ----------------------------------------------------------------------------------------------------------

    def _look(self, page: list[bytes], verify: bool, selection: Selection, delete: str, findings: Findings) -> None:
        beside = (self._names.epoch, self._names.root(b""))
        start = len(self._names.namespace) + 1
        known: dict[bytes, tuple[CopyKey, str]] = {}
        for name in page:
            parsed = parse_name(name[start:])
            if parsed is not None:
                if selection.matches(family_name(*parsed), findings.words.get(parsed[0].root.hex(), {})):
                    known[name] = parsed
            elif not (name == beside[0] or name.startswith(beside[1])):
                findings.add_foreign(name)
        doomed = []
        for name, reply in zip(known, self._ask(list(known), _first_questions), strict=True):
            key, parameters = known[name]
            if self._judge(name, key, parameters, reply, verify, findings) or delete == "selected":
                doomed.append(name)
        if delete != "none" and doomed:
            self._unlink(doomed, known, findings)

    def _judge(
        self, name: bytes, key: CopyKey, parameters: str, reply: Reply | Lost, verify: bool, findings: Findings
    ) -> bool:
        """Count one copy; True when it is corrupt."""
        if not isinstance(reply, list):
            if reply is not None:
                self._refused(findings, reply)
            return False
        idle, ttl_ms, size, start = reply
        if ttl_ms == -2:
            findings.gone_count += 1
            return False
        text = name.decode("ascii")
        if isinstance(size, ErrorReply):
            if size.code != "WRONGTYPE":
                self._refused(findings, size)
                return False
            return findings.judge(findings.add(family_name(key, parameters), 0), text, "type")
        assert isinstance(size, int)
        family = findings.add(family_name(key, parameters), size)
        if isinstance(ttl_ms, int) and ttl_ms >= 0:
            family.ttl_seconds.add(ttl_ms / 1000)
        elif ttl_ms == -1:
            findings.add_note("some copies never expire: no store wrote them so")
        if isinstance(idle, int):
            family.idle_seconds.add(idle)
        if not isinstance(start, bytes):
            if isinstance(start, ErrorReply) and verify:
                self._refused(findings, start)
            return False
        if not verify:
            return False
        try:
            cause = self._fault(name, key, parameters, size, start, family, findings)
        except _GoneError:
            findings.gone_count += 1
            return False
        except TierError as error:
            findings.add_problem(str(error))
            return False
        return findings.judge(family, text, cause)

    def _fault(
        self, name: bytes, key: CopyKey, parameters: str, size: int, start: bytes, family: Family, findings: Findings
    ) -> str | None:
        read = self._reader(name, start)
        statement = read_statement(read, size)
        if isinstance(statement, FrameFault):
            return statement
        stated = hashlib.sha256(statement.parameters).hexdigest()[:16] if statement.parameters else "0"
        if stated != parameters:
            return FrameFault.PARAMETERS
        spec = stated_spec(statement, CopyKey(*key[:7], statement.parameters))
        if isinstance(spec, FrameFault):
            return spec
        cause = check_frame(read, size, spec, statement, self._secret)
        if cause is None or cause in (FrameFault.NO_SECRET, FrameFault.UNSIGNED):
            findings.note_shape(family, statement)
        return cause

    def _reader(self, name: bytes, start: bytes) -> Callable[[int, int], bytes]:
        def read(offset: int, length: int) -> bytes:
            if offset + length <= len(start):
                return start[offset : offset + length]
            (reply,) = self._ask(
                [name], lambda one: [[b"GETRANGE", one, b"%d" % offset, b"%d" % (offset + length - 1)]]
            )
            found = reply[0] if isinstance(reply, list) else reply
            if found == b"":
                raise _GoneError
            if not isinstance(found, bytes):
                raise TierError(f"{printable(name.decode('utf-8', 'replace'))} could not be read: {found}")
            return found

        return read

    def _refused(self, findings: Findings, reply: Reply | Lost) -> None:
        findings.add_problem(f"some copies could not be read: {printable(str(getattr(reply, 'line', reply)))}")

    def _unlink(self, names: list[bytes], known: dict[bytes, tuple[CopyKey, str]], findings: Findings) -> None:
        for name, reply in zip(names, self._ask(names, lambda name: [[b"UNLINK", name]]), strict=True):
            if isinstance(reply, list) and isinstance(reply[0], int):
                findings.deleted_count += reply[0]
                findings.family(family_name(*known[name])).deleted_count += reply[0]
            else:
                self._refused(findings, reply[0] if isinstance(reply, list) else reply)

    def _ask(self, names: Sequence[bytes], questions: Callable[[bytes], list[list[bytes]]]) -> list[Reply | Lost]:
        """A list of replies for each name, or what its server said or did instead."""

        def work(wire: Wire, _: Node, window: Sequence[Order], asking: bool) -> list[Reply]:
            wire.call([_NO_TOUCH])
            asked = [questions(order.name) for order in window]
            replies = wire.call([question for one in asked for question in one], asking)
            return list(_by_order(replies, [len(one) for one in asked]))

        orders = [Order(name, START_BYTES) for name in names]
        if orders:
            dispatch(self._links, orders, work)
        return [order.reply for order in orders]


class _GoneError(Exception):
    """The copy went while it was read."""


def _first_questions(name: bytes) -> list[list[bytes]]:
    return [
        [b"OBJECT", b"IDLETIME", name],
        [b"PTTL", name],
        [b"STRLEN", name],
        [b"GETRANGE", name, b"0", b"%d" % (START_BYTES - 1)],
    ]


def _by_order(replies: Iterable[Reply], counts: Sequence[int]) -> Iterator[Reply]:
    """Replies again by order; a redirection in place of the list, so that the order goes where it points."""
    waiting = iter(replies)
    for count in counts:
        mine = [next(waiting) for _ in range(count)]
        moved = [one for one in mine if isinstance(one, ErrorReply) and one.code in ("MOVED", "ASK", "READONLY")]
        yield moved[0] if moved else mine


def _words(text: Buffer) -> dict[str, str] | None:
    """A root's description; None for anything else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    return {printable(word): printable(str(value)) for word, value in list(found.items())[:MOST_WORDS]}
