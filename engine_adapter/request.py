"""What a caller asks of the decode loop, and what it gets back.

Plain immutable values and their checks; no tensors, no store. Any thread may build a `Request`; the loop's thread
builds the results.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from allocator.errors import UsageError
from engine_adapter.media import EmbeddedMedia
from kvstore.identity import Identity
from kvstore.retention import Retention, check_retention

if TYPE_CHECKING:
    from torch import Tensor

LogitsCallback = Callable[[int, int, "Tensor"], None]
"""Called as (branch index, output position, logits Tensor[vocab]) for every output token."""

TokenCallback = Callable[[str, int, int], None]
"""Called as (request id, branch index, token id) for every output token, in order."""


class FinishReason(StrEnum):
    """Why an output stream ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how to continue it. Token ids are ints, or an array or tensor of them of one dimension.

    `temperature` 0 is greedy; otherwise tokens are drawn from the softmax cut to `top_k` (0: all) and `top_p`.
    `n` asks for that many continuations, which share the prompt's blocks. `exact` accepts only cached keys and values
    that equal full precision. `forced_token_ids` (teacher forcing) are fed instead of the model's choices, whose argmax
    and logits are still recorded; the output is then exactly those tokens. `media` stand in for placeholders among the
    prompt's tokens, in order; `adapter` (a name, or name, id and digest) and `tenant`, where they are not the store's
    own, say whose KV it is: all three reach the names of blocks, and a tenant's quota counts them. `retention` says how
    long what it leaves behind is to be kept, beside others. `session` and `turn` are for a trace only.
    """

    request_id: str
    token_ids: Sequence[int]
    max_new_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    n: int = 1
    exact: bool = False
    forced_token_ids: Sequence[int] | None = None
    keep_logits: LogitsCallback | None = None
    on_token: TokenCallback | None = None
    media: Sequence[EmbeddedMedia] = ()
    adapter: object = None
    tenant: str | bytes | None = None
    session: str | None = None
    turn: int | None = None
    retention: Sequence[Retention] = ()

    def __post_init__(self) -> None:
        for name in ("token_ids", "forced_token_ids", "eos_token_ids"):
            given = getattr(self, name)
            if getattr(given, "ndim", 0) == 1 and hasattr(given, "tolist"):
                object.__setattr__(self, name, given.tolist())

    def identity(self, own: Identity) -> Identity | None:
        """Whose KV this is, None for the store's `own`."""
        return other_identity(own, self.adapter, self.tenant)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def output_limit(self) -> int:
        """Most tokens that one branch puts out."""
        if self.forced_token_ids is None:
            return self.max_new_tokens
        return min(self.max_new_tokens, len(self.forced_token_ids))


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished output stream: the tokens put out, and what the model itself would have put out at each place."""

    index: int
    token_ids: tuple[int, ...]
    argmax_token_ids: tuple[int, ...]
    finish_reason: FinishReason
    error: str | None = None


@dataclass(frozen=True, slots=True)
class RequestResult:
    """All that is known of a finished request.

    `reused_tokens` counts, per tier, the prompt tokens that the first admission took from the cache; resumptions after
    a preemption are in `resumed_tokens`. `computed_prefill_tokens` counts the tokens fed from each admission up to the
    next output token, `recomputed_tokens` those among them whose keys and values had existed before.
    """

    request_id: str
    prompt_tokens: int
    completions: tuple[Completion, ...]
    reused_tokens: Mapping[str, int]
    resumed_tokens: Mapping[str, int]
    computed_prefill_tokens: int
    recomputed_tokens: int
    preemptions: int
    drafted_tokens: int
    accepted_tokens: int
    queue_seconds: float | None
    ttft_seconds: float | None
    itl_seconds: tuple[float, ...] = field(default=())

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.completions[0].token_ids

    @property
    def argmax_token_ids(self) -> tuple[int, ...]:
        return self.completions[0].argmax_token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.completions[0].finish_reason

    @property
    def error(self) -> str | None:
        return next((completion.error for completion in self.completions if completion.error), None)


def other_identity(own: Identity, adapter: object, tenant: str | bytes | None) -> Identity | None:
    """`own` with another adapter or tenant, None where neither is given. An empty tenant is one."""
    if adapter is None and tenant is None:
        return None
    return replace(
        own,
        adapter=own.adapter if adapter is None else adapter,
        tenant=own.tenant if tenant is None else tenant,
    )


def check_request(request: Request, vocab_size: int) -> None:
    """Raise `UsageError` that says what was given and what was expected, if the request cannot be served."""
    if not isinstance(request, Request):
        raise UsageError(f"request: got {request!r}; expected a Request")
    name = request.request_id
    if not isinstance(name, str) or not name or "#" in name:
        raise UsageError(f"request_id must be a non-empty string without '#', got {name!r}")
    _check_kinds(request)
    if len(request.token_ids) == 0:
        raise UsageError(f"request {name!r}: the prompt is empty; expected at least one token id")
    _check_token_ids(name, "token_ids", request.token_ids, vocab_size)
    if request.forced_token_ids is not None:
        if len(request.forced_token_ids) == 0:
            raise UsageError(f"request {name!r}: forced_token_ids is empty; expected None or at least one token id")
        _check_token_ids(name, "forced_token_ids", request.forced_token_ids, vocab_size)
    _check_at_least(name, "max_new_tokens", request.max_new_tokens, 1)
    _check_at_least(name, "n", request.n, 1)
    _check_at_least(name, "top_k", request.top_k, 0)
    if type(request.exact) is not bool:
        raise UsageError(f"request {name!r}: exact must be True or False, got {request.exact!r}")
    _check_trace_fields(request)
    _check_names(request)
    check_retention(request.retention)
    if type(request.seed) is not int:
        raise UsageError(f"request {name!r}: seed must be an int, got {request.seed!r}")
    for what in ("temperature", "top_p"):
        number = getattr(request, what)
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise UsageError(f"request {name!r}: {what} must be a number, got {number!r}")
    if not 0.0 <= request.temperature < float("inf"):
        raise UsageError(f"request {name!r}: temperature must be finite and >= 0, got {request.temperature}")
    if not 0.0 < request.top_p <= 1.0:
        raise UsageError(f"request {name!r}: top_p must be in (0, 1], got {request.top_p}")


def _check_kinds(request: Request) -> None:
    name = request.request_id
    kinds: tuple[tuple[str, Any, str], ...] = (
        ("token_ids", Sequence, "a list of token ids, or an array of one dimension"),
        ("forced_token_ids", Sequence | None, "None, a list of token ids, or an array of one dimension"),
        ("eos_token_ids", Collection, "a collection of token ids"),
        ("keep_logits", Callable | None, "None or a function of (branch, position, logits)"),
        ("on_token", Callable | None, "None or a function of (request id, branch, token id)"),
        ("media", list | tuple, "a list of EmbeddedMedia"),
    )
    for what, kind, text in kinds:
        given = getattr(request, what)
        if not isinstance(given, kind) or isinstance(given, str | bytes | bytearray | Mapping):
            shape = f" of shape {list(given.shape)}" if hasattr(given, "shape") else ""
            raise UsageError(
                f"request {name!r}: {what} must be {text}, got {given!r:.120} ({type(given).__name__}{shape})"
            )
    for token in request.eos_token_ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise UsageError(f"request {name!r}: eos_token_ids must be ints, got {token!r}")


def _check_names(request: Request) -> None:
    name, end = request.request_id, 0
    for one in request.media:
        if not isinstance(one, EmbeddedMedia) or not end <= one.start < one.stop <= len(request.token_ids):
            raise UsageError(
                f"request {name!r}: media must be EmbeddedMedia in the order of their places, inside the prompt's "
                f"{len(request.token_ids)} tokens, got {one!r:.120}"
            )
        end = one.stop
    Identity(model="-", weights=None, geometry=b"", adapter=request.adapter, tenant=request.tenant)  # its checks


def _check_trace_fields(request: Request) -> None:
    name = request.request_id
    if request.session is not None and not isinstance(request.session, str):
        raise UsageError(f"request {name!r}: session must be None or a string, got {request.session!r}")
    if request.turn is not None:
        _check_at_least(name, "turn", request.turn, 0)


def _check_at_least(name: str, what: str, given: int, least: int) -> None:
    if isinstance(given, bool) or not isinstance(given, int) or given < least:
        raise UsageError(f"request {name!r}: {what} must be an integer >= {least}, got {given!r}")


def _check_token_ids(name: str, what: str, token_ids: Sequence[int], vocab_size: int) -> None:
    for place, token in enumerate(token_ids):
        if isinstance(token, bool) or not isinstance(token, int):
            raise UsageError(f"request {name!r}: {what}[{place}] must be an int, got {token!r}")
        if not 0 <= token < vocab_size:
            raise UsageError(f"request {name!r}: {what}[{place}] is {token}, expected 0 <= id < {vocab_size}")
