"""Prometheus counters and histograms whose values live in memory that API workers share.

Each worker writes only its own row, so that counting needs neither locks nor messages. Whichever
worker Prometheus scrapes sums all rows. A worker's counts outlive its process. One observation
costs a binary search of the bucket bounds and two additions, because one is made per streamed
token.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from mmap import mmap

from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

ROW_CELLS = 2048
"""Values per row. The server's metrics use less than half of them."""
_CELL_BYTES = 8


def cells_bytes(num_workers: int) -> int:
    """Size in bytes of the memory in which ``num_workers`` workers count."""
    return num_workers * ROW_CELLS * _CELL_BYTES


class MetricCells:
    """Allocates the values of all metrics from the shared rows, which start at zero. All workers
    allocate in the same order, so that a metric has the same place in every row.

    Args:
        memory: the shared memory, ``cells_bytes`` long; None for a single process.
        worker: the row that this process writes.
    """

    def __init__(self, memory: mmap | memoryview | None = None, worker: int = 0) -> None:
        whole = memoryview(bytearray(cells_bytes(1)) if memory is None else memory).cast("d")
        self._rows = [whole[start : start + ROW_CELLS] for start in range(0, len(whole), ROW_CELLS)]
        self._worker = worker
        self._num_allocated = 0

    def allocate(self, count: int) -> Cells:
        """Allocate the next ``count`` values of every row."""
        start, stop = self._num_allocated, self._num_allocated + count
        assert stop <= ROW_CELLS, "the metrics need more values than a row has"
        self._num_allocated = stop
        rows = [row[start:stop] for row in self._rows]
        return Cells(rows[self._worker], rows)


class Cells:
    """The values of one metric.

    Args:
        own: this worker's values.
        rows: the values of every worker, this one included.
    """

    def __init__(self, own: memoryview[float], rows: Sequence[memoryview[float]]) -> None:
        self.own = own
        self._rows = rows

    def totals(self) -> list[float]:
        """The sum of each value over all workers."""
        return [sum(column) for column in zip(*self._rows, strict=True)]


class Histogram:
    """A Prometheus histogram in shared memory.

    Args:
        name, help_text: the metric's name and help text.
        labels: label names and values, the same for every observation.
        bounds: upper bounds of the buckets, ascending.
        cells: the memory to allocate values from.
    """

    def __init__(
        self,
        name: str,
        help_text: str,
        labels: tuple[Sequence[str], Sequence[str]],
        bounds: Sequence[float],
        cells: MetricCells,
    ) -> None:
        self._name = name
        self._help_text = help_text
        self._label_names, self._label_values = labels
        self._bounds = bounds
        self._cells = cells.allocate(len(bounds) + 2)  # plus the +Inf bucket and the sum
        self._own = self._cells.own

    def observe(self, value: float) -> None:
        """Record a value."""
        own = self._own
        own[bisect_left(self._bounds, value)] += 1.0
        own[-1] += value

    def observe_all(self, values: Sequence[float]) -> None:
        """Record values at once; faster than ``observe`` if most fall into the same bucket."""
        own, bounds = self._own, self._bounds
        indexes = [bisect_left(bounds, value) for value in values]
        for index in set(indexes):
            own[index] += indexes.count(index)
        own[-1] += sum(values)

    def collect(self) -> Metric:
        """The metric as it is exported: summed over all workers."""
        *counts, total = self._cells.totals()
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        family = HistogramMetricFamily(self._name, self._help_text, labels=self._label_names)
        buckets = list(zip(names, itertools.accumulate(counts), strict=True))
        family.add_metric(self._label_values, buckets, total)
        return family


class Counter:
    """A Prometheus counter in shared memory, by labels whose values are known in advance.

    Args:
        name, help_text: the metric's name and help text.
        labels: label names and values, the same for every count.
        kinds: the labels that vary: their names, and the possible values of each.
        cells: the memory to allocate values from.
        shows_zeros: whether label combinations that were never counted are exported, too.
    """

    def __init__(
        self,
        name: str,
        help_text: str,
        labels: tuple[Sequence[str], Sequence[str]],
        kinds: dict[str, Sequence[str]],
        cells: MetricCells,
        *,
        shows_zeros: bool = False,
    ) -> None:
        self._name = name
        self._help_text = help_text
        self._label_names = (*labels[0], *kinds)
        self._label_values = tuple(labels[1])
        self._index = {
            values: index for index, values in enumerate(itertools.product(*kinds.values()))
        }
        self._cells = cells.allocate(len(self._index))
        self._shows_zeros = shows_zeros

    def inc(self, *values: str) -> None:
        """Add one to the count with these values of the varying labels."""
        self._cells.own[self._index[values]] += 1.0

    def collect(self) -> Metric:
        """The metric as it is exported: summed over all workers."""
        family = CounterMetricFamily(self._name, self._help_text, labels=self._label_names)
        for values, count in zip(self._index, self._cells.totals(), strict=True):
            if count or self._shows_zeros:
                family.add_metric((*self._label_values, *values), count)
        return family
