"""The report of a replay, as a table for the terminal and as a JSON file that a later run can read
for comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec

from mooncake_engine.errors import ConfigError
from mooncake_engine.replay.latency_summary import (
    Distribution,
    LatencyTargets,
    Record,
    Summary,
    summarise,
)


class _Request(msgspec.Struct):
    """One request in the JSON file; see ``Record``."""

    index: int
    planned_s: float
    sent_s: float
    end_s: float
    piece_times_s: list[float]
    num_input: int
    num_output: int
    num_cached: int
    error: str | None
    is_refused: bool


class _File(msgspec.Struct):
    """The parts of the JSON file that are read back; statistics are computed again from them."""

    setting: dict[str, str]
    objective: LatencyTargets
    requests: list[_Request]


@dataclass(frozen=True, slots=True)
class Report:
    """The report of a finished replay.

    Args:
        setting: trace, endpoint, model and pace, by name, for display.
        records: the records of all requests.
        objective: the latency objectives.
        summary: the statistics.
    """

    setting: dict[str, str]
    records: Sequence[Record]
    objective: LatencyTargets
    summary: Summary

    @classmethod
    def of(
        cls, setting: dict[str, str], records: Sequence[Record], objective: LatencyTargets
    ) -> Report:
        """Compute the statistics of a replay."""
        return cls(setting, records, objective, summarise(records, objective))

    @classmethod
    def read(cls, path: Path) -> Report:
        """Read the report of an earlier run from its JSON file.

        Raises:
            ConfigError: the file can't be read or is not a report.
        """
        try:
            found = msgspec.json.decode(path.read_bytes(), type=_File)
        except (OSError, msgspec.DecodeError) as exc:
            raise ConfigError(f"{path} is not a result of mooncake-engine bench: {exc}") from exc
        if not found.requests:
            raise ConfigError(f"{path} contains no requests")
        records = [Record(**msgspec.structs.asdict(request)) for request in found.requests]
        return cls.of(found.setting, records, found.objective)

    def json(self) -> bytes:
        """The whole report as JSON, with an entry per request. Times are in seconds from the first
        request."""
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
        """The report as a text table for the terminal."""
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
        return "\n".join([*lines, "", *(f"{name}: {value}" for name, value in self.details())])

    def spreads(self) -> list[tuple[str, tuple[float, ...], int]]:
        """The rows of the table: name with unit, values in that unit, and decimal digits."""
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

    def details(self) -> list[tuple[str, str]]:
        """The statistics beside the table, as names and texts."""
        s = self.summary
        details = [
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
            details.append(("at P90", self._verdict()))
        for name, is_refused in (("first failure", False), ("first refusal", True)):
            failed = (r.error for r in self.records if r.error and r.is_refused is is_refused)
            if (error := next(failed, None)) is not None:
                details.append((name, error))
        return details

    def _limits(self) -> str:
        limits = {"TTFT": self.objective.ttft_s, "TBT": self.objective.tbt_s}
        named = [f"{name} ≤ {1000 * s:g} ms" for name, s in limits.items() if s is not None]
        named += [f"{name} ≤ {limit:g} times unloaded" for name, limit, _ in self._multiples()]
        return "within " + ", ".join(named) if named else "(no objective given)"

    def _multiples(self) -> list[tuple[str, float, Distribution]]:
        """Name, limit and measured distribution of each objective that is a multiple."""
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
        "planned_s": record.planned_s - start,
        "sent_s": record.sent_s - start,
        "end_s": record.end_s - start,
        "piece_times_s": [round(at - start, 6) for at in record.piece_times_s],
        "num_input": record.num_input,
        "num_output": record.num_output,
        "num_cached": record.num_cached,
        "ttft_s": record.ttft_s if answered else None,
        "tbt_s": record.tbt_s if answered else None,
        "e2e_s": record.e2e_s if answered else None,
        "error": record.error,
        "is_refused": record.is_refused,
    }
