"""Writes a self-contained HTML page or SVG file with charts of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from mooncake_conductor.simulator.results import COLUMNS, RunSummary, cells_of
from mooncake_conductor.simulator.simulation import HOT_RANKS, SimulationResult

_WIDTH, _HEIGHT = 520, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 14, 12, 40
_MAX_POINTS = 300
_COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4b5563")
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; text-align: right; border-bottom: 1px solid #8884; }
th:first-child, td:first-child { text-align: left; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(26rem, 1fr)); gap: 1rem; }
figure { margin: 0; } figcaption { font-weight: 600; }
svg { width: 100%; height: auto; color-scheme: light dark; }
svg text { font-size: 11px; fill: currentColor; } .grid { stroke: #8883; }
.line { fill: none; stroke-width: 1.8; }
:root { color-scheme: light dark; }
"""

_SVG_STYLE = """
text { font: 11px system-ui, sans-serif; fill: #6b7280; } .grid { stroke: #9ca3af44; }
.line { fill: none; stroke-width: 1.8; }
"""


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart: points with rising x."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Chart:
    """A line chart.

    Args:
        title: title of the chart.
        x_label: label of the x axis, with its unit.
        y_label: label of the y axis, with its unit.
        series: the lines.
    """

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]


def run_charts(result: SimulationResult) -> list[Chart]:
    """The charts of one run."""
    ttft = [record.ttft for record in result.records if record.ttft is not None]
    tbt = [1000 * r.tail_tbt for r in result.records if r.tail_tbt is not None]
    samples = result.samples
    queue = [(sample.at_s, sample.prefill_queue_s) for sample in samples]
    batch = [(sample.at_s, sample.decode_batch) for sample in samples]
    copies = [
        Series(f"rank {rank:,}", [(s.at_s, float(s.num_copies[at])) for s in samples])
        for at, rank in enumerate(HOT_RANKS)
        if samples and at < len(samples[0].num_copies)
    ]
    share = "share of requests"
    return [
        Chart("Time to first token", "s", share, [Series("TTFT", _shares(ttft))]),
        Chart("Longest tenth of gaps between tokens", "ms", share, [Series("TBT", _shares(tbt))]),
        Chart("Load of prefill nodes", "s", "seconds of queue, mean", [Series("P", queue)]),
        Chart("Load of decode nodes", "s", "sequences, mean", [Series("D", batch)]),
        Chart("Copies of hot chunks", "s", "nodes that hold it", copies),
    ]


def page(
    title: str, rows: Sequence[tuple[str, RunSummary]], charts: Sequence[Chart], setting: str
) -> str:
    """The whole HTML document."""
    drawn = "\n".join(_figure(chart) for chart in charts if any(s.points for s in chart.series))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n<p><code>{escape(setting)}</code></p>\n{_table(rows)}\n"
        f'<div class="charts">\n{drawn}\n</div>\n</body>\n</html>\n'
    )


def _table(rows: Sequence[tuple[str, RunSummary]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in ("", *(title for title, _, _ in COLUMNS)))
    lines = [
        "<tr>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in (name, *cells_of(summary)))
        + "</tr>"
        for name, summary in rows
    ]
    return f"<table>\n<tr>{head}</tr>\n" + "\n".join(lines) + "\n</table>"


def _shares(values: Sequence[float]) -> list[tuple[float, float]]:
    """The cumulative distribution of the values, at evenly spread ranks."""
    ordered = sorted(values)
    if not ordered:
        return []
    last = len(ordered) - 1
    ranks = sorted({round(at * last / _MAX_POINTS) for at in range(_MAX_POINTS + 1)})
    return [(ordered[rank], (rank + 1) / len(ordered)) for rank in ranks]


def svg_file(chart: Chart) -> str:
    """One chart as the content of an SVG file."""
    frame = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}">'
    return f"{frame}\n<style>{_SVG_STYLE}</style>\n{_drawing(chart)}\n</svg>\n"


def _figure(chart: Chart) -> str:
    return (
        f"<figure>\n<figcaption>{escape(chart.title)}</figcaption>\n"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(chart.title)}">\n'
        f"{_drawing(chart)}\n</svg>\n</figure>"
    )


def _drawing(chart: Chart) -> str:
    xs = [x for series in chart.series for x, _ in series.points]
    ys = [y for series in chart.series for _, y in series.points]
    x_ticks, y_ticks = _ticks(max(xs)), _ticks(max(ys))
    parts = [*_axes(chart, x_ticks, y_ticks)]
    for number, series in enumerate(chart.series):
        colour = _COLOURS[number % len(_COLOURS)]
        points = " ".join(
            f"{_x(x / x_ticks[-1]):.1f},{_y(y / y_ticks[-1]):.1f}" for x, y in series.points
        )
        parts.append(f'<polyline class="line" stroke="{colour}" points="{points}"/>')
        if len(chart.series) > 1:
            at = _TOP + 14 * (number + 1)
            parts.append(
                f'<text x="{_LEFT + 8}" y="{at}" style="fill:{colour}">{escape(series.name)}</text>'
            )
    return "\n".join(parts)


def _axes(chart: Chart, x_ticks: Sequence[float], y_ticks: Sequence[float]) -> list[str]:
    parts = []
    for tick in y_ticks:
        y = _y(tick / y_ticks[-1])
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{tick:g}</text>')
    for tick in x_ticks:
        x = _x(tick / x_ticks[-1])
        parts.append(
            f'<text x="{x}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{tick:g}</text>'
        )
    right = f'x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 8}" text-anchor="end"'
    parts.append(f"<text {right}>{escape(chart.x_label)}</text>")
    parts.append(f'<text x="4" y="{_HEIGHT - 8}">{escape(chart.y_label)}</text>')
    return parts


def _ticks(largest: float) -> list[float]:
    """Axis ticks from 0 to just above the largest value, in round steps."""
    if largest <= 0:
        return [0.0, 1.0]
    step = 10.0 ** len(str(int(largest))) / 100 if largest >= 1 else 0.01
    while largest / step > 6:
        step *= 2 if f"{step:e}"[0] != "2" else 2.5
    count = int(largest / step) + 1
    return [round(at * step, 6) for at in range(count + 1)]


def _x(share: float) -> float:
    return round(_LEFT + share * (_WIDTH - _LEFT - _RIGHT), 1)


def _y(share: float) -> float:
    return round(_HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM), 1)
