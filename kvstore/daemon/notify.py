"""systemd's notification protocol, both ends of what is used of it: states, and descriptors kept over a restart.

A daemon sends descriptors to whoever listens at $NOTIFY_SOCKET (systemd with FileDescriptorStoreMax=, or our keeper)
and gets them back from the next start on, at 3 and up, named in $LISTEN_FDNAMES. Nothing is answered: what could not be
sent is counted. Any thread.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections import Counter
from collections.abc import MutableMapping

FIRST_FD = 3
MOST_MESSAGE_BYTES = 4096
MOST_MESSAGE_FDS = 253  # SCM_MAX_FD
_SEND_SECONDS = 1.0


class NotifySocket:
    """What a service manager is told. address: of its socket, as $NOTIFY_SOCKET says it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.counts: Counter[str] = Counter()

    @classmethod
    def from_environ(cls, environ: MutableMapping[str, str]) -> NotifySocket | None:
        """None where nobody listens."""
        address = environ.get("NOTIFY_SOCKET", "")
        return cls(address) if address else None

    def tell(self, message: str) -> bool:
        """A state, such as READY=1."""
        return self._send(message, ())

    def keep(self, name: str, descriptor: int) -> bool:
        """Hand over a duplicate; of a name that is kept already a second one. It is not polled."""
        return self._send(f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0", (descriptor,))

    def remove(self, name: str, *, wait: bool = True) -> bool:
        """Let go what is kept under this name."""
        return self._send(f"FDSTOREREMOVE=1\nFDNAME={name}", (), _SEND_SECONDS if wait else 0)

    def _send(self, message: str, descriptors: tuple[int, ...], seconds: float = _SEND_SECONDS) -> bool:
        address = "\0" + self.address[1:] if self.address.startswith("@") else self.address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
                sock.settimeout(seconds)
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(descriptors)}i", *descriptors))]
                sock.sendmsg([message.encode()], rights if descriptors else [], 0, address)
        except OSError as error:
            self.counts[f"not_told_{error.errno}"] += 1
            return False
        return True


def received(environ: MutableMapping[str, str]) -> dict[str, list[int]]:
    """Descriptors that this process was started with, by name; the caller owns them. Says so once."""
    count, names = environ.pop("LISTEN_FDS", ""), environ.pop("LISTEN_FDNAMES", "").split(":")
    if environ.pop("LISTEN_PID", "") != str(os.getpid()) or not count.isdecimal():
        return {}
    found: dict[str, list[int]] = {}
    for place in range(int(count)):
        descriptor = FIRST_FD + place
        try:
            fcntl.fcntl(descriptor, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
        except OSError:
            continue
        found.setdefault(names[place] if place < len(names) else "unknown", []).append(descriptor)
    return found
