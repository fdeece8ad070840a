"""Reading traces: Mooncake's and Alibaba Bailian's JSON lines, and our own (docs/formats/trace.md).

Every line is checked; what is wrong raises TraceError with the line and the reason. Lines stream: the text of a trace
is never in memory as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from allocator.block_marks import PRIORITY_DEFAULT, PRIORITY_MAX
from kvstore.simulation.trace import KEY_MAX, Request, Trace, TraceError, build

FORMATS = ("mooncake", "bailian", "kvstore")
_BLOCK_TOKENS = {"mooncake": 512, "bailian": 16}
_TOKENS_MAX = 1 << 31
_SECONDS_MAX = 1e10
_MILLISECONDS_MAX = (1 << 53) - 1
_COMPRESSED = {
    b"\x1f\x8b": ("gzip", "gunzip"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unzstd"),
    b"\xfd7zXZ\0": ("xz", "unxz"),
    b"BZh": ("bzip2", "bunzip2"),
    b"\x04\x22\x4d\x18": ("lz4", "unlz4"),
    b"PK\x03\x04": ("zip", "unzip"),
}
_Line = dict[str, Any]


def read(path: Path, form: str | None = None, block_tokens: int | None = None) -> Trace:
    """The trace in `path`. `form`: one of FORMATS, None: by its first line. `block_tokens`: None: what the form has."""
    if form is not None and form not in FORMATS:
        raise TraceError(f"trace format: got {form!r}; expected one of {', '.join(FORMATS)}")
    try:
        with path.open("rb") as file:
            first = next(iter(file), b"")
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}; expected a trace that can be read") from None
    _check_start(path, first)
    place = f"{path.name}, line 1"
    head = _parsed(first, place)
    if form is None:
        form = "kvstore" if "format" in head else "bailian" if "chat_id" in head else "mooncake"
    if form == "kvstore":
        tokens = _header(head, place)
        if block_tokens not in (None, tokens):
            raise TraceError(f"{place}: the trace has blocks of {tokens} tokens, asked for {block_tokens}")
    else:
        tokens = _BLOCK_TOKENS[form] if block_tokens is None else block_tokens
    requests = _recorded(path, tokens) if form == "kvstore" else _published(path, form, tokens)
    # Bailian's page does not say that an id stands for all before it; the other two formats do
    return build(path.stem, tokens, requests, file=path.name if form != "bailian" else None)


def _check_start(path: Path, first: bytes) -> None:
    """What is no text needs other words than a line that is no JSON."""
    if not first:
        raise TraceError(f"{path}: got an empty file; expected a trace, a JSON object a line")
    for start, (kind, command) in _COMPRESSED.items():
        if first.startswith(start):
            raise TraceError(f"{path}: got a file compressed with {kind}; expected it unpacked ({command})")


def _header(head: _Line, place: str) -> int:
    if head.get("format") != "kvstore-trace" or head.get("version") != 1 or head["version"] is True:
        raise TraceError(
            f"{place}: got format {head.get('format')!r} version {head.get('version')!r}; "
            "expected 'kvstore-trace' version 1"
        )
    return _whole(head, "block_tokens", place, least=1, most=65_536)


def _lines(path: Path, skip: int) -> Iterator[tuple[_Line, str]]:
    """(line, where it stands) of every line behind the first `skip` that is not blank."""
    with path.open("rb") as file:
        for number, text in enumerate(file, start=1):
            if number > skip and text.strip():
                place = f"{path.name}, line {number}"
                yield _parsed(text, place), place


def _published(path: Path, form: str, block_tokens: int) -> Iterator[Request]:
    """Requests of traces whose lines are in order of time."""
    convert: Callable[[_Line, str, dict[int, int]], Request] = {"mooncake": _mooncake, "bailian": _bailian}[form]
    before = 0.0
    chats: dict[int, int] = {}
    is_counted = form == "mooncake" or block_tokens != _BLOCK_TOKENS[form]  # Bailian's page does not promise a count
    for line, place in _lines(path, skip=0):
        request = convert(line, place, chats)
        if is_counted:
            _check_count(request, block_tokens, place)
        if request.seconds < before:
            raise TraceError(
                f"{place}: got time {request.seconds} s after {before} s; expected requests in order of time"
            )
        before = request.seconds
        yield replace(request, line=int(place.rpartition(" ")[2]))


def _check_count(request: Request, block_tokens: int, place: str) -> None:
    """An id a block, whether the last is full or not, or only the full ones: else blocks have another size, or it is
    another format."""
    full, given = request.input_tokens // block_tokens, len(request.block_ids)
    most = -(-request.input_tokens // block_tokens)
    if not full <= given <= most:
        raise TraceError(
            f"{place}: hash_ids: got {given} for {request.input_tokens} tokens in blocks of {block_tokens}; expected "
            f"{most if full == most else f'{full} or {most}'}"
        )


def _recorded(path: Path, block_tokens: int) -> Iterator[Request]:
    """Requests of our own format, in order of their ends."""
    for line, place in _lines(path, skip=1):
        input_tokens = _whole(line, "input_length", place, least=1, most=_TOKENS_MAX)
        ids = _ids(line, place)
        if len(ids) != input_tokens // block_tokens:
            raise TraceError(
                f"{place}: hash_ids: got {len(ids)} for {input_tokens} tokens in blocks of {block_tokens}; "
                f"expected one a whole block, {input_tokens // block_tokens}"
            )
        yield Request(
            _whole(line, "timestamp", place, least=0, most=_MILLISECONDS_MAX) / 1000,
            input_tokens,
            _whole(line, "output_length", place, least=0, most=_TOKENS_MAX),
            ids,
            session=_whole(line, "session", place, least=0, most=KEY_MAX) if "session" in line else 0,
            line=int(place.rpartition(" ")[2]),
            tenant=_whole(line, "tenant", place, least=0, most=KEY_MAX) if "tenant" in line else 0,
            priority=_priority(line, place),
        )


def _priority(line: _Line, place: str) -> int:
    """Of our own format: what the request asked for, absent where it asked for nothing."""
    if "priority" not in line:
        return PRIORITY_DEFAULT
    return _whole(line, "priority", place, least=0, most=PRIORITY_MAX)


def _parsed(text: bytes, place: str) -> _Line:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError) as error:
        why = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise TraceError(f"{place}: got what is no JSON ({why}); expected one object a line") from None
    if not isinstance(line, dict):
        raise TraceError(f"{place}: got {type(line).__name__}; expected one JSON object a line")
    return line


def _mooncake(line: _Line, place: str, chats: dict[int, int]) -> Request:
    del chats
    return Request(
        _number(line, "timestamp", place) / 1000,
        _whole(line, "input_length", place, least=0, most=_TOKENS_MAX),
        _whole(line, "output_length", place, least=0, most=_TOKENS_MAX),
        _ids(line, place),
    )


def _bailian(line: _Line, place: str, chats: dict[int, int]) -> Request:
    chat = _whole(line, "chat_id", place, least=0, most=KEY_MAX)
    if chat in chats:
        raise TraceError(f"{place}: got chat_id {chat} again; expected each once")
    parent = _whole(line, "parent_chat_id", place, least=-1, most=KEY_MAX) if "parent_chat_id" in line else -1
    chats[chat] = chats.get(parent, chat)
    return Request(
        _number(line, "timestamp", place),
        _whole(line, "input_length", place, least=0, most=_TOKENS_MAX),
        _whole(line, "output_length", place, least=0, most=_TOKENS_MAX),
        _ids(line, place),
        session=chats[chat] + 1,
    )


def _ids(line: _Line, place: str) -> list[int]:
    ids = line.get("hash_ids")
    if not isinstance(ids, list):
        raise TraceError(f"{place}: hash_ids: got {_shown(ids)}; expected a list of block ids")
    if ids and not (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) <= KEY_MAX):
        wrong = next(one for one in ids if type(one) is not int or not 0 <= one <= KEY_MAX)
        raise TraceError(f"{place}: hash_ids: got {_shown(wrong)}; expected ints in [0, 2^64)")
    return _distinct(ids, place)


def _distinct(ids: list[int], place: str) -> list[int]:
    if len(set(ids)) < len(ids):
        seen: set[int] = set()
        twice = next(one for one in ids if one in seen or seen.add(one))  # type: ignore[func-returns-value]
        raise TraceError(f"{place}: got block id {twice} twice; expected an id to stand for one prefix")
    return ids


def _whole(line: _Line, name: str, place: str, least: int, most: int) -> int:
    value = line.get(name)
    if type(value) is not int or not least <= value <= most:
        raise TraceError(f"{place}: {name}: got {_shown(value)}; expected an int in [{least}, {most}]")
    return value


def _number(line: _Line, name: str, place: str) -> float:
    value = line.get(name)
    if type(value) not in (int, float) or not 0 <= value <= _SECONDS_MAX * 1000:  # type: ignore[operator]
        raise TraceError(f"{place}: {name}: got {_shown(value)}; expected a time >= 0 and at most {_SECONDS_MAX:g} s")
    return float(value)  # type: ignore[arg-type]


def _shown(value: object) -> str:
    if value is None:
        return "nothing"
    if type(value) is int and value.bit_length() > 256:
        return f"an int of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
