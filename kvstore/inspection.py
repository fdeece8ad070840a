"""What an inspection of a disk directory or a Redis namespace found, counted within bounds, whatever is stored there.

Plain values and counting; one thread. Filled by disk_tier.inspection and redis_tier.inspection, shown by cli/inspect.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from kvstore.copy_key import CopyKey
from kvstore.frame.inspection import Statement
from kvstore.frame.parsing import FrameFault

MOST_FAMILIES = 1000
MOST_EXAMPLES = 100
MOST_WORDS = 16
OTHERS = "others"
SECRET_MATTERS = (FrameFault.NO_SECRET, FrameFault.UNSIGNED)
"""Causes that say nothing against the bytes: another reader may have, or need no, secret."""

Advance: TypeAlias = Callable[[int, int], None]
"""(copies looked at, copies there may be in all; 0: not known), for a progress bar."""


class FamilyName(NamedTuple):
    """Everything in a copy's name but the block."""

    root: str
    group: int
    codec: str
    exact: bool
    heads: str
    layers: str
    parameters: str


def family_name(key: CopyKey, parameters: str) -> FamilyName:
    heads, layers = (f"{start}-{stop}" for start, stop in (key.heads, key.layers))
    return FamilyName(key.root.hex(), key.group, printable(key.codec), key.exact, heads, layers, parameters)


@dataclass(slots=True)
class Span:
    """Smallest and largest of some numbers."""

    least: float | None = None
    most: float | None = None

    def add(self, value: float) -> None:
        self.least = value if self.least is None else min(self.least, value)
        self.most = value if self.most is None else max(self.most, value)

    def to_json(self) -> dict[str, float | None]:
        return {"least": self.least, "most": self.most}


@dataclass(slots=True)
class Family:
    """Counts of one family; `shape` as its first frame says it."""

    copy_count: int = 0
    stored_bytes: int = 0
    corrupt_count: int = 0
    deleted_count: int = 0
    shape: str = ""
    age_seconds: Span = field(default_factory=Span)
    ttl_seconds: Span = field(default_factory=Span)
    idle_seconds: Span = field(default_factory=Span)

    def to_json(self) -> dict[str, Any]:
        return {
            "copies": self.copy_count,
            "bytes": self.stored_bytes,
            "corrupt": self.corrupt_count,
            "deleted": self.deleted_count,
            "shape": self.shape,
            "age_seconds": self.age_seconds.to_json(),
            "ttl_left_seconds": self.ttl_seconds.to_json(),
            "idle_seconds": self.idle_seconds.to_json(),
        }


@dataclass(slots=True)
class Findings:
    """problems: what could not be looked at; notes: what is worth knowing and no fault."""

    target: str
    kind: str
    verified: bool
    copy_count: int = 0
    stored_bytes: int = 0
    signed_count: int = 0
    unsigned_count: int = 0
    gone_count: int = 0
    deleted_count: int = 0
    used_again_count: int | None = None
    file_bytes: int | None = None
    foreign_count: int = 0
    repaired: bool = False
    families: dict[FamilyName, Family] = field(default_factory=dict)
    words: dict[str, dict[str, str]] = field(default_factory=dict)
    corrupt: Counter[str] = field(default_factory=Counter)
    corrupt_examples: list[dict[str, str]] = field(default_factory=list)
    foreign_examples: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        return bool(self.problems or (self.corrupt and not self.repaired))

    def family(self, name: FamilyName) -> Family:
        if name not in self.families and len(self.families) >= MOST_FAMILIES:
            name = FamilyName(OTHERS, 0, OTHERS, False, "", "", "")
        return self.families.setdefault(name, Family())

    def add(self, name: FamilyName, stored_bytes: int) -> Family:
        """One more copy."""
        family = self.family(name)
        family.copy_count += 1
        family.stored_bytes += stored_bytes
        self.copy_count += 1
        self.stored_bytes += stored_bytes
        return family

    def note_shape(self, family: Family, statement: Statement | None) -> None:
        if statement is not None and not family.shape:
            value = f", V {statement.value_dim}" if statement.value_dim else ""
            dtype = printable(statement.dtype)
            family.shape = f"{statement.block_tokens} tokens, K {statement.key_dim}{value}, {dtype}"

    def judge(self, family: Family | None, copy: str, cause: str | None) -> bool:
        """Count what was found about one copy's bytes; True when they are corrupt."""
        if cause == FrameFault.NO_SECRET:
            self.signed_count += 1
        elif cause == FrameFault.UNSIGNED:
            self.unsigned_count += 1
        elif cause is not None:
            self.corrupt[str(cause)] += 1
            if family is not None:
                family.corrupt_count += 1
            if len(self.corrupt_examples) < MOST_EXAMPLES:
                self.corrupt_examples.append({"copy": copy, "cause": str(cause)})
            return True
        return False

    def add_problem(self, text: str) -> None:
        if text not in self.problems and len(self.problems) < MOST_EXAMPLES:
            self.problems.append(text)

    def add_note(self, text: str) -> None:
        if text not in self.notes and len(self.notes) < MOST_EXAMPLES:
            self.notes.append(text)

    def add_foreign(self, name: bytes) -> None:
        """A key that is no copy's."""
        self.foreign_count += 1
        if len(self.foreign_examples) < 5:
            self.foreign_examples.append(printable(name.decode("utf-8", "replace")))

    def to_json(self) -> dict[str, Any]:
        families = [
            name._asdict() | {"description": self.words.get(name.root, {})} | family.to_json()
            for name, family in self.families.items()
        ]
        return {
            "target": self.target,
            "kind": self.kind,
            "verified": self.verified,
            "copies": self.copy_count,
            "bytes": self.stored_bytes,
            "roots": len({name.root for name in self.families}),
            "families": families,
            "corrupt": dict(self.corrupt),
            "corrupt_copies": self.corrupt_examples,
            "signed_unchecked": self.signed_count,
            "unsigned": self.unsigned_count,
            "gone": self.gone_count,
            "used_again": self.used_again_count,
            "file_bytes": self.file_bytes,
            "deleted": self.deleted_count,
            "foreign": self.foreign_count,
            "foreign_keys": self.foreign_examples,
            "problems": self.problems,
            "notes": self.notes,
        }


@dataclass(frozen=True, slots=True)
class Selection:
    """Which copies are meant: all that match what is given. root: the first hex digits of it."""

    root: str = ""
    codec: str = ""
    words: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return not (self.root or self.codec or self.words)

    def matches(self, name: FamilyName, words: Mapping[str, str]) -> bool:
        return (
            name.root.startswith(self.root)
            and self.codec in ("", name.codec)
            and all(words.get(word) == value for word, value in self.words.items())
        )


def printable(text: str) -> str:
    """Without what a terminal would obey, and not long."""
    return "".join(one if one.isprintable() else f"\\x{ord(one):02x}" for one in text[:200])
