"""The demo's requests: users who ask questions about shared documents, and users who chat over several turns.

A workload is a list of sessions in the order of their arrival. A session is a first prompt and what its user says next;
the prompt of each turn contains everything said before it, the model's answers included. Built once from a tokenizer
and a seed; plain immutable values after that.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine_adapter.demo.texts import CHATS, DOCUMENTS, GENERAL_QUESTIONS, Document

_ANSWER = "\u241f"  # stands for the model's answer while a chat template is rendered
_LOCALITY = 0.6  # chance that the next user asks about the same document as the one before


class WorkloadError(ValueError):
    """The texts on this machine do not give the workload that was asked for."""


@dataclass(frozen=True, slots=True)
class Session:
    """One user. `follow_ups` are the token ids that come between an answer and the next one."""

    session_id: str
    document: str
    first_prompt: tuple[int, ...]
    follow_ups: tuple[tuple[int, ...], ...] = ()

    @property
    def turn_count(self) -> int:
        return 1 + len(self.follow_ups)

    def request_id(self, turn: int) -> str:
        return self.session_id if not self.follow_ups else f"{self.session_id}-turn{turn + 1}"

    def next_prompt(self, turn: int, prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
        """Prompt of `turn` (1 is the second), from the prompt before it and its answer.

        An answer that the model ended itself already has the end marker with which the follow-up begins.
        """
        follow_up = list(self.follow_ups[turn - 1])
        if follow_up and answer and answer[-1] == follow_up[0]:
            follow_up = follow_up[1:]
        return [*prompt, *answer, *follow_up]


@dataclass(frozen=True, slots=True)
class Workload:
    """Sessions in order of arrival; `users` of them at a time, and at most `max_new_tokens` per answer."""

    sessions: tuple[Session, ...]
    users: int
    max_new_tokens: int
    eos_token_ids: frozenset[int]

    @property
    def request_count(self) -> int:
        return sum(session.turn_count for session in self.sessions)

    def document_tokens(self) -> dict[str, int]:
        """Prompt tokens that the sessions of each document have in common."""
        common: dict[str, Sequence[int]] = {}
        for session in self.sessions:
            if session.document:
                known = common.get(session.document)
                prompt = session.first_prompt
                common[session.document] = prompt if known is None else prompt[: common_length(known, prompt)]
        return {name: len(tokens) for name, tokens in common.items()}


def common_length(left: Sequence[int], right: Sequence[int]) -> int:
    """Tokens that both begin with."""
    for place, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return place
    return min(len(left), len(right))


class ChatFormat:
    """Turns what users say into token ids, with the tokenizer's chat template, or plainly when it has none."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._templated = bool(getattr(tokenizer, "chat_template", None))

    def count(self, text: str) -> int:
        return len(self._encode(text))

    def first(self, text: str) -> tuple[int, ...]:
        """Prompt of a first turn, up to where the answer begins."""
        if not self._templated:
            return self._encode(f"{text}\nAnswer:")
        return self._encode(self._render([_message("user", text)]))

    def follow_up(self, text: str) -> tuple[int, ...]:
        """What comes between an answer and the next one."""
        if not self._templated:
            return self._encode(f"\n{text}\nAnswer:")
        said = [_message("user", "Hello"), _message("assistant", _ANSWER), _message("user", text)]
        return self._encode(self._render(said).partition(_ANSWER)[2])

    def _render(self, messages: list[dict[str, str]]) -> str:
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def document_text(document: Document, chat_format: ChatFormat, token_count: int) -> str:
    """The document's text, cut at a paragraph (else at a line) so that it has about `token_count` tokens, rather more.

    Raises WorkloadError when this Python's documentation is too short for that.
    """
    lines: list[str] = []
    tokens = 0
    for paragraph in document.paragraphs():
        for line in [*paragraph.splitlines(), ""]:
            lines.append(line)
            tokens += chat_format.count(line + "\n")
            if tokens > token_count * 1.05 or (tokens >= token_count and not line):
                return "\n".join(lines).rstrip()
    raise WorkloadError(
        f"document {document.name!r} has {tokens} tokens in this Python's pydoc_data.topics, fewer than {token_count}; "
        "ask for shorter documents"
    )


def question_limit() -> int:
    """Most document questions that a workload can hold, all different."""
    return sum(len(document.questions) + len(GENERAL_QUESTIONS) for document in DOCUMENTS)


def document_sessions(chat_format: ChatFormat, count: int, token_count: int, documents: int) -> list[Session]:
    """`count` questions, the same number for each of the first `documents` documents where that divides."""
    sessions = []
    for place, document in enumerate(DOCUMENTS[:documents]):
        text = document_text(document, chat_format, token_count)
        questions = [*document.questions, *GENERAL_QUESTIONS]
        wanted = count // documents + int(place < count % documents)
        if wanted > len(questions):
            raise WorkloadError(f"{wanted} questions for {document.name!r}, but only {len(questions)} are known")
        for number, question in enumerate(questions[:wanted]):
            said = f"Answer the question about this part of the Python documentation.\n\n{text}\n\nQuestion: {question}"
            sessions.append(Session(f"{document.name}-{number + 1}", document.name, chat_format.first(said)))
    return sessions


def chat_sessions(chat_format: ChatFormat, count: int, turns: int, token_count: int) -> list[Session]:
    """`count` chats of `turns` turns each, which begin with a passage of about `token_count` tokens."""
    sessions = []
    for chat in CHATS[:count]:
        passage = document_text(chat, chat_format, token_count)
        first = chat_format.first(f"{passage}\n\n{chat.questions[0]}")
        follow_ups = tuple(chat_format.follow_up(said) for said in chat.questions[1:turns])
        sessions.append(Session(f"chat-{chat.name}", "", first, follow_ups))
    return sessions


def mixed_order(sessions: Sequence[Session], seed: int) -> list[Session]:
    """An order with the locality of real traffic: often, not always, the next user reads the same document."""
    chooser = random.Random(seed)
    left: dict[str, list[Session]] = {}
    for session in sessions:
        left.setdefault(session.document, []).append(session)
    for group in left.values():
        chooser.shuffle(group)
    order: list[Session] = []
    current = ""
    while left:
        others = sorted(set(left) - {current})
        if current not in left or (others and chooser.random() >= _LOCALITY):
            current = chooser.choice(others)
        order.append(left[current].pop())
        if not left[current]:
            del left[current]
    return order
