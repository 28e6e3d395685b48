"""History of the live page's charts: one sample per second of the last ten minutes."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import astuple

from mooncake_proxy.ops.proxy_metrics import SECONDS, Histogram, ProxyMetrics

SAMPLE_S = 1.0
NUM_SAMPLES = 600
# Samples over which a pair's KV rate is averaged: instances report about once per second.
PAIR_SAMPLES = 10
# Statuses that are shown as refusals rather than errors: the client may retry.
REFUSALS = frozenset({"429", "503"})
_NO_COUNTS = (0.0,) * (len(SECONDS) + 1)

# (sender, receiver), by name.
Pair = tuple[str, str]


class Totals(Struct, frozen=True):
    """The proxy's counters since its start, and its current load."""

    time: float
    running: int
    waiting: int
    requests: float = 0.0
    refused: float = 0.0
    failed: float = 0.0
    ttft_met: float = 0.0
    tbt_met: float = 0.0
    prompt_tokens: float = 0.0
    cached_tokens: float = 0.0
    # Observations per bucket.
    first_token: Sequence[float] = _NO_COUNTS
    between_tokens: Sequence[float] = _NO_COUNTS
    # Bytes of KV by pair, since the receiver's start.
    kv: Mapping[Pair, int] = {}

    @classmethod
    def of(
        cls, metrics: ProxyMetrics, now: float, load: tuple[int, int], kv: Mapping[Pair, int]
    ) -> Totals:
        """Read the counters. `now` is in seconds since 1970; `load` is (running, waiting)."""
        requests, objectives = metrics.requests.values, metrics.slo_requests.values
        met = {"ttft": 0.0, "tbt": 0.0}
        for (_, objective, is_met), count in objectives.items():
            met[objective] += count if is_met == "true" else 0.0
        refused = sum(n for (_, status), n in requests.items() if status in REFUSALS)
        errors = sum(n for (_, status), n in requests.items() if status >= "400")
        return cls(
            time=now,
            running=load[0],
            waiting=load[1],
            requests=sum(requests.values()),
            refused=refused,
            failed=errors - refused,
            ttft_met=met["ttft"],
            tbt_met=met["tbt"],
            prompt_tokens=metrics.prompt_tokens.values[()],
            cached_tokens=metrics.cached_tokens.values[()],
            first_token=_counts(metrics.first_token_seconds),
            between_tokens=_counts(metrics.between_tokens_seconds),
            kv=kv,
        )


def _counts(histogram: Histogram) -> Sequence[float]:
    """Observations per bucket of a histogram without labels, without the trailing sum."""
    return tuple(histogram.series.get((), (*_NO_COUNTS, 0.0))[:-1])


class Sample(Struct, frozen=True):
    """One point of the charts: the difference between two `Totals`, as rates per second.

    Latencies are in seconds. None: there were no observations.
    """

    time: float
    running: int
    waiting: int
    answered: float
    refused: float
    failed: float
    ttft_met: float
    tbt_met: float
    hit_rate: float | None
    ttft_p50: float | None
    ttft_p99: float | None
    tbt_p50: float | None
    tbt_p99: float | None
    kv_bytes: float


class LiveHistory:
    """The latest NUM_SAMPLES samples; its memory is bounded."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=NUM_SAMPLES)
        self._latest: deque[Totals] = deque(maxlen=PAIR_SAMPLES + 1)

    def add(self, now: Totals) -> None:
        """Add the current totals. The first call yields no sample, as there is no difference."""
        if self._latest and now.time > self._latest[-1].time:
            self._samples.append(_compare(self._latest[-1], now))
        self._latest.append(now)

    def columns(self, since: float = 0.0) -> dict[str, list[Any]]:
        """The samples later than `since` (seconds since 1970), as one list per field."""
        first = bisect_right(self._samples, since, key=lambda sample: sample.time)
        rows = [astuple(sample) for sample in list(self._samples)[first:]]
        columns: Iterable[Sequence[Any]] = zip(*rows, strict=True) if rows else ()
        names = Sample.__struct_fields__
        return {name: [] for name in names} | {
            name: list(column) for name, column in zip(names, columns, strict=False)
        }

    def pairs(self) -> list[dict[str, Any]]:
        """Bytes of KV per pair: in total, and per second over the latest samples."""
        if not self._latest:
            return []
        first, last = self._latest[0], self._latest[-1]
        seconds = max(last.time - first.time, SAMPLE_S)
        return [
            {
                "sender": pair[0],
                "receiver": pair[1],
                "bytes": nbytes,
                "rate": _growth(first.kv.get(pair, 0), nbytes) / seconds,
            }
            for pair, nbytes in sorted(last.kv.items())
        ]


def _compare(before: Totals, now: Totals) -> Sample:
    seconds = now.time - before.time
    prompt_tokens = now.prompt_tokens - before.prompt_tokens
    ttft = [b - a for a, b in zip(before.first_token, now.first_token, strict=True)]
    tbt = [b - a for a, b in zip(before.between_tokens, now.between_tokens, strict=True)]
    moved = sum(_growth(before.kv.get(pair, 0), nbytes) for pair, nbytes in now.kv.items())
    refused, failed = now.refused - before.refused, now.failed - before.failed
    return Sample(
        time=now.time,
        running=now.running,
        waiting=now.waiting,
        answered=(now.requests - before.requests - refused - failed) / seconds,
        refused=refused / seconds,
        failed=failed / seconds,
        ttft_met=(now.ttft_met - before.ttft_met) / seconds,
        tbt_met=(now.tbt_met - before.tbt_met) / seconds,
        hit_rate=(now.cached_tokens - before.cached_tokens) / prompt_tokens
        if prompt_tokens > 0
        else None,
        ttft_p50=quantile(ttft, 0.5),
        ttft_p99=quantile(ttft, 0.99),
        tbt_p50=quantile(tbt, 0.5),
        tbt_p99=quantile(tbt, 0.99),
        kv_bytes=moved / seconds,
    )


def _growth(before: int, now: int) -> int:
    """Growth of a counter, which restarts from zero with its receiver."""
    return now - before if now >= before else now


def quantile(counts: Sequence[float], share: float) -> float | None:
    """The quantile `share` in seconds, from observations per bucket; None without observations.

    Interpolates like Prometheus' `histogram_quantile`.
    """
    wanted = share * sum(counts)
    if wanted <= 0:
        return None
    seen, low = 0.0, 0.0
    for bound, count in zip(SECONDS, counts, strict=False):
        if count and seen + count >= wanted:
            return low + (bound - low) * (wanted - seen) / count
        seen += count
        low = bound
    return SECONDS[-1]
