"""What the demo runs: sizes of the workload, and the memory that each setting gets.

Plain frozen values. The five settings differ in memory and codec only; model, requests and loop are the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

EXACT_AMPLE = "exact-ample"
EXACT_TIGHT = "exact-tight"
AMPLE = "ample"
TIGHT = "tight"
TIGHT_INT4 = "tight-int4"
MULTI_TURN = "multi-turn"
MULTI_TURN_INT4 = "multi-turn-int4"

TIGHT_SHARE = 0.25
"""Device bytes of the tight settings, as a share of what `ample` used at its peak."""
HOST_SHARE = 0.10
"""Host tier of the tight settings, as a share of the same."""
BLOCK_TOKENS = 16
THREADS_MOST = 1024


@dataclass(frozen=True, slots=True)
class Below:
    """Tiers that outlive the process; '' for none."""

    disk_path: str = ""
    redis_url: str = field(default="", repr=False)  # may hold a password

    @property
    def given(self) -> bool:
        return bool(self.disk_path or self.redis_url)


@dataclass(frozen=True, slots=True)
class Options:
    """The command line, checked."""

    model: Path | None = None
    json_path: str = "demo-report.json"
    html_path: str = "demo-report.html"
    quick: bool = False
    requests: int | None = None
    threads: int = 2
    below: Below = Below()


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is asked. Tokens of documents and passages are what a prompt has at least, questions and template apart.

    users: sessions that are open at a time; each sends its next request when the last one is answered.
    mixed_chats: conversations beside the questions; chats: conversations of the multi-turn workload.
    exact_*: part 1, in float32, which is also computed by transformers' own generate, without any cache between
    requests.
    """

    documents: int = 4
    document_tokens: int = 1540
    questions: int = 24
    chat_turns: int = 5
    passage_tokens: int = 200
    mixed_chats: int = 2
    chats: int = 4
    max_new_tokens: int = 32
    users: int = 8
    step_tokens: int = 256
    exact_documents: int = 2
    exact_document_tokens: int = 200
    exact_requests: int = 8
    exact_new_tokens: int = 32
    exact_users: int = 6
    seed: int = 7

    @property
    def longest_tokens(self) -> int:
        """No sequence of this workload is longer: a document with its question, or a whole chat."""
        document = int(1.05 * self.document_tokens) + 160
        chat = int(1.05 * self.passage_tokens) + 120 + self.chat_turns * (self.max_new_tokens + 80)
        return max(document, chat) + self.max_new_tokens


QUICK = Sizes(
    document_tokens=160,
    questions=8,
    chat_turns=2,
    passage_tokens=60,
    mixed_chats=1,
    chats=2,
    max_new_tokens=8,
    users=4,
    exact_document_tokens=120,
    exact_requests=4,
    exact_new_tokens=8,
    exact_users=3,
)


def sizes_for(options: Options) -> Sizes:
    """The sizes that the command line asks for; part 1 keeps its own number of requests."""
    sizes = QUICK if options.quick else Sizes()
    if options.requests is None:
        return sizes
    return replace(sizes, questions=options.requests, documents=min(sizes.documents, options.requests))


@dataclass(frozen=True, slots=True)
class Setting:
    """Memory of one run. `codec`: of cold blocks on the device, "raw" for none. below: of the tight settings only.

    least_first: the loop's order of admission. The demo's settings are served first come, first served.
    """

    name: str
    dtype: str
    device_bytes: int
    host_bytes: int
    codec: str
    exact: bool = False
    below: Below = Below()
    least_first: bool = False
