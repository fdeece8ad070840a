"""The error tree of the whole project.

    KVError
      CapacityError(needed, available)      nothing changed; memory is short (transient or permanent)
      IntegrityError                        an invariant of ours is broken: a bug, never bad bytes from outside
      TierError                             a tier cannot be reached or refused an order that must not fail silently
      LeaseError                            a lease has ended, is foreign or was released twice
      ConfigError (ValueError)              a setting is wrong; names the key, what was given and what is expected
        GeometryError                       a model geometry is impossible or does not match
      UsageError (ValueError)               misuse of a call: double free, use after finish, bad argument
        UnknownSequence (KeyError)
        DuplicateSequence
        CannotRollback

Any package may import this module; it imports nothing. The data path never raises for a bad or absent copy.
"""

from __future__ import annotations


class KVError(Exception):
    """Root of every error this project raises on purpose."""


class CapacityError(KVError):
    """Not enough room; nothing was changed."""

    def __init__(self, needed: int, available: int, *, transient: bool = False, permanent: bool = False) -> None:
        super().__init__(f"needed {needed}, available {available}")
        self.needed = needed
        self.available = available
        self.transient = transient
        self.permanent = permanent


class IntegrityError(KVError):
    """An invariant of the project does not hold."""


class TierError(KVError):
    """A tier could not carry out an order that must not fail silently."""


class LeaseError(KVError):
    """A lease has ended, belongs to someone else or was given back before."""


class ConfigError(KVError, ValueError):
    """A setting is wrong."""


class GeometryError(ConfigError):
    """A model geometry is impossible, or does not match what it is used with."""


class UsageError(KVError, ValueError):
    """A call was misused."""


class UnknownSequence(UsageError, KeyError):  # noqa: N818
    """No sequence of that id is known."""

    def __str__(self) -> str:
        return ValueError.__str__(self)


class DuplicateSequence(UsageError):  # noqa: N818
    """A sequence of that id exists already."""


class CannotRollback(UsageError):  # noqa: N818
    """The blocks that a rollback needs are gone."""
