"""What is asked of an endpoint, in which order, and what came back.

One request at a time over several prompt lengths, in rounds (all lengths, then all again: a machine that grows slower
does not pass for long prompts being slow); the last of the longest prompts again, to see a cache; then several at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier

from allocator.errors import ConfigError
from kvstore.diagnosis.endpoint import Endpoint, Sample
from kvstore.diagnosis.prompts import Prompts

_LONGEST_SECONDS = 86_400
_WARM_TOKENS = 64
_MARGIN_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Probes:
    """prompt_tokens: lengths. concurrency: how many at once, beside one. rounds: how often each length is asked."""

    prompt_tokens: tuple[int, ...]
    answer_tokens: int = 64
    concurrency: tuple[int, ...] = (4,)
    rounds: int = 3
    seconds_limit: float = 300.0

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "concurrency"):
            if not all(1 <= one <= 1 << 22 for one in getattr(self, name)):
                raise ConfigError(f"{name}: got {getattr(self, name)}; expected counts above 0")
        if not self.prompt_tokens:
            raise ConfigError("prompt_tokens: got none; expected at least one length")
        if not 2 <= self.answer_tokens <= 1 << 22:
            raise ConfigError(f"answer_tokens: got {self.answer_tokens}; expected answers of 2 tokens or more")
        if not 1 <= self.rounds <= 1 << 22:
            raise ConfigError(f"rounds: got {self.rounds}; expected 1 or more")
        if not 0 < self.seconds_limit <= _LONGEST_SECONDS:  # NaN is neither
            raise ConfigError(f"seconds: got {self.seconds_limit}; expected a number in (0, {_LONGEST_SECONDS}]")


@dataclass(slots=True)
class Measurements:
    """Samples by what was asked: (prompt length asked for, sample); bursts by how many at once."""

    probes: Probes
    alone: list[tuple[int, Sample]] = field(default_factory=list)
    repeated: list[Sample] = field(default_factory=list)
    bursts: dict[int, list[Sample]] = field(default_factory=dict)
    cut_short: bool = False

    @property
    def longest(self) -> int:
        return max(self.probes.prompt_tokens)

    @property
    def samples(self) -> list[Sample]:
        return [
            *(one for _, one in self.alone),
            *self.repeated,
            *(one for burst in self.bursts.values() for one in burst),
        ]


def measure(
    endpoint: Endpoint, probes: Probes, seed: int, on_step: Callable[[str], None] = lambda _: None
) -> Measurements:
    """Ask everything. ConfigError when a length cannot be asked of this model."""
    longest = max(probes.prompt_tokens) + probes.answer_tokens + _MARGIN_TOKENS
    if endpoint.model_limit is not None and longest > endpoint.model_limit:
        raise ConfigError(
            f"prompt_tokens: got {max(probes.prompt_tokens)}; the model has {endpoint.model_limit} positions, "
            f"{probes.answer_tokens} of them for the answer"
        )
    deadline = time.monotonic() + probes.seconds_limit
    prompts, found = Prompts(seed), Measurements(probes)
    on_step("warming up")
    for _ in range(2):
        text = prompts.fresh(_WARM_TOKENS)
        warm = endpoint.ask(text, 2)
        if warm.prompt_tokens:
            prompts.calibrate(text, warm.prompt_tokens)
    last = ""
    for round_number in range(probes.rounds):
        for tokens in sorted(probes.prompt_tokens):
            if _late(deadline, found):
                return found
            on_step(f"round {round_number + 1} of {probes.rounds}: a prompt of {tokens} tokens")
            last = prompts.fresh(tokens)
            found.alone.append((tokens, endpoint.ask(last, probes.answer_tokens)))
    on_step("the last prompt again")
    for _ in range(2):
        found.repeated.append(endpoint.ask(last, 2))
    for count in sorted(set(probes.concurrency) - {1}):
        if _late(deadline, found):
            return found
        on_step(f"{count} at once")
        found.bursts[count] = _burst(endpoint, [prompts.fresh(found.longest) for _ in range(count)], probes)
    return found


def _late(deadline: float, found: Measurements) -> bool:
    found.cut_short = found.cut_short or time.monotonic() > deadline
    return found.cut_short


def _burst(endpoint: Endpoint, texts: Sequence[str], probes: Probes) -> list[Sample]:
    """All at once, as nearly as threads can."""
    gate = Barrier(len(texts))

    def ask(text: str) -> Sample:
        gate.wait()
        return endpoint.ask(text, probes.answer_tokens)

    with ThreadPoolExecutor(len(texts)) as pool:
        return list(pool.map(ask, texts))
