"""The live page at `/`: one self-contained file, and the numbers that it asks for every second."""

from __future__ import annotations

import time
from importlib.resources import files
from typing import Any

from mooncake_proxy import __version__
from mooncake_proxy.metrics import SECONDS, Metrics
from mooncake_proxy.process import Process


def html() -> bytes:
    """The page."""
    return files("mooncake_proxy").joinpath("page.html").read_bytes()


def view(process: Process, instances: list[dict[str, Any]]) -> dict[str, Any]:
    """What the page shows, counted over all workers."""
    metrics = process.all_metrics()
    return {
        "time": time.time(),
        "version": __version__,
        "flow": process.config.flow,
        "prefill_policy": process.config.prefill_policy,
        "decode_policy": process.config.decode_policy,
        "running": sum(i["running"] for i in instances if i["role"] != "prefill"),
        "waiting": process.num_waiting,
        "requests": sum(metrics.requests.values.values()),
        "errors": sum(n for (_, status), n in metrics.requests.values.items() if status >= "400"),
        "prompt_tokens": metrics.prompt_tokens.values[()],
        "cached_tokens": metrics.cached_tokens.values[()],
        "first_token": {"bounds": SECONDS, "counts": _first_token_counts(metrics)},
        "instances": instances,
    }


def _first_token_counts(metrics: Metrics) -> list[float]:
    """Observations per bucket; the last one holds everything beyond the bounds."""
    row = metrics.first_token_seconds.series.get((), [0.0] * (len(SECONDS) + 2))
    return row[:-1]
