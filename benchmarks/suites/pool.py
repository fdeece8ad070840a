"""The control plane beside vLLM's own block pool and KV cache manager, round by round in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from benchmarks.peers import PeerProcess, peer_python
from benchmarks.rows import Options, Row, compared, interleaved
from benchmarks.suites import pool_workload as work
from benchmarks.suites.own_pool import OwnSide

_VARIABLE = "KVSTORE_VLLM_PYTHON"
_BASELINE = "vllm"
PEER = "benchmarks.suites.vllm_peer"
_NOTE = (
    "Pool rows: blocks of 16 tokens, caching on; the pool is full of idle blocks, every other one hashed, so that "
    "taking blocks evicts hashed ones. A block counts once for allocate and free together. Prompts have 32,768 tokens. "
    "Seconds are CPU seconds of the one thread."
)
_READY = (
    "Lookups and admissions begin with the prompt's hashes ready on both sides; `from_tokens` begins with token ids."
)
_ADMIT = (
    "An admission ends with the block table handed out and all full blocks named. Ours is admit, grow, tables and "
    "commit; vLLM's is get_computed_blocks, allocate_slots (which names them before they are computed), get_blocks."
)
_STEP = "A decode step is one token of one of 32 sequences; ours includes the store's own step()."
_GROWTH = (
    "Growth rows: microseconds a sequence with 1,000 live sequences of 1,000 tokens beside the same with 10; "
    "0.77 or more is asked. grow is room for a token and the token noted; step is that for all and the store's step(); "
    "lookup is that of ten of the prompts, several times."
)


@dataclass(frozen=True, slots=True)
class _Case:
    name: str
    unit: str
    method: str
    arguments: tuple[object, ...] = ()
    note: str = _NOTE


_CASES = (
    *(_Case(f"alloc_free_{batch}", "M blocks/s", "alloc_free", (batch,)) for batch in work.BATCHES),
    _Case("hash_32k", "us", "hash_prompt"),
    _Case("lookup_32k", "us", "lookup", note=_READY),
    _Case("admit_cold_32k", "us", "admit", (False, True), _ADMIT),
    _Case("admit_warm_32k", "us", "admit", (True, True), _ADMIT),
    _Case("admit_cold_32k_from_tokens", "us", "admit", (False, False), _ADMIT),
    _Case("admit_warm_32k_from_tokens", "us", "admit", (True, False), _ADMIT),
    _Case("free_32k", "us", "free"),
    _Case("decode_step", "us", "decode_step", note=_STEP),
)


def rows(options: Options) -> Iterator[Row]:
    """One row a case; without vLLM the rows stand alone, named the same."""
    own = OwnSide()
    python = None if options.quick else vllm_python()
    peer = PeerProcess(python, PEER) if python else None
    if peer is None and not options.quick:
        options.log(f"pool: vLLM is not here, so nothing stands beside; run make bench-peers or set {_VARIABLE}")
    try:
        for case in _CASES:
            yield _measured(case, own, peer, options.rounds)
    finally:
        if peer is not None:
            peer.close()
    for what in ("step", "lookup", "grow"):
        yield _grown(own, what, options)


def _grown(own: OwnSide, what: str, options: Options) -> Row:
    """How the cost of one sequence changes when a hundred times as many are live. Ours alone: no peer."""
    few, many = work.FEW_SEQUENCES, work.MANY_SEQUENCES // (10 if options.quick else 1)
    mine, other = interleaved(
        lambda number: own.among(what, many, number), lambda number: own.among(what, few, number), options.rounds
    )
    return compared(
        "pool",
        f"{what}_per_sequence_1000_vs_10",
        "us",
        [1e6 * seconds for seconds in mine],
        better="smaller",
        baseline=f"the same, {few} live",
        theirs=[1e6 * seconds for seconds in other],
        note=_GROWTH,
    )


def _measured(case: _Case, own: OwnSide, peer: PeerProcess | None, rounds: int) -> Row:
    run: Callable[..., float] = getattr(own, case.method)

    def ours(number: int) -> float:
        return run(*case.arguments, number)

    def theirs(number: int) -> float:
        assert peer is not None
        return peer.seconds(case.method, *case.arguments, number)

    mine, other = interleaved(ours, theirs if peer else None, rounds)
    rate = case.unit == "M blocks/s"
    row = compared(
        "pool",
        f"{case.name}_vs_vllm",
        case.unit,
        [1e-6 / seconds if rate else 1e6 * seconds for seconds in mine],
        better="larger" if rate else "smaller",
        baseline=_BASELINE,
        theirs=[1e-6 / seconds if rate else 1e6 * seconds for seconds in other],
        note=case.note,
    )
    return replace(row, baseline=f"vllm {peer.version}") if peer else row


def vllm_python() -> str | None:
    """An interpreter that has vLLM, or none."""
    return peer_python(_VARIABLE, ".venv-vllm")
