"""Writes a trace of requests without their content: docs/formats/trace.md. What `kvstore record` switches on.

An engine makes one recorder and calls `record` for every request that has ended, from the thread that runs it; the
recorder has no lock. It never fails its caller: a full disk, or a file that reached its limit, ends the recording, is
said once as a warning and counted in `lost_requests`.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import secrets
import struct
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from allocator.errors import ConfigError
from kvstore.identity import HashChain

FILE_VARIABLE = "KVSTORE_TRACE_FILE"
SALT_VARIABLE = "KVSTORE_TRACE_SALT_FILE"
FORMAT = "kvstore-trace"
VERSION = 1
SALT_BYTES = 32
_FLUSH_SECONDS = 1.0
_BYTES_LIMIT = 8 << 30
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRequest:
    """What an engine knows of a request that has ended. age_seconds: how long ago it arrived.

    names: of the prompt's whole blocks, head first, from whoever has them (adapter, tenant and media are in them); else
    they are made of the tokens, under the recorder's root.
    """

    token_ids: Sequence[int]
    output_tokens: int
    age_seconds: float
    names: Sequence[bytes] | None = None
    finish: str = "stop"
    session: str | None = None
    turn: int | None = None
    tenant: str | None = None
    reused_tokens: int | None = None
    ttft_seconds: float | None = None
    itl_seconds: float | None = None


class TraceRecorder:
    """Appends to no existing file: `path` must not be there yet.

    root, block_tokens: of the store's hash chain. group_blocks: how many of its blocks one hash_id stands for.
    salt: 32 bytes; drawn, and then known to nobody, when None.
    Raises ConfigError when the file cannot be made or the salt is no salt.
    """

    def __init__(
        self,
        path: str | Path,
        root: bytes,
        block_tokens: int,
        *,
        model: str = "",
        group_blocks: int = 1,
        salt: bytes | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if salt is not None and len(salt) != SALT_BYTES:
            raise ConfigError(f"salt: got {len(salt)} bytes; expected {SALT_BYTES}")
        if type(group_blocks) is not int or group_blocks < 1:
            raise ConfigError(f"group_blocks: got {group_blocks!r}; expected a count of blocks")
        self._salt = secrets.token_bytes(SALT_BYTES) if salt is None else salt
        self._path = Path(path)
        self._root, self._block_tokens, self._group_blocks = root, block_tokens, group_blocks
        self._clock = clock
        self._started = self._flushed = clock()
        self._written_bytes = 0
        self.recorded_requests = 0
        self.lost_requests = 0
        try:
            self._file: IO[bytes] | None = open(path, "xb", buffering=1 << 20)  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise ConfigError(f"trace {path}: cannot be made ({error.strerror}); expected a new file") from error
        header: dict[str, Any] = {"format": FORMAT, "version": VERSION, "block_tokens": block_tokens * group_blocks}
        self._write(header | ({"model": model} if model else {}))

    @classmethod
    def from_environment(
        cls, root: bytes, block_tokens: int, model: str = "", environ: Mapping[str, str] | None = None
    ) -> TraceRecorder | None:
        """The recorder that `kvstore record` asked for, or None. A second engine of the process gets its own file."""
        environ = os.environ if environ is None else environ
        named = environ.get(FILE_VARIABLE)
        if not named:
            return None
        path, number = Path(named), 1
        salt_file = environ.get(SALT_VARIABLE)
        salt = read_salt(salt_file) if salt_file else None
        while True:
            try:
                recorder = cls(path, root, block_tokens, model=model, salt=salt)
                break
            except ConfigError:
                if not path.exists():
                    raise
            number += 1  # made by another engine, perhaps this moment
            path = Path(named).with_name(f"{Path(named).stem}-{number}{Path(named).suffix}")
        atexit.register(recorder.close)
        return recorder

    def record(self, ended: EndedRequest) -> None:
        """One request. Costs a hash of its prompt's names; nothing of the prompt is kept."""
        if self._file is None:
            self.lost_requests += 1
            return
        arrived = self._clock() - ended.age_seconds - self._started
        line: dict[str, Any] = {
            "timestamp": max(0, round(arrived * 1e3)),
            "input_length": len(ended.token_ids),
            "output_length": ended.output_tokens,
            "hash_ids": self.hash_ids(ended.token_ids) if ended.names is None else self._numbers(ended.names),
        }
        if ended.session is not None:
            line["session"] = self._hidden(b"session", ended.session.encode())
        if ended.turn is not None:
            line["turn"] = ended.turn
        if ended.tenant is not None:
            line["tenant"] = self._hidden(b"tenant", ended.tenant.encode())
        if ended.finish != "stop":
            line["finish"] = ended.finish
        if ended.reused_tokens is not None:
            line["reused_tokens"] = ended.reused_tokens
        if ended.ttft_seconds is not None:
            line["ttft_ms"] = round(ended.ttft_seconds * 1e3, 3)
        if ended.itl_seconds is not None:
            line["itl_ms"] = round(ended.itl_seconds * 1e3, 3)
        if self._write(line):
            self.recorded_requests += 1
        else:
            self.lost_requests += 1

    def hash_ids(self, token_ids: Sequence[int]) -> list[int]:
        """The numbers that stand for a prompt's whole blocks."""
        chain = HashChain(self._root, self._block_tokens)
        chain.extend(token_ids)
        return self._numbers(chain.hashes)

    def _numbers(self, names: Sequence[bytes]) -> list[int]:
        return [self._hidden(b"block", name) for name in names[self._group_blocks - 1 :: self._group_blocks]]

    def flush(self) -> None:
        """What was recorded is in the file."""
        if self._file is not None:
            try:
                self._file.flush()
            except OSError as error:
                warnings.warn(f"trace: recording ends here ({error})", RuntimeWarning, stacklevel=2)
                self.close()

    def close(self) -> None:
        """Flush and close. Idempotent."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                warnings.warn(f"trace: the last lines were lost ({error})", RuntimeWarning, stacklevel=2)
                self._cut_to_whole_lines()

    def _cut_to_whole_lines(self) -> None:
        """A full disk took a part of a line: what is left can be read."""
        with suppress(OSError), self._path.open("r+b") as file:
            end = file.seek(0, os.SEEK_END)
            while end:
                start = max(0, end - _PIECE_BYTES)
                file.seek(start)
                if (found := file.read(end - start).rfind(b"\n")) >= 0:
                    file.truncate(start + found + 1)
                    return
                end = start

    def _hidden(self, kind: bytes, name: bytes) -> int:
        digest = hashlib.blake2b(name, digest_size=8, key=self._salt, person=kind).digest()
        (number,) = struct.unpack("<Q", digest)
        return int(number)

    def _write(self, line: Mapping[str, Any]) -> bool:
        """False when the recording has ended."""
        assert self._file is not None
        text = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        try:
            if self._written_bytes + len(text) > _BYTES_LIMIT:
                raise OSError(f"limit of {_BYTES_LIMIT} bytes reached")
            self._file.write(text)
            self._written_bytes += len(text)
            if (now := self._clock()) - self._flushed > _FLUSH_SECONDS:
                self._file.flush()
                self._flushed = now
        except OSError as error:
            warnings.warn(f"trace: recording ends here ({error})", RuntimeWarning, stacklevel=3)
            self.close()
            return False
        return True


def read_salt(path: str | Path) -> bytes:
    """The salt in a file: 64 hex digits. ConfigError for anything else; the content is in no message."""
    try:
        text = Path(path).read_text(encoding="ascii").strip()
        salt = bytes.fromhex(text)
    except OSError as error:
        raise ConfigError(f"salt file {path}: cannot be read ({error.strerror})") from None
    except ValueError:
        salt = b""
    if len(salt) != SALT_BYTES:
        raise ConfigError(f"salt file {path}: expected {2 * SALT_BYTES} hex digits")
    return salt
