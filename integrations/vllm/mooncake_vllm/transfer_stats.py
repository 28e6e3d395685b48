"""A connector's metrics, in the form in which vLLM collects, logs and publishes them."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

PREFIX = "vllm:mooncake_hal_"
POOL = "pool_"
"""Prefix of the pool's metrics. In a MultiConnector its connector is combined with one for P and D,
and Prometheus accepts each name only once."""
GAUGES = {
    "leases_held": "Finished prompts whose blocks are kept for a peer.",
    "reservations": "Requests whose blocks are reserved for a peer's writes.",
    "pool_saves_under_way": "Requests whose blocks are kept until they are stored.",
}
ONE_SERVERS = {"multiprocess_mode": "mostrecent"}
"""vLLM sends the metrics of a step to any one of its API servers, and publishes the metrics of all
servers as one. Counters are added; of a gauge, the value of the most recently updated server is
taken."""
COUNTERS = {
    "leases_expired": "Prompts that were kept for a peer that did not read them in time.",
    "loads": "Prompts whose KV was to come from a peer.",
    "load_failures": "Those whose KV did not come across.",
    "refused_loads": "Those of the failures whose peer can't exchange KV with this instance.",
    "refused_peers": "Instances whose handshake was refused.",
    "peers_rounding_otherwise": "Instances whose KV is rounded otherwise.",
    "refused_requests": "Requests whose kv_transfer_params could not be honoured.",
    "bytes_received": "KV read from peers.",
    "bytes_received_early": "Of that, what was read while the peer still computed the prompt.",
    "load_seconds": "Time that loads took.",
    "pushes": "Prompts whose KV was to be sent to a peer.",
    "push_failures": "Those whose KV did not come across.",
    "bytes_sent": "KV written to peers.",
    "push_seconds": "Time that pushes took.",
    "hook_errors": "Calls of vLLM that ended in an error of the connector.",
    "pool_num_lookups": "Prompts that were looked up in stores.",
    "pool_num_queried_chunks": "Chunks of these prompts.",
    "pool_num_found_chunks": "Those of the chunks that a store had.",
    "pool_num_loads": "Loads from stores.",
    "pool_num_failed_loads": "Those that ended without all that was asked for.",
    "pool_num_loaded_chunks": "Chunks that were loaded.",
    "pool_loaded_bytes": "KV read from stores.",
    "pool_load_seconds": "Time that loads from stores took.",
    "pool_num_saves": "Requests of which something was stored.",
    "pool_num_saved_chunks": "Chunks that were stored.",
    "pool_saved_bytes": "KV written to stores.",
    "pool_num_save_refusals": "Chunks that were not stored: there already, or no room.",
    "pool_hook_errors": "Calls of vLLM that ended in an error of the pool's connector.",
}


class Differences:
    """Converts metrics since the start to changes since the last call."""

    def __init__(self) -> None:
        self._seen: dict[str, float] = {}

    def take(self, figures: dict[str, float]) -> dict[str, float]:
        """Return increments of counters, and values of gauges; empty if nothing has changed."""
        changed = {name: value for name, value in figures.items() if self._seen.get(name) != value}
        grown = {
            name: value if name in GAUGES else value - self._seen.get(name, 0.0)
            for name, value in changed.items()
        }
        self._seen.update(changed)
        return {name: value for name, value in grown.items() if value or name in GAUGES}


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
        self._metrics = {
            name: metric_types[kind](
                name=f"{PREFIX}{name}", documentation=text, labelnames=labelnames, **words
            )
            for kind, table, words in ((Gauge, GAUGES, ONE_SERVERS), (Counter, COUNTERS, {}))
            for name, text in table.items()
            if name.startswith(POOL) is of_pool
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            metric = self._metrics[name].labels(*labels)
            if name in GAUGES:
                metric.set(value)
            else:
                metric.inc(value)
