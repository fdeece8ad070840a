"""Random loads over random memory, and the check of what comes out; used plainly and with planted bugs."""

from __future__ import annotations

import random

from engine_adapter.decode_loop import DecodeLoop
from engine_adapter.request import FinishReason, Request, RequestResult
from engine_adapter.sampling import draw, uniform_at
from engine_adapter.testing import ScriptedDrafter, toy_generate
from kvstore.testing import Faults
from tests.engine_adapter.loop_kit import FAMILIES, VOCAB, Kit, KitMaker, prompt


def truth(kit: Kit, request: Request, branch: int) -> list[int]:
    if request.greedy:
        return toy_generate(kit.model, request.token_ids, request.max_new_tokens)
    return toy_generate(
        kit.model,
        request.token_ids,
        request.max_new_tokens,
        lambda row, place: draw(row, request, uniform_at(0, request.seed, branch, place)),
    )


def random_prompts(rng: random.Random, longest: int, block_tokens: int) -> list[list[int]]:
    """Prompts that share prefixes, whole blocks behind other pasts, or everything."""
    roots = [prompt(rng.randrange(1000), longest) for _ in range(3)]
    made: list[list[int]] = []
    for _ in range(rng.randint(4, 12)):
        kind = rng.random()
        if kind < 0.15 and made:
            made.append(list(rng.choice(made)))
            continue
        if kind < 0.45:
            starts = range(0, rng.randint(0, longest - 6), block_tokens)
            shared = [token for start in starts for token in rng.choice(roots)[start : start + block_tokens]]
        else:
            shared = rng.choice(roots)[: rng.randint(0, longest - 6)]
        ended = rng.random() < 0.4 and len(shared) > 0
        made.append(shared if ended else [*shared, *(rng.randrange(VOCAB) for _ in range(rng.randint(1, 6)))])
    return made


def random_requests(rng: random.Random, longest: int, block_tokens: int) -> list[Request]:
    return [
        Request(
            f"r{index}",
            token_ids,
            rng.randint(1, 16),
            temperature=1.5 if rng.random() < 0.3 else 0.0,
            seed=index,
            n=rng.choice([1, 1, 1, 2, 3]),
        )
        for index, token_ids in enumerate(random_prompts(rng, longest, block_tokens))
    ]


def check(kit: Kit, request: Request, result: RequestResult) -> None:
    assert len(result.completions) == request.n
    for completion in result.completions:
        expected = truth(kit, request, completion.index)
        assert completion.error is None, completion.error
        if completion.finish_reason is FinishReason.ABORT:
            expected = expected[: len(completion.token_ids)]
        assert list(completion.token_ids) == expected, (request.request_id, completion.index)


def run_random_mix(make_kit: KitMaker, seed: int, *, faults: Faults | None = None) -> Kit:
    """Everything at once, drawn from `seed`: family, block size, tight memory, drafts, forks, aborts, preemptions."""
    rng = random.Random(seed)
    family = FAMILIES[seed % len(FAMILIES)]
    block_tokens = rng.choice([1, 2, 4, 8])
    longest = rng.choice([16, 40, 60])
    tightest = -(-(longest + 32) // block_tokens) + 4
    kit = make_kit(
        family,
        block_tokens,
        blocks=int(tightest * rng.choice([1.0, 1.5, 3.0])) + 10,
        host_blocks=rng.choice([0, 8, 200]) if faults is None else 200,
        prefill_tokens_per_second=rng.choice([1e-3, 1e9]) if faults is None else 1e-3,
        faults=faults,
        seed=seed,
        io_threads=rng.choice(["inline", "inline", "thread"]),
    )
    requests = random_requests(rng, longest, block_tokens)
    batch = rng.randint(1, 5)
    drafter = None
    if rng.random() < 0.6:
        streams = [[*request.token_ids, *truth(kit, request, 0)] for request in requests]
        drafter = ScriptedDrafter(streams, draft_tokens=rng.randint(1, 5), right_tokens=rng.randint(0, 5))
    kit.loop = DecodeLoop(
        kit.runner, kit.store, max_batch_sequences=batch, step_tokens=rng.randint(batch, 24), drafter=drafter
    )
    to_submit = list(requests)
    for _ in range(4000):
        if to_submit and rng.random() < 0.4:
            kit.loop.submit(to_submit.pop(0))
        if kit.loop.busy:
            kit.step()
        elif not to_submit:
            break
        live = sorted(kit.loop._live)
        if live and rng.random() < 0.02:
            kit.loop.abort(rng.choice(live))
            kit.store.check_invariants()
        scheduler = kit.loop._scheduler
        if scheduler.running and rng.random() < 0.03:
            scheduler.preempt(rng.choice(scheduler.running))
            kit.store.check_invariants()
    results = kit.loop.collect()
    assert len(results) == len(requests)
    for request in requests:
        check(kit, request, results[request.request_id])
    kit.nothing_left()
    return kit
