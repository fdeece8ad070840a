"""What a replay adds up: blocks and bytes by tier, and the model's seconds and dollars. Plain numbers."""

from __future__ import annotations

from collections import Counter

from kvstore.simulation.setting import Costs, Setting, TierRow

_SECONDS_AN_HOUR = 3600


class Counts:
    """See the module. capacity_blocks: of each host's device."""

    def __init__(self, setting: Setting, capacity_blocks: int, block_tokens: int) -> None:
        self._costs: Costs = setting.costs
        self._block_tokens = block_tokens
        self._hosts = setting.hosts
        block_bytes = block_tokens * setting.costs.block_token_bytes(setting.codec)
        rooms = {
            "device": capacity_blocks * setting.hosts,
            "host": setting.host_blocks * setting.hosts,
            "remote": setting.remote_blocks,
        }
        self._room_bytes = {tier: blocks * block_bytes for tier, blocks in rooms.items() if blocks}
        self._fetch_seconds = (
            block_bytes / setting.costs.host_bytes_per_second,
            block_bytes / setting.costs.remote_bytes_per_second,
        )
        self.blocks = Counter(dict.fromkeys(rooms, 0))
        self.evictions: Counter[str] = Counter()
        self.written_bytes: Counter[str] = Counter()
        self.read_bytes: Counter[str] = Counter()
        self.hits: list[int] = []  # blocks, by request
        self.seconds_plain = 0.0
        self.seconds_saved = 0.0
        self._saved = dict.fromkeys(rooms, 0.0)

    def add(self, tokens: int, device: int, host: int = 0, remote: int = 0, fetching_seconds: float = 0.0) -> None:
        """One request of that many prompt tokens: blocks it got from each tier, and how long the fetch took.

        The last token is always computed. A fetch that came too late saves less than nothing.
        """
        plain = self._costs.prefill_seconds(0, tokens)
        self.seconds_plain += plain
        self.blocks["device"] += device
        self.hits.append(device + host + remote)
        if device or host or remote or fetching_seconds:
            own, far = host * self._fetch_seconds[0], remote * self._fetch_seconds[1]
            share = own / (own + far) if own + far else float("host" in self._room_bytes)
            left = plain
            reused = 0
            for tier, count, fetching in (
                ("device", device, 0.0),
                ("host", host, fetching_seconds * share),
                ("remote", remote, fetching_seconds * (1 - share)),
            ):
                reused += count
                before, left = left, self._left_seconds(reused, tokens)
                self._saved[tier] += before - left - fetching
            self.blocks["host"] += host
            self.blocks["remote"] += remote
            self.seconds_saved += plain - left - fetching_seconds

    def _left_seconds(self, reused_blocks: int, tokens: int) -> float:
        return self._costs.prefill_seconds(max(0, min(reused_blocks * self._block_tokens, tokens - 1)), tokens)

    def tier_rows(self, presented_blocks: int, span_seconds: float) -> tuple[TierRow, ...]:
        """One for each tier that there is. span_seconds: how long its memory was paid for."""
        return tuple(
            TierRow(
                tier=tier,
                capacity_bytes=room,
                block_hit_ratio=self.blocks[tier] / presented_blocks,
                written_bytes=self.written_bytes[tier],
                read_bytes=self.read_bytes[tier],
                evictions=self.evictions[tier],
                seconds_saved=self._saved[tier],
                dollars=self._dollars(tier, room) * span_seconds / _SECONDS_AN_HOUR,
            )
            for tier, room in self._room_bytes.items()
        )

    def _dollars(self, tier: str, room_bytes: int) -> float:
        costs = self._costs
        if tier == "device":
            return self._hosts * costs.gpu_dollars_per_hour
        price = costs.host_dollars_per_gib_hour if tier == "host" else costs.remote_dollars_per_gib_hour
        return room_bytes / 2**30 * price
