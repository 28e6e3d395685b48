"""Benchmarks the conductor, and compares its index with NVIDIA Dynamo's.

python ci/bench_conductor.py [--chunks N]

Dynamo's RadixTree (Rust, through ai-dynamo-runtime from PyPI) runs in a separate environment under
.cache/, on the same prompts in the same run. Exits 0 if all bounds hold, 77 if that package can't
be installed and all bounds that could be measured hold.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from support.figures import Figure  # noqa: E402  # tests/ is not installed

HOME = ROOT / ".cache" / "venv-dynamo"
PACKAGE = "ai-dynamo-runtime==1.6.1"
SKIPPED = 77
ROUNDS = 3


def install() -> tuple[Path, str]:
    """Install Dynamo's index; returns its interpreter, and the reason if that failed, else ""."""
    python = HOME / "bin" / "python"
    stamp = HOME / f".installed-{PACKAGE}"
    if not stamp.exists():
        venv.create(HOME, with_pip=True)
        command = [
            str(python),
            "-m",
            "pip",
            "install",
            "--quiet",
            "--only-binary",
            ":all:",
            PACKAGE,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return python, done.stderr.strip().splitlines()[-1]
        stamp.touch()
    return python, ""


def measure(python: Path | str, kind: str, num_chunks: int) -> dict[str, float]:
    """Measure one index in a separate process."""
    command = [str(python), str(ROOT / "ci" / "index_contenders.py"), kind, "--chunks"]
    done = subprocess.run(
        [*command, str(num_chunks)], stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def figures(ours: dict[str, float], theirs: dict[str, float], num_chunks: int) -> list[Figure]:
    """Our results, with Dynamo's as bounds."""
    context = f"Dynamo's RadixTree in the same run, {num_chunks:,} chunks"
    rows = (
        ("index: lookup of 64 chunks", "lookup_us", "us", False),
        ("index: chunks stored by events", "chunks_per_s", "1/s", True),
        ("index: memory per chunk and holder", "bytes_per_copy", "B", False),
    )
    return [
        Figure(name, ours[key], theirs[key], unit, at_least, context)
        for name, key, unit, at_least in rows
    ]


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--chunks", type=int, default=1_000_000, help="in the index (default: 1000000)"
    )
    options = parser.parse_args()
    command = [sys.executable, str(ROOT / "ci" / "bench.py"), "tests/benchmarks/conductor"]
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    python, missing = install()
    if missing:
        print(f"Dynamo's index was not measured: {missing}", file=sys.stderr)
        return status or SKIPPED
    # Both run in turns, and the best round of each counts: other load slows both alike.
    ours, theirs = [], []
    for _ in range(ROUNDS):
        ours.append(measure(sys.executable, "conductor", options.chunks))
        theirs.append(measure(python, "dynamo", options.chunks))
    best = figures(_best(ours), _best(theirs), options.chunks)
    for figure in best:
        print(figure)
    return status or int(not all(figure.holds for figure in best))


def _best(runs: list[dict[str, float]]) -> dict[str, float]:
    return {
        "lookup_us": min(run["lookup_us"] for run in runs),
        "chunks_per_s": max(run["chunks_per_s"] for run in runs),
        "bytes_per_copy": min(run["bytes_per_copy"] for run in runs),
    }


if __name__ == "__main__":
    sys.exit(main())
