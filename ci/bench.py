"""Runs benchmarks and checks the figures that they record against their bounds.

python ci/bench.py [FOLDER ...] [--markdown FILE]

Prints one line per figure: name, value, bound, ok or missed. Exits 0 only if at least one figure
was measured and all are within their bounds.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from support.figures import (  # noqa: E402  # tests/ is not installed
    FIGURES_FILE,
    Figure,
    as_markdown,
    read_figures,
)

DEFAULT = ["tests/benchmarks/engine", "tests/benchmarks/pd", "tests/benchmarks/proxy/test_start.py"]


def measure(folders: list[str]) -> tuple[int, list[Figure]]:
    """Run the benchmarks; returns pytest's exit status and the figures."""
    with tempfile.TemporaryDirectory() as scratch:
        recorded = Path(scratch) / "figures"
        options = ["--benchmark-only", "--benchmark-quiet", "--timeout=900"]
        command = [sys.executable, "-m", "pytest", "-q", "-rs", *options, *folders]
        environment = os.environ | {FIGURES_FILE: str(recorded)}
        status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        return status, read_figures(recorded)


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
