"""Reports of transfer measurements: a table, plain data for JSON, and a plot in SVG. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from html import escape

from mooncake_hal.bench.transfer_speed import Bandwidth, Latency

WIDTH, HEIGHT, MARGIN = 760, 420, 60
COLOURS = ("#1b6ca8", "#c8553d", "#588b8b", "#8f5db7", "#d4a017", "#444444", "#2f9e44", "#e64980")


def table(bandwidths: Sequence[Bandwidth], latencies: Sequence[Latency]) -> str:
    """Return the measurements as text, one line per shape and subject."""
    lines = [f"{'':28}{'shape':22}{'read GB/s':>10}{'write GB/s':>12}{'CPU s/GiB':>12}"]
    for subject, shape in dict.fromkeys((item.subject, str(item.shape)) for item in bandwidths):
        found = {
            item.operation: item
            for item in bandwidths
            if item.subject == subject and str(item.shape) == shape
        }
        read, write = (
            f"{found[operation].gb_per_s:.2f}" if operation in found else "-"
            for operation in ("read", "write")
        )
        cpu = max(item.cpu_s_per_gib for item in found.values())
        lines.append(f"{subject:28}{shape:22}{read:>10}{write:>12}{cpu:>12.2f}")
    for late in latencies:
        lines.append(
            f"{late.subject:28}one read of {late.nbytes} bytes: "
            f"p50 {late.p50_us:.1f} us, p99 {late.p99_us:.1f} us"
        )
    return "\n".join(lines)


def as_data(
    bandwidths: Sequence[Bandwidth], latencies: Sequence[Latency]
) -> dict[str, list[dict[str, object]]]:
    """Return the measurements as plain data for JSON."""
    return {
        "bandwidth": [asdict(item) for item in bandwidths],
        "latency": [asdict(item) for item in latencies],
    }


def plot(bandwidths: Sequence[Bandwidth]) -> str:
    """Return an SVG plot of read bandwidth over the size of pieces, with a line per subject."""
    reads = [item for item in bandwidths if item.operation == "read"]
    sizes = sorted({item.shape.piece_bytes for item in reads})
    top = max((item.gb_per_s for item in reads), default=1.0) * 1.05
    subjects = list(dict.fromkeys(item.subject for item in reads))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        *_axes(sizes, top),
    ]
    for at, subject in enumerate(subjects):
        colour = COLOURS[at % len(COLOURS)]
        points = sorted(
            (sizes.index(item.shape.piece_bytes), item.gb_per_s)
            for item in reads
            if item.subject == subject
        )
        path = " ".join(f"{_x(x, sizes):.1f},{_y(y, top):.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{_x(x, sizes):.1f}" cy="{_y(y, top):.1f}" r="3" fill="{colour}"/>'
            for x, y in points
        ]
        parts.append(
            f'<text x="{WIDTH - 190}" y="{MARGIN + 16 * at}" fill="{colour}">'
            f"{escape(subject)}</text>"
        )
    return "\n".join([*parts, "</svg>\n"])


def _x(index: int, sizes: Sequence[int]) -> float:
    room = WIDTH - 2 * MARGIN - 140
    return MARGIN + room * index / max(len(sizes) - 1, 1)


def _y(value: float, top: float) -> float:
    return HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * value / top


def _axes(sizes: Sequence[int], top: float) -> list[str]:
    parts = []
    for step in range(5):
        value = top * step / 4
        y = _y(value, top)
        parts.append(f'<text x="8" y="{y + 4:.1f}">{value:.1f}</text>')
        parts.append(
            f'<line x1="{MARGIN}" x2="{WIDTH - 200}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
        )
    for index, size in enumerate(sizes):
        label = f"{size >> 20} MiB" if size >= 1 << 20 else f"{size / 1024:g} KiB"
        at = f'x="{_x(index, sizes):.1f}" y="{HEIGHT - MARGIN + 20}"'
        parts.append(f'<text {at} text-anchor="middle">{label}</text>')
    parts.append(f'<text x="8" y="{MARGIN - 24}">read, GB/s, by size of the pieces</text>')
    return parts
