"""Made-up workloads with a seed: chats, one long system prompt, questions about documents, agents, and a mixture.

Each is an endless stream of chains of block ids, cut to a number of requests; the same seed gives the same trace.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from kvstore.simulation.trace import Request, Trace, TraceError, build

_Chain = list[int]
_REQUESTS_PER_SECOND = 20.0
_MOST_REQUESTS = 10_000_000


class _Ids:
    """Numbers that were never given out."""

    def __init__(self) -> None:
        self.next = 1

    def take(self, count: int) -> _Chain:
        first = self.next
        self.next += count
        return list(range(first, self.next))


def _length(random_numbers: random.Random, mean: float) -> int:
    return max(1, round(random_numbers.lognormvariate(0, 0.8) * mean / 1.38))


def _zipf(random_numbers: random.Random, count: int) -> int:
    """A number below `count`, small ones more often."""
    return min(count - 1, int(count ** random_numbers.random()) - 1)


def _chats(numbers: random.Random, ids: _Ids, trunk: _Chain) -> Iterator[tuple[_Chain, int]]:
    """Sessions of several turns; who spoke last is the likeliest to speak again."""
    sessions: list[tuple[_Chain, int]] = []
    while True:
        if sessions and numbers.random() < 0.6:
            back = min(len(sessions) - 1, int(numbers.expovariate(1 / 120)))
            chain, session = sessions.pop(len(sessions) - 1 - back)
        else:
            chain, session = list(trunk), ids.next
        chain = chain + ids.take(_length(numbers, 6))
        if len(chain) < 200 and numbers.random() < 0.75:
            sessions.append((chain, session))
            del sessions[:-4000]
        yield chain, session


def _system_prompt(numbers: random.Random, ids: _Ids) -> Iterator[tuple[_Chain, int]]:
    trunks = [ids.take(_length(numbers, 12)) for _ in range(20)]
    while True:
        yield trunks[_zipf(numbers, len(trunks))] + ids.take(_length(numbers, 5)), ids.next


def _documents(numbers: random.Random, ids: _Ids) -> Iterator[tuple[_Chain, int]]:
    """Questions about documents: a long prefix, a short question; some documents are asked about often."""
    documents: list[_Chain] = []
    while True:
        if not documents or numbers.random() < 0.25:
            documents.append(ids.take(_length(numbers, 40)))
            del documents[:-500]
        document = documents[len(documents) - 1 - _zipf(numbers, len(documents))]
        yield document + ids.take(1), document[0]


def _agents(numbers: random.Random, ids: _Ids) -> Iterator[tuple[_Chain, int]]:
    """Tool loops: one growing context asked again and again in quick succession, then never more."""
    trunk = ids.take(16)
    running: list[list[_Chain | int]] = []
    while True:
        if len(running) < 24:
            running.append([trunk + ids.take(_length(numbers, 8)), 2 + _length(numbers, 8)])
        agent = numbers.choice(running)
        chain, left = agent
        assert isinstance(chain, list)
        assert isinstance(left, int)
        agent[0] = chain = chain + ids.take(_length(numbers, 3))
        agent[1] = left - 1
        if left <= 1:
            running.remove(agent)
        yield chain, chain[len(trunk)]


def _multi_turn(numbers: random.Random, ids: _Ids) -> Iterator[tuple[_Chain, int]]:
    return _chats(numbers, ids, ids.take(2))


def _mixture(numbers: random.Random, ids: _Ids) -> Iterator[tuple[_Chain, int]]:
    """All of them, with a stream of prompts that never come back."""
    streams = [one(numbers, ids) for one in (_system_prompt, _multi_turn, _documents, _agents)]
    while True:
        choice = numbers.randrange(len(streams) + 1)
        yield next(streams[choice]) if choice < len(streams) else (ids.take(_length(numbers, 30)), ids.next)


_STREAMS: dict[str, Callable[[random.Random, _Ids], Iterator[tuple[_Chain, int]]]] = {
    "system-prompt": _system_prompt,
    "multi-turn": _multi_turn,
    "rag": _documents,
    "agent": _agents,
    "mixture": _mixture,
}
WORKLOADS = tuple(_STREAMS)


def generate(workload: str, request_count: int, seed: int = 0, block_tokens: int = 512) -> Trace:
    """`request_count` requests of a workload (one of WORKLOADS)."""
    if workload not in _STREAMS:
        raise TraceError(f"workload: got {workload!r}; expected one of {', '.join(WORKLOADS)}")
    if not 1 <= request_count <= _MOST_REQUESTS:
        raise TraceError(f"requests: got {request_count}; expected 1 to {_MOST_REQUESTS:,}")
    return build(f"{workload}-{seed}", block_tokens, _requests(workload, request_count, seed, block_tokens))


def _requests(workload: str, request_count: int, seed: int, block_tokens: int) -> Iterator[Request]:
    numbers = random.Random(f"{workload}/{seed}")
    stream = _STREAMS[workload](numbers, _Ids())
    seconds = 0.0
    for _ in range(request_count):
        chain, session = next(stream)
        seconds += numbers.expovariate(_REQUESTS_PER_SECOND)
        yield Request(seconds, len(chain) * block_tokens, _length(numbers, 200), chain, session)
