"""A replay's figures as a table, as JSON, and the series that charts are drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import msgspec

from mooncake_engine.replay.measure import Objective, Record, Spread, Summary, summarise


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
    objective: Objective
    summary: Summary

    @classmethod
    def of(cls, setting: dict[str, str], records: Sequence[Record], objective: Objective) -> Report:
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
        rows = [["", *(field.name for field in fields(Spread))]]
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
        """Rows of the table: name, values in milliseconds, and digits."""
        found = [
            ("TTFT ms", self.summary.ttft_s),
            ("TBT ms", self.summary.tbt_s),
            ("E2E ms", self.summary.e2e_s),
        ]
        return [
            (name, tuple(1000 * getattr(spread, f.name) for f in fields(Spread)), 1)
            for name, spread in found
        ]

    def facts(self) -> list[tuple[str, str]]:
        """The other figures, in words."""
        s = self.summary
        facts = [
            ("requests", f"{s.num_requests} in {s.duration_s:.1f} s, {s.num_failed} failed"),
            (
                "throughput",
                f"{s.requests_per_s:.2f} requests/s, {s.input_tokens_per_s:.0f} prompt tokens/s, "
                f"{s.output_tokens_per_s:.0f} generated tokens/s",
            ),
            ("goodput", f"{s.goodput_per_s:.2f} requests/s ({s.good_share:.0%}) {self._limits()}"),
            ("prompt tokens from cache", f"{s.cached_share:.0%}"),
            ("sent late", f"{1000 * s.late_s.p99:.1f} ms (p99)"),
        ]
        first_error = next((record.error for record in self.records if record.error), None)
        return facts if first_error is None else [*facts, ("first failure", first_error)]

    def _limits(self) -> str:
        limits = {"TTFT": self.objective.ttft_s, "TBT": self.objective.tbt_s}
        named = [f"{name} ≤ {1000 * s:g} ms" for name, s in limits.items() if s is not None]
        return "within " + ", ".join(named) if named else "(no objective given)"


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
    }
