"""A replay's results as a table, JSON, and an HTML page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from html import escape
from importlib.resources import files
from typing import Any

import msgspec

from mooncake_engine.replay.latency_summary import (
    Distribution,
    LatencyTargets,
    Record,
    Summary,
    summarise,
)

_WIDTH, _HEIGHT = 480, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 10, 34
_MAX_POINTS = 400
_NUM_BINS = 60


@dataclass(frozen=True, slots=True)
class Chart:
    """Points in a frame.

    Args:
        title: what is shown, with its unit.
        x_label, y_label: of the axes, with their units.
        points: (x, y), x rising where ``is_line``.
        is_line: joined, not dotted.
        x_limit, y_limit: an objective to mark, in the axis's unit.
    """

    title: str
    x_label: str
    y_label: str
    points: Sequence[tuple[float, float]]
    is_line: bool
    x_limit: float | None = None
    y_limit: float | None = None


def page(report: Report) -> str:
    """The whole document."""
    head = '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    view = '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    style = files("mooncake_engine.replay").joinpath("page.css").read_text()
    title = f"<title>mooncake-engine bench</title>\n<style>\n{style}</style>\n</head>\n"
    figures = "\n".join(_figure(chart) for chart in charts(report))
    return (
        f"{head}{view}{title}<body>\n<h1>mooncake-engine bench</h1>\n"
        f"{_definitions(list(report.setting.items()))}\n{_table(report)}\n"
        f"{_definitions(report.facts())}\n"
        f'<div class="charts">\n{figures}\n</div>\n</body>\n</html>\n'
    )


def charts(report: Report) -> list[Chart]:
    """What is drawn."""
    answered = [record for record in report.records if record.error is None]
    start = min(record.sent_s for record in report.records)
    ttft = [1000 * record.ttft_s for record in answered]
    tbt = [1000 * gap for record in answered for gap in record.gaps_s]
    slow_ttft = _ms(report.objective.ttft_s)
    sent = [(r.sent_s - start, 1000 * r.ttft_s) for r in answered]
    return [
        Chart("Time to first token", "ms", "share of requests", _shares(ttft), True, slow_ttft),
        Chart(
            "Time between tokens",
            "ms",
            "share of gaps",
            _shares(tbt),
            True,
            _ms(report.objective.tbt_s),
        ),
        Chart(
            "Time to first token, as requests were sent", "s", "ms", sent, False, None, slow_ttft
        ),
        Chart("Generated", "s", "pieces per second", _rate(answered, start), True),
    ]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def _shares(values: list[float]) -> list[tuple[float, float]]:
    """What share of the values is at most so large: at evenly spread ranks."""
    ordered = sorted(values)
    if not ordered:
        return []
    count = len(ordered)
    ranks = sorted({round(i * (count - 1) / _MAX_POINTS) for i in range(_MAX_POINTS + 1)})
    return [(ordered[rank], (rank + 1) / count) for rank in ranks]


def _rate(records: Sequence[Record], start: float) -> list[tuple[float, float]]:
    """Pieces of text per second, over the time of the replay."""
    times = [at - start for record in records for at in record.piece_times_s]
    width = max(max(times, default=0.0) / _NUM_BINS, 1e-3)
    counts = [0] * (_NUM_BINS + 1)
    for at in times:
        counts[min(int(at / width), _NUM_BINS)] += 1
    return [((index + 0.5) * width, count / width) for index, count in enumerate(counts)]


def _table(report: Report) -> str:
    names = ("", "mean", "p50", "p90", "p99", "max")
    rows = ["<tr>" + "".join(f"<th>{name}</th>" for name in names) + "</tr>"]
    for name, values, digits in report.spreads():
        cells = "".join(f"<td>{value:.{digits}f}</td>" for value in values)
        rows.append(f"<tr><td>{name}</td>{cells}</tr>")
    return "<table>\n" + "\n".join(rows) + "\n</table>"


def _definitions(pairs: Sequence[tuple[str, str]]) -> str:
    entries = [f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in pairs]
    return "<dl>\n" + "\n".join(entries) + "\n</dl>"


def _figure(chart: Chart) -> str:
    xs, ys = ([point[axis] for point in chart.points] for axis in (0, 1))
    x_ticks = _ticks(max([*xs, chart.x_limit or 0.0], default=1.0))
    y_ticks = _ticks(max([*ys, chart.y_limit or 0.0], default=1.0))
    places = [(_x(x, x_ticks[-1]), _y(y, y_ticks[-1])) for x, y in chart.points]
    parts = [*_axes(chart, x_ticks, y_ticks), *_marks(chart, places)]
    parts += _limits(chart, x_ticks[-1], y_ticks[-1])
    drawn = "\n".join(parts)
    return (
        f"<figure>\n<h2>{escape(chart.title)}</h2>\n"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(chart.title)}">\n'
        f"{drawn}\n</svg>\n</figure>"
    )


def _axes(chart: Chart, x_ticks: list[float], y_ticks: list[float]) -> list[str]:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = []
    for tick in y_ticks:
        y = _y(tick, y_ticks[-1])
        parts.append(f'<line class="grid" x1="{_LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in x_ticks:
        x = _x(tick, x_ticks[-1])
        parts.append(f'<text x="{x:.1f}" y="{bottom + 15}" text-anchor="middle">{tick:g}</text>')
    parts.append(
        f'<text x="{right}" y="{_HEIGHT - 4}" text-anchor="end">{escape(chart.x_label)}</text>'
    )
    parts.append(f'<text x="{_LEFT + 4}" y="{_TOP + 10}">{escape(chart.y_label)}</text>')
    return parts


def _marks(chart: Chart, places: Sequence[tuple[float, float]]) -> list[str]:
    if chart.is_line and places:
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        return [f'<polyline class="line" points="{joined}"/>']
    return [f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in places]


def _limits(chart: Chart, x_max: float, y_max: float) -> list[str]:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = []
    if chart.x_limit is not None:
        x = _x(chart.x_limit, x_max)
        parts.append(f'<line class="limit" x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{bottom}"/>')
    if chart.y_limit is not None:
        y = _y(chart.y_limit, y_max)
        parts.append(f'<line class="limit" x1="{_LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>')
    return parts


def _ticks(largest: float) -> list[float]:
    """Round numbers from 0 to at least ``largest``."""
    largest = largest if largest > 0 else 1.0
    step = 10 ** math.floor(math.log10(largest))
    step = next(s for s in (step / 5, step / 2, step, 2 * step) if largest / s <= 5)
    return [index * step for index in range(math.ceil(largest / step - 1e-9) + 1)]


def _x(value: float, largest: float) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * value / largest


def _y(value: float, largest: float) -> float:
    return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * value / largest


@dataclass(frozen=True, slots=True)
class Report:
    """A finished replay.

    Args:
        setting: what was replayed where, by name, for readers.
        records: of all requests.
        objective: what a good answer keeps to.
        summary: the figures.
    """

    setting: dict[str, str]
    records: Sequence[Record]
    objective: LatencyTargets
    summary: Summary

    @classmethod
    def of(
        cls, setting: dict[str, str], records: Sequence[Record], objective: LatencyTargets
    ) -> Report:
        """Work the figures out."""
        return cls(setting, records, objective, summarise(records, objective))

    def json(self) -> bytes:
        """Everything, with a line per request; times from the first request on, in seconds."""
        start = min(record.sent_s for record in self.records)
        return msgspec.json.format(
            msgspec.json.encode(
                {
                    "setting": self.setting,
                    "objective": self.objective,
                    "summary": self.summary,
                    "requests": [_entry(record, start) for record in self.records],
                }
            )
        )

    def table(self) -> str:
        """For a terminal."""
        rows = [["", *(field.name for field in fields(Distribution))]]
        rows += [
            [name, *(f"{value:.{digits}f}" for value in values)]
            for name, values, digits in self.spreads()
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in rows
        ]
        return "\n".join([*lines, "", *(f"{name}: {value}" for name, value in self.facts())])

    def spreads(self) -> list[tuple[str, tuple[float, ...], int]]:
        """Rows of the table: name, values in its unit, and digits."""
        found = [
            ("TTFT ms", self.summary.ttft_s),
            ("TBT ms", self.summary.tbt_s),
            ("E2E ms", self.summary.e2e_s),
        ]
        rows = [(name, _values(spread, 1000), 1) for name, spread in found]
        multiples = {"TTFT times": self.summary.ttft_times, "TBT times": self.summary.tbt_times}
        return rows + [
            (f"{name} unloaded", _values(spread, 1), 2)
            for name, spread in multiples.items()
            if spread is not None
        ]

    def facts(self) -> list[tuple[str, str]]:
        """The other figures, in words."""
        s = self.summary
        facts = [
            (
                "requests",
                f"{s.num_requests} in {s.duration_s:.1f} s, {s.num_refused} refused, "
                f"{s.num_failed} failed",
            ),
            (
                "throughput",
                f"{s.requests_per_s:.2f} requests/s, {s.input_tokens_per_s:.0f} prompt tokens/s, "
                f"{s.output_tokens_per_s:.0f} generated tokens/s",
            ),
            ("goodput", f"{s.goodput_per_s:.2f} requests/s ({s.good_share:.0%}) {self._limits()}"),
            ("prompt tokens from cache", f"{s.cached_share:.0%}"),
            ("sent late", f"{1000 * s.late_s.p99:.1f} ms (p99)"),
        ]
        if self.objective.needs_unloaded:
            facts.append(("at P90", self._verdict()))
        for name, is_refused in (("first failure", False), ("first refusal", True)):
            failed = (r.error for r in self.records if r.error and r.is_refused is is_refused)
            if (error := next(failed, None)) is not None:
                facts.append((name, error))
        return facts

    def _limits(self) -> str:
        limits = {"TTFT": self.objective.ttft_s, "TBT": self.objective.tbt_s}
        named = [f"{name} ≤ {1000 * s:g} ms" for name, s in limits.items() if s is not None]
        named += [f"{name} ≤ {limit:g} times unloaded" for name, limit, _ in self._multiples()]
        return "within " + ", ".join(named) if named else "(no objective given)"

    def _multiples(self) -> list[tuple[str, float, Distribution]]:
        """Name, limit and what was found of each objective that is a multiple."""
        rows = [
            ("TTFT", self.objective.ttft_times, self.summary.ttft_times),
            ("TBT", self.objective.tbt_times, self.summary.tbt_times),
        ]
        return [
            (name, limit, found)
            for name, limit, found in rows
            if limit is not None and found is not None
        ]

    def _verdict(self) -> str:
        return ", ".join(
            f"{name} {found.p90:.2f} times unloaded "
            f"({'within' if found.p90 <= limit else 'above'} {limit:g})"
            for name, limit, found in self._multiples()
        )


def _values(spread: Distribution, scale: float) -> tuple[float, ...]:
    return tuple(scale * getattr(spread, field.name) for field in fields(Distribution))


def _entry(record: Record, start: float) -> dict[str, Any]:
    answered = record.error is None
    return {
        "index": record.index,
        "sent_s": record.sent_s - start,
        "num_input": record.num_input,
        "num_output": record.num_output,
        "num_cached": record.num_cached,
        "ttft_s": record.ttft_s if answered else None,
        "tbt_s": record.tbt_s if answered else None,
        "e2e_s": record.e2e_s if answered else None,
        "error": record.error,
        "is_refused": record.is_refused,
    }
