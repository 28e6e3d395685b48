"""Results of a run: summary, load swing, table and CSV file."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from mooncake_conductor.simulator.simulation import RequestRecord, SimulationResult
from mooncake_conductor.slo_admission import Objective, UnloadedLatency


@dataclass(frozen=True, slots=True)
class RunSummary:
    """Figures of a run. Times in seconds.

    TTFTs are of the requests that got a first token; TBTs are of the longest tenth of each
    request's gaps.

    Args:
        num_requests: requests of the trace.
        num_completed: requests that got all their tokens.
        refused_early: requests refused at arrival.
        refused_late: requests refused after a prefill, which was wasted.
        wasted_prefill_s: computation of the wasted prefills.
        within_slo: share of all requests that completed within both objectives.
        goodput: requests per second that completed within both objectives.
        hit_rate: share of reused tokens in the prompts that were prefilled.
        prefill_s: computation per prefilled request.
        fetched_gb: GB fetched between nodes.
    """

    num_requests: int
    num_completed: int
    refused_early: int
    refused_late: int
    wasted_prefill_s: float
    within_slo: float
    goodput: float
    mean_ttft: float
    p50_ttft: float
    p90_ttft: float
    p99_ttft: float
    mean_tbt: float
    p90_tbt: float
    hit_rate: float
    prefill_s: float
    fetched_gb: float


def summarise(result: SimulationResult, wanted: Objective) -> RunSummary:
    """Compute the figures of a run."""
    records = result.records
    prefilled = [record for record in records if record.prefill_s > 0]
    late = [record for record in records if record.stage == "prefill"]
    good = sum(1 for record in records if is_within(record, wanted))
    ttft = [record.ttft for record in records if record.ttft is not None]
    tbt = [record.tail_tbt for record in records if record.tail_tbt is not None]
    tokens = sum(record.num_input for record in prefilled)
    return RunSummary(
        len(records),
        sum(1 for record in records if record.ended_at is not None),
        sum(1 for record in records if record.stage == "arrival"),
        len(late),
        sum(record.prefill_s for record in late),
        good / len(records),
        good / max(result.ended_at, 1e-9),
        _mean(ttft),
        _quantile(ttft, 0.5),
        _quantile(ttft, 0.9),
        _quantile(ttft, 0.99),
        _mean(tbt),
        _quantile(tbt, 0.9),
        sum(record.num_reused for record in prefilled) / max(tokens, 1),
        _mean([record.prefill_s for record in prefilled]),
        result.num_fetched_bytes / 1e9,
    )


def is_within(record: RequestRecord, wanted: Objective) -> bool:
    """Whether a request completed within its objectives."""
    if record.ended_at is None or record.ttft is None:
        return False
    limits = wanted.in_seconds(UnloadedLatency(record.alone_ttft, record.alone_tbt))
    return record.ttft <= limits.ttft_s and (record.tail_tbt or 0.0) <= limits.tbt_s


@dataclass(frozen=True, slots=True)
class Swing:
    """Fluctuation of prefill and decode load over the middle of a run, in their own units.

    Args:
        prefill_sd: standard deviation of the prefill load.
        decode_sd: standard deviation of the decode load.
        prefill_mean: mean prefill load.
        decode_mean: mean decode load.
        correlation: correlation of both; negative if one drains while the other fills.
    """

    prefill_sd: float
    decode_sd: float
    prefill_mean: float
    decode_mean: float
    correlation: float

    @property
    def text(self) -> str:
        """The figures as a line of text."""
        return (
            f"load: prefill queue {self.prefill_mean:.3g} s, swings by {self.prefill_sd:.3g}; "
            f"decode batch {self.decode_mean:.3g}, swings by {self.decode_sd:.3g}; correlation "
            f"{self.correlation:.2f}"
        )


def swing(result: SimulationResult) -> Swing:
    """Compute the swing of a run, without its first and last tenth."""
    samples = result.samples[len(result.samples) // 10 : -(len(result.samples) // 10) or None]
    prefill = np.array([sample.prefill_queue_s for sample in samples])
    decode = np.array([sample.decode_batch for sample in samples])
    spread = float(prefill.std() * decode.std())
    together = float(((prefill - prefill.mean()) * (decode - decode.mean())).mean())
    return Swing(
        float(prefill.std()),
        float(decode.std()),
        float(prefill.mean()),
        float(decode.mean()),
        together / spread if spread else 0.0,
    )


COLUMNS = (
    ("requests", "num_requests", "{:,}"),
    ("refused early", "refused_early", "{:,}"),
    ("after prefill", "refused_late", "{:,}"),
    ("in SLO %", "within_slo", "{:.1%}"),
    ("goodput /s", "goodput", "{:.2f}"),
    ("TTFT mean s", "mean_ttft", "{:.3g}"),
    ("p90", "p90_ttft", "{:.3g}"),
    ("p99", "p99_ttft", "{:.3g}"),
    ("TBT p90 ms", "p90_tbt", "{:.3g}"),
    ("hit %", "hit_rate", "{:.1%}"),
    ("prefill s", "prefill_s", "{:.3g}"),
    ("fetched GB", "fetched_gb", "{:,.0f}"),
)


def table(rows: Sequence[tuple[str, RunSummary]]) -> str:
    """A text table with a row per run."""
    cells = [["", *(title for title, _, _ in COLUMNS)]]
    for name, summary in rows:
        cells.append([name, *cells_of(summary)])
    widths = [max(len(row[at]) for row in cells) for at in range(len(cells[0]))]
    lines = []
    for row in cells:
        first, *rest = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join([row[0].ljust(len(first)), *rest]).rstrip())
    return "\n".join(lines)


def cells_of(summary: RunSummary) -> list[str]:
    """A run's figures as text, in the order of ``COLUMNS``."""
    values = asdict(summary)
    values["p90_tbt"] *= 1000
    return [form.format(values[name]) for _, name, form in COLUMNS]


def write_csv(path: Path, records: Sequence[RequestRecord]) -> None:
    """Write one line per request."""
    names = [each.name for each in fields(RequestRecord)]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows([getattr(record, name) for name in names] for record in records)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _quantile(values: Sequence[float], share: float) -> float:
    return float(np.quantile(values, share)) if values else math.nan
