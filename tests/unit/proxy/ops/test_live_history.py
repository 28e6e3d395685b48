"""The live page's history: counter rates, quantiles, and a bound on its memory."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from mooncake_proxy.ops.live_history import (
    NUM_SAMPLES,
    PAIR_SAMPLES,
    LiveHistory,
    Totals,
    quantile,
)
from mooncake_proxy.ops.proxy_metrics import SECONDS, ProxyMetrics


def after(*looks: Totals) -> dict[str, list[Any]]:
    history = LiveHistory()
    for look in looks:
        history.add(look)
    return history.columns()


START = Totals(time=100.0, running=0, waiting=0)


def test_counts_between_two_samples_become_a_rate() -> None:
    metrics = ProxyMetrics()
    before = Totals.of(metrics, 100.0, (0, 0), {})
    for status in ("200", "200", "200", "429", "503", "500"):
        metrics.requests.add("/v1/completions", status)
    metrics.slo_requests.add("default", "ttft", "true")
    metrics.slo_requests.add("default", "ttft", "false")
    metrics.slo_requests.add("batch", "tbt", "true")
    metrics.prompt_tokens.values[()] = 40.0
    metrics.cached_tokens.values[()] = 10.0
    metrics.first_token_seconds.observe(0.2)
    found = after(before, Totals.of(metrics, 102.0, (5, 7), {}))
    assert {name: column for name, [column] in found.items()} == {
        "time": 102.0,
        "running": 5,
        "waiting": 7,
        "answered": 1.5,
        "refused": 1.0,
        "failed": 0.5,
        "ttft_met": 0.5,
        "tbt_met": 0.5,
        "hit_rate": 0.25,
        "ttft_p50": pytest.approx(0.175),
        "ttft_p99": pytest.approx(0.2485),
        "tbt_p50": None,
        "tbt_p99": None,
        "kv_bytes": 0.0,
    }


def test_only_newer_samples_are_returned() -> None:
    history = LiveHistory()
    for second in range(4):
        history.add(replace(START, time=100.0 + second))
    assert history.columns()["time"] == [101.0, 102.0, 103.0]
    assert history.columns(since=102.0)["time"] == [103.0]
    assert history.columns(since=103.0)["kv_bytes"] == []


def test_clock_set_back_adds_no_sample() -> None:
    found = after(START, replace(START, time=50.0), replace(START, time=51.0))
    assert found["time"] == [51.0]


def test_memory_is_bounded() -> None:
    looks = (replace(START, time=float(second)) for second in range(NUM_SAMPLES + 50))
    found = after(*looks)
    assert (len(found["time"]), found["time"][-1]) == (NUM_SAMPLES, NUM_SAMPLES + 49)


def test_kv_by_pair_with_restarted_receiver() -> None:
    history, pair, other = LiveHistory(), ("p", "d"), ("p", "e")
    for look in range(2 * PAIR_SAMPLES):
        history.add(replace(START, time=float(look), kv={pair: 100 * look, other: 7}))
    rate = {"sender": "p", "receiver": "d", "bytes": 100 * (2 * PAIR_SAMPLES - 1), "rate": 100.0}
    assert history.pairs() == [rate, rate | {"receiver": "e", "bytes": 7, "rate": 0.0}]
    history.add(replace(START, time=2.0 * PAIR_SAMPLES, kv={pair: 30}))
    assert history.columns()["kv_bytes"][-2:] == [100.0, 30.0]
    assert [found["bytes"] for found in history.pairs()] == [30]


def test_empty_history() -> None:
    assert LiveHistory().pairs() == []
    assert LiveHistory().columns()["time"] == []


def in_bucket(*positions: int) -> list[float]:
    counts = [0.0] * (len(SECONDS) + 1)
    for position in positions:
        counts[position] += 1
    return counts


@pytest.mark.parametrize(
    ("counts", "share", "wanted"),
    [
        (in_bucket(), 0.5, None),
        (in_bucket(0), 0.5, SECONDS[0] / 2),
        (in_bucket(3, 3), 1.0, SECONDS[3]),
        (in_bucket(3, 3), 0.5, (SECONDS[2] + SECONDS[3]) / 2),
        (in_bucket(1, 5), 0.99, SECONDS[4] + (SECONDS[5] - SECONDS[4]) * 0.98),
        # Beyond the last bucket's bound, which is all that is known.
        (in_bucket(len(SECONDS)), 0.5, SECONDS[-1]),
    ],
)
def test_quantiles_match_prometheus(
    counts: list[float], share: float, wanted: float | None
) -> None:
    assert quantile(counts, share) == (wanted and pytest.approx(wanted))
