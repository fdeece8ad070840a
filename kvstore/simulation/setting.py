"""What to simulate: one Setting a configuration, and the Row that comes out of it. Pure values."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from allocator import ConfigError
from kvstore.simulation.policies import BOUND, POLICIES
from quant.record_layout import RUN_TOKENS, record_bytes

CODECS = ("raw", "int4")
PRICES = ("uniform", "cost")
ADMISSIONS = ("reuse", "everything")
ROUTINGS = ("random", "session", "prefix")
HOSTS_MAX = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What a block is and what moving or computing it takes. The defaults are Llama-3.1-8B's in bf16 on one GPU."""

    bytes_per_token: int = 131_072
    head_dim: int = 128
    prefill_tokens_per_second: float = 8_000.0
    attention_tokens: float = 60_000.0  # context at which attending costs as much as all the rest
    host_bytes_per_second: float = 20e9
    remote_bytes_per_second: float = 2e9
    step_seconds: float = 0.1  # a forward pass with a piece of a prompt in it: how often a store with tiers is stepped
    gpu_dollars_per_hour: float = 2.5
    host_dollars_per_gib_hour: float = 0.005
    remote_dollars_per_gib_hour: float = 0.017

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"{name}: got {value}; expected a number > 0")

    def prefill_seconds(self, reused_tokens: int, tokens: int) -> float:
        """Time to compute tokens reused_tokens..tokens of a prompt, attention to all before included."""
        quadratic = (tokens * tokens - reused_tokens * reused_tokens) / (2 * self.attention_tokens)
        return (tokens - reused_tokens + quadratic) / self.prefill_tokens_per_second

    def block_token_bytes(self, codec: str) -> int:
        """Bytes of a token in that codec."""
        return max(1, round(self.bytes_per_token / self.blocks_per_raw_block(codec)))

    def blocks_per_raw_block(self, codec: str) -> float:
        """How many blocks of a codec fit where one raw block does."""
        raw_bytes = RUN_TOKENS * self.head_dim * 2 * 2
        return 1.0 if codec == "raw" else raw_bytes / record_bytes(self.head_dim, self.head_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One configuration. Give a capacity (of each host's device) in percent of the unique blocks, or in blocks.

    host_blocks and remote_blocks: room of the tiers below, in blocks of that codec; 0: there is none.
    tenant_percent: most of a device that one tenant's blocks may take, in % of its capacity; 0: no quota.
    price: what a policy that learns weighs hits by; "cost": the time that losing
    the block would cost, as a store tells it; it tells blocks apart only where tiers below may have copies.
    admission, fetch_deadline_seconds: of a store with tiers, its `spill_policy` and `fetch_deadline_seconds`.
    """

    policy: str = "default"
    capacity_percent: float | None = None
    capacity_blocks: int | None = None
    codec: str = "raw"
    hosts: int = 1
    routing: str = "random"
    host_blocks: int = 0
    remote_blocks: int = 0
    seed: int = 0
    tenant_percent: float = 0.0
    price: str = "cost"
    admission: str = "reuse"
    fetch_deadline_seconds: float = 1.0
    costs: Costs = field(default_factory=Costs)

    def __post_init__(self) -> None:
        for name, value, known in (
            ("policy", self.policy, (*POLICIES, BOUND)),
            ("codec", self.codec, CODECS),
            ("routing", self.routing, ROUTINGS),
            ("price", self.price, PRICES),
            ("admission", self.admission, ADMISSIONS),
        ):
            if value not in known:
                raise ConfigError(f"{name}: got {value!r}; expected one of {', '.join(known)}")
        if (self.capacity_percent is None) == (self.capacity_blocks is None):
            raise ConfigError("capacity: expected either a percentage of the unique blocks or a number of blocks")
        percent, blocks = self.capacity_percent, self.capacity_blocks
        if percent is not None and not 0 < percent <= 100:
            raise ConfigError(f"capacity percent: got {percent}; expected more than 0 and at most 100")
        if blocks is not None and not 1 <= blocks < 1 << 31:
            raise ConfigError(f"capacity blocks: got {blocks}; expected an int in [1, 2^31)")
        if not 0 <= self.seed < 1 << 64:
            raise ConfigError(f"seed: got {self.seed}; expected an int in [0, 2^64)")
        if not 0 <= self.tenant_percent <= 100:
            raise ConfigError(f"tenant percent: got {self.tenant_percent}; expected 0 (no quota) to 100")
        if not 1 <= self.hosts <= HOSTS_MAX:
            raise ConfigError(f"hosts: got {self.hosts}; expected 1 to {HOSTS_MAX}")
        if min(self.host_blocks, self.remote_blocks) < 0:
            raise ConfigError(f"blocks of a tier: got {self.host_blocks} and {self.remote_blocks}; expected >= 0")
        if self.tenant_percent and self.has_tiers:
            raise ConfigError("tenant percent: expected no tiers below, where quotas are not simulated")
        if not 0 < self.fetch_deadline_seconds <= 3600:
            raise ConfigError(f"fetch deadline: got {self.fetch_deadline_seconds}; expected seconds in (0, 3600]")
        if self.policy == BOUND and (self.hosts > 1 or self.has_tiers):
            raise ConfigError("policy belady is the bound of one device: expected 1 host and no tiers below")

    @property
    def has_tiers(self) -> bool:
        """Whether there is anything below the device."""
        return bool(self.host_blocks or self.remote_blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierRow:
    """What one tier did, all hosts together.

    seconds_saved: of prefill, less what fetching from it took. A request's blocks are counted device first, then host,
    then remote. dollars: of its memory for as long as the trace is; the device's are the GPUs'.
    """

    tier: str
    capacity_bytes: int
    block_hit_ratio: float
    written_bytes: int
    read_bytes: int
    evictions: int
    seconds_saved: float
    dollars: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one Setting came to. Ratios are of all that requests presented; bytes and seconds are the model's."""

    trace: str
    policy: str
    capacity_percent: float
    capacity_blocks: int
    codec: str
    hosts: int
    routing: str
    requests: int
    blocks: int
    block_hit_ratio: float
    token_hit_ratio: float
    device_hit_ratio: float
    host_hit_ratio: float
    remote_hit_ratio: float
    least_tenant_hit_ratio: float  # of the tenant that has it worst; of all where the trace tells of no tenant
    evictions: int
    spilled_bytes: int
    fetched_bytes: int
    prefill_seconds_saved: float
    ttft_seconds_mean: float
    ttft_seconds_mean_without_cache: float
    gpu_dollars_saved: float
    tier_dollars: float
    tiers: tuple[TierRow, ...]
    seconds: float
