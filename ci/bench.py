"""Runs benchmarks and checks the figures that they record against their bounds.

python ci/bench.py [FOLDER ...] [--markdown FILE]

One line per figure: name, value, bound, ok or missed. Exits 0 only if all hold, and at
least one was measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from support.figures import Figure  # noqa: E402  # tests/ is not installed

DEFAULT = ["tests/benchmarks/engine", "tests/benchmarks/pd", "tests/benchmarks/proxy/test_start.py"]


def measure(folders: list[str]) -> tuple[int, list[Figure]]:
    """Run the benchmarks; returns pytest's exit status and the figures."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        options = ["--benchmark-only", "--benchmark-quiet", f"--benchmark-json={report}"]
        command = [sys.executable, "-m", "pytest", "-q", "-rs", "--timeout=900", *options, *folders]
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        if not report.exists() or not report.stat().st_size:
            return status or 1, []
        benchmarks = json.loads(report.read_text())["benchmarks"]
    found = [Figure(**raw) for b in benchmarks for raw in b["extra_info"].get("figures", [])]
    return status, found


def as_markdown(figures: list[Figure]) -> str:
    """The figures as a table for docs/benchmarks.md."""
    rows = ["| figure | measured | bound | details |", "|---|---|---|---|"]
    for figure in figures:
        sign = "≥" if figure.at_least else "≤"
        verdict = "" if figure.holds else "**missed**; "
        value, wanted = f"{figure.value:.3g} {figure.unit}", f"{sign} {figure.wanted:.3g}"
        rows.append(f"| {figure.name} | {value} | {wanted} | {verdict}{figure.context} |")
    return "\n".join(rows) + "\n"


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*", default=DEFAULT)
    parser.add_argument("--markdown", type=Path, help="also write the figures as a table")
    arguments = parser.parse_args()
    status, figures = measure(arguments.folders)
    for figure in figures:
        print(figure)
    if arguments.markdown is not None:
        arguments.markdown.write_text(as_markdown(figures))
    if not figures:
        print("no figure was measured", file=sys.stderr)
        return 1
    return status or int(not all(figure.holds for figure in figures))


if __name__ == "__main__":
    sys.exit(main())
