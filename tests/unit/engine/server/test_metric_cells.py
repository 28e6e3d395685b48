"""Counters and histograms in shared memory: every worker exports the counts of all."""

from __future__ import annotations

from mmap import mmap

from prometheus_client.metrics_core import Metric

from mooncake_engine.server.metric_cells import Counter, Histogram, MetricCells, cells_bytes

LABELS = (("model",), ("m",))
BOUNDS = (0.5, 1.0, 2.5)


def histogram(cells: MetricCells) -> Histogram:
    return Histogram("t", "Times.", LABELS, BOUNDS, cells)


def counter(cells: MetricCells) -> Counter:
    kinds = {"method": ("GET", "POST"), "status": ("2xx", "5xx")}
    return Counter("c", "Calls.", LABELS, kinds, cells)


def shown(metric: Metric) -> dict[tuple[str, str], float]:
    """The samples by name and labels, without the model's label."""
    found = {}
    for sample in metric.samples:
        kinds = [value for name, value in sample.labels.items() if name != "model"]
        found[sample.name, ",".join(kinds)] = sample.value
    return found


def test_a_value_counts_in_the_first_bucket_that_holds_it() -> None:
    times = histogram(MetricCells())
    for value in (0.25, 0.5, 0.75, 2.5, 40.0):
        times.observe(value)
    assert shown(times.collect()) == {
        ("t_bucket", "0.5"): 2.0,
        ("t_bucket", "1.0"): 3.0,
        ("t_bucket", "2.5"): 4.0,
        ("t_bucket", "+Inf"): 5.0,
        ("t_count", ""): 5.0,
        ("t_sum", ""): 44.0,
    }


def test_observe_all_counts_like_single_observations() -> None:
    values = [0.25, 0.5, 0.75, 2.5, 40.0, 0.25]
    single, together = histogram(MetricCells()), histogram(MetricCells())
    for value in values:
        single.observe(value)
    together.observe_all(values)
    together.observe_all([])
    assert shown(together.collect()) == shown(single.collect())


def test_counts_are_exported_once_they_are_not_zero() -> None:
    calls = counter(MetricCells())
    assert not calls.collect().samples
    calls.inc("POST", "2xx")
    calls.inc("POST", "2xx")
    assert shown(calls.collect()) == {("c_total", "POST,2xx"): 2.0}


def test_workers_count_separately_and_export_the_sum() -> None:
    memory = mmap(-1, cells_bytes(2))
    first, second = (
        (histogram(cells), counter(cells))
        for cells in (MetricCells(memory, 0), MetricCells(memory, 1))
    )
    first[0].observe(0.25)
    second[0].observe(0.75)
    second[0].observe(0.75)
    first[1].inc("GET", "5xx")
    second[1].inc("GET", "5xx")
    second[1].inc("GET", "2xx")
    for times, calls in (first, second):
        assert shown(times.collect())["t_count", ""] == 3.0
        assert shown(times.collect())["t_bucket", "0.5"] == 1.0
        assert shown(calls.collect()) == {
            ("c_total", "GET,2xx"): 1.0,
            ("c_total", "GET,5xx"): 2.0,
        }
