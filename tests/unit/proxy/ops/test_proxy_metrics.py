"""Counters and histograms: text exposition, and sums over workers."""

from __future__ import annotations

from mooncake_proxy.ops.proxy_metrics import Counter, Histogram, ProxyMetrics, label_text


def test_exposition() -> None:
    counter = Counter("c_total", "Text.", ("name",))
    for _ in range(2):
        counter.add('a"\\\n')
    assert list(counter.lines())[-1] == 'c_total{name="a\\"\\\\\\n"} 2'
    histogram = Histogram("h", "Text.")
    histogram.observe(0.002)
    histogram.observe(1e9)
    lines = list(histogram.lines())
    assert 'h_bucket{le="0.001"} 0' in lines
    assert 'h_bucket{le="0.0025"} 1' in lines
    assert 'h_bucket{le="+Inf"} 2' in lines
    assert "h_count 2" in lines
    assert label_text((), ()) == ""


def test_counts_of_workers_are_summed() -> None:
    one, two = ProxyMetrics(), ProxyMetrics()
    for metrics in (one, two):
        metrics.requests.add("/v1/completions", "200")
        metrics.first_token_seconds.observe(0.01)
    total = ProxyMetrics.sum_of([one.snapshot(), two.snapshot()])
    assert total.requests.values == {("/v1/completions", "200"): 2.0}
    assert sum(total.first_token_seconds.series[()][:-1]) == 2


def test_large_counts_are_exposed_exactly() -> None:
    counter = Counter("tokens_total", "All.")
    counter.values[()] = 12_345_678.0
    assert list(counter.lines())[-1] == "tokens_total 12345678"
    counter.add()
    assert list(counter.lines())[-1] == "tokens_total 12345679"
    seconds = Histogram("seconds", "Spent.")
    seconds.observe(1234.5678)
    assert "seconds_sum 1234.5678" in list(seconds.lines())
