"""The worker's counts on their way to vLLM: its log line "KV Transfer metrics", and its Prometheus page.

Imports vLLM, as connector.py does. Counts are per name since the last report; vLLM adds them up over ranks and time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig

METRIC = "vllm:kvstore_counts"
"""With the label `what`: loaded_tokens, saved_blocks, loads_failed, disk_corrupt_checksum, ..."""


class ConnectorStats(KVConnectorStats):  # type: ignore[misc]
    """Counts since the last report, by name."""

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class ConnectorPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """One counter, a label for what was counted: tiers and causes are not known beforehand."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counts = metric_types[Counter](
            name=METRIC,
            documentation="What the KV store's connector did, by what was counted.",
            labelnames=[*labelnames, "what"],
        )

    def observe(self, counts: dict[str, Any], engine_idx: int = 0) -> None:
        for name, count in counts.items():
            self._counts.labels(*self.per_engine_labelvalues[engine_idx], name).inc(count)
