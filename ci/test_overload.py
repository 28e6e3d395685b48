"""Ten times the load that two prefill instances compute, for a minute, in each admission mode.

    python ci/test_overload.py [--seconds 60] [--factor 10]

The proxy with --policy cost in front of modelled instances, in this process, with clients that do
not wait for each other. Prints a line per mode: admitted, share of those within their objectives
(wanted: 95 %), refused, and how soon (wanted: 99 % within 50 ms), cut streams (wanted: none).
Exit 0 only if all hold.
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
            f"{mode:<10} {len(report.ttft)} served, {100 * report.attainment:.1f} % in time; "
            f"refused: {codes}, 99 % within {refused_ms:.1f} ms; {report.num_cut} cut: "
            f"{'ok' if is_good else 'short'}"
        )
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
