"""The index of a disk directory in LMDB: records, small values, recency. The only file that imports lmdb.

A write transaction is one call; views of the map never leave the transaction in which they were read. Values are cut
into pieces that fill one page each, so that any free page serves and room never goes to gaps. The map is sparse and far
larger than the budget; what the file may grow by is the caller's business (PageAccount).

Used by DiskTier, whose writing lock serialises `write`; reads come from any thread. The reader side is for inspection.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import lmdb

from kvstore.disk_tier.index_check import find_damage
from kvstore.disk_tier.layout import FORMAT_VERSION, INDEX_NAME, VALUE_BYTES

_GENERATION = struct.Struct(">Q")
_VALUE_KEY = struct.Struct(">QH")
_TICK = struct.Struct("<Q")
_TABLES = (b"copies", b"values", b"recency", b"meta")
_META_PAGES = 2
_READERS = 126
_LOCK_BYTES = 8192  # of LMDB's lock file for so many readers
_TRIES = 100
_COMMIT_BYTES = 256 << 10  # what LMDB writes in one call, at most
_FULL = ("No space left on device", "Disk quota exceeded", "File too large")


class CatalogError(Exception):
    """The index could not do it. cause: a short name for counters."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class CatalogFullError(CatalogError):
    """No room: the map ("map_full") or the file system ("disk_full"). Nothing was changed."""


class Addition(NamedTuple):
    digest: bytes
    record: bytes
    generation: int
    value: bytes | None


class Removal(NamedTuple):
    """pieces: of its value; 0 where the frame lies in a slot file."""

    digest: bytes
    generation: int
    pieces: int


@dataclass(slots=True)
class PageAccount:
    """Pages of the index file, of what is alive in it, and of its trees without values."""

    file_pages: int = _META_PAGES
    live_pages: int = _META_PAGES
    tree_pages: int = 0


class DiskCatalog:
    """An open index. sync: none, batch or always, see DiskTier. CatalogError when it cannot be opened."""

    def __init__(self, directory: Path, map_bytes: int, sync: str, *, readonly: bool = False) -> None:
        self._path = directory / INDEX_NAME
        self._settings: dict[str, Any] = {
            "subdir": False,
            "max_dbs": len(_TABLES),
            "max_readers": _READERS,
            "max_spare_txns": 2,
            "mode": 0o600,
            "readahead": True,
            "readonly": readonly,
        }
        if readonly:
            self._settings |= {"create": False, "lock": (directory / f"{INDEX_NAME}-lock").exists()}
        else:
            self._settings |= {"map_size": map_bytes, "sync": sync != "none", "metasync": sync == "always"}
        self.account = PageAccount()
        self._open()

    def _open(self) -> None:
        try:
            if self._path.exists() and not self._path.stat().st_size:  # LMDB takes it for a file that it makes
                raise CatalogError("empty", f"{self._path}: 0 bytes, so no LMDB file")
            if not self._settings["readonly"]:
                self._take_lock_room()
            self._env = lmdb.open(str(self._path), **self._settings)
            self._check_whole()
            self.stale_readers = self._env.reader_check()
            self._tables = {}
            create = not self._settings["readonly"]
            for name in _TABLES:
                self._tables[name] = self._env.open_db(name, create=create)
            with self._env.begin() as txn:
                version = txn.get(b"version", db=self._tables[b"meta"])
                if version is not None and version != _TICK.pack(FORMAT_VERSION):
                    raise CatalogError("version", f"{self._path}: format {version!r}; expected {FORMAT_VERSION}")
                self._measure(txn)
            self._after_write()
        except lmdb.InvalidError as error:
            raise CatalogError("not_lmdb", f"{self._path}: no LMDB file, or its beginning is damaged") from error
        except lmdb.Error as error:
            raise _translated(error) from error

    def _take_lock_room(self) -> None:
        """LMDB writes its lock file through a map: without room behind that, the process would end (SIGBUS)."""
        try:
            fd = os.open(f"{self._path}-lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, _LOCK_BYTES)
            finally:
                os.close(fd)
        except OSError as error:
            raise CatalogFullError("disk_full", f"{self._path}-lock: {error.strerror}") from error

    def _check_whole(self) -> None:
        """Before a page is looked at through the map: damage there could end the process (SIGBUS)."""
        try:
            damage = self._damage_as_read() if self._settings["readonly"] else find_damage(self._path)
        except OSError as error:  # of this process or its system (no descriptor, say): the file may be as good as ever
            self._env.close()
            raise CatalogError("unreadable", f"{self._path}: {error.strerror}") from error
        if damage is not None:
            self._env.close()
            raise CatalogError("damaged", f"{self._path}: {damage}")

    def _damage_as_read(self) -> str | None:
        """Somebody may write meanwhile: pages that a read transaction can see stay as they are while it lasts."""
        for _ in range(_TRIES):
            with self._env.begin() as txn, suppress(LookupError):
                return find_damage(self._path, txn.id())
        return "it changes too quickly to be read"

    def reopen(self) -> None:
        """After an error that leaves LMDB's environment unusable."""
        self._env.close()
        self._open()

    # reading ---------------------------------------------------------------------------------------------------------

    def _begin(self) -> Any:
        try:
            return self._env.begin(buffers=True)
        except lmdb.ReadersFullError:
            self.stale_readers += self._env.reader_check()
            return self._env.begin(buffers=True)

    @contextmanager
    def _reading(self) -> Iterator[Any]:
        try:
            with self._begin() as txn:
                yield txn
        except lmdb.Error as error:
            raise _translated(error) from error

    def read_value(self, generation: int, frame_bytes: int) -> bytearray | None:
        """The value stored under a generation, copied; None when it is not there or not of this length."""
        out = bytearray(frame_bytes)
        at, piece = 0, 0
        table = self._tables[b"values"]
        with self._reading() as txn:
            while at < frame_bytes:
                part = txn.get(_VALUE_KEY.pack(generation, piece), db=table)
                if part is None or len(part) != min(VALUE_BYTES, frame_bytes - at):
                    return None
                out[at : at + len(part)] = part
                at, piece = at + len(part), piece + 1
        return out

    def records(self) -> Iterator[tuple[bytes, bytes]]:
        """(digest, record) of every copy, as of one moment. CatalogError from a damaged index."""
        with self._reading() as txn:
            for digest, record in txn.cursor(db=self._tables[b"copies"]):
                yield bytes(digest), bytes(record)

    def recency(self) -> dict[int, int]:
        """generation -> tick of the last use that was written down."""
        with self._reading() as txn:
            return {
                int.from_bytes(name, "big"): int.from_bytes(tick, "little")
                for name, tick in txn.cursor(db=self._tables[b"recency"])
            }

    def value_pieces(self) -> dict[int, tuple[int, int]]:
        """generation -> (pieces stored of its value, number of the last and one)."""
        found: dict[int, tuple[int, int]] = {}
        with self._reading() as txn:
            for name in txn.cursor(db=self._tables[b"values"]).iternext(keys=True, values=False):
                generation = int.from_bytes(name[:8], "big")
                count, _ = found.get(generation, (0, 0))
                found[generation] = count + 1, int.from_bytes(name[8:], "big") + 1
        return found

    def record(self, digest: bytes) -> bytes | None:
        """What is stored of one copy now."""
        with self._reading() as txn:
            row = txn.get(digest, db=self._tables[b"copies"])
            return None if row is None else bytes(row)

    def last_generation(self) -> int:
        with self._reading() as txn:
            row = txn.get(b"generation", db=self._tables[b"meta"])
            return 0 if row is None else int.from_bytes(row, "little")

    def epoch(self) -> int:
        """The highest epoch that was written down; 0 for none."""
        with self._begin() as txn:
            row = txn.get(b"epoch", db=self._tables[b"meta"])
            return 0 if row is None else int.from_bytes(row, "little")

    @property
    def has_other_readers(self) -> bool:
        """Whether somebody reads an older state, so that no freed page can be used again."""
        lines = self._env.readers().splitlines()[1:]
        return any(line.split()[-1:] != ["-"] for line in lines if line.strip())

    # writing ---------------------------------------------------------------------------------------------------------

    def write(
        self,
        additions: Sequence[Addition] = (),
        removals: Sequence[Removal] = (),
        recency: Sequence[tuple[int, int]] = (),
        generation: int = 0,
        epoch: int = 0,
    ) -> None:
        """All or nothing. CatalogError, and then nothing has changed.

        A removal goes by generation: a newer copy under the same name stays. generation, epoch: the highest ones given
        out.
        """
        copies, values, ticks, meta = (self._tables[name] for name in _TABLES)
        try:
            with self._env.begin(write=True) as txn:
                for digest, number, pieces in removals:
                    record = txn.get(digest, db=copies) if digest else None
                    if record is not None and int.from_bytes(record[40:48], "little") == number:  # even if cut short
                        txn.delete(digest, db=copies)
                    for piece in range(pieces):
                        txn.delete(_VALUE_KEY.pack(number, piece), db=values)
                    txn.delete(_GENERATION.pack(number), db=ticks)
                for digest, record, number, value in additions:
                    for piece, at in enumerate(range(0, len(value or b""), VALUE_BYTES)):
                        assert value is not None
                        txn.put(_VALUE_KEY.pack(number, piece), value[at : at + VALUE_BYTES], db=values)
                    txn.put(digest, record, db=copies)
                for number, tick in recency:
                    txn.put(_GENERATION.pack(number), _TICK.pack(tick), db=ticks)
                txn.put(b"version", _TICK.pack(FORMAT_VERSION), db=meta)
                if generation:
                    txn.put(b"generation", _TICK.pack(generation), db=meta)
                if epoch:
                    txn.put(b"epoch", _TICK.pack(epoch), db=meta)
                self._measure(txn)
        except lmdb.Error as error:
            self._recover(error)
            raise self._write_error(error) from error
        self._after_write()

    def settle(self) -> None:
        """One more transaction: what the last one freed can be used by the next."""
        self.write()

    def clear(self, generation: int) -> None:
        """Drop everything but the highest generation and the epoch."""
        try:
            with self._env.begin(write=True) as txn:
                for name in _TABLES[:3]:
                    txn.drop(self._tables[name], delete=False)
                txn.put(b"generation", _TICK.pack(generation), db=self._tables[b"meta"])
                self._measure(txn)
        except lmdb.Error as error:
            self._recover(error)
            raise self._write_error(error) from error
        self._after_write()

    def compact(self) -> None:
        """Rewrite the file without its free pages. The caller is alone with it and has room for the live ones."""
        fresh = self._path.with_name(f"{INDEX_NAME}.new")
        try:
            fresh.unlink(missing_ok=True)
            self._env.copy(str(fresh), compact=True)
            if self._settings["sync"]:
                _sync_file(fresh)
        except (lmdb.Error, OSError) as error:
            fresh.unlink(missing_ok=True)
            raise CatalogFullError("compact", str(error)) from error
        self._env.close()
        os.replace(fresh, self._path)
        self._path.with_name(f"{INDEX_NAME}-lock").unlink(missing_ok=True)
        self._open()

    def check_readers(self) -> bool:
        """Whether somebody alive reads an older state; the dead are cleared away."""
        if not self.has_other_readers:
            return False
        self._env.reader_check()
        return self.has_other_readers

    def sync(self) -> None:
        try:
            self._env.sync(True)
        except lmdb.Error as error:
            raise _translated(error) from error

    def close(self) -> None:
        self._env.close()

    def _write_error(self, error: lmdb.Error) -> CatalogError:
        """A commit that a full file system cuts short says EIO."""
        if "Input/output error" in str(error):
            room = os.statvfs(self._path.parent)
            if room.f_bavail * room.f_frsize < _COMMIT_BYTES:
                return CatalogFullError("disk_full", str(error))
        return _translated(error)

    def _recover(self, error: lmdb.Error) -> None:
        if isinstance(error, lmdb.PanicError):
            self.reopen()

    def _measure(self, txn: Any) -> None:
        tree, overflow = 0, 0
        for table in (None, *self._tables.values()):
            stat = txn.stat(table) if table is not None else txn.stat()
            tree += stat["branch_pages"] + stat["leaf_pages"]
            overflow += stat["overflow_pages"]
        self.account.tree_pages = tree
        self.account.live_pages = tree + overflow + _META_PAGES

    def _after_write(self) -> None:
        self.account.file_pages = self._env.info()["last_pgno"] + 1


def _sync_file(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _translated(error: lmdb.Error) -> CatalogError:
    if isinstance(error, lmdb.MapFullError):
        return CatalogFullError("map_full", str(error))
    if isinstance(error, lmdb.DiskError) or any(text in str(error) for text in _FULL):
        return CatalogFullError("disk_full", str(error))
    return CatalogError(f"index_{type(error).__name__}", str(error))
