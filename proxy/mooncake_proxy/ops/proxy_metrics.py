"""The proxy's metrics: counters and histograms in Prometheus text format.

An observation costs 0.15 µs, cheap enough for the hot path.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter as Tally, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from functools import partial
from typing import Any

SECONDS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
    60.0, 120.0, 300.0, 600.0,
)  # fmt: skip
_bucket_of = partial(bisect_left, SECONDS)
Labels = tuple[str, ...]
FORGET_S = 300.0
# Metric name -> rows of (label values, numbers), to send to other workers and to sum up.
MetricsSnapshot = dict[str, list[tuple[list[str], list[float]]]]


class Counter:
    """A monotonic number per combination of label values."""

    def __init__(self, name: str, text: str, labels: Labels = ()) -> None:
        self.name = name
        self.text = text
        self.labels = labels
        self.values: defaultdict[Labels, float] = defaultdict(float)
        if not labels:
            self.values[()] = 0.0

    def add(self, *values: str) -> None:
        """Add 1 for these label values."""
        self.values[values] += 1.0

    def rows(self) -> list[tuple[list[str], list[float]]]:
        """All values, as plain data."""
        return [(list(values), [number]) for values, number in self.values.items()]

    def instances(self) -> set[str]:
        """Names of the instances among the label values."""
        return _instances(self.labels, self.values)

    def forget(self, instance: str) -> None:
        """Drop the values of an instance."""
        _forget(self.labels, self.values, instance)

    def absorb(self, values: Labels, row: list[float]) -> None:
        """Add a row of another process."""
        self.values[values] += row[0]

    def lines(self) -> Iterator[str]:
        """Exposition lines."""
        yield f"# HELP {self.name} {self.text}"
        yield f"# TYPE {self.name} counter"
        for values, number in self.values.items():
            yield f"{self.name}{label_text(self.labels, values)} {number_text(number)}"


class Histogram:
    """Observations in fixed buckets per combination of label values."""

    def __init__(self, name: str, text: str, labels: Labels = ()) -> None:
        self.name = name
        self.text = text
        self.labels = labels
        # Observations since the last `settle`.
        self._new: defaultdict[Labels, list[float]] = defaultdict(list)
        self._series: dict[Labels, list[float]] = {}

    def observe(self, value: float, *values: str) -> None:
        """Add an observation in seconds. `settle` sorts it into its bucket later."""
        self._new[values].append(value)

    def recorder(self, *values: str) -> Callable[[float], None]:
        """A fast `observe` for one series: appends to its list of new observations."""
        return self._new[values].append

    def settle(self) -> None:
        """Sort new observations into buckets. Called a few times per second to bound the list."""
        for values, new in self._new.items():
            row = self._series.get(values)
            if row is None:
                row = self._series[values] = [0.0] * (len(SECONDS) + 2)
            # Tally counts in C: streams add an observation per token.
            for bucket, count in Tally(map(_bucket_of, new)).items():
                row[bucket] += count
            row[-1] += sum(new)
            new.clear()

    @property
    def series(self) -> dict[Labels, list[float]]:
        """Rows by label values: one count per bucket, one for +Inf, then the sum."""
        self.settle()
        return self._series

    def rows(self) -> list[tuple[list[str], list[float]]]:
        """All series, as plain data."""
        return [(list(values), row) for values, row in self.series.items()]

    def instances(self) -> set[str]:
        """Names of the instances among the label values."""
        return _instances(self.labels, self.series)

    def forget(self, instance: str) -> None:
        """Drop the series of an instance."""
        _forget(self.labels, self._new, instance)
        _forget(self.labels, self._series, instance)

    def absorb(self, values: Labels, row: list[float]) -> None:
        """Add a row of another process."""
        mine = self.series.setdefault(values, [0.0] * len(row))
        for position, number in enumerate(row):
            mine[position] += number

    def lines(self) -> Iterator[str]:
        """Exposition lines, where bucket counts are cumulative."""
        yield f"# HELP {self.name} {self.text}"
        yield f"# TYPE {self.name} histogram"
        for values, row in self.series.items():
            total = 0.0
            for bound, count in zip((*map(str, SECONDS), "+Inf"), row, strict=False):
                total += count
                labels = label_text((*self.labels, "le"), (*values, bound))
                yield f"{self.name}_bucket{labels} {number_text(total)}"
            labels = label_text(self.labels, values)
            yield f"{self.name}_sum{labels} {number_text(row[-1])}"
            yield f"{self.name}_count{labels} {number_text(total)}"


def _instances(labels: Labels, rows: Mapping[Labels, object]) -> set[str]:
    if "instance" not in labels:
        return set()
    position = labels.index("instance")
    return {values[position] for values in rows}


def _forget(labels: Labels, rows: MutableMapping[Labels, Any], instance: str) -> None:
    if "instance" in labels:
        position = labels.index("instance")
        for values in [values for values in rows if values[position] == instance]:
            del rows[values]


def label_text(names: Labels, values: Labels) -> str:
    """`{a="x",b="y"}` with escaped values; empty without labels."""
    if not names:
        return ""
    pairs = ",".join(f'{n}="{_escape(v)}"' for n, v in zip(names, values, strict=True))
    return "{" + pairs + "}"


def gauge_lines(
    name: str, text: str, rows: Iterable[tuple[Mapping[str, str], float]]
) -> Iterator[str]:
    """Exposition lines of a gauge."""
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} gauge"
    for labels, number in rows:
        labelled = label_text(tuple(labels), tuple(labels.values()))
        yield f"{name}{labelled} {number_text(number)}"


def number_text(number: float) -> str:
    """The number with all digits: a rounded large counter would seem to have a rate of 0."""
    return str(int(number)) if number == int(number) else repr(float(number))


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class ProxyMetrics:
    """All metrics of one proxy process. The label `role` is prefill, decode or both."""

    def __init__(self) -> None:
        prefix = "mooncake_proxy_"
        # Names of instances that have left the pool -> loop time since when.
        self._gone_since: dict[str, float] = {}
        self.requests = Counter(
            f"{prefix}requests_total", "Requests by endpoint and status.", ("endpoint", "status")
        )
        self.disconnects = Counter(
            f"{prefix}client_disconnects_total", "Clients that left early, by stage.", ("stage",)
        )
        self.attempts = Counter(
            f"{prefix}attempts_total",
            "Steps sent to instances, by outcome.",
            ("instance", "role", "outcome"),
        )
        self.retries = Counter(f"{prefix}retries_total", "Attempts after the first.", ("role",))
        self.aborts = Counter(
            f"{prefix}aborts_total", "POST /abort sent to prefill instances.", ("outcome",)
        )
        self.fallbacks = Counter(
            f"{prefix}local_prefill_total", "Requests that D prefilled itself.", ("reason",)
        )
        self.role_changes = Counter(
            f"{prefix}role_changes_total",
            "Role switches that were made to balance the load.",
            ("instance", "role"),
        )
        self.rate_limited = Counter(
            f"{prefix}rate_limited_total",
            "Requests refused because their API key had reached a limit.",
            ("key", "limit"),
        )
        self.suspects = Counter(
            f"{prefix}suspect_requests_total",
            "Requests during which instances died or hung up: stopped, or refused afterwards.",
            ("outcome",),
        )
        self.recomputed = Counter(
            f"{prefix}recomputed_total", "Requests that D returned for recomputation."
        )
        self.migrated = Counter(
            f"{prefix}migrated_total", "Streams that were migrated when their D was lost."
        )
        self.stream_errors = Counter(
            f"{prefix}stream_errors_total", "Streams that ended with an error event."
        )
        self.prompt_tokens = Counter(
            f"{prefix}prompt_tokens_total", "Prompt tokens prefilled, as instances count them."
        )
        self.cached_tokens = Counter(
            f"{prefix}cached_tokens_total", "Prompt tokens that P had cached."
        )
        self.slo_requests = Counter(
            f"{prefix}slo_requests_total",
            "Streams by class, objective and whether it was met.",
            ("class", "objective", "met"),
        )
        self._add_histograms(prefix)

    def _add_histograms(self, prefix: str) -> None:
        """Create the histograms of times."""
        self.stage_seconds = Histogram(
            f"{prefix}stage_seconds",
            "prefill: until P's answer; decode: until D's first event or whole answer.",
            ("stage", "instance"),
        )
        self.first_token_seconds = Histogram(
            f"{prefix}time_to_first_token_seconds", "Arrival to the first token sent, of streams."
        )
        self.between_tokens_seconds = Histogram(
            f"{prefix}time_between_tokens_seconds",
            "Time between the tokens of streams, including the handover to D.",
        )
        self.request_seconds = Histogram(
            f"{prefix}request_seconds", "Arrival to the last byte sent.", ("endpoint",)
        )
        self.queue_seconds = Histogram(f"{prefix}queue_seconds", "Time in the admission queue.")

    def all(self) -> Iterator[Counter | Histogram]:
        """Every metric, in the order of definition."""
        yield from (value for name, value in vars(self).items() if not name.startswith("_"))

    def forget_instances(self, known: Collection[str], now: float) -> None:
        """Drop the rows of instances that left the pool more than FORGET_S ago.

        Restarted pods have new addresses, so label values would accumulate without bound.
        """
        gone = {name for metric in self.all() for name in metric.instances()} - set(known)
        self._gone_since = {name: self._gone_since.get(name, now) for name in gone}
        for name, since in self._gone_since.items():
            if now - since >= FORGET_S:
                for metric in self.all():
                    metric.forget(name)

    def settle(self) -> None:
        """Sort new observations of all histograms into their buckets."""
        for metric in self.all():
            if isinstance(metric, Histogram):
                metric.settle()

    def lines(self) -> Iterator[str]:
        """All exposition lines."""
        for metric in self.all():
            yield from metric.lines()

    def charted(self) -> MetricsSnapshot:
        """The metrics that the live page's history needs, as plain data."""
        metrics = (
            self.requests,
            self.slo_requests,
            self.prompt_tokens,
            self.cached_tokens,
            self.first_token_seconds,
            self.between_tokens_seconds,
        )
        return {metric.name: metric.rows() for metric in metrics}

    def snapshot(self) -> MetricsSnapshot:
        """All metrics, as plain data."""
        return {metric.name: metric.rows() for metric in self.all()}

    @classmethod
    def sum_of(cls, snapshots: Iterable[MetricsSnapshot]) -> ProxyMetrics:
        """The sum of several processes' metrics."""
        total = cls()
        by_name = {metric.name: metric for metric in total.all()}
        for snapshot in snapshots:
            for name, rows in snapshot.items():
                for values, row in rows:
                    by_name[name].absorb(tuple(values), row)
        return total
