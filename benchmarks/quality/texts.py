"""Real text that every machine with Python has, cut into windows of tokens. Deterministic for a given Python."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# Reference prose, change notes, essays and heavily commented code: paths below the standard library's folder.
_FILES = (
    "pydoc_data/topics.py",
    "idlelib/News3.txt",
    "_pydecimal.py",
    "idlelib/NEWS2x.txt",
    "argparse.py",
    "turtle.py",
)


def sources() -> dict[str, str]:
    """Texts by name, those that this Python has; the topics are the documentation of the language itself."""
    folder = Path(sysconfig.get_path("stdlib"))
    found = {name: (folder / name).read_text(encoding="utf-8") for name in _FILES if (folder / name).is_file()}
    topics = found.get("pydoc_data/topics.py")
    if topics is not None:
        found["pydoc_data/topics.py"] = _topics(topics)
    if not found:
        raise RuntimeError(f"no text found below {folder}: the standard library's files are missing")
    return found


def _topics(source: str) -> str:
    from pydoc_data.topics import topics

    if not topics:
        return source
    return "\n\n".join(str(text) for _, text in sorted(topics.items()))


def windows(
    encode: Callable[[str], list[int]], count: int, length: int, *, first_token: int | None = None, skip: int = 0
) -> list[torch.Tensor]:
    """`count` windows of `length` token ids, Tensor[1, length] int64, in turn from the sources, never overlapping.

    `skip` leaves out as many windows before. Each begins with `first_token` where the model has one.
    """
    found: list[torch.Tensor] = []
    streams = [encode(text) for text in sources().values()]
    own = length - (first_token is not None)
    rank = 0
    while len(found) < count + skip:
        if rank * own > max(map(len, streams)):
            raise RuntimeError(f"the texts hold {len(found)} windows of {length} tokens, {count + skip} were asked for")
        for stream in streams:
            part = stream[rank * own : (rank + 1) * own]
            if len(part) == own and len(found) < count + skip:
                head = [first_token] if first_token is not None else []
                found.append(torch.tensor([head + part]))
        rank += 1
    return found[skip:]


def digest(parts: list[torch.Tensor]) -> str:
    """A short name for exactly these windows."""
    return hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()[:12]


def tokenizer_of(tokenizer: Any) -> Callable[[str], list[int]]:
    """`tokenizer` as a plain function from text to token ids, without special tokens."""

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text[:2_000_000], add_special_tokens=False, verbose=False).input_ids
        return ids

    return encode
