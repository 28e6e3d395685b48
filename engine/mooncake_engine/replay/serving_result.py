"""Computes the result of ``bench serve``, with the names and definitions of ``vllm bench serve``.

TTFT and inter-token latency are measured between pieces of text; a request's latency ends with its
last piece. TPOT excludes the first token. All times in the result are in seconds, except those
whose names end in ``_ms``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean, pstdev
from typing import Any

from mooncake_engine.errors import ConfigError
from mooncake_engine.replay.latency_summary import Record, quantile

METRICS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
"""The metrics: short name and title in tables."""
GOODPUT_METRICS = ("ttft", "tpot", "e2el")
DETAILS = ("input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors")
"""The keys that hold one value per request; the file has them only with ``--save-detailed``."""
_WIDTH = 50


@dataclass(frozen=True, slots=True)
class ServingTargets:
    """The statistics to report.

    Args:
        metrics: the metrics whose distributions are shown.
        percentiles: the percentiles to show of them, 0 to 100.
        goodput: limits in ms that a good request meets, by metric; empty for no goodput.

    Raises:
        ConfigError: a metric is unknown, or a value is out of range.
    """

    metrics: tuple[str, ...]
    percentiles: tuple[float, ...]
    goodput: dict[str, float]

    def __post_init__(self) -> None:
        for name in self.metrics:
            if name not in METRICS:
                raise ConfigError(
                    f"--percentile-metrics must be of {', '.join(METRICS)}, got {name!r}"
                )
        for value in self.percentiles:
            if not 0 <= value <= 100:
                raise ConfigError(f"--metric-percentiles must be 0 to 100, got {value:g}")
        for name, limit in self.goodput.items():
            if name not in GOODPUT_METRICS or not limit >= 0:
                raise ConfigError(
                    f"--goodput takes {', '.join(GOODPUT_METRICS)} with milliseconds, got "
                    f"{name}:{limit:g}"
                )


def serving_result(
    records: Sequence[Record], duration_s: float, targets: ServingTargets
) -> dict[str, Any]:
    """The statistics of a run, under the keys of vLLM's result file.

    Args:
        records: the records, in the order of the requests.
        duration_s: seconds from the first request to the end of the last answer.
        targets: the statistics to report.
    """
    answered = [record for record in records if record.error is None]
    num_input = sum(record.num_input for record in answered)
    num_output = sum(record.num_output for record in answered)
    num_good = sum(_is_good(record, targets.goodput) for record in answered)
    result: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(answered),
        "failed": len(records) - len(answered),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(answered) / duration_s,
        "request_goodput": num_good / duration_s if targets.goodput else None,
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
        "input_lens": [record.num_input for record in records],
        "output_lens": [record.num_output for record in records],
        "ttfts": [_ttft_s(record) for record in records],
        "itls": [record.gaps_s for record in records],
        "start_times": [record.sent_s for record in records],
        "generated_texts": ["".join(record.pieces) for record in records],
        "errors": [record.error or "" for record in records],
        "max_output_tokens_per_s": float(_peak_tokens_per_s(answered)),
        "max_concurrent_requests": _peak_concurrency(answered),
    }
    for name in targets.metrics:
        result |= _distribution(name, _values(name, answered), targets.percentiles)
    return result


def _ttft_s(record: Record) -> float:
    return record.ttft_s if record.piece_times_s else 0.0


def _latency_s(record: Record) -> float:
    return record.piece_times_s[-1] - record.sent_s


def _tpot_s(record: Record) -> float:
    if record.num_output <= 1:
        return 0.0
    return (_latency_s(record) - record.ttft_s) / (record.num_output - 1)


def _values(name: str, answered: Sequence[Record]) -> list[float]:
    """The values of a metric, in seconds."""
    if name == "itl":
        return [gap for record in answered for gap in record.gaps_s]
    if name == "tpot":
        return [_tpot_s(record) for record in answered if record.num_output > 1]
    return [_ttft_s(record) if name == "ttft" else _latency_s(record) for record in answered]


def _is_good(record: Record, limits_ms: dict[str, float]) -> bool:
    times = {"ttft": _ttft_s, "tpot": _tpot_s, "e2el": _latency_s}
    return all(times[name](record) * 1000 <= limit for name, limit in limits_ms.items())


def _distribution(
    name: str, values_s: Sequence[float], percentiles: Sequence[float]
) -> dict[str, float]:
    ordered = sorted(1000 * value for value in values_s) or [0.0]
    found = {"mean": fmean(ordered), "median": quantile(ordered, 0.5), "std": pstdev(ordered)}
    found |= {_percentile_name(p): quantile(ordered, p / 100) for p in percentiles}
    return {f"{statistic}_{name}_ms": value for statistic, value in found.items()}


def _percentile_name(percentile: float) -> str:
    return f"p{int(percentile) if percentile == int(percentile) else percentile}"


def _peak_tokens_per_s(answered: Sequence[Record]) -> int:
    """The most pieces of text received in one second; seconds count from the first request."""
    if not answered:
        return 0
    start = min(record.sent_s for record in answered)
    counts: dict[int, int] = {}
    for record in answered:
        for at_s in record.piece_times_s:
            second = int(at_s - start)
            counts[second] = counts.get(second, 0) + 1
    return max(counts.values())


def _peak_concurrency(answered: Sequence[Record]) -> int:
    """The most requests in flight at a time. A request that ends when another starts does not
    overlap it."""
    begins = [(record.sent_s, 1) for record in answered]
    ends = [(record.sent_s + _latency_s(record), -1) for record in answered]
    steps = [step for _, step in sorted([*begins, *ends])]
    return max(accumulate(steps), default=0)


def serving_table(result: dict[str, Any], targets: ServingTargets, setting: dict[str, Any]) -> str:
    """The result as a table with the same lines as that of ``vllm bench serve``, which scripts
    parse.

    Args:
        setting: the run's configuration, with ``request_rate`` and ``max_concurrency``.
    """
    return "\n".join(
        [
            f"{' Serving Benchmark Result ':=^{_WIDTH}}",
            *(f"{label:<40} {_shown(value):<10}" for label, value in _lines(result, setting)),
            *_metric_lines(result, targets),
            "=" * _WIDTH,
        ]
    )


def _lines(result: dict[str, Any], setting: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    yield "Successful requests:", result["completed"]
    yield "Failed requests:", result["failed"]
    if setting["max_concurrency"] is not None:
        yield "Maximum request concurrency:", setting["max_concurrency"]
    if setting["request_rate"] != "inf":
        yield "Request rate configured (RPS):", float(setting["request_rate"])
    yield "Benchmark duration (s):", result["duration"]
    yield "Total input tokens:", result["total_input_tokens"]
    yield "Total generated tokens:", result["total_output_tokens"]
    yield "Request throughput (req/s):", result["request_throughput"]
    if result["request_goodput"] is not None:
        yield "Request goodput (req/s):", result["request_goodput"]
    yield "Output token throughput (tok/s):", result["output_throughput"]
    yield "Peak output token throughput (tok/s):", result["max_output_tokens_per_s"]
    yield "Peak concurrent requests:", float(result["max_concurrent_requests"])
    yield "Total token throughput (tok/s):", result["total_token_throughput"]


def _metric_lines(result: dict[str, Any], targets: ServingTargets) -> Iterator[str]:
    for name in targets.metrics:
        short, title = METRICS[name]
        yield f"{title:-^{_WIDTH}}"
        names = ["mean", "median", *(_percentile_name(p) for p in targets.percentiles)]
        for statistic in names:
            label = f"{statistic[0].upper()}{statistic[1:]} {short} (ms):"
            yield f"{label:<40} {result[f'{statistic}_{name}_ms']:<10.2f}"


def _shown(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
