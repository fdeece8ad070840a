"""The server as a child process, for `kvstore doctor --loop`: an endpoint over our own decode loop.

Offered by an entry point of the group `kvstore.doctor`, so that the command line below imports nothing from here.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from allocator.errors import ConfigError

_STOP_SECONDS = 20.0


@contextmanager
def own_loop(words: Sequence[str] = ()) -> Iterator[str]:
    """The URL of `python -m engine_adapter.server WORDS` on a free port; stopped at the end."""
    command = [sys.executable, "-m", "engine_adapter.server", "--port", "0", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        said = process.stdout.readline()
        if not said.startswith("listening on "):
            raise ConfigError(f"the loop's server did not start (exit code {process.wait(_STOP_SECONDS)})")
        yield said.removeprefix("listening on ").strip()
    finally:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
