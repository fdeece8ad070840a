"""Which releases of an engine this is tested with. Any other is refused at start, with what to install instead.

Engines change what they hand over without a word, and then tokens are wrong and nothing complains. Any thread.
"""

from __future__ import annotations

from dataclasses import dataclass

from allocator.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Releases:
    """Of one package: `first` and later, and below `below`."""

    name: str
    package: str
    first: tuple[int, ...]
    below: tuple[int, ...]

    @property
    def requirement(self) -> str:
        """As pip takes it."""
        first, below = (".".join(map(str, one)) for one in (self.first, self.below))
        return f"{self.package}>={first},<{below}"

    def check(self, version: str) -> None:
        """ConfigError for a release outside the range."""
        parts = version.split("+")[0].split(".")[: len(self.first)]
        numbers = tuple(int(part) for part in parts if part.isdigit())
        if not self.first <= numbers < self.below:
            raise ConfigError(
                f"{self.name} {version}: not tested with this release; expected one of {self.requirement}: install "
                "such a one with pip, or a kvstore-llm that knows yours"
            )


TRANSFORMERS = Releases("transformers", "transformers", (5, 24), (5, 25))
VLLM = Releases("vLLM", "vllm", (0, 32), (0, 33))
SGLANG = Releases("SGLang", "sglang", (0, 5, 23), (0, 5, 24))
