"""From measurements to a verdict: which phase is the bottleneck, why, what helps; or why nothing can be said. Pure.

The verdict is about the longest prompt and the most requests at once that were asked for: name your own traffic. Every
threshold is a share of time, and wide enough that a different verdict needs a different machine, not a different day.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

from kvstore.diagnosis.endpoint import Sample
from kvstore.diagnosis.fits import Line, Point, fit
from kvstore.diagnosis.measurements import Measurements
from kvstore.diagnosis.shares import Shares, most_at_once, shares

BOTTLENECK_SHARE = 0.5
_GROWS = 0.6  # share of the longest prompt's time that must grow with its length to call it compute
_FIXED = 0.3
_KV_GROWS = 0.35  # share of a step's time that must grow with the context to call it KV
_SPREAD = 0.4  # of a whole request's time: how much later than the best the median first token may come
_FIT_QUALITY = 0.8
_FAILED = 0.2
_UNSEEN_CACHED = 0.1
_REUSED = 0.7  # a repeated prompt that takes more of the first one's time than this was not reused
_LENGTH_SPAN = 3.0
_TOKENS = 8
_QUICK_SECONDS = 0.02  # a whole request that takes less is timed by this machine's threads, not by the server

REMEDIES = {
    "queueing": (
        "let more requests run at once (a larger batch), if their KV has room: kvstore plan says how many fit",
        "more KV in the same memory: INT4 cold blocks (codec = int4), shared prefixes",
        "shorter answers, or another replica: a queue grows without end once requests come faster than they leave",
    ),
    "compute": (
        "reuse prompts: a prefix cache with tiers below (host, disk, Redis) computes a shared prefix once",
        "shorter prompts, or the changing part last, so that what is before it can be reused",
        "a faster card or more of them for prompts; chunked prefill keeps others' answers flowing meanwhile",
    ),
    "cache misses": (
        "switch the prefix cache on, or give it memory: kvstore simulate says how much your traffic needs",
        "begin prompts with what they share; one changed token at the front makes everything behind it new",
        "look at kvstore_missed_blocks_total by cause on our server: it says why each copy was not used",
    ),
    "overhead": (
        "the time is there before the prompt matters: network, TLS, tokenizing, a proxy or a queue in front",
        "measure from the server's own machine and compare",
    ),
    "bandwidth, KV": (
        "fewer bytes of KV to read: INT4 cold blocks, read in place; a model with GQA, MLA or windows",
        "shorter contexts; fewer long ones in one batch",
    ),
    "bandwidth, weights": (
        "more requests at once: a step reads the weights (and pays the engine's fixed cost) once for all of them",
        "quantised weights, speculative decoding, a card with more bandwidth",
    ),
    "compute, decode": (
        "every further request in the batch costs as much as the first: fewer at once, or more arithmetic",
        "check that decode attention runs a kernel and not a fallback: kvstore doctor --kernels on our server",
    ),
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """bottleneck: "queue", "prompt", "decode" or None. refused: why there is none."""

    bottleneck: str | None
    cause: str | None
    because: str
    evidence: tuple[str, ...]
    remedies: tuple[str, ...]
    refused: str | None = None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Everything that was found. Fits are None where too few lengths were measured."""

    ttft_points: tuple[Point, ...]
    itl_points: tuple[Point, ...]
    ttft: Line | None
    itl: Line | None
    repeated_share: float | None
    shares: tuple[Shares, ...]
    at_once: dict[int, int]
    verdict: Verdict

    def to_json(self) -> dict[str, Any]:
        def line(found: Line | None) -> dict[str, float] | None:
            return None if found is None else {
                "fixed_seconds": found.fixed_seconds, "token_seconds": found.token_seconds, "quality": found.quality,
            }  # fmt: skip

        def table(measured: tuple[Point, ...]) -> list[dict[str, float]]:
            return [{"tokens": one.tokens, "seconds": one.best, "spread": one.spread} for one in measured]

        return {
            "ttft": {"points": table(self.ttft_points), "fit": line(self.ttft)},
            "itl": {"points": table(self.itl_points), "fit": line(self.itl)},
            "repeated_prompt_share": self.repeated_share,
            "shares": [
                {
                    "requests_at_once": one.requests_at_once,
                    "answers_at_once": self.at_once[one.requests_at_once],
                    "queue_seconds": one.queue_seconds,
                    "prompt_seconds": one.prompt_seconds,
                    "decode_seconds": one.decode_seconds,
                    "step_seconds": one.step_seconds,
                }
                for one in self.shares
            ],
            "verdict": {
                "bottleneck": self.verdict.bottleneck,
                "cause": self.verdict.cause,
                "because": self.verdict.because,
                "evidence": list(self.verdict.evidence),
                "remedies": list(self.verdict.remedies),
                "refused": self.verdict.refused,
            },
        }


def diagnose(found: Measurements) -> Diagnosis:
    """What the measurements say."""
    sound = [(tokens, one) for tokens, one in found.alone if one.error is None and one.chunk_seconds]
    ttft = _points([(tokens, one, one.ttft_seconds) for tokens, one in sound])
    itl = _points([(tokens, one, gap) for tokens, one in sound if (gap := one.itl_seconds) is not None])
    refusal = _unusable(found, sound, ttft, itl)
    if refusal is not None:
        verdict = Verdict(None, None, refusal, (), (), refused=refusal)
        return Diagnosis(ttft, itl, _fit(ttft), _fit(itl), None, (), {}, verdict)
    longest = [one for tokens, one in sound if tokens == found.longest]
    bursts = [
        [min(longest, key=lambda one: one.total_seconds)],
        *(found.bursts[count] for count in sorted(found.bursts)),
    ]
    by_count = tuple(shares(burst, ttft[-1].best, itl[-1].best) for burst in bursts)
    at_once = {len(burst): most_at_once(burst) for burst in bursts}
    diagnosis = Diagnosis(
        ttft, itl, _fit(ttft), _fit(itl), _repeated(found, ttft), by_count, at_once, Verdict(None, None, "", (), ())
    )
    return Diagnosis(
        ttft, itl, diagnosis.ttft, diagnosis.itl, diagnosis.repeated_share, by_count, at_once, _judge(diagnosis)
    )


def _points(found: list[tuple[int, Sample, float]]) -> tuple[Point, ...]:
    """One point a length that was asked for."""
    measured = []
    for length in sorted({tokens for tokens, _, _ in found}):
        here = [(one.prompt_tokens or tokens, seconds) for tokens, one, seconds in found if tokens == length]
        measured.append(Point(median(count for count, _ in here), tuple(seconds for _, seconds in here)))
    return tuple(measured)


def _fit(measured: tuple[Point, ...]) -> Line | None:
    return fit(measured) if len(measured) >= 2 else None


def _repeated(found: Measurements, ttft: tuple[Point, ...]) -> float | None:
    """Time to first token of the longest prompt asked again, as a share of the first time's; the best of the tries."""
    again = [one.ttft_seconds for one in found.repeated if one.error is None]
    return min(again) / ttft[-1].best if again else None


def _unusable(
    found: Measurements, sound: list[tuple[int, Sample]], ttft: tuple[Point, ...], itl: tuple[Point, ...]
) -> str | None:
    """Why no verdict can rest on these samples."""
    if found.cut_short:
        return f"the limit of {found.probes.seconds_limit:g} s ended the measurement; give --seconds, or less to do"
    failed = [one.error for one in found.samples if one.error is not None]
    if not sound or len(failed) > _FAILED * len(found.samples):
        return f"{len(failed)} of {len(found.samples)} requests failed; the last: {failed[-1] if failed else 'none'}"
    if any(one.error for burst in found.bursts.values() for one in burst):
        return f"requests asked at once failed: {failed[-1]}"
    if found.longest not in {tokens for tokens, _ in sound}:
        return "no request with the longest prompt was answered"
    if min(one.tokens for _, one in sound) < min(_TOKENS, found.probes.answer_tokens) or not itl:
        return (
            f"answers ended after {min(one.tokens for _, one in sound)} tokens; too few to time the steps between them"
        )
    if all(len(one.chunk_seconds) * 4 <= one.tokens for _, one in sound):
        return "answers come in a few large pieces, not token by token: time between tokens cannot be seen from here"
    cached = [one.cached_tokens / one.prompt_tokens for _, one in sound if one.cached_tokens and one.prompt_tokens]
    if cached and max(cached) > _UNSEEN_CACHED:
        return f"prompts that were new here were {max(cached):.0%} in the server's cache: another --seed, please"
    return _restless(sound, ttft)


def _restless(sound: list[tuple[int, Sample]], ttft: tuple[Point, ...]) -> str | None:
    """Why equal requests were too unequal: what disturbs adds much to what most lengths take."""
    lengths = sorted({tokens for tokens, _ in sound})
    wholes = [min(one.total_seconds for tokens, one in sound if tokens == length) for length in lengths]
    loose = [one for one, whole in zip(ttft, wholes, strict=True) if one.best * one.spread > _SPREAD * whole]
    if len(loose) * 2 <= len(ttft):
        return None
    worst = max(loose, key=lambda one: one.spread)
    return (
        f"equal prompts took unequal times (the median {worst.spread:.0%} above the best at {worst.tokens:.0f} "
        "tokens): the machine is busy with something else; more --rounds may help"
    )


def _judge(found: Diagnosis) -> Verdict:
    """The phase with most of the time at the highest load, and its cause."""
    here = found.shares[-1]
    if here.total_seconds < _QUICK_SECONDS:
        whole = f"{here.total_seconds * 1e3:.1f} ms"
        quick = f"a whole request takes {whole}: too little to be divided, and nothing is slow"
        return Verdict(None, None, quick, (), (), refused=quick)
    name = max(("queue", "prompt", "decode"), key=here.of)
    said = (
        f"of a request's {here.total_seconds:.2f} s with {here.requests_at_once} at once: queue "
        f"{here.of('queue'):.0%}, prompt {here.of('prompt'):.0%}, decode {here.of('decode'):.0%}"
    )
    if here.of(name) < BOTTLENECK_SHARE:
        return Verdict(None, None, f"no single bottleneck: {said}", (said,), ())
    cause, evidence, refused = {"queue": _queue, "prompt": _prompt, "decode": _decode}[name](found)
    if cause is None:
        because = f"most of the time is {name}, but why cannot be told: {refused}"
        return Verdict(name, None, because, (said, *evidence), (), refused=refused)
    kind, _, detail = cause.partition(", ")
    because = f"{name} takes {here.of(name):.0%} of the time, and the cause is {kind}{f' ({detail})' if detail else ''}"
    return Verdict(name, kind, because, (said, *evidence), REMEDIES[cause])


_Cause = tuple[str | None, tuple[str, ...], str | None]


def _queue(found: Diagnosis) -> _Cause:
    here = found.shares[-1]
    return (
        "queueing",
        (
            f"first tokens come {here.queue_seconds:.2f} s later than {here.requests_at_once} prompts take to compute",
            f"{found.at_once[here.requests_at_once]} of {here.requests_at_once} answers were written at the same time",
        ),
        None,
    )


def _prompt(found: Diagnosis) -> _Cause:
    refusal = _no_line(found.ttft_points, found.ttft, "time to first token")
    line, longest = found.ttft, found.ttft_points[-1]
    if refusal is not None or line is None:
        return None, (), refusal
    grows = line.growing_share(longest.tokens)
    evidence = [
        f"time to first token = {line.fixed_seconds * 1e3:.1f} ms + {line.token_seconds * 1e6:.0f} us a token "
        f"({1 / line.token_seconds:,.0f} tokens/s); {grows:.0%} of it grows with the prompt at {longest.tokens:,.0f}"
        if line.token_seconds > 0
        else f"time to first token is {line.fixed_seconds * 1e3:.1f} ms at any length"
    ]
    again = found.repeated_share
    if again is not None:
        evidence.append(f"the same prompt again takes {again:.0%} of the first time")
    if grows <= _FIXED:
        return "overhead", tuple(evidence), None
    if grows < _GROWS or line.quality < _FIT_QUALITY:
        return None, tuple(evidence), (
            f"{grows:.0%} of the time to first token grows with the prompt (line fits to {line.quality:.0%}); longer "
            "prompts would tell"
        )  # fmt: skip
    if again is not None and again > _REUSED:
        return "cache misses", tuple(evidence), None
    return "compute", tuple(evidence), None


def _decode(found: Diagnosis) -> _Cause:
    refusal = _no_line(found.itl_points, found.itl, "time between tokens")
    line, longest = found.itl, found.itl_points[-1]
    if refusal is not None or line is None:
        return None, (), refusal
    grows = line.growing_share(longest.tokens)
    evidence = [
        f"time between tokens = {line.fixed_seconds * 1e3:.2f} ms + {line.token_seconds * 1e9:.0f} ns a token of "
        f"context; {grows:.0%} of it grows with the context at {longest.tokens:,.0f}"
    ]
    if grows >= _KV_GROWS:
        if line.quality < _FIT_QUALITY:
            return None, tuple(evidence), f"the line fits to {line.quality:.0%} only; more rounds would tell"
        return "bandwidth, KV", tuple(evidence), None
    alone, loaded = found.shares[0], found.shares[-1]
    if loaded.requests_at_once < 2 or found.at_once[loaded.requests_at_once] < 2:
        return None, tuple(evidence), "a step's time does not depend on the context; only several requests at once tell"
    together = found.at_once[loaded.requests_at_once]
    ratio = loaded.step_seconds / alone.step_seconds
    evidence.append(f"a step takes {ratio:.2f} times as long with {together} requests as with one")
    if ratio <= 1 + 0.35 * (together - 1):
        return "bandwidth, weights", tuple(evidence), None
    if ratio >= 1 + 0.65 * (together - 1):
        return "compute, decode", tuple(evidence), None
    return (
        None,
        tuple(evidence),
        f"{together} requests make a step {ratio:.2f} times as long: between both explanations",
    )


def _no_line(measured: tuple[Point, ...], line: Line | None, what: str) -> str | None:
    if line is None or len(measured) < 3 or measured[-1].tokens < _LENGTH_SPAN * measured[0].tokens:
        lengths = ", ".join(f"{one.tokens:.0f}" for one in measured)
        return (
            f"{what} was measured at {lengths} tokens; expected three lengths or more, the longest {_LENGTH_SPAN:g} "
            "times the shortest"
        )
    return None
