"""Counters and histograms whose numbers lie in memory that API workers share.

Each worker counts in a row of its own, so that nobody waits for a lock and nobody sends messages;
whichever worker is scraped adds the rows up. What a worker has counted outlives it. Counting costs
a search among the bounds and two additions, as one is made for each streamed token.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from mmap import mmap

from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

ROW_CELLS = 2048
"""Numbers in a row; what is counted here takes less than half of them."""
_CELL_BYTES = 8


def cells_bytes(num_workers: int) -> int:
    """Size of the memory that so many workers count in."""
    return num_workers * ROW_CELLS * _CELL_BYTES


class MetricCells:
    """The numbers of all workers, zero at first. Workers take cells in the same order.

    Args:
        memory: that they share, ``cells_bytes`` long; None for a worker that is alone.
        worker: which row is this process's.
    """

    def __init__(self, memory: mmap | memoryview | None = None, worker: int = 0) -> None:
        whole = memoryview(bytearray(cells_bytes(1)) if memory is None else memory).cast("d")
        self._rows = [whole[start : start + ROW_CELLS] for start in range(0, len(whole), ROW_CELLS)]
        self._worker = worker
        self._num_taken = 0

    def take(self, count: int) -> Cells:
        """The next ``count`` numbers of every row."""
        start, stop = self._num_taken, self._num_taken + count
        assert stop <= ROW_CELLS, "more is counted than a row has room for"
        self._num_taken = stop
        rows = [row[start:stop] for row in self._rows]
        return Cells(rows[self._worker], rows)


class Cells:
    """Numbers of one metric.

    Args:
        own: this worker's.
        rows: every worker's.
    """

    def __init__(self, own: memoryview[float], rows: Sequence[memoryview[float]]) -> None:
        self.own = own
        self._rows = rows

    def totals(self) -> list[float]:
        """Over all workers."""
        return [sum(column) for column in zip(*self._rows, strict=True)]


class Histogram:
    """How often a value was how large.

    Args:
        name, words: as Prometheus shows them.
        labels: names and values, the same for every observation.
        bounds: upper ends of the buckets, rising.
        cells: where it counts.
    """

    def __init__(
        self,
        name: str,
        words: str,
        labels: tuple[Sequence[str], Sequence[str]],
        bounds: Sequence[float],
        cells: MetricCells,
    ) -> None:
        self._name = name
        self._words = words
        self._label_names, self._label_values = labels
        self._bounds = bounds
        self._cells = cells.take(len(bounds) + 2)  # those above all bounds, and the sum
        self._own = self._cells.own

    def observe(self, value: float) -> None:
        """Count a value in."""
        own = self._own
        own[bisect_left(self._bounds, value)] += 1.0
        own[-1] += value

    def observe_all(self, values: Sequence[float]) -> None:
        """Count values in that came together, and are mostly alike."""
        own, bounds = self._own, self._bounds
        indexes = [bisect_left(bounds, value) for value in values]
        for index in set(indexes):
            own[index] += indexes.count(index)
        own[-1] += sum(values)

    def collect(self) -> Metric:
        """What Prometheus gets."""
        *counts, total = self._cells.totals()
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        family = HistogramMetricFamily(self._name, self._words, labels=self._label_names)
        buckets = list(zip(names, itertools.accumulate(counts), strict=True))
        family.add_metric(self._label_values, buckets, total)
        return family


class Counter:
    """How often something happened, by labels whose values are known beforehand.

    Args:
        name, words: as Prometheus shows them.
        labels: names and values, the same for every count.
        kinds: further labels: their names, and the values of each.
        cells: where it counts.
        shows_zeros: whether what has not happened is shown, too.
    """

    def __init__(
        self,
        name: str,
        words: str,
        labels: tuple[Sequence[str], Sequence[str]],
        kinds: dict[str, Sequence[str]],
        cells: MetricCells,
        *,
        shows_zeros: bool = False,
    ) -> None:
        self._name = name
        self._words = words
        self._label_names = (*labels[0], *kinds)
        self._label_values = tuple(labels[1])
        self._index = {
            values: index for index, values in enumerate(itertools.product(*kinds.values()))
        }
        self._cells = cells.take(len(self._index))
        self._shows_zeros = shows_zeros

    def inc(self, *values: str) -> None:
        """Count one, of these values of the further labels."""
        self._cells.own[self._index[values]] += 1.0

    def collect(self) -> Metric:
        """What Prometheus gets."""
        family = CounterMetricFamily(self._name, self._words, labels=self._label_names)
        for values, count in zip(self._index, self._cells.totals(), strict=True):
            if count or self._shows_zeros:
                family.add_metric((*self._label_values, *values), count)
        return family
