"""Every error of the project, from the allocator up (the packages above re-export what they raise).

    KVError
    ├── CapacityError            no room; nothing was changed; carries needed and available
    ├── IntegrityError           an invariant of our own bookkeeping is broken
    ├── TierError                a tier cannot do what was asked (never raised for a bad or absent copy)
    ├── LeaseError               a lease ended, or is not the caller's
    ├── ConfigError              a setting or geometry cannot work          (also a ValueError)
    │   └── GeometryError
    └── UsageError               misuse: double free, use after finish, ...  (also a ValueError)
        ├── UnknownSequence      (also a KeyError)
        ├── DuplicateSequence
        └── CannotRollback       blocks that the shorter sequence needs are gone

Who may raise: anybody. Messages say what was given and what was expected. No lock, no thread rules.
"""

from __future__ import annotations


class KVError(Exception):
    """Root of all errors raised on purpose by this project."""


class CapacityError(KVError):
    """No room for what was asked; nothing was changed.

    `needed` and `available` are in the unit of the request (blocks unless the message says otherwise).
    `permanent` means that it can never fit; `transient` that transfers under way will free room by themselves.
    """

    def __init__(
        self,
        needed: int,
        available: int,
        what: str = "blocks",
        *,
        permanent: bool = False,
        transient: bool = False,
    ) -> None:
        super().__init__(f"needed {needed} {what}, {available} available")
        self.needed = needed
        self.available = available
        self.permanent = permanent
        self.transient = transient


class IntegrityError(KVError):
    """Our own bookkeeping contradicts itself. Never caused by bytes that somebody else wrote."""


class TierError(KVError):
    """A tier could not be reached or could not do an operation that must not fail silently."""


class LeaseError(KVError):
    """A lease has ended or belongs to somebody else."""


class ConfigError(KVError, ValueError):
    """A setting cannot work; raised when the object is built, not later."""


class GeometryError(ConfigError):
    """A cache group or its tensors do not have the shape they must have."""


class UsageError(KVError, ValueError):
    """The caller broke the contract of a call; nothing was changed."""


class UnknownSequence(UsageError, KeyError):  # noqa: N818
    """No sequence of that id is alive."""

    __str__ = Exception.__str__  # KeyError would print the repr of the message


class DuplicateSequence(UsageError):  # noqa: N818
    """A sequence of that id is alive already."""


class CannotRollback(UsageError):  # noqa: N818
    """A shorter sequence would need blocks that have left the window; recompute instead."""
