"""Is an LMDB file whole? Its trees are walked by reading the file, before anybody maps it.

LMDB trusts its pages: a damaged length or offset in one makes it read past the map's end, which ends the process
(SIGBUS), or give live pages away as free ones. So every page that can be reached is looked at first: numbers, bounds of
nodes, order of keys, counts, and the list of free pages. What values say is not judged here; frames and records have
checksums. Knows format 1 (LMDB 0.9); of any other LMDB itself says that it cannot read it.

Costs a read of each tree page and of the first bytes of each page of a value. Any thread; no lock: the caller sees to
it that nobody writes, or holds a read transaction and names it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_META = struct.Struct("<QHHI II QQ")
_META_MAGIC, _META_VERSION = 0xBEEFC0DE, 1
_TABLE = struct.Struct("<IHHQQQQQ")  # padding, flags, depth, branch, leaf and overflow pages, entries, root
_TABLES_AT = _META.size
_LAST = struct.Struct("<QQ")  # last page, transaction
_PAGE = struct.Struct("<QHHHH")
_SPAN = struct.Struct("<QHHI")  # first page of a value: how many there are
_NODE = struct.Struct("<HHHH")
_NUMBER = struct.Struct("<Q")
_BRANCH, _LEAF, _VALUE = 1, 2, 4
_ON_PAGES, _TABLE_NODE = 1, 2  # a node's flags: its bytes lie on pages of their own; it is a table
_NO_ROOT = (1 << 64) - 1
_DEEPEST = 32
_KEY_MOST_BYTES = 511
_META_PAGES = 2
_FREE = "free"  # the tree of free pages


class _DamageError(Exception):
    """What is wrong, for people."""


class _Node(NamedTuple):
    """key; a leaf's flags and value, whole (b"" unless it was asked for), or a branch's child."""

    key: bytes
    flags: int
    value: bytes
    value_bytes: int
    child: int


class _Counts:
    __slots__ = ("branch", "entries", "leaf", "overflow")

    def __init__(self) -> None:
        self.branch = self.leaf = self.overflow = self.entries = 0


def find_damage(path: Path, transaction: int | None = None) -> str | None:
    """What is wrong with the file; None: nothing that could be. transaction: the state to look at; None: the newest.

    OSError when it cannot be read; LookupError when that state is not the newest any more.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _Walk(fd, os.fstat(fd).st_size).damage(transaction)
    finally:
        os.close(fd)


class _Walk:
    def __init__(self, fd: int, file_bytes: int) -> None:
        self._fd, self._file_bytes = fd, file_bytes
        self._page_bytes = self._page_count = 0
        self._seen = bytearray()

    def damage(self, transaction: int | None) -> str | None:
        try:
            meta = self._newest(transaction)
            if meta is None:
                return None
            free, main = (self._table(meta, _TABLES_AT + at * _TABLE.size) for at in range(2))
            for node in self._tree("main", main, with_values=True):
                if node.flags != _TABLE_NODE or node.value_bytes != _TABLE.size:
                    raise _DamageError("main: an entry that is no table")
                for _ in self._tree(repr(node.key), _TABLE.unpack(node.value)):
                    pass
            if transaction is None:  # those who only read do not use it
                self._check_free(free)
        except _DamageError as damage:
            return str(damage)
        return None

    def _newest(self, transaction: int | None) -> bytes | None:
        """The meta page that counts; None where this is no file of the format that is known here."""
        start = os.pread(self._fd, _TABLES_AT + 4, 0)
        if len(start) < _TABLES_AT + 4:
            return None
        magic, version = _META.unpack_from(start)[4:6]
        (page_bytes,) = struct.unpack_from("<I", start, _TABLES_AT)
        if (magic, version) != (_META_MAGIC, _META_VERSION):
            return None
        if page_bytes not in (1 << bits for bits in range(9, 17)):
            raise _DamageError(f"pages of {page_bytes} bytes")
        self._page_bytes = page_bytes
        last_at = _TABLES_AT + 2 * _TABLE.size
        metas = [os.pread(self._fd, last_at + _LAST.size, number * page_bytes) for number in range(_META_PAGES)]
        usable = [
            meta
            for meta in metas
            if len(meta) == last_at + _LAST.size and _META.unpack_from(meta)[4:6] == (magic, version)
        ]
        if not usable:
            raise _DamageError(f"{self._file_bytes} bytes; expected a whole page")
        meta = max(usable, key=lambda meta: meta[last_at + _NUMBER.size :][::-1])  # of the highest transaction
        last, number = _LAST.unpack_from(meta, last_at)
        if transaction is not None and number != transaction:
            raise LookupError(f"transaction {transaction} was asked for, {number} is there")
        if (last + 1) * page_bytes > self._file_bytes:
            raise _DamageError(f"{self._file_bytes} bytes; expected at least {(last + 1) * page_bytes}")
        self._page_count = last + 1
        self._seen = bytearray(self._page_count)
        self._seen[:_META_PAGES] = b"\1" * _META_PAGES
        return meta

    @staticmethod
    def _table(meta: bytes, at: int) -> tuple[int, ...]:
        return _TABLE.unpack_from(meta, at)

    # trees -----------------------------------------------------------------------------------------------------------

    def _tree(self, name: str, table: tuple[int, ...], *, with_values: bool = False) -> Iterator[_Node]:
        """Leaf nodes in order, each checked. A tree whose last node has come is as its counts say."""
        _, _, depth, *counted, root = table
        if (root == _NO_ROOT) != (depth == 0) or depth > _DEEPEST:
            raise _DamageError(f"{name}: {depth} levels and root {root}")
        found, last_key = _Counts(), b""
        waiting = [(root, depth, b"")] if depth else []
        while waiting:
            number, level, least = waiting.pop()
            if last_key >= least > b"":
                raise _DamageError(f"{name}: page {number}: keys out of order")
            nodes = self._nodes(name, number, _LEAF if level == 1 else _BRANCH, with_values, found)
            if level > 1:
                children = [(node.child, level - 1, node.key) for node in nodes]
                children[0] = (children[0][0], level - 1, least)
                waiting += children[::-1]
                continue
            for node in nodes:
                if node.key <= last_key or node.key < least:
                    raise _DamageError(f"{name}: page {number}: keys out of order")
                last_key = node.key
                yield node
        if counted != [found.branch, found.leaf, found.overflow, found.entries]:
            raise _DamageError(f"{name}: counts that do not fit")

    def _nodes(self, name: str, number: int, kind: int, with_values: bool, found: _Counts) -> list[_Node]:
        self._take(number, 1, name)
        page = os.pread(self._fd, self._page_bytes, number * self._page_bytes)
        own, _, flags, lower, upper = _PAGE.unpack_from(page)
        count = (lower - _PAGE.size) // 2
        if own != number or flags != kind or lower % 2 or count < 1 or not lower <= upper <= len(page):
            raise _DamageError(f"{name}: page {number} is none of this tree")
        nodes, used_bytes = [], 0
        for at in struct.unpack_from(f"<{count}H", page, _PAGE.size):
            if not upper <= at <= len(page) - _NODE.size:
                raise _DamageError(f"{name}: page {number}: a node outside")
            low, high, flags, key_bytes = _NODE.unpack_from(page, at)
            size = low | high << 16
            key_at = at + _NODE.size
            stored_bytes = 0 if kind == _BRANCH else _NUMBER.size if flags & _ON_PAGES else size
            end = key_at + key_bytes + stored_bytes
            used_bytes += (end - at + 1) & ~1
            if end > len(page) or key_bytes > _KEY_MOST_BYTES:
                raise _DamageError(f"{name}: page {number}: a node outside")
            key = page[key_at : key_at + key_bytes][:: -1 if name == _FREE else 1]  # there they are numbers
            if kind == _BRANCH:
                nodes.append(_Node(key, 0, b"", 0, size | flags << 32))
                continue
            if flags not in (0, _ON_PAGES, _TABLE_NODE):
                raise _DamageError(f"{name}: page {number}: a node of a kind that nobody makes here")
            value = page[key_at + key_bytes : end]
            if flags == _ON_PAGES:
                value = self._value(name, _NUMBER.unpack(value)[0], size, with_values, found)
            nodes.append(_Node(key, flags, value, size, 0))
        if used_bytes != len(page) - upper:
            raise _DamageError(f"{name}: page {number}: nodes that overlap")
        found.branch += kind == _BRANCH
        found.leaf += kind == _LEAF
        found.entries += count if kind == _LEAF else 0
        return nodes

    def _value(self, name: str, first: int, size: int, with_value: bool, found: _Counts) -> bytes:
        """A value on pages of its own: they are there, and its."""
        count = -(-(_PAGE.size + size) // self._page_bytes)
        self._take(first, count, name)
        start = os.pread(self._fd, _SPAN.size, first * self._page_bytes)
        own, _, flags, span = _SPAN.unpack(start)
        if (own, flags, span) != (first, _VALUE, count):
            raise _DamageError(f"{name}: page {first} does not begin a value of {size} bytes")
        found.overflow += count
        return os.pread(self._fd, size, first * self._page_bytes + _PAGE.size) if with_value else b""

    def _take(self, number: int, count: int, name: str) -> None:
        """Pages that belong to a tree: inside the file, and to no other."""
        if not _META_PAGES <= number <= self._page_count - count:
            raise _DamageError(f"{name}: page {number} and {count - 1} more of {self._page_count}")
        if any(self._seen[number : number + count]):
            raise _DamageError(f"{name}: page {number} is used twice")
        self._seen[number : number + count] = b"\1" * count

    # free pages ------------------------------------------------------------------------------------------------------

    def _check_free(self, table: tuple[int, ...]) -> None:
        """Pages that may be written over are none that are used, and each is named once. After all trees."""
        listed: list[int] = []
        for node in self._tree(_FREE, table, with_values=True):
            if len(node.key) != _NUMBER.size or node.value_bytes % _NUMBER.size or node.value_bytes < _NUMBER.size:
                raise _DamageError(f"{_FREE}: an entry that is no list")
            (count,) = _NUMBER.unpack_from(node.value)
            if count > node.value_bytes // _NUMBER.size - 1:
                raise _DamageError(f"{_FREE}: a list that is too long")
            listed += struct.unpack_from(f"<{count}Q", node.value, _NUMBER.size)
        for number in listed:
            self._take(number, 1, _FREE)
