"""What the demo's users read and ask: topics of Python's own documentation, which every Python installation carries.

The text comes from `pydoc_data.topics` of the running interpreter, so it differs a little between Python versions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pydoc_data.topics import topics

_UNDERLINE = re.compile(r"^([*=\-^~\"'.+#])\1{2,}$")


@dataclass(frozen=True, slots=True)
class Document:
    """One shared document: topics to join, in order, and questions that its text answers."""

    name: str
    topics: tuple[str, ...]
    questions: tuple[str, ...]

    def paragraphs(self) -> Iterator[str]:
        """Paragraphs of the topics, underlines of titles left out. Topics this Python does not have are skipped."""
        for topic in self.topics:
            for paragraph in topics.get(topic, "").split("\n\n"):
                lines = [line.rstrip() for line in paragraph.splitlines() if not _UNDERLINE.match(line.strip())]
                text = "\n".join(lines).strip("\n")
                if text:
                    yield text


DOCUMENTS = (
    Document(
        "exceptions",
        ("try", "raise", "exceptions", "with", "assert", "context-managers"),
        (
            "When is the finally clause executed?",
            "What does a bare except clause match?",
            "What happens to the exception variable at the end of an except clause?",
            "What does 'raise X from Y' do?",
            "In which case is the optional else clause executed?",
            "Which methods does the with statement call, and when?",
        ),
    ),
    Document(
        "functions",
        ("function", "calls", "class", "lambda", "return", "yield"),
        (
            "When are default parameter values evaluated?",
            "What is a decorator expression?",
            "What does the form '*identifier' in a parameter list mean?",
            "Why is a mutable default parameter value a problem?",
            "Which parameters are positional-only?",
            "What is an annotation of a parameter?",
        ),
    ),
    Document(
        "names",
        ("execmodel", "naming", "global", "nonlocal", "exceptions"),
        (
            "What binds a name?",
            "What is a free variable?",
            "What is a code block?",
            "When is UnboundLocalError raised?",
            "How does the global statement change name resolution?",
            "What is the builtins namespace?",
        ),
    ),
    Document(
        "imports",
        ("import", "compound", "customization"),
        (
            "What are the two steps of a basic import statement?",
            "What does 'from module import *' bind?",
            "What is a relative import?",
            "What is a future statement?",
            "When is ImportError raised?",
            "What does the public name list __all__ contain?",
        ),
    ),
)

GENERAL_QUESTIONS = (
    "Summarize this text in one sentence.",
    "Which term in this text is most important, and why?",
    "Give an example that is not in the text.",
    "What would a beginner find surprising here?",
    "Which keywords does this text explain?",
    "What are the restrictions mentioned in the text?",
    "Write a title for this text.",
    "What should a programmer remember from this text?",
)

CHATS = (
    Document(
        "truth",
        ("truth", "booleans", "comparisons"),
        (
            "I am learning Python and do not understand this text. Which values are false?",
            "So is a list that holds only a zero true or false?",
            "Show me a short example with an if statement.",
            "What is a common mistake here?",
            "Summarize our conversation in two sentences.",
        ),
    ),
    Document(
        "scopes",
        ("global", "nonlocal", "naming"),
        (
            "Explain this text to somebody who has written only a few programs.",
            "When would I need that?",
            "What happens if I forget it?",
            "Is there a way to do without it?",
            "Give me one rule to remember.",
        ),
    ),
    Document(
        "checks",
        ("assert", "raise", "try"),
        (
            "What is this statement good for?",
            "Should I use it to check what a user types in?",
            "What should I use instead?",
            "Write a short example of that.",
            "What would you tell a colleague about it?",
        ),
    ),
    Document(
        "identifiers",
        ("id-classes", "identifiers", "atom-identifiers"),
        (
            "Why do some names begin with an underscore?",
            "What is different with two of them?",
            "Which of these should I use in a class of my own?",
            "What does the interpreter do with such a name?",
            "Put that into a list of three points.",
        ),
    ),
)
"""Conversations: a text to begin with, and what the user says in each turn."""
