"""Renders the report of a replay as an HTML page with charts, optionally beside that of an earlier
run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files

from mooncake_engine.replay.latency_summary import Record
from mooncake_engine.replay.replay_report import Report

_WIDTH, _HEIGHT = 480, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 24, 34
_MAX_POINTS = 400
_NUM_BINS = 60
# The timeline: at most as many rows as can be distinguished, and their height.
_MAX_ROWS = 150
_ROW = 4
_MIN_ROWS = 20
_CLASS_SUFFIXES = ("", " earlier")
"""Suffixes of the CSS classes with which this run and the earlier run are drawn."""

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Chart:
    """A line or scatter chart; its axes end at the largest values.

    Args:
        title: the title.
        x_label, y_label: the labels of the axes, with units.
        series: the points (x, y) of each run, with ascending x where ``is_line``.
        is_line: whether points are joined by a line instead of drawn as dots.
        x_limit, y_limit: an objective to mark, in the unit of the axis. If it lies outside the
            chart, it is named in a text.
    """

    title: str
    x_label: str
    y_label: str
    series: Sequence[Points]
    is_line: bool
    x_limit: float | None = None
    y_limit: float | None = None


def page(report: Report, earlier: Report | None = None) -> str:
    """The whole HTML document. An ``earlier`` run is shown beside the report, in the same
    charts."""
    reports = [report] if earlier is None else [report, earlier]
    head = '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    view = '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    style = files("mooncake_engine.replay").joinpath("page.css").read_text()
    title = f"<title>mooncake-engine bench</title>\n<style>\n{style}</style>\n</head>\n"
    runs = "\n".join(_run(number, each, len(reports)) for number, each in enumerate(reports))
    figures = "\n".join(_figure(chart) for chart in charts(reports))
    duration = max(_duration(each) for each in reports)
    names = [_name(number) if earlier else "" for number in range(len(reports))]
    timelines = "\n".join(
        _timeline(each, duration, name) for each, name in zip(reports, names, strict=True)
    )
    return (
        f"{head}{view}{title}<body>\n<h1>mooncake-engine bench</h1>\n"
        f'<div class="runs">\n{runs}\n</div>\n<div class="charts">\n{figures}\n</div>\n'
        f'<div class="runs">\n{timelines}\n</div>\n</body>\n</html>\n'
    )


def charts(reports: Sequence[Report]) -> list[Chart]:
    """The charts of one or two runs, with the objectives of the first."""
    objective = reports[0].objective
    answered = [[r for r in report.records if r.error is None] for report in reports]
    starts = [_start(report) for report in reports]
    ttft = [_shares([1000 * r.ttft_s for r in each]) for each in answered]
    tbt = [_shares([1000 * gap for r in each for gap in r.gaps_s]) for each in answered]
    e2e = [_shares([r.e2e_s for r in each]) for each in answered]
    sent = [
        [(r.sent_s - start, 1000 * r.ttft_s) for r in each]
        for each, start in zip(answered, starts, strict=True)
    ]
    rate = [_rate(each, start) for each, start in zip(answered, starts, strict=True)]
    slow_ttft, slow_tbt = _ms(objective.ttft_s), _ms(objective.tbt_s)
    as_sent = "Time to first token, as requests were sent"
    return [
        Chart("Time to first token", "ms", "share of requests", ttft, True, slow_ttft),
        Chart("Time between tokens", "ms", "share of gaps", tbt, True, slow_tbt),
        Chart("Whole answer", "s", "share of requests", e2e, True),
        Chart(as_sent, "s", "ms", sent, False, None, slow_ttft),
        Chart("Generated", "s", "pieces per second", rate, True),
    ]


def _name(number: int) -> str:
    return "earlier run" if number else "this run"


def _start(report: Report) -> float:
    return min(record.sent_s for record in report.records)


def _duration(report: Report) -> float:
    return max(record.end_s for record in report.records) - _start(report)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def _shares(values: list[float]) -> list[tuple[float, float]]:
    """The cumulative distribution of the values, sampled at evenly spaced ranks."""
    ordered = sorted(values)
    if not ordered:
        return []
    count = len(ordered)
    ranks = sorted({round(i * (count - 1) / _MAX_POINTS) for i in range(_MAX_POINTS + 1)})
    return [(ordered[rank], (rank + 1) / count) for rank in ranks]


def _rate(records: Sequence[Record], start: float) -> list[tuple[float, float]]:
    """Pieces of text per second over the duration of the replay."""
    times = [at - start for record in records for at in record.piece_times_s]
    width = max(max(times, default=0.0) / _NUM_BINS, 1e-3)
    counts = [0] * (_NUM_BINS + 1)
    for at in times:
        counts[min(int(at / width), _NUM_BINS)] += 1
    return [((index + 0.5) * width, count / width) for index, count in enumerate(counts)]


def _run(number: int, report: Report, count: int) -> str:
    heading = (
        f'<h2><i class="key{_CLASS_SUFFIXES[number]}"></i>{_name(number)}</h2>\n'
        if count > 1
        else ""
    )
    return (
        f"<section>\n{heading}{_definitions(list(report.setting.items()))}\n{_table(report)}\n"
        f"{_definitions(report.details())}\n</section>"
    )


def _table(report: Report) -> str:
    names = ("", "mean", "p50", "p90", "p99", "max")
    rows = ["<tr>" + "".join(f"<th>{name}</th>" for name in names) + "</tr>"]
    for name, values, digits in report.spreads():
        cells = "".join(f"<td>{value:.{digits}f}</td>" for value in values)
        rows.append(f"<tr><td>{name}</td>{cells}</tr>")
    return '<div class="wide"><table>\n' + "\n".join(rows) + "\n</table></div>"


def _definitions(pairs: Sequence[tuple[str, str]]) -> str:
    entries = [f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in pairs]
    return "<dl>\n" + "\n".join(entries) + "\n</dl>"


def _figure(chart: Chart) -> str:
    points = [point for each in chart.series for point in each]
    x_ticks, y_ticks = (_ticks(max((p[axis] for p in points), default=1.0)) for axis in (0, 1))
    parts = _axes(chart.x_label, chart.y_label, x_ticks, y_ticks)
    # Reversed, so that this run is drawn on top of the earlier one.
    for kind, each in reversed(list(zip(_CLASS_SUFFIXES, chart.series, strict=False))):
        places = [(_x(x, x_ticks[-1]), _y(y, y_ticks[-1])) for x, y in each]
        parts += _marks(kind, places, is_line=chart.is_line)
    parts += _limits(chart, x_ticks[-1], y_ticks[-1])
    return _svg(chart.title, _HEIGHT, parts)


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    drawn = "\n".join(parts)
    return (
        f"<figure>\n<h2>{escape(title)}</h2>\n"
        f'<svg viewBox="0 0 {_WIDTH} {height:g}" role="img" aria-label="{escape(title)}">\n'
        f"{drawn}\n</svg>\n</figure>"
    )


def _axes(x_label: str, y_label: str, x_ticks: list[float], y_ticks: list[float]) -> list[str]:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = []
    for tick in y_ticks:
        y = _y(tick, y_ticks[-1])
        parts.append(f'<line class="grid" x1="{_LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in x_ticks:
        x = _x(tick, x_ticks[-1])
        parts.append(f'<text x="{x:.1f}" y="{bottom + 15}" text-anchor="middle">{tick:g}</text>')
    parts.append(f'<text x="{right}" y="{_HEIGHT - 4}" text-anchor="end">{escape(x_label)}</text>')
    parts.append(f'<text x="{_LEFT}" y="{_TOP - 10}">{escape(y_label)}</text>')
    return parts


def _marks(kind: str, places: Points, *, is_line: bool) -> list[str]:
    if is_line and places:
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        return [f'<polyline class="line{kind}" points="{joined}"/>']
    return [f'<circle class="dot{kind}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in places]


def _limits(chart: Chart, x_max: float, y_max: float) -> list[str]:
    """The objectives: as lines within the chart, as texts if they lie outside."""
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = []
    for limit, largest, unit in (
        (chart.x_limit, x_max, chart.x_label),
        (chart.y_limit, y_max, chart.y_label),
    ):
        if limit is not None and limit > largest:
            text = f"objective {limit:g} {unit}: beyond the axis"
            parts.append(
                f'<text class="outside" x="{right}" y="{bottom - 6}" text-anchor="end">'
                f"{escape(text)}</text>"
            )
    if chart.x_limit is not None and chart.x_limit <= x_max:
        x = _x(chart.x_limit, x_max)
        parts.append(f'<line class="limit" x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{bottom}"/>')
    if chart.y_limit is not None and chart.y_limit <= y_max:
        y = _y(chart.y_limit, y_max)
        parts.append(f'<line class="limit" x1="{_LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>')
    return parts


def _timeline(report: Report, duration: float, run: str) -> str:
    """A chart with a row per request, in the order sent: waiting for the first token, then
    receiving the answer."""
    ordered = sorted(report.records, key=lambda record: record.sent_s)
    step = max(1, math.ceil(len(ordered) / _MAX_ROWS))
    shown, start = ordered[::step], _start(report)
    ticks = _ticks(duration)
    bottom = _TOP + _ROW * max(len(shown), _MIN_ROWS)
    parts = []
    for tick in ticks:
        x = _x(tick, ticks[-1])
        line = f'x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{bottom}"'
        parts.append(f'<line class="grid" {line}/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 15}" text-anchor="middle">{tick:g}</text>')
    parts.append(f'<text x="{_WIDTH - _RIGHT}" y="{bottom + 30}" text-anchor="end">s</text>')
    for row, record in enumerate(shown):
        parts.append(_bars(record, start, ticks[-1], _TOP + _ROW * row))
    every = "" if step == 1 else f", every {step}th"
    title = f"Requests{every}" + (f": {run}" if run else "")
    return _svg(f"{title} (pale: until the first token)", bottom + _BOTTOM, parts)


def _bars(record: Record, start: float, longest: float, y: float) -> str:
    sent, end = _x(record.sent_s - start, longest), _x(record.end_s - start, longest)
    text = f"request {record.index}: {record.error or f'{1000 * record.ttft_s:.0f} ms to first'}"
    tip = f"<title>{escape(text)}</title>"
    if record.error is not None:
        return _bar("bar-failed", sent, end, y, tip)
    first = _x(record.piece_times_s[0] - start, longest)
    return _bar("bar-wait", sent, first, y, tip) + _bar("bar-answer", first, end, y, tip)


def _bar(kind: str, left: float, right: float, y: float, tip: str) -> str:
    width = max(right - left, 0.5)
    place = f'x="{left:.1f}" y="{y:g}" width="{width:.1f}" height="{_ROW - 1}"'
    return f'<rect class="{kind}" {place}>{tip}</rect>'


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
