"""The demo's requests: real text, prompts that share documents, chats whose prompts hold what was said before."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from engine_adapter.demo.texts import CHATS, DOCUMENTS
from engine_adapter.demo.workload import (
    ChatFormat,
    Session,
    Workload,
    chat_sessions,
    common_length,
    document_sessions,
    document_text,
    mixed_order,
    question_limit,
)
from tests.engine_adapter.demo_kit import save_tiny_model


class _Words:
    """A tokenizer of one token per word or line end, without a chat template."""

    chat_template = None

    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [self.known.setdefault(word, len(self.known)) for word in text.replace("\n", " \n ").split(" ") if word]


@pytest.fixture(scope="module")
def tiny_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(save_tiny_model(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize("document", [*DOCUMENTS, *CHATS], ids=lambda document: document.name)
def test_every_document_is_long_enough_on_this_python(document: Any) -> None:
    tokens = sum(len(paragraph.split()) for paragraph in document.paragraphs())
    assert tokens >= (900 if document in DOCUMENTS else 150), "words; the demo asks for 1,600 or 200 tokens"
    assert "****" not in document_text(document, ChatFormat(_Words()), 100)


def test_documents_that_are_too_short_are_refused() -> None:
    with pytest.raises(ValueError, match="fewer than 1000000"):
        document_text(DOCUMENTS[0], ChatFormat(_Words()), 1_000_000)


@pytest.mark.parametrize("token_count", [150, 700, 1200])
def test_text_has_as_many_tokens_as_asked(token_count: int) -> None:
    chat_format = ChatFormat(_Words())
    for document in DOCUMENTS:
        count = chat_format.count(document_text(document, chat_format, token_count))
        assert 0.9 * token_count <= count <= 1.2 * token_count


def test_questions_about_one_document_share_it_and_differ_after_it() -> None:
    sessions = document_sessions(ChatFormat(_Words()), 24, 600, 4)
    assert len(sessions) == len({session.session_id for session in sessions}) == 24
    assert len({session.first_prompt for session in sessions}) == 24
    for one in sessions:
        for other in sessions:
            shared = common_length(one.first_prompt, other.first_prompt)
            assert (shared >= 600) == (one.document == other.document)
    shared = Workload(tuple(sessions), 4, 8, frozenset()).document_tokens()
    assert set(shared) == {document.name for document in DOCUMENTS}
    assert min(shared.values()) >= 600


def test_all_questions_are_different_up_to_the_limit() -> None:
    sessions = document_sessions(ChatFormat(_Words()), question_limit(), 50, 4)
    assert len({session.first_prompt for session in sessions}) == question_limit()
    with pytest.raises(ValueError, match="only"):
        document_sessions(ChatFormat(_Words()), question_limit() + 1, 50, 4)


def test_order_mixes_documents_with_locality_and_follows_the_seed() -> None:
    sessions = document_sessions(ChatFormat(_Words()), 24, 50, 4)
    order = mixed_order(sessions, 7)
    assert order == mixed_order(sessions, 7) != mixed_order(sessions, 8)
    assert sorted(s.session_id for s in order) == sorted(s.session_id for s in sessions)
    switches = sum(a.document != b.document for a, b in itertools.pairwise(order))
    assert 4 <= switches <= 16, "neither one document after the other nor without any locality"


def test_a_turn_contains_everything_said_before(tiny_tokenizer: Any) -> None:
    session = chat_sessions(ChatFormat(tiny_tokenizer), 1, 5, 60)[0]
    end = tiny_tokenizer.eos_token_id
    prompt = list(session.first_prompt)
    for turn in range(1, session.turn_count):
        answer = [65 + turn, 66 + turn]
        following = session.next_prompt(turn, prompt, answer)
        assert following[: len(prompt) + 2] == [*prompt, *answer]
        assert following[len(prompt) + 2] == end
        assert following == session.next_prompt(turn, prompt, [*answer, end]), "an end the model wrote is not doubled"
        prompt = following
    said = tiny_tokenizer.decode(prompt)
    assert all(text in said for text in CHATS[0].questions)
    assert said.count("<assistant>") == 5


def test_request_ids_name_the_turn() -> None:
    chat = Session("chat", "", (1,), ((2,), (3,)))
    assert [chat.request_id(turn) for turn in range(chat.turn_count)] == ["chat-turn1", "chat-turn2", "chat-turn3"]
    assert Session("question", "names", (1,)).request_id(0) == "question"


def test_tokenizers_without_a_template_are_asked_plainly() -> None:
    words = _Words()
    chat_format = ChatFormat(words)
    names = {token: word for word, token in words.known.items()}
    first = chat_format.first("Why ?")
    names = {token: word for word, token in words.known.items()}
    assert [names[token] for token in first] == ["Why", "?", "\n", "Answer:"]
    assert chat_format.follow_up("And ?")[0] == first[2]


def test_a_workload_counts_every_turn(tmp_path: Path) -> None:
    chat = Session("chat", "", (1,), ((2,), (3,)))
    assert Workload((chat, Session("q", "names", (1,))), 1, 8, frozenset()).request_count == 4
