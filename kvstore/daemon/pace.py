"""Who may ask how much: the request rate, shared by who is busy.

Users share alike, then the processes of a user, then the connections of a process, so who opens many connections gains
nothing by it. Who is busy is seen ten times a second. Until then a connection has its part among all that there are,
and borrows from what nobody has used lately: so many that wake at once get no more together than one would.

`settle` is the watching thread's; the rest any thread's.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.daemon.session import Session

_BUSY_REQUESTS = 10  # between two looks
_SPARE_SECONDS, _OWED_SECONDS = 0.05, 2.0  # of the rate


class Pace:
    """See the module."""

    def __init__(self, requests_per_second: float) -> None:
        self.requests_per_second = requests_per_second
        self._lock = threading.Lock()
        self._busy: dict[Session, int] = {}
        self._all: dict[Session, int] = {}
        self._spent: dict[Session, float] = {}
        self._spare = requests_per_second * _SPARE_SECONDS
        self._borrowed = 0.0  # since the last look
        self._asked_by_ended = 0.0  # the same

    def rate(self, session: Session) -> tuple[float, bool]:
        """Requests a second, and whether more may be borrowed: by who has just begun, or is alone busy."""
        part = self._busy.get(session)
        if part is not None:
            return self.requests_per_second / part, part == 1
        return self.requests_per_second / (self._all.get(session) or 1 + max(self._all.values(), default=0)), True

    def borrow(self, requests: float) -> float:
        """As many of these as nobody needs."""
        with self._lock:
            given = max(0.0, min(self._spare, requests))
            self._spare -= given
            self._borrowed += given
            return given

    def ended(self, session: Session) -> None:
        """A connection is over; it will not be seen again."""
        with self._lock:
            self._asked_by_ended += session.spent - self._spent.get(session, 0.0)
            self._spent[session] = session.spent  # a look that is under way may still count it

    def settle(self, sessions: Sequence[Session], seconds: float) -> None:
        """A look at what each has asked in the time since the one before."""
        with self._lock:
            asked = {one: one.spent - self._spent.get(one, 0.0) for one in sessions}
            self._spent = {one: one.spent for one in sessions}
        self._busy = shares([one for one, requests in asked.items() if requests > _BUSY_REQUESTS])
        self._all = shares(sessions)
        with self._lock:
            left = self.requests_per_second * seconds - (sum(asked.values()) + self._asked_by_ended - self._borrowed)
            self._borrowed = self._asked_by_ended = 0.0
            most, least = self.requests_per_second * _SPARE_SECONDS, -self.requests_per_second * _OWED_SECONDS
            self._spare = max(least, min(most, self._spare + left))


def shares(busy: Sequence[Session]) -> dict[Session, int]:
    """What part of the request rate each has, as its divisor."""
    uids = {one.uid for one in busy}
    processes = Counter(uid for uid, _ in {(one.uid, one.pid) for one in busy})
    connections = Counter((one.uid, one.pid) for one in busy)
    return {one: len(uids) * processes[one.uid] * connections[one.uid, one.pid] for one in busy}
