"""What a successor must know to take over shared memory: which copy lies in which slot, whose segment it is, epochs.

A memfd of the daemon's own that no client ever gets, written as things happen, so that it is right after kill -9 too. A
row is summed (CRC-32) and written in one piece: one that was being written counts as none. A copy's row is written when
the copy is published and gone before its slot is used again; a segment's says who may write there before that client
can. Rows are believed no further than that: whoever takes them over looks at the frames (see handover).

Layout, little-endian: header (4,096 bytes), epochs, segments, forms, copies; every kind a table of rows of one size.
Rows of copies are reserved from the system piece by piece. Under the daemon's lock, but for `raise_epoch`.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import struct
import threading
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from allocator.errors import CapacityError, UsageError
from kvstore.copy_key import CopyKey
from kvstore.daemon import protocol
from kvstore.daemon.forms import Form
from kvstore.daemon.slots import NO_ROW
from kvstore.frame import layout

if TYPE_CHECKING:
    from kvstore.daemon.settings import DaemonSettings
    from kvstore.daemon.slots import ArenaEntry, ArenaSegment

VERSION = 1
"""Of this layout, and of what a slot, a segment or a domain means: raise it with any of them."""
_MAGIC = b"kvstore ledger\x00\x00"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_HEAD = struct.Struct("<16s32s32sQQ")  # magic, digest of versions, digest of settings, segments, rows
_HEAD_BYTES, _STATE_WORD, _ROWS_WORD = 4096, 256, 257
_EPOCH, _EPOCH_BYTES, _MOST_DOMAINS = struct.Struct("<64sQ"), 128, 1024
_SEGMENT, _SEGMENT_BYTES = struct.Struct("<32s64sQqqQ16sQ"), 256
_FORM, _FORM_BYTES, _MOST_FORMS = struct.Struct("<I"), 20480, 4096
_ROW, _ROW_BYTES = struct.Struct("<IIQQ32s32s"), 104  # form, segment, offset, frame bytes, hash, parent; then the tick
_TICK_WORD = 12
_SUM = struct.Struct("<Q")
_MOST_ROWS = 1 << 24
_PIECE_ROWS = (1 << 20) // _ROW_BYTES
_LEAST_SLOT_BYTES = 512
GOOD, TAKING_OVER, GIVEN_UP = 0, 1, 2


class RefusedLedgerError(Exception):
    """It cannot be taken over; says why in one word."""


class KeptSegment(NamedTuple):
    """A segment as its row says. is_held: a client may write there; `started` 0: no process that could be seen."""

    row: int
    name: str
    domain: str
    slot_bytes: int
    is_held: bool
    uid: int
    pid: int
    started: int
    token: bytes


class KeptCopy(NamedTuple):
    tick: int
    row: int
    form: int
    segment: int
    offset: int
    frame_bytes: int
    hash: bytes
    parent: bytes


@dataclass(slots=True)
class _FormRow:
    row: int
    copy_count: int = 0


class Ledger:
    """See the module. `counts`: copies that could not be written down, `unkept`: they are lost at the daemon's end."""

    def __init__(self, descriptor: int, segment_limit: int, row_limit: int) -> None:
        self.descriptor = descriptor
        self.counts: Counter[str] = Counter()
        self._segment_limit, self._row_limit = segment_limit, row_limit
        places = _places(segment_limit, row_limit)
        self._epochs_at, self._segments_at, self._forms_at, self._rows_at, self.size_bytes = places
        self._map = mmap.mmap(descriptor, self.size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self._bytes = memoryview(self._map)
        self._words = self._bytes.cast("q")
        self._first_row_word = self._rows_at // 8
        self._epoch_rows: dict[str, int] = {}
        self._epochs_lock = threading.Lock()
        self._free_segments = list(range(segment_limit - 1, -1, -1))
        self._forms: dict[Form, _FormRow] = {}
        self._free_forms = list(range(_MOST_FORMS - 1, -1, -1))
        self._free_rows: list[int] = []

    @classmethod
    def create(cls, settings: DaemonSettings) -> Ledger:
        """An empty one. CapacityError when the system has no room."""
        segment_limit, row_limit = _limits(settings)
        places = _places(segment_limit, row_limit)
        descriptor = os.memfd_create("kvstore-ledger", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(descriptor, 0)
            os.ftruncate(descriptor, places[-1])
            os.posix_fallocate(descriptor, 0, places[2])  # all but forms and copies
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            made = cls(descriptor, segment_limit, row_limit)
        except OSError as error:
            os.close(descriptor)
            raise CapacityError(places[2], 0, "bytes") from error
        head = _HEAD.pack(_MAGIC, *_digests(settings), segment_limit, row_limit)
        made._write(0, head)
        return made

    @classmethod
    def opened(cls, descriptor: int, settings: DaemonSettings) -> Ledger:
        """One that was handed over, which owns the descriptor from then on. RefusedLedgerError."""
        segment_limit, row_limit = _limits(settings)
        try:
            head = os.pread(descriptor, _SUM.size + _HEAD.size, 0)
            size_bytes = os.fstat(descriptor).st_size
        except OSError:
            raise RefusedLedgerError("unreadable") from None
        body = head[_SUM.size :]
        if len(body) < _HEAD.size or _sum(body) != _SUM.unpack(head[: _SUM.size])[0]:
            raise RefusedLedgerError("torn")
        magic, versions, configured, *limits = _HEAD.unpack(body)
        own_versions, own_settings = _digests(settings)
        if magic != _MAGIC or versions != own_versions:
            raise RefusedLedgerError("version")
        if configured != own_settings or limits != [segment_limit, row_limit]:
            raise RefusedLedgerError("settings")
        if size_bytes != _places(segment_limit, row_limit)[-1]:
            raise RefusedLedgerError("torn")
        try:
            found = cls(descriptor, segment_limit, row_limit)
        except OSError:
            raise RefusedLedgerError("unreadable") from None
        if not 0 <= found._words[_ROWS_WORD] <= row_limit:
            raise RefusedLedgerError("torn")
        if found.state != GOOD:
            raise RefusedLedgerError("unfinished" if found.state == TAKING_OVER else "given_up")
        return found

    @property
    def state(self) -> int:
        """GOOD; TAKING_OVER: a daemon has begun and not finished, so another attempt would end as that one did."""
        return self._words[_STATE_WORD]

    @state.setter
    def state(self, state: int) -> None:
        self._words[_STATE_WORD] = state

    def close(self) -> None:
        """Let it go; who else has the descriptor keeps it as it is. Idempotent."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    # copies ----------------------------------------------------------------------------------------------------------

    def keep(self, entry: ArenaEntry) -> None:
        """A copy has been published. One that has a row already keeps it."""
        if entry.row != NO_ROW:
            return
        form = None if entry.segment.row == NO_ROW else self._form_row(entry.form)
        row = self._new_row() if form is not None else NO_ROW
        if form is None or row == NO_ROW:
            self.counts["unkept"] += 1
            return
        form.copy_count += 1
        entry.row = row
        key = entry.key
        place = (form.row, entry.segment.row, entry.offset, entry.size_bytes)
        self._write(self._rows_at + row * _ROW_BYTES, _ROW.pack(*place, key.hash, entry.parent or key.root))
        self.touch(entry)

    def touch(self, entry: ArenaEntry) -> None:
        if entry.row != NO_ROW:
            self._words[self._first_row_word + entry.row * (_ROW_BYTES // 8) + _TICK_WORD] = entry.tick

    def drop(self, entry: ArenaEntry) -> None:
        """A copy is found no more; its slot may be used again after this."""
        if entry.row == NO_ROW:
            return
        self.clear_row(entry.row)
        entry.row = NO_ROW
        form = self._forms[entry.form]
        form.copy_count -= 1
        if not form.copy_count:
            self._clear(self._forms_at + form.row * _FORM_BYTES)
            self._free_forms.append(form.row)
            del self._forms[entry.form]

    def clear_row(self, row: int) -> None:
        self._clear(self._rows_at + row * _ROW_BYTES)
        self._free_rows.append(row)

    def _new_row(self) -> int:
        if not self._free_rows:
            first = self._words[_ROWS_WORD]
            stop = min(first + _PIECE_ROWS, self._row_limit)
            if first >= stop or not self._reserve(self._rows_at + first * _ROW_BYTES, (stop - first) * _ROW_BYTES):
                return NO_ROW
            self._words[_ROWS_WORD] = stop
            self._free_rows = list(range(stop - 1, first - 1, -1))
        return self._free_rows.pop()

    def _form_row(self, form: Form) -> _FormRow | None:
        found = self._forms.get(form)
        if found is not None or not self._free_forms:
            return found
        key = form.template
        fields = (key.root, key.group, key.codec, key.exact, key.heads, key.layers, key.parameters)
        dims = (form.block_tokens, form.key_dim, form.value_dim, form.dtype, form.tenant, form.domain)
        packed = msgspec.msgpack.encode((*fields, *dims))
        row = self._free_forms[-1]
        at = self._forms_at + row * _FORM_BYTES
        if len(packed) > _FORM_BYTES - 12 or not self._reserve(at, 12 + len(packed)):
            return None
        self._free_forms.pop()
        self._write(at, _FORM.pack(len(packed)) + packed)
        found = self._forms[form] = _FormRow(row)
        return found

    # segments --------------------------------------------------------------------------------------------------------

    def keep_segment(self, segment: ArenaSegment, domain: str) -> None:
        """Whose it is, from now on: before whoever may write there gets it."""
        if segment.row == NO_ROW:
            if not self._free_segments:
                return
            segment.row = self._free_segments.pop()
        holder = segment.holder
        is_held = holder is not None and holder.is_remote
        uid, pid, token = (holder.uid, holder.pid, holder.token) if holder is not None else (-1, 0, b"")
        began = process_start(pid) if is_held else 0
        fields = (domain.encode(), segment.slot_bytes, uid, pid, began, token, int(is_held))
        self._write(
            self._segments_at + segment.row * _SEGMENT_BYTES, _SEGMENT.pack(segment.memory.name.encode(), *fields)
        )

    def drop_segment(self, row: int) -> None:
        """It leaves the arena, and nothing is in it."""
        if row != NO_ROW:
            self._clear(self._segments_at + row * _SEGMENT_BYTES)
            self._free_segments.append(row)

    # epochs ----------------------------------------------------------------------------------------------------------

    def raise_epoch(self, domain: str, epoch: int) -> None:
        """Before any client can know of it. Any thread."""
        with self._epochs_lock:
            row = self._epoch_rows.setdefault(domain, len(self._epoch_rows))
            if row >= _MOST_DOMAINS:
                self.state = GIVEN_UP
                return
            self._write(self._epochs_at + row * _EPOCH_BYTES, _EPOCH.pack(domain.encode(), epoch))

    # what was handed over --------------------------------------------------------------------------------------------

    def read_epochs(self) -> dict[str, int]:
        """RefusedLedgerError for one that cannot be read: nothing must be served under an older one."""
        found: dict[str, int] = {}
        for row in range(_MOST_DOMAINS):
            at = self._epochs_at + row * _EPOCH_BYTES
            if not any(self._bytes[at : at + _SUM.size + _EPOCH.size]):
                break
            body = self._read(at, _EPOCH.size)
            if body is None:
                raise RefusedLedgerError("torn")
            name, epoch = _EPOCH.unpack(body)
            domain = name.rstrip(b"\0").decode()
            found[domain], self._epoch_rows[domain] = epoch, row
        return found

    def read_segments(self) -> Iterator[KeptSegment]:
        for row in range(self._segment_limit):
            body = self._read(self._segments_at + row * _SEGMENT_BYTES, _SEGMENT.size)
            if body is None:
                continue
            name, domain, slot_bytes, uid, pid, began, token, is_held = _SEGMENT.unpack(body)
            words = (name.rstrip(b"\0").decode(), domain.rstrip(b"\0").decode())
            yield KeptSegment(row, *words, slot_bytes, bool(is_held), uid, pid, began, token)

    def take_segments(self, rows: set[int]) -> None:
        """These rows go on; every other one is free, whatever it says."""
        for row in range(self._segment_limit):
            if row not in rows:
                self._clear(self._segments_at + row * _SEGMENT_BYTES)
        self._free_segments = [row for row in range(self._segment_limit - 1, -1, -1) if row not in rows]

    def read_forms(self) -> dict[int, Form]:
        found: dict[int, Form] = {}
        for row in range(_MOST_FORMS):
            at = self._forms_at + row * _FORM_BYTES
            start = os.pread(self.descriptor, _SUM.size + _FORM.size, at)  # a hole stays one
            (length,) = _FORM.unpack_from(start, _SUM.size)
            body = self._read(at, _FORM.size + length) if 0 < length <= _FORM_BYTES - 12 else None
            if body is None:
                continue
            try:
                found[row] = _form_of(body[_FORM.size :])
            except (UsageError, msgspec.DecodeError, TypeError, ValueError):
                self.counts["torn_form"] += 1
        return found

    def read_copies(self) -> Iterator[KeptCopy]:
        """Those whose row is whole."""
        for row in range(self._words[_ROWS_WORD]):
            at = self._rows_at + row * _ROW_BYTES
            if not self._words[at // 8]:
                continue
            body = self._read(at, _ROW.size)
            if body is None:
                self.counts["torn_row"] += 1
                continue
            yield KeptCopy(self._words[at // 8 + _TICK_WORD], row, *_ROW.unpack(body))

    def take_copies(self, kept: dict[int, tuple[int, Form]]) -> None:
        """These rows (each with its form's row and form) go on; every other one is free, and so are other forms."""
        for form_row, form in kept.values():
            self._forms.setdefault(form, _FormRow(form_row)).copy_count += 1
        for row in range(self._words[_ROWS_WORD]):
            if row not in kept:
                self._clear(self._rows_at + row * _ROW_BYTES)
                self._free_rows.append(row)
        used = {one.row for one in self._forms.values()}
        self._free_forms = [row for row in range(_MOST_FORMS - 1, -1, -1) if row not in used]

    # bytes -----------------------------------------------------------------------------------------------------------

    def _write(self, at: int, body: bytes) -> None:
        self._bytes[at : at + _SUM.size + len(body)] = _SUM.pack(_sum(body)) + body

    def _clear(self, at: int) -> None:
        self._words[at // 8] = 0

    def _read(self, at: int, size_bytes: int) -> bytes | None:
        body = self._bytes[at + _SUM.size : at + _SUM.size + size_bytes].tobytes()
        return body if self._words[at // 8] == _sum(body) else None

    def _reserve(self, at: int, size_bytes: int) -> bool:
        try:
            os.posix_fallocate(self.descriptor, at, size_bytes)
        except OSError:
            return False
        return True


def process_start(pid: int) -> int:
    """When a process began, in ticks since the machine did: with its number, its name. 0: it cannot be seen."""
    if pid <= 0:
        return 0
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def _sum(body: bytes) -> int:
    return zlib.crc32(body) | 1 << 32  # never 0, which is no row


def _form_of(packed: bytes) -> Form:
    kinds = tuple[bytes, int, str, bool, tuple[int, int], tuple[int, int], bytes, int, int, int, str, str, str]
    root, group, codec, exact, heads, layers, parameters, *dims = msgspec.msgpack.decode(packed, type=kinds)
    return Form(CopyKey(root, group, bytes(32), codec, exact, heads, layers, parameters), *dims)  # type: ignore[arg-type]


def _limits(settings: DaemonSettings) -> tuple[int, int]:
    rows = min(_MOST_ROWS, settings.store.host_bytes // _LEAST_SLOT_BYTES)
    return settings.store.host_bytes // settings.segment_bytes, rows


def _places(segment_limit: int, row_limit: int) -> tuple[int, int, int, int, int]:
    """Where epochs, segments, forms and copies begin, and the end; each on a page."""
    epochs_at = _HEAD_BYTES
    segments_at = epochs_at + _MOST_DOMAINS * _EPOCH_BYTES
    forms_at = segments_at + -(-segment_limit * _SEGMENT_BYTES // 4096) * 4096
    rows_at = forms_at + _MOST_FORMS * _FORM_BYTES
    return epochs_at, segments_at, forms_at, rows_at, rows_at + -(-row_limit * _ROW_BYTES // 4096) * 4096


def _digests(settings: DaemonSettings) -> tuple[bytes, bytes]:
    """Of all versions that decide what the bytes mean, and of the settings that do or say whose they are."""
    try:
        release = version("kvstore-llm")
    except PackageNotFoundError:
        release = ""
    versions = (VERSION, protocol.VERSION, layout.VERSION, release)
    own = (settings.segment_bytes, settings.store.host_bytes, settings.domains, settings.checksums, os.geteuid())
    person = b"kvstore ledger"
    secret = hashlib.blake2b(settings.store.secret.encode(), person=person).digest()
    return (
        hashlib.blake2b(repr(versions).encode(), digest_size=32, person=person).digest(),
        hashlib.blake2b(repr(own).encode() + secret, digest_size=32, person=person).digest(),
    )
