"""The plan as one document: what `kvstore plan --json` writes, and what its table and page are made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvstore.planning.capacity import Capacity, Demand, Machine
from kvstore.planning.cards import Card
from kvstore.planning.effects import effects
from kvstore.planning.model_config import ModelShape
from kvstore.planning.traffic import Traffic, traffic_rows

Document = dict[str, Any]
_CARDS_LIMIT = 64
_CURVE_POINTS = 12


@dataclass(frozen=True, slots=True)
class TierSize:
    """A tier below the device. bytes_per_second None: not known, so no times are given for it."""

    name: str
    capacity_bytes: int
    bytes_per_second: float | None


@dataclass(frozen=True, slots=True)
class Cards:
    """Cards of one kind. count None: as few as hold the weights and one request in full precision."""

    name: str
    card: Card
    count: int | None


def machine_for(shape: ModelShape, demand: Demand, cards: Cards, weights_bytes: int) -> tuple[Machine, int]:
    """All cards as one machine, and how many they are."""

    def of(count: int) -> Machine:
        card = cards.card
        return Machine(
            memory_bytes=card.memory_bytes * count,
            bytes_per_second=card.bytes_per_second * count,
            flops_per_second=card.flops_per_second * count,
            weights_bytes=weights_bytes,
        )

    if cards.count is not None:
        return of(cards.count), cards.count
    raw = Capacity(shape, demand, "raw")
    for count in range(1, _CARDS_LIMIT + 1):
        if raw.requests_that_fit(of(count).kv_bytes):
            return of(count), count
    return of(_CARDS_LIMIT), _CARDS_LIMIT


def plan_document(
    shape: ModelShape,
    demand: Demand,
    codecs: Sequence[str],
    cards: Cards,
    weights_bytes: int,
    tiers: Sequence[TierSize] = (),
    traffic: Traffic | None = None,
) -> Document:
    """Everything, in bytes, tokens and seconds. Raises ConfigError for what cannot be."""
    machine, count = machine_for(shape, demand, cards, weights_bytes)
    capacities = [Capacity(shape, demand, codec) for codec in codecs]
    settings = [_setting(one, machine, shared) for one in capacities for shared in sorted({0, demand.shared_tokens})]
    return {
        "model": {
            "name": shape.name,
            "parameters": shape.parameters,
            "active_parameters": shape.active_parameters,
            "layers": shape.layers,
            "context_limit": shape.context_limit,
            "groups": [
                {
                    "name": group.name,
                    "kv_heads": group.kv_heads,
                    "key_dim": group.key_dim,
                    "value_dim": group.value_dim,
                    "window_tokens": group.window_tokens,
                }
                for group in shape.groups
            ],
        },
        "demand": asdict(demand),
        "machine": {
            "gpu": cards.name,
            "gpus": count,
            "gpus_chosen": cards.count is None,
            **asdict(machine),
            "kv_bytes": max(0, machine.kv_bytes),
        },
        "settings": settings,
        "effects": [
            {**asdict(one), "times_less": one.times_less, "fewer_percent": one.fewer_percent}
            for one in effects(shape, demand)
        ],
        "tiers": [_tier(tier, one, machine) for tier in tiers for one in capacities],
        "traffic": [] if traffic is None else traffic_rows(traffic, capacities, machine, tiers),
        "curves": [_curve(one, machine) for one in capacities],
        "notes": _notes(shape, demand, machine, settings),
    }


def _setting(capacity: Capacity, machine: Machine, shared_tokens: int) -> Document:
    demand = capacity.demand
    fit = capacity.requests_that_fit(machine.kv_bytes, shared_tokens)
    step = capacity.decode_step(machine, demand.concurrency)
    first = capacity.prefill(machine, min(shared_tokens, demand.context_tokens - 1))
    return {
        "name": capacity.codec + (f", {shared_tokens:,} shared" if shared_tokens else ""),
        "codec": capacity.codec,
        "shared_tokens": shared_tokens,
        "kv_bytes_per_token": capacity.token_bytes,
        "kv_bytes_per_request": capacity.request_bytes,
        "kv_bytes_total": capacity.total_bytes(demand.concurrency, shared_tokens),
        "requests_that_fit": fit,
        "fits": fit >= demand.concurrency,
        "decode_step_read_bytes": step.read_bytes,
        "itl_floor_seconds": step.seconds,
        "itl_bound_by": step.bound_by,
        "ttft_floor_seconds": first.seconds,
        "ttft_bound_by": first.bound_by,
    }


def _tier(tier: TierSize, capacity: Capacity, machine: Machine) -> Document:
    fetch = None if tier.bytes_per_second is None else capacity.request_bytes / tier.bytes_per_second
    recompute = capacity.prefill(machine).seconds
    return {
        "name": tier.name,
        "codec": capacity.codec,
        "capacity_bytes": tier.capacity_bytes,
        "requests_held": tier.capacity_bytes // capacity.request_bytes,
        "fetch_seconds": fetch,
        "recompute_floor_seconds": recompute,
        "cheaper": None if fetch is None else ("fetch" if fetch < recompute else "recompute"),
    }


def _curve(capacity: Capacity, machine: Machine) -> Document:
    """Requests that fit, and the floor of a decode step of one request, over the context's length."""
    demand = capacity.demand
    step = max(demand.block_tokens, demand.context_tokens // _CURVE_POINTS)
    points = []
    for tokens in sorted({*range(step, demand.context_tokens, step), demand.context_tokens}):
        at = Capacity(capacity.shape, replace(demand, context_tokens=tokens), capacity.codec)
        floor = at.decode_step(machine, demand.concurrency)
        points.append(
            {
                "context_tokens": tokens,
                "requests_that_fit": at.requests_that_fit(machine.kv_bytes),
                "itl_floor_seconds": floor.seconds,
            }
        )
    return {"codec": capacity.codec, "points": points}


def _notes(shape: ModelShape, demand: Demand, machine: Machine, settings: Sequence[Document]) -> list[str]:
    notes = []
    if machine.kv_bytes <= 0:
        notes.append(
            f"the weights take {machine.weights_bytes / 2**30:.1f} GiB and may have "
            f"{machine.memory_bytes * machine.usable_fraction / 2**30:.1f} GiB with the KV: nothing is left for KV"
        )
    if shape.context_limit is not None and demand.context_tokens > shape.context_limit:
        notes.append(f"the model's config allows {shape.context_limit:,} positions, fewer than the context asked for")
    short = [one["name"] for one in settings if not one["fits"]]
    if short and machine.kv_bytes > 0:
        notes.append(f"{demand.concurrency} requests do not fit at once with: {'; '.join(short)}")
    if shape.experts is not None:
        notes.append("experts are taken to be drawn alike; a skewed router reads fewer of them in a step")
    return notes
