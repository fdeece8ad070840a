"""Made-up workloads with seeds, to hold eviction against: none of them shaped after the public traces.

Each is a stream of chains of block numbers; fourteen kinds, of any size and seed. Nothing here is like
`kvstore.simulation.workloads`, which the policy was made with.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import islice

from kvstore.simulation.trace import Request, Trace, build

Chain = list[int]
BLOCK_TOKENS = 512


class Fresh:
    """Numbers never given before."""

    def __init__(self) -> None:
        self.next = 1

    def __call__(self, count: int) -> Chain:
        self.next += count
        return list(range(self.next - count, self.next))


def scan(numbers: random.Random, fresh: Fresh) -> Iterator[Chain]:
    """A set of documents read round and round in order: LRU's worst."""
    documents = [fresh(numbers.randint(4, 30)) for _ in range(300)]
    while True:
        for one in documents:
            yield one + fresh(1)


def scan_beside_chat(numbers: random.Random, fresh: Fresh) -> Iterator[Chain]:
    """A batch job that reads everything once, every so often, through a chat's working set."""
    chats = [fresh(6) for _ in range(40)]
    while True:
        for _ in range(200):
            place = min(39, int(numbers.expovariate(0.15)))
            chats[place] = chats[place] + fresh(2) if len(chats[place]) < 60 else fresh(6)
            yield chats[place]
        for _ in range(60):
            yield fresh(numbers.randint(10, 40))


def loop(numbers: random.Random, fresh: Fresh) -> Iterator[Chain]:
    """Loops of three lengths in turns, long enough to learn each."""
    sets = [[fresh(8) for _ in range(count)] for count in (20, 120, 500)]
    while True:
        chosen = sets[numbers.randrange(3)]
        for turn in range(4 * len(chosen)):
            yield chosen[turn % len(chosen)] + fresh(1)


def phases(numbers: random.Random, fresh: Fresh) -> Iterator[Chain]:
    """What was worth keeping changes to its opposite: short chains come back, then long ones do."""
    while True:
        short, long = [fresh(3) for _ in range(150)], [fresh(40) for _ in range(30)]
        for _ in range(500):
            yield numbers.choice(short) + fresh(1) if numbers.random() < 0.6 else fresh(40)
        for _ in range(500):
            yield numbers.choice(long) + fresh(1) if numbers.random() < 0.6 else fresh(4)


def tenants(numbers: random.Random, fresh: Fresh) -> Iterator[Chain]:
    """Eight tenants with a system prompt each and loads that differ by two orders of magnitude."""
    prompts = [fresh(numbers.randint(2, 25)) for _ in range(8)]
    open_chats: list[list[Chain]] = [[] for _ in range(8)]
    while True:
        who = min(7, int(numbers.expovariate(0.6)))
        chats = open_chats[who]
        if chats and numbers.random() < 0.2 + 0.08 * who:
            chain = chats.pop(numbers.randrange(len(chats))) + fresh(numbers.randint(1, 5))
        else:
            chain = prompts[who] + fresh(numbers.randint(1, 8))
        if len(chain) < 90:
            chats.append(chain)
            del chats[:-60]
        yield chain


def zipf(numbers: random.Random, fresh: Fresh) -> Iterator[Chain]:
    """Independent draws by popularity: frequency is all there is."""
    documents = [fresh(numbers.randint(2, 20)) for _ in range(2000)]
    while True:
        yield documents[min(1999, int(2000 ** numbers.random()) - 1)] + fresh(1)


def bursts(numbers: random.Random, fresh: Fresh) -> Iterator[Chain]:
    """A prompt asked twenty times within a moment and never more; between them others that come once."""
    while True:
        hot = fresh(numbers.randint(5, 50))
        for _ in range(numbers.randint(2, 20)):
            yield hot + fresh(1)
            if numbers.random() < 0.5:
                yield fresh(numbers.randint(2, 30))


def agents(numbers: random.Random, fresh: Fresh) -> Iterator[Chain]:
    """Tool loops that fork: sub-agents share what their parent read and return to it."""
    trunk = fresh(10)
    while True:
        root = trunk + fresh(numbers.randint(3, 12))
        for _ in range(numbers.randint(2, 6)):
            child = root + fresh(2)
            for _ in range(numbers.randint(1, 9)):
                child = child + fresh(numbers.randint(1, 4))
                yield child
                if numbers.random() < 0.3:
                    yield trunk + fresh(numbers.randint(5, 60))
            root = root + fresh(1)
            yield root


def drifting(numbers: random.Random, fresh: Fresh) -> Iterator[Chain]:
    """News: popularity moves on, each day's documents are asked about for a while."""
    shelf = [fresh(numbers.randint(3, 25)) for _ in range(100)]
    while True:
        if numbers.random() < 0.1:
            shelf.append(fresh(numbers.randint(3, 25)))
            shelf.pop(0)
        yield shelf[-1 - min(99, int(numbers.expovariate(0.06)))] + fresh(1)


def long_pauses(numbers: random.Random, fresh: Fresh) -> Iterator[Chain]:
    """Chats whose users come back after hours: the oldest first, never the newest."""
    waiting: list[Chain] = []
    while True:
        chain = waiting.pop(0) + fresh(3) if len(waiting) > 400 else fresh(numbers.randint(3, 15))
        if len(chain) < 40:
            waiting.append(chain)
        yield chain


def nothing_twice(numbers: random.Random, fresh: Fresh) -> Iterator[Chain]:
    """Hardly anything comes back, so whatever is learned is noise."""
    kept = fresh(5)
    while True:
        yield kept + fresh(2) if numbers.random() < 0.02 else fresh(numbers.randint(1, 60))


def random_walk(numbers: random.Random, fresh: Fresh) -> Iterator[Chain]:
    """A tree of prompts walked at random: few-shot variants, edits in the middle, retries."""
    tree: list[Chain] = [fresh(4)]
    while True:
        base = numbers.choice(tree[-200:] if numbers.random() < 0.7 else tree)
        cut = numbers.randint(1, len(base))
        chain = base[:cut] + fresh(numbers.randint(0, 6))
        if len(chain) < 80 and len(tree) < 5000:
            tree.append(chain)
        yield chain


def trap(numbers: random.Random, fresh: Fresh) -> Iterator[Chain]:
    """Long chains come back for a while, so they are kept; as soon as that is known, only short ones do."""
    while True:
        long = [fresh(numbers.randint(15, 40)) for _ in range(numbers.choice((20, 40, 80)))]
        period = numbers.choice((250, 500, 900))
        for turn in range(period):
            yield long[turn % len(long)] + fresh(1) if numbers.random() < 0.5 else fresh(numbers.randint(3, 8))
        short: list[Chain] = []
        for _ in range(period):
            if short and numbers.random() < 0.6:
                yield short[-1 - min(len(short) - 1, int(numbers.expovariate(1 / 30)))] + fresh(1)
            else:
                short.append(fresh(numbers.randint(3, 8)))
                yield short[-1]
            if numbers.random() < 0.1:
                yield fresh(30)


def few_of_many_blocks(numbers: random.Random, fresh: Fresh) -> Iterator[Chain]:
    """A few requests of very many blocks between small ones: one of them lost is a point of a short trace."""
    small, large = [fresh(4) for _ in range(300)], [fresh(250) for _ in range(12)]
    while True:
        choice = numbers.random()
        if choice < 0.05:
            yield numbers.choice(large) + fresh(2)
        elif choice < 0.08:
            yield fresh(300)
        else:
            yield small[min(299, int(300 ** numbers.random()) - 1)] + fresh(1)


KINDS: dict[str, Callable[[random.Random, Fresh], Iterator[Chain]]] = {
    one.__name__: one
    for one in (
        scan, scan_beside_chat, loop, phases, tenants, zipf, bursts, agents, drifting, long_pauses, nothing_twice,
        random_walk, trap, few_of_many_blocks,
    )
}  # fmt: skip


def tenants_that_differ(request_count: int, seed: int, *, told: bool = True) -> Trace:
    """Six tenants with requests of the same lengths; how often a chain comes back differs. told: the trace says who."""
    numbers, fresh = random.Random(seed), Fresh()
    prompts = [fresh(2) for _ in range(6)]
    returning, load = (0.0, 0.1, 0.5, 0.9, 0.95, 0.3), (30, 10, 20, 15, 5, 20)
    chats: list[list[Chain]] = [[] for _ in range(6)]

    def requests() -> Iterator[Request]:
        for number in range(request_count):
            (who,) = numbers.choices(range(6), load)
            own = chats[who]
            if own and numbers.random() < returning[who]:
                place = len(own) - 1 - min(len(own) - 1, int(numbers.expovariate(1 / 40)))
                chain = own.pop(place) + fresh(numbers.randint(2, 10))
            else:
                chain = prompts[who] + fresh(numbers.randint(4, 20))
            if len(chain) < 120:
                own.append(chain)
                del own[:-300]
            yield Request(number / 10, len(chain) * BLOCK_TOKENS, 100, chain, tenant=who + 1 if told else 0)

    return build(f"tenants-that-differ-{seed}", BLOCK_TOKENS, requests())


def invented(kind: str, request_count: int, seed: int) -> Trace:
    """`request_count` requests of one of KINDS."""
    stream = KINDS[kind](random.Random(f"{kind}/{seed}"), Fresh())
    requests = (
        Request(number / 10, len(chain) * BLOCK_TOKENS, 100, chain)
        for number, chain in enumerate(islice(stream, request_count))
    )
    return build(f"{kind}-{seed}", BLOCK_TOKENS, requests)
