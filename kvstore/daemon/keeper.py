"""`kvstore serve --keeper`: starts the daemon, keeps what it hands over, and starts it again with that when it ends.

Towards the daemon it speaks as systemd does (kvstore.daemon.notify), so the daemon has one way for both. It never maps
what it keeps, and does little enough to outlive it. Told to end (SIGTERM, SIGINT) it ends the daemon and itself; a
daemon that ends otherwise, killed or on SIGTERM of its own, is started again: that is how one upgrades. One thread.
"""

from __future__ import annotations

import array
import errno
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from allocator.errors import TierError
from kvstore.daemon.notify import FIRST_FD, MOST_MESSAGE_BYTES, MOST_MESSAGE_FDS, NotifySocket
from kvstore.daemon.settings import DaemonSettings
from kvstore.daemon.socket_lock import locked_directory

_MOST_KEPT = 8192
_BAD_USAGE = 2
_QUICK_SECONDS = 5.0  # a daemon that was not ready and ended sooner than this
_MOST_QUICK_ENDS = 5
_PAUSE_SECONDS = 0.5
_CREDENTIALS = struct.Struct("3i")
_RIGHTS_BYTES = socket.CMSG_SPACE(4 * MOST_MESSAGE_FDS) + socket.CMSG_SPACE(_CREDENTIALS.size)


class Keeper:
    """See the module. command: starts the daemon. TierError when another keeper has the socket."""

    def __init__(self, settings: DaemonSettings, command: Sequence[str]) -> None:
        self.path = f"{settings.socket_path}.keeper"
        self.kept: dict[str, list[int]] = {}
        self._command = list(command)
        self._above = NotifySocket.from_environ(os.environ)
        self._lock_fd = locked_directory(Path(self.path), settings)
        self._pid = 0
        self._is_ready = self._is_ending = False
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        Path(self.path).unlink(missing_ok=True)
        try:
            self._sock.bind(self.path)
            os.chmod(self.path, 0o600)
        except OSError as error:
            raise TierError(f"keeper {self.path}: cannot be made ({error.strerror})") from error
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._sock.setblocking(False)

    def run(self) -> int:
        """Until it is told to end, or the daemon cannot run: the daemon's exit code."""
        wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        heard = select.poll()  # select() knows no descriptor above 1023
        heard.register(wake, select.POLLIN)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, self._heard)
        quick_ends = 0
        try:
            while True:
                began = time.monotonic()
                code = self._one_life(wake)
                is_quick = not self._is_ready and time.monotonic() - began < _QUICK_SECONDS
                quick_ends = quick_ends + 1 if is_quick else 0
                if self._is_ending or code == _BAD_USAGE or quick_ends >= _MOST_QUICK_ENDS:
                    return code if code >= 0 else 128 - code
                print(f"kvstore serve: the daemon ended ({code}) and is started again", file=sys.stderr, flush=True)
                if is_quick:
                    heard.poll(_PAUSE_SECONDS * 1000)
        finally:
            self._sock.close()
            Path(self.path).unlink(missing_ok=True)
            os.close(self._lock_fd)

    def _heard(self, number: int, frame: object) -> None:
        if number == signal.SIGCHLD:
            return
        self._is_ending = self._is_ending or number != signal.SIGHUP
        if self._pid:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGTERM if number == signal.SIGINT else number)

    def _one_life(self, wake: int) -> int:
        """Start the daemon and serve it until it ends; its exit code, negative for a signal."""
        self._is_ready = False
        self._pid = self._start()
        if self._is_ending:  # told while there was none
            os.kill(self._pid, signal.SIGTERM)
        heard = select.poll()
        for one in (self._sock.fileno(), wake):
            heard.register(one, select.POLLIN)
        while True:
            heard.poll()
            with suppress(BlockingIOError):
                os.read(wake, 4096)
            ended, status = os.waitpid(self._pid, os.WNOHANG)
            self._receive_all()  # what a daemon said before it ended counts
            if ended:
                self._pid = 0
                return os.waitstatus_to_exitcode(status)

    def _start(self) -> int:
        names = [(name, descriptor) for name, some in self.kept.items() for descriptor in some]
        environ = dict(os.environ) | {"NOTIFY_SOCKET": self.path}
        sys.stdout.flush()
        child = os.fork()
        if child:
            return child
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            become(self._command, environ, names)
        finally:
            os._exit(127)

    # messages --------------------------------------------------------------------------------------------------------

    def _receive_all(self) -> None:
        while True:
            try:
                message, control, _, _ = self._sock.recvmsg(MOST_MESSAGE_BYTES, _RIGHTS_BYTES, socket.MSG_CMSG_CLOEXEC)
            except OSError as error:
                if error.errno in (errno.EAGAIN, errno.EINTR):
                    return
                raise
            pid, descriptors = 0, array.array("i")
            for _, kind, piece in control:
                if kind == socket.SCM_RIGHTS:
                    descriptors.frombytes(piece[: len(piece) // 4 * 4])
                elif kind == socket.SCM_CREDENTIALS:
                    pid = _CREDENTIALS.unpack(piece)[0]
            self._heed(message.decode("utf-8", "replace") if pid == self._pid else "", list(descriptors))

    def _heed(self, message: str, descriptors: list[int]) -> None:
        """Of nobody but the daemon that we have started."""
        fields = dict(line.partition("=")[::2] for line in message.splitlines())
        name = fields.get("FDNAME", "")
        if fields.get("FDSTORE") == "1" and name and ":" not in name and self._kept_count < _MOST_KEPT:
            self.kept.setdefault(name, []).extend(descriptors)
            return
        for descriptor in descriptors:
            os.close(descriptor)
        if fields.get("FDSTOREREMOVE") == "1":
            for descriptor in self.kept.pop(name, []):
                os.close(descriptor)
        elif fields.keys() & {"READY", "STOPPING", "RELOADING", "STATUS"}:
            self._is_ready = self._is_ready or fields.get("READY") == "1"
            if self._above is not None and (self._is_ending or "STOPPING" not in fields):
                self._above.tell(message)

    @property
    def _kept_count(self) -> int:
        return sum(map(len, self.kept.values()))


def become(command: Sequence[str], environ: Mapping[str, str], named: Sequence[tuple[str, int]]) -> None:
    """This process goes on as the command, with the descriptors at 3 and up."""
    import fcntl

    above = FIRST_FD + len(named)
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, above) for _, descriptor in named]
    for place, descriptor in enumerate(moved):
        os.dup2(descriptor, FIRST_FD + place, inheritable=True)
    given = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(len(named))}
    given["LISTEN_FDNAMES"] = ":".join(name for name, _ in named)
    os.execve(command[0], list(command), dict(environ) | (given if named else {}))
