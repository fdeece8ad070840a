"""Every order in which several threads can take a daemon's locks: one thread runs at a time, and at each lock, each
call of a tier below and each sleep it is chosen which one goes on. All choices are tried, up to a number of times that
one which could go on has to wait for another; few bugs need more than two.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kvstore.host_tier.tier import HostTier
from kvstore.tier import CopyKey, Transfer

_SECONDS = 60.0


class Choice(NamedTuple):
    """Who could go on, who did, who had been, and how often one had been made to wait before."""

    able: list[str]
    taken: str
    current: str
    switches: int


class _Actor:
    def __init__(self, name: str, work: Callable[[], Any], steps: Steps) -> None:
        self.name, self.steps, self.go = name, steps, threading.Semaphore(0)
        self.wants: SteppedLock | None = None
        self.is_done = False
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, args=(work,), daemon=True)

    def _run(self, work: Callable[[], Any]) -> None:
        _here.actor = self
        self.go.acquire()
        try:
            work()
        except BaseException as error:
            self.error = error
        self.is_done = True
        self.steps.back.release()


_here = threading.local()


def point() -> None:
    """Another may go on here."""
    actor: _Actor | None = getattr(_here, "actor", None)
    if actor is not None:
        actor.steps.back.release()
        assert actor.go.acquire(timeout=_SECONDS)


class SteppedLock:
    """A lock at which another may go on. Outside of a run it is free."""

    def __init__(self) -> None:
        self.is_held = False

    def acquire(self) -> bool:
        actor: _Actor | None = getattr(_here, "actor", None)
        if actor is not None:
            actor.wants = self
            point()
            actor.wants = None
        assert not self.is_held
        self.is_held = True
        return True

    def release(self) -> None:
        self.is_held = False

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class SteppedTier(HostTier):
    """A tier below of this process; another may go on before each of its calls."""

    def contains(self, keys: Sequence[CopyKey]) -> list[bool]:
        point()
        return super().contains(keys)

    def submit_get(self, *arguments: Any, **details: Any) -> Transfer:
        point()
        return super().submit_get(*arguments, **details)

    def delete(self, keys: Sequence[CopyKey]) -> int:
        point()
        return super().delete(keys)

    def clear(self) -> None:
        point()
        super().clear()


class Steps:
    """One run: `prefix` says who goes on at first, after that whoever has been, while that can."""

    def __init__(self, prefix: Sequence[str]) -> None:
        self._prefix = prefix
        self.back = threading.Semaphore(0)
        self.trace: list[Choice] = []

    def run(self, works: Mapping[str, Callable[[], Any]]) -> None:
        actors = {name: _Actor(name, work, self) for name, work in works.items()}
        for actor in actors.values():
            actor.thread.start()
        current, switches = "", 0
        while not all(actor.is_done for actor in actors.values()):
            able = [
                name for name, one in actors.items() if not one.is_done and (one.wants is None or not one.wants.is_held)
            ]
            assert able, f"all wait for each other: {self.trace}"
            at = len(self.trace)
            taken = self._prefix[at] if at < len(self._prefix) else current if current in able else able[0]
            self.trace.append(Choice(able, taken, current, switches))
            switches += taken != current and current in able
            current = taken
            actors[taken].go.release()
            assert self.back.acquire(timeout=_SECONDS)
        for actor in actors.values():
            actor.thread.join()
            if actor.error is not None:
                raise actor.error


def orders(switches: int) -> Iterator[Steps]:
    """All runs, each one to be run before the next is asked for."""
    waiting: list[list[str]] = [[]]
    while waiting:
        prefix = waiting.pop()
        steps = Steps(prefix)
        yield steps
        for at in range(len(prefix), len(steps.trace)):
            choice = steps.trace[at]
            for other in choice.able:
                cost = choice.switches + (other != choice.current and choice.current in choice.able)
                if other != choice.taken and cost <= switches:
                    waiting.append([one.taken for one in steps.trace[:at]] + [other])
