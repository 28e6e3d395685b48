"""Replays Mooncake's public traces over a grid of clusters, to find where `cost` is behind.

python ci/replay_grid.py TRACES [--jobs N] [--only WORD ...]

TRACES is a folder with conversation_trace.jsonl and synthetic_trace.jsonl, from the folder
FAST25-release/traces of github.com/kvcache-ai/Mooncake. Prints one line per cell: mean TTFT by
policy. Exits 0 only if `cost` is at most 5 % slower than `mooncake` in every cell, at least 20 %
faster where the cache is starved, and not slower on the whole traces with 8 prefill nodes, where
the policies must also be in the paper's order. Under overload (the cell "admission"), predictive
admission must reject at most as many requests as early rejection, that at most as many as the
baseline, and the prefill load must vary at least 25 % less with predictive admission than with
early rejection.
"""

from __future__ import annotations

import argparse
import random
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from mooncake_conductor.conductor import ConductorSettings
from mooncake_conductor.cost.latency_model import cold_start
from mooncake_conductor.errors import ConductorError
from mooncake_conductor.simulator.results import RunSummary, summarise, swing
from mooncake_conductor.simulator.simulation import Cluster, Simulation
from mooncake_conductor.simulator.trace_file import at_random, read_trace
from mooncake_conductor.slo_admission import AdmissionMode, Objective, Objectives

POLICIES = ("random", "least-loaded", "cache-local", "mooncake", "cost")
WORST, STARVED = 1.05, 0.8
"""Maximum TTFT of `cost` relative to `mooncake`: anywhere, and where the cache is starved."""
SWING = 0.75
"""Maximum variation of the prefill load with predictive admission, relative to early rejection."""
H100_LIKE = 0.36
"""Prefill time relative to the same node with A800."""


@dataclass(frozen=True)
class Cell:
    """One cluster and trace.

    Args:
        trace: name of the trace.
        num_prefill: number of prefill nodes; there are 8 decode nodes.
        link_gb_s: bandwidth of each node's link.
        wanted: maximum TTFT of `cost` relative to `mooncake`.
        speed: prefill time relative to 8×A800.
        limit: maximum number of requests.
        is_ordered: whether all policies must be in the paper's order.
    """

    trace: str
    num_prefill: int
    link_gb_s: float
    wanted: float = WORST
    speed: float = 1.0
    limit: int | None = None
    is_ordered: bool = False

    @property
    def name(self) -> str:
        """The name that is printed, and matched by --only."""
        kind = "" if self.speed == 1 else " H100-like"
        part = "" if self.limit is None else f", first {self.limit:,}"
        return f"{self.trace} P{self.num_prefill}{kind}, {self.link_gb_s:g} GB/s{part}"


GRID = (
    Cell("conversation", 8, 50, wanted=1.0, is_ordered=True),
    Cell("synthetic", 8, 50, wanted=1.0, is_ordered=True),
    Cell("synthetic", 4, 12.5, wanted=STARVED),
    Cell("synthetic", 5, 12.5),
    Cell("synthetic", 5, 3),
    Cell("synthetic", 6, 12.5),
    Cell("synthetic", 2, 12.5, speed=H100_LIKE),
    Cell("conversation", 6, 12.5, limit=5000),
    Cell("conversation", 6, 3, limit=5000),
    Cell("conversation", 8, 12.5, limit=5000),
    Cell("conversation", 8, 3, limit=5000),
    Cell("conversation", 3, 12.5, speed=H100_LIKE, limit=5000),
)


def run(folder: Path, cell: Cell, policy: str) -> RunSummary:
    """One replay."""
    requests = read_trace(folder / f"{cell.trace}_trace.jsonl")[: cell.limit]
    a800 = cold_start("llama-3-70b", "A800", 8)
    latency = replace(
        a800,
        fixed=a800.fixed * cell.speed,
        per_token=a800.per_token * cell.speed,
        per_token_squared=a800.per_token_squared * cell.speed,
    )
    cluster = Cluster(cell.num_prefill, 8, latency, link_gb_s=cell.link_gb_s)
    result = Simulation(cluster, ConductorSettings(policy)).run(requests)
    return summarise(result, Objective())


def verdict(cell: Cell, ttft: dict[str, float]) -> str:
    """The bounds that a cell misses; empty if none."""
    found = []
    share = ttft["cost"] / ttft["mooncake"]
    if share > cell.wanted:
        found.append(f"cost takes {share:.3f} of mooncake's time, wanted at most {cell.wanted:g}")
    if cell.is_ordered:
        order = [ttft[policy] for policy in POLICIES]
        if order != sorted(order, reverse=True):
            found.append(f"not in this order: {' > '.join(POLICIES)}")
    return "; ".join(found)


def overloaded(folder: Path, mode: str) -> tuple[int, float]:
    """Rejected requests under overload, and the prefill queue's standard deviation in seconds."""
    requests = at_random(read_trace(folder / "conversation_trace.jsonl"), 8.0, random.Random(0))
    cluster = Cluster(8, 8, cold_start("llama-3-70b", "A800", 8), max_batch=8)
    settings = ConductorSettings(
        admission=AdmissionMode(mode), objectives=Objectives(Objective(30.0, 0.1))
    )
    result = Simulation(cluster, settings).run(requests)
    found = summarise(result, Objective(30.0, 0.1))
    return found.refused_early + found.refused_late, swing(result).prefill_sd


def admission_verdict(folder: Path, pool: ProcessPoolExecutor) -> bool:
    """Print the cell of the admission modes; returns whether its bounds hold."""
    modes = ("baseline", "early", "predictive")
    asked = [pool.submit(overloaded, folder, mode) for mode in modes]
    found = dict(zip(modes, (each.result() for each in asked), strict=True))
    refused = [found[mode][0] for mode in modes]
    is_ordered = refused == sorted(refused, reverse=True)
    holds = is_ordered and found["predictive"][1] <= SWING * found["early"][1]
    ending = "ok" if holds else f"MISSED: wanted them in order, the last swing at most {SWING:g}"
    rows = (f"{mode} {found[mode][0]:,} ({found[mode][1]:.3g} s)" for mode in modes)
    print(f"admission: refused (prefill queue swings by) {', '.join(rows)}  {ending}")
    return holds


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", type=Path, help="folder with the two traces")
    parser.add_argument("--jobs", type=int, default=2, help="processes (2)")
    parser.add_argument("--only", nargs="*", default=[], help="cells with these words in the name")
    options = parser.parse_args()
    cells = [cell for cell in GRID if all(word in cell.name for word in options.only)]
    print(f"{'mean TTFT, s':42}" + "".join(f"{policy:>14}" for policy in POLICIES), flush=True)
    is_admission_asked = not options.only or "admission" in options.only
    failed = 0 if cells or is_admission_asked else 1
    with ProcessPoolExecutor(options.jobs) as pool:
        runs = {
            (cell, policy): pool.submit(run, options.traces, cell, policy)
            for cell in cells
            for policy in (POLICIES if cell.is_ordered else POLICIES[2:])
        }
        for cell in cells:
            try:
                done = {p: runs[cell, p].result() for p in POLICIES if (cell, p) in runs}
            except ConductorError as exc:
                print(exc, file=sys.stderr)
                return 1
            ttft = {policy: summary.mean_ttft for policy, summary in done.items()}
            row = [f"{ttft[p]:.4g}" if p in ttft else "" for p in POLICIES]
            complaint = verdict(cell, ttft)
            failed += bool(complaint)
            ending = f"  MISSED: {complaint}" if complaint else "  ok"
            print(f"{cell.name:42}" + "".join(f"{text:>14}" for text in row) + ending, flush=True)
        if is_admission_asked:
            failed += not admission_verdict(options.traces, pool)
    num_cells = len(cells) + is_admission_asked
    print(f"{num_cells - failed} of {num_cells} cells hold")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
