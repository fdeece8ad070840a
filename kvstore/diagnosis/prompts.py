"""Prompts that no prefix cache can have seen: random words from the first one on, new for every probe.

Words are short and common, so that a tokenizer cuts them much alike; how many tokens a word takes is measured.
"""

from __future__ import annotations

import random

# fmt: off
_WORDS = (
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state",
    "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system",
    "program", "question", "work", "night", "point", "home", "water", "room", "mother", "area", "money", "story",
    "month", "lot", "right", "study", "book", "eye", "job", "word", "business", "issue", "side", "kind", "head",
    "service", "friend", "father", "power", "hour", "game", "line", "end", "member", "law", "car", "city", "name",
    "team", "minute", "idea", "body", "back", "parent", "face", "level", "office", "door", "health", "person", "art",
    "war", "history", "party", "result", "change", "morning", "reason", "research", "girl", "moment", "air", "teacher",
)
# fmt: on


class Prompts:
    """Draws prompts; the same seed draws the same ones, so take a new seed for a server that has a cache."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.tokens_per_word = 1.2

    def fresh(self, tokens: int) -> str:
        """About `tokens` tokens of text that begins as nothing before it did."""
        number = self._random.randrange(10**8)  # the very first block differs, also in blocks of few tokens
        count = max(1, round(tokens / self.tokens_per_word) - 1)
        return f"{number} " + " ".join(self._random.choices(_WORDS, k=count))

    def calibrate(self, prompt: str, tokens: int) -> None:
        """Learn from what a server counted."""
        self.tokens_per_word = max(0.2, tokens / len(prompt.split()))
