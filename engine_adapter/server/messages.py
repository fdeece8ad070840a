"""The OpenAI interface as values: what a client sends to a `Request`, and pieces of text from token ids.

Pure functions and small state of one answer; any thread. What would change the answer and is not supported is refused,
with the field, what was given and what is expected; what only describes the caller (user, metadata) is ignored.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine_adapter.request import Request

_MAX_BRANCHES = 16
_MAX_STOPS = 16
_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
_DEFAULT_CHAT_TOKENS = 512
_HELD_BACK_TOKENS = 8
# Field: the value that changes nothing and may be given.
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "logprobs": (None, False), "top_logprobs": (None, 0), "echo": (None, False), "suffix": (None, ""),
    "best_of": (None, 1), "logit_bias": (None, {}), "presence_penalty": (None, 0), "frequency_penalty": (None, 0),
    "tools": (None, []), "tool_choice": (None, "none", "auto"), "functions": (None, []), "cache_salt": (None,),
    "response_format": (None, {"type": "text"}), "min_tokens": (None, 0), "min_p": (None, 0),
    "repetition_penalty": (None, 1), "length_penalty": (None, 1), "stop_token_ids": (None, []), "bad_words": (None, []),
    "allowed_token_ids": (None,), "truncate_prompt_tokens": (None,), "use_beam_search": (None, False),
}  # fmt: skip


class BadRequest(Exception):  # noqa: N818 - named as HTTP names it
    """What a client sent cannot be served: message and the field it is about."""

    def __init__(self, message: str, field: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.field = field
        self.status = status


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request and how its answer is to be sent."""

    request: Request
    chat: bool
    stream: bool
    include_usage: bool
    stops: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Limits:
    """position_limit: of the model, None without one."""

    position_limit: int | None
    vocab_size: int


def parse_body(body: bytes) -> dict[str, Any]:
    """The JSON object of a request."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON ({error})") from error
    if not isinstance(fields, dict):
        raise BadRequest(f"the body is {type(fields).__name__}; expected an object")
    return fields


def wanted(
    fields: Mapping[str, Any], *, chat: bool, tokenizer: Any, eos_token_ids: frozenset[int], limits: Limits
) -> Wanted:
    """What a parsed body asks for. Raises BadRequest."""
    for field, harmless in _UNSUPPORTED.items():
        if field in fields and not _is_one_of(fields[field], harmless):
            raise BadRequest(f"{field}: got {fields[field]!r:.80}; this server does not support it", field)
    token_ids = _chat_prompt(fields, tokenizer) if chat else _prompt(fields, tokenizer, limits.vocab_size)
    if not token_ids:
        raise BadRequest("the prompt is empty; expected at least one token", "messages" if chat else "prompt")
    default = _DEFAULT_CHAT_TOKENS if chat else _DEFAULT_COMPLETION_TOKENS
    name = "max_completion_tokens" if fields.get("max_completion_tokens") is not None else "max_tokens"
    room = None if limits.position_limit is None else limits.position_limit - len(token_ids)
    if room is not None and room < 1:
        raise BadRequest(
            f"the prompt has {len(token_ids)} tokens; the model has {limits.position_limit} positions, and at least "
            "one is needed for the answer", "messages" if chat else "prompt",
        )  # fmt: skip
    new_tokens = _whole(fields, name, default if room is None else min(default, room), 1, 1 << 20)
    if room is not None and new_tokens > room:
        raise BadRequest(f"{name}: got {new_tokens}; expected at most {room} behind {len(token_ids)} tokens", name)
    request = Request(
        request_id=f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
        token_ids=token_ids,
        max_new_tokens=new_tokens,
        eos_token_ids=frozenset() if _truth(fields, "ignore_eos") else eos_token_ids,
        temperature=_number(fields, "temperature", 1.0, 0.0, 100.0),
        top_p=_number(fields, "top_p", 1.0, 1e-6, 1.0),
        top_k=max(0, _whole(fields, "top_k", 0, -1, limits.vocab_size)),
        seed=_whole(fields, "seed", secrets.randbits(32), -(1 << 63), (1 << 63) - 1),
        n=_whole(fields, "n", 1, 1, _MAX_BRANCHES),
        turn=_turn(fields) if chat else None,
    )
    options = fields.get("stream_options") or {}
    if not isinstance(options, Mapping):
        raise BadRequest(f"stream_options: got {options!r:.80}; expected an object", "stream_options")
    return Wanted(request, chat, _truth(fields, "stream"), _truth(options, "include_usage"), _stops(fields))


def _is_one_of(given: object, harmless: tuple[object, ...]) -> bool:
    """0 is not false here: OpenAI's logprobs of 0 asks for those of the tokens put out."""
    return any(given == one and (type(given) is bool) == (type(one) is bool) for one in harmless)


def _prompt(fields: Mapping[str, Any], tokenizer: Any, vocab_size: int) -> list[int]:
    given = fields.get("prompt")
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], str | list):
        given = given[0]
    if isinstance(given, str):
        return _encode(tokenizer, given)
    if isinstance(given, list) and given and all(type(one) is int for one in given):
        for place, one in enumerate(given):
            if not 0 <= one < vocab_size:
                raise BadRequest(f"prompt[{place}]: got {one}; expected a token id in [0, {vocab_size})", "prompt")
        return list(given)
    raise BadRequest(
        f"prompt: got {given!r:.80}; expected one text or one list of token ids (one prompt a request)", "prompt"
    )


def _chat_prompt(fields: Mapping[str, Any], tokenizer: Any) -> list[int]:
    if not getattr(tokenizer, "chat_template", None):
        raise BadRequest("this model has no chat template; use /v1/completions", "messages")
    given = fields.get("messages")
    if not isinstance(given, list) or not given:
        raise BadRequest(f"messages: got {given!r:.80}; expected a list of messages", "messages")
    messages = []
    for place, one in enumerate(given):
        role = one.get("role") if isinstance(one, Mapping) else None
        content = _content(one.get("content")) if isinstance(one, Mapping) else None
        if not isinstance(role, str) or content is None:
            raise BadRequest(f"messages[{place}]: got {one!r:.80}; expected role and content, both text", "messages")
        messages.append({"role": role, "content": content})
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is a program and may refuse with anything
        raise BadRequest(f"messages: the model's chat template refuses them ({error})", "messages") from error
    return _encode(tokenizer, text, special=False)


def _encode(tokenizer: Any, text: str, *, special: bool = True) -> list[int]:
    """A lone surrogate is legal in JSON and no text that a tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRequest(f"the prompt is no text ({error.reason})", "prompt") from error
    return list(tokenizer(text, add_special_tokens=special).input_ids)


def _content(given: object) -> str | None:
    """Text, or the joined texts of a list of parts; None for anything else."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        return None
    parts = [one.get("text") if isinstance(one, Mapping) and one.get("type") == "text" else None for one in given]
    return "".join(part for part in parts if isinstance(part, str)) if all(isinstance(p, str) for p in parts) else None


def _turn(fields: Mapping[str, Any]) -> int:
    return sum(1 for one in fields["messages"] if one["role"] == "assistant")


def _stops(fields: Mapping[str, Any]) -> tuple[str, ...]:
    given = fields.get("stop")
    stops = [] if given is None else [given] if isinstance(given, str) else given
    if not isinstance(stops, list) or len(stops) > _MAX_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise BadRequest(f"stop: got {given!r:.80}; expected a text, or up to {_MAX_STOPS} of them", "stop")
    return tuple(stops)


def _whole(fields: Mapping[str, Any], name: str, default: int, least: int, most: int) -> int:
    value = fields.get(name)
    if value is None:
        return default
    if type(value) is not int or not least <= value <= most:
        raise BadRequest(f"{name}: got {value!r:.80}; expected an integer in [{least}, {most}]", name)
    return value


def _number(fields: Mapping[str, Any], name: str, default: float, least: float, most: float) -> float:
    value = fields.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise BadRequest(f"{name}: got {value!r:.80}; expected a number in [{least:g}, {most:g}]", name)
    return float(value)


def _truth(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value is None or type(value) is bool:
        return bool(value)
    raise BadRequest(f"{name}: got {value!r:.80}; expected true or false", name)


class TextPieces:
    """Text of one output stream, piece by piece: what is certain not to change, up to a stop text.

    A token may end inside a character, and a stop text may be spread over several tokens: such ends are held back.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._ids: list[int] = []
        self._start = self._read = 0  # decoding begins at _start; text up to _read has been taken
        self._held = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """The text that this token makes certain."""
        self._ids.append(token_id)
        fresh = self._decode(len(self._ids))
        if fresh.endswith("\ufffd") and len(self._ids) - self._read < _HELD_BACK_TOKENS:
            return ""
        return self._take(fresh)

    def rest(self) -> str:
        """What was held back; at the end of the stream."""
        if self.stopped:
            return ""
        text = self._held + (self._decode(len(self._ids)) if self._read < len(self._ids) else "")
        self._held, self._read = "", len(self._ids)
        return self._cut(text)

    def _decode(self, end: int) -> str:
        before = self._tokenizer.decode(self._ids[self._start : self._read], skip_special_tokens=True)
        both = self._tokenizer.decode(self._ids[self._start : end], skip_special_tokens=True)
        return str(both[len(before) :])

    def _take(self, fresh: str) -> str:
        self._start, self._read = self._read, len(self._ids)
        text = self._cut(self._held + fresh)
        if self.stopped:
            return text
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :] if keep else ""
        return text[: len(text) - keep] if keep else text

    def _cut(self, text: str) -> str:
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.stopped, self._held = True, ""
            return text[: min(places)]
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-size:])), 0)
