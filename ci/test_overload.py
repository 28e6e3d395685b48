"""Offers ten times the load that two prefill instances can serve, for a minute per admission mode.

    python ci/test_overload.py [--seconds 60] [--factor 10]

Runs the proxy with --policy cost in front of modelled instances, in this process, with an open-loop
load generator. Prints a line per mode: admitted requests, the share of them within their SLO
(bound: 95 %), rejected requests and their latency (bound: 99 % within 50 ms), and streams that were
cut off (bound: none). Exits 0 only if all bounds hold.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from support.overload import overload


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--factor", type=float, default=10.0)
    args = parser.parse_args()
    holds = True
    for mode in ("baseline", "early", "predictive"):
        report = uvloop.run(overload(args.seconds, args.factor, mode))
        refused_ms = 1000 * report.refused_within(0.99)
        is_good = report.attainment >= 0.95 and refused_ms <= 50 and not report.num_cut
        holds &= is_good
        codes = ", ".join(f"{number} {code}" for code, number in report.codes.items())
        print(
            f"{mode:<10} {len(report.ttft)} served, {100 * report.attainment:.1f} % within SLO; "
            f"rejected: {codes}, 99 % within {refused_ms:.1f} ms; {report.num_cut} cut off: "
            f"{'ok' if is_good else 'short'}"
        )
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
