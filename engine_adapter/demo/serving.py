"""`kvstore serve` beside a demo, for as long as its context lasts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class MissingServerError(RuntimeError):
    """What a demo needs beside it is not on this machine, or did not start."""


@contextmanager
def daemon_at(path: Path, host_bytes: str) -> Iterator[None]:
    """A daemon whose socket is `path`, ready. MissingServerError when it does not start."""
    command = [sys.executable, "-m", "kvstore.cli", "serve", "--socket", str(path), "--host-bytes", host_bytes]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            if "ready on" not in process.stdout.readline():
                raise MissingServerError("kvstore serve did not start; its error is above")
            yield
        finally:
            process.terminate()
