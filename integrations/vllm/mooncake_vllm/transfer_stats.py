"""A connector's metrics, in the form in which vLLM collects, logs and publishes them."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from mooncake_kv.connector import TRANSFER_GAUGES, TRANSFER_STATS_HELP
from mooncake_kv.pool.pool_events import POOL_STATS_HELP

PREFIX = "vllm:mooncake_hal_"
POOL = "pool_"
"""Prefix of the pool's metrics. In a MultiConnector its connector is combined with one for P and D,
and Prometheus accepts each name only once."""
GAUGES = {
    **{name: TRANSFER_STATS_HELP[name] for name in TRANSFER_GAUGES},
    "pool_saves_in_flight": "Copies of chunks to stores in flight.",
    "pool_num_stores": "Stores that the pool's options name, this instance's own included.",
    "pool_num_connected_stores": "Stores of these that can be used now.",
}
GAUGE_OPTIONS = {"multiprocess_mode": "mostrecent"}
"""vLLM sends the metrics of a step to any one of its API servers, and publishes the metrics of all
servers as one. Counters are added; of a gauge, the value of the most recently updated server is
taken."""
COUNTERS = {
    **{name: text for name, text in TRANSFER_STATS_HELP.items() if name not in TRANSFER_GAUGES},
    "refused_requests": "Requests whose kv_transfer_params could not be honoured.",
    "hook_errors": "Connector hooks that failed with an unexpected error.",
    "pool_num_lookups": "Look-ups of prompts in stores.",
    "pool_num_queried_chunks": "Chunks that were looked up.",
    "pool_num_found_chunks": "Chunks that a store had at the look-up.",
    "pool_num_loads": "Loads from stores.",
    "pool_num_failed_loads": "Loads from stores that did not load every requested chunk, though "
    "their request still ran.",
    "pool_num_loaded_chunks": "Chunks that were loaded.",
    "pool_loaded_bytes": "Bytes of KV read from stores.",
    "pool_load_seconds": "Time spent in loads from stores, in seconds.",
    "pool_num_saves": "Saves to stores.",
    "pool_num_saved_chunks": "Chunks that were saved.",
    "pool_saved_bytes": "Bytes of KV written to stores.",
    "pool_num_save_refusals": "Chunks that a store refused: already stored, or no free space.",
    "pool_num_unheld_chunks": "Chunks not saved because blocks of sliding windows were not "
    "there any more, or too many were held.",
    "pool_hook_errors": "Hooks of the pool's connector that failed with an unexpected error.",
}
BY_TRANSPORT = {
    f"pool_{name}": POOL_STATS_HELP[name]
    for name in ("loaded_bytes_by_transport", "saved_bytes_by_transport")
}
"""Counters with a label ``transport``. Metrics hold one per transport, such as
``pool_loaded_bytes_by_transport/shm``."""


class MetricDeltas:
    """Converts metrics since the start to changes since the last call."""

    def __init__(self) -> None:
        self._seen: dict[str, float] = {}

    def take(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return increments of counters, and values of gauges; empty if nothing has changed. A
        counter of a transport is returned when it appears, at 0 as well: Prometheus would not see
        its first increase otherwise."""
        changed = {name: value for name, value in metrics.items() if self._seen.get(name) != value}
        deltas = {
            name: value if name in GAUGES else value - self._seen.get(name, 0.0)
            for name, value in changed.items()
        }
        new = {name for name in changed.keys() - self._seen.keys() if "/" in name}
        self._seen.update(changed)
        kept = GAUGES.keys() | new
        return {name: value for name, value in deltas.items() if value or name in kept}


class HalStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is not installed where types are
    """Metrics of one interval; ``data`` maps names to numbers."""

    def reset(self) -> None:
        self.data: dict[str, float] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            self.data[name] = value if name in GAUGES else self.data.get(name, 0.0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class HalPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # as above
    """Publishes the metrics to Prometheus, per engine.

    Args:
        vllm_config, metric_types, labelnames, per_engine_labelvalues: as vLLM passes them.
        of_pool: whether to publish the pool's metrics, or those of the transfer connectors.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        of_pool: bool = False,
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        by_transport = [*labelnames, "transport"]
        self._metrics = {
            name: metric_types[kind](
                name=f"{PREFIX}{name}", documentation=text, labelnames=labels, **options
            )
            for kind, table, labels, options in (
                (Gauge, GAUGES, labelnames, GAUGE_OPTIONS),
                (Counter, COUNTERS, labelnames, {}),
                (Counter, BY_TRANSPORT, by_transport, {}),
            )
            for name, text in table.items()
            if name.startswith(POOL) is of_pool
        }
        # At 0 from the start: Prometheus sees no increase in a series that begins with an event.
        for name in self._metrics.keys() & COUNTERS.keys():
            for labels in per_engine_labelvalues.values():
                self._metrics[name].labels(*labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for full_name, value in transfer_stats_data.items():
            name, slash, transport = full_name.partition("/")
            metric = self._metrics[name].labels(*labels, *([transport] if slash else ()))
            if name in GAUGES:
                metric.set(value)
            else:
                metric.inc(value)
