"""Counts the tests in a pytest report (``--junit-xml``), to reject runs that only skipped tests.

Standard library only.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class JunitCounts:
    """Test counts of a report.

    Args:
        ran: number of executed tests, passed or failed.
        skipped: number of skipped tests.
        reason: the most frequent skip reason; empty if no test was skipped.
    """

    ran: int
    skipped: int
    reason: str

    @property
    def why_nothing_ran(self) -> str:
        """The explanation for a verdict."""
        if not self.skipped:
            return "nothing ran: no test was selected"
        return f"nothing ran: {self.skipped} skipped, most of them: {self.reason}"


def read_counts(report: Path) -> JunitCounts:
    """Read a report; a missing file counts as a report without tests."""
    if not report.exists():
        return JunitCounts(0, 0, "")
    root = ElementTree.parse(report).getroot()
    suites = list(root.iter("testsuite"))
    total, skipped = (sum(int(s.get(name, 0)) for s in suites) for name in ("tests", "skipped"))
    reasons = Counter(found.get("message", "no reason") for found in root.iter("skipped"))
    reason = reasons.most_common(1)[0][0] if reasons else ""
    return JunitCounts(total - skipped, skipped, reason)
