"""Compares our proxy with sglang-router and nginx in one run, in front of the same fake backends.

    python ci/bench_proxy.py [--seconds 2] [--rounds 5] [--json FILE] [--beside CHECKOUT]

proxy_contenders.py starts the proxies. Rounds are interleaved, and medians of the ratios within a
round are compared, so that temporary noise affects all proxies alike. Requires a C compiler (load
generator and backends are tests/benchmarks/proxy/bench.c), nginx on PATH, and a package index for
the first run, which installs sglang-router into a separate venv under .cache/. Prints a table per
place, then one line per figure: name, value, bound, ok or short. Exits 0 only if all bounds hold;
figures marked "shown" have none. With --beside, compares our proxy only with the one of another
checkout of this repository, to detect a regression.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from proxy_contenders import (
    DIRECT,
    EARLIER,
    OURS,
    OURS_TWICE,
    ROOT,
    ROUTER,
    Contender,
    Place,
    bind_to,
    build,
    one_core,
    python_path,
    two_checkouts,
    whole_machine,
)

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
WARM_UP_S = 0.3
# (connections, whether their requests stream)
Case = tuple[int, bool]
FEW, MANY, STREAMS, ALONE = (16, False), (64, False), (64, True), (1, False)
ALL = (ALONE, FEW, MANY, STREAMS)
PLACE_CASES = {"one core": (FEW, MANY), "whole machine": ALL}
# Lowest ratio to the other checkout's requests or tokens per second that counts as noise.
NOT_SLOWER = 0.95


@dataclass(frozen=True)
class Figures:
    """One measurement."""

    requests_per_s: float
    tokens_per_s: float
    p50_ms: float
    p99_ms: float
    cpu_us_per_request: float
    cpu_us_per_token: float
    errors: int


@dataclass
class Results:
    """All measurements of a place, by contender and case; one per round."""

    rounds: dict[tuple[str, Case], list[Figures]] = field(default_factory=dict)

    def note(self, name: str, case: Case, figures: Figures) -> None:
        """One more."""
        self.rounds.setdefault((name, case), []).append(figures)

    def mid(self, name: str, case: Case, figure: str) -> float:
        """The median of one figure over the rounds."""
        return float(median(getattr(row, figure) for row in self.rounds[(name, case)]))

    def ratio(self, ours: str, theirs: str, case: Case, figure: str) -> float:
        """The median over the rounds of our figure divided by theirs."""
        pairs = zip(self.rounds[(ours, case)], self.rounds[(theirs, case)], strict=True)
        return float(median(getattr(a, figure) / max(getattr(b, figure), 1e-9) for a, b in pairs))

    def num_errors(self, name: str) -> int:
        """Number of a contender's failed requests."""
        return sum(f.errors for (who, _), rows in self.rounds.items() if who == name for f in rows)


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds per measurement")
    parser.add_argument("--rounds", type=int, default=5, help="rounds; medians are printed")
    parser.add_argument("--json", type=Path, help="write all figures to a file")
    parser.add_argument("--skip-memory", action="store_true", help="skip the 100,000 requests")
    parser.add_argument("--beside", type=Path, metavar="CHECKOUT", help="compare only with this")
    args = parser.parse_args()
    bench = build()
    if args.beside:
        return judge_beside(bench, args.beside, args.rounds, args.seconds)
    results: dict[str, Results] = {}
    growth = None
    for prepare in (one_core, whole_machine):
        with ExitStack() as stack:
            place = prepare(stack, bench)
            cases = PLACE_CASES[place.name]
            results[place.name] = measure_all(bench, place, cases, args.rounds, args.seconds)
            print_table(place, results[place.name], cases)
            if place.name == "whole machine" and not args.skip_memory:
                growth = memory_growth(bench, place.contenders[OURS])
    if args.json:
        args.json.write_text(json.dumps(as_json(results, growth), indent=1))
    return judge(results["one core"], results["whole machine"], growth)


# ---------------------------------------------------------------- measuring


def measure_all(
    bench: Path, place: Place, cases: tuple[Case, ...], num_rounds: int, seconds: float
) -> Results:
    """Measure every case with every contender, round by round, contenders back to back."""
    results = Results()
    for _ in range(num_rounds):
        for case in cases:
            for contender in place.contenders.values():
                load(bench, place, contender, case, WARM_UP_S)
                results.note(contender.name, case, measure(bench, place, contender, case, seconds))
    return results


def measure(bench: Path, place: Place, contender: Contender, case: Case, seconds: float) -> Figures:
    """Measure one closed-loop run."""
    before = cpu_seconds(contender.pid)
    got = load(bench, place, contender, case, seconds)
    used_us = (cpu_seconds(contender.pid) - before) * 1e6
    return Figures(
        got["requests_per_s"],
        got["tokens_per_s"],
        got["p50_ms"],
        got["p99_ms"],
        used_us / max(1, got["requests"]),
        used_us / max(1, got["tokens"]),
        int(got["errors"]),
    )


def load(
    bench: Path, place: Place, contender: Contender, case: Case, seconds: float
) -> dict[str, float]:
    """Run the load generator for some seconds; returns its report."""
    connections, streams = case
    command = [bench, "load", contender.port, connections, seconds, int(streams)]
    done = subprocess.run(
        [str(word) for word in command],
        check=True,
        capture_output=True,
        preexec_fn=bind_to(place.load_cores),
    )
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def tree(pid: int | None) -> list[int]:
    """The ids of a process and its children."""
    if pid is None:
        return []
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(descendant for child in children for descendant in tree(int(child)))]


def cpu_seconds(pid: int | None) -> float:
    """User and system time so far of a process tree."""
    total = 0
    for member in tree(pid):
        fields = Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / TICKS_PER_S


def rss_kib(pid: int | None, field: str) -> int:
    """Resident memory of a process tree."""
    total = 0
    for member in tree(pid):
        for line in Path(f"/proc/{member}/status").read_text().splitlines():
            if line.startswith(field):
                total += int(line.split()[1])
    return total


def memory_growth(bench: Path, ours: Contender) -> int:
    """KiB by which 100,000 requests grow a proxy that is warm."""
    before = rss_kib(ours.pid, "VmRSS")
    alone = Place("memory", {}, None)
    done = 0.0
    while done < 100_000:
        done += load(bench, alone, ours, FEW, 2.0)["requests"]
    return rss_kib(ours.pid, "VmRSS") - before


def start_seconds(checkout: Path = ROOT) -> float:
    """Seconds to import and start the proxy until it reports that it listens."""
    flags = ["--port", "0", "--health-interval", "0", "--backend-url", "http://127.0.0.1:9"]
    began = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-m", "mooncake_proxy", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": python_path(checkout)},
    ) as child:
        assert child.stdout is not None
        line = child.stdout.readline()
        elapsed = time.monotonic() - began
        child.terminate()
    if b"listens on" not in line:
        raise SystemExit(f"the proxy of {checkout} did not start; its output: {line!r}")
    return elapsed


# ---------------------------------------------------------------- judging


def row_of(results: Results, name: str, cases: tuple[Case, ...]) -> dict[str, float]:
    """The medians of one contender."""
    row: dict[str, float] = {}
    for case in cases:
        if case == STREAMS:
            row |= {
                key: results.mid(name, case, key) for key in ("tokens_per_s", "cpu_us_per_token")
            }
            row["chunk_p99_ms"] = results.mid(name, case, "p99_ms")
        else:
            for key in ("requests_per_s", "cpu_us_per_request", "p50_ms"):
                row[f"{key}_{case[0]}"] = results.mid(name, case, key)
    return row | {"errors": float(results.num_errors(name))}


def print_table(place: Place, results: Results, cases: tuple[Case, ...]) -> None:
    """All medians of a place."""
    table = {name: row_of(results, name, cases) for name in place.contenders}
    print(f"{place.name:24}" + "".join(f"{name:>18}" for name in table))
    for key in next(iter(table.values())):
        print(f"  {key:22}" + "".join(f"{row[key]:18.2f}" for row in table.values()))


def as_json(results: dict[str, Results], growth: int | None) -> dict[str, object]:
    """All measurements, round by round."""
    rounds = {
        f"{place}, {name}, {connections} {'streams' if streams else 'connections'}": [
            vars(figures) for figures in rows
        ]
        for place, found in results.items()
        for (name, (connections, streams)), rows in found.rounds.items()
    }
    return {"rounds": rounds, "memory_growth_kib": growth}


def judge(core: Results, machine: Results, growth: int | None) -> int:
    """Print one line per bound; returns 0 if all hold."""
    rate, added = "requests_per_s", machine.mid(OURS, ALONE, "p50_ms")
    added -= machine.mid(DIRECT, ALONE, "p50_ms")
    items = [
        at_least("proxy_requests_16_one_core", core.ratio(OURS, ROUTER, FEW, rate), 1.3),
        at_least("proxy_requests_64_one_core", core.ratio(OURS, ROUTER, MANY, rate), 1.3),
        at_least(
            "proxy_requests_16_two_workers", machine.ratio(OURS_TWICE, ROUTER, FEW, rate), 1.3
        ),
        at_least(
            "proxy_requests_64_two_workers", machine.ratio(OURS_TWICE, ROUTER, MANY, rate), 1.3
        ),
        at_most(
            "proxy_cpu_per_token", machine.ratio(OURS, ROUTER, STREAMS, "cpu_us_per_token"), 1.0
        ),
        at_most("proxy_chunk_p99", machine.ratio(OURS, ROUTER, STREAMS, "p99_ms"), 1.0),
        at_most("proxy_added_p50_ms", added, 0.3),
        at_most("proxy_errors", machine.num_errors(OURS) + core.num_errors(OURS), 0),
        at_most("proxy_start_s", min(start_seconds() for _ in range(3)), 1.0),
    ]
    if growth is not None:
        items.append(at_most("proxy_growth_kib_100k_requests", growth, 1024))
    for case in (FEW, MANY):
        cpu = core.ratio(ROUTER, OURS, case, "cpu_us_per_request")
        show(f"proxy_requests_{case[0]}_per_cpu_second", cpu)
    show("proxy_requests_16_one_process", machine.ratio(OURS, ROUTER, FEW, rate))
    show("proxy_requests_64_one_process", machine.ratio(OURS, ROUTER, MANY, rate))
    return 0 if all(items) else 1


def judge_beside(bench: Path, checkout: Path, num_rounds: int, seconds: float) -> int:
    """Compare with another checkout's proxy; returns 0 if nothing is slower."""
    with ExitStack() as stack:
        place = two_checkouts(stack, bench, checkout)
        results = measure_all(bench, place, ALL, num_rounds, seconds)
        print_table(place, results, ALL)
    items = []
    for case, of in ((ALONE, "1"), (FEW, "16"), (MANY, "64"), (STREAMS, "streams")):
        rate, unit = ("tokens", "token") if case == STREAMS else ("requests", "request")
        ratio = results.ratio(OURS, EARLIER, case, f"{rate}_per_s")
        items.append(at_least(f"proxy_{rate}_{of}_beside", ratio, NOT_SLOWER))
        show(f"proxy_cpu_{of}_beside", results.ratio(OURS, EARLIER, case, f"cpu_us_per_{unit}"))
    starts = [start_seconds() / start_seconds(checkout) for _ in range(2 * num_rounds)]
    starts += [1 / (start_seconds(checkout) / start_seconds()) for _ in range(2 * num_rounds)]
    items.append(at_most("proxy_start_beside", median(starts), 1 / NOT_SLOWER))
    return 0 if all(items) else 1


def at_least(name: str, figure: float, wanted: float) -> bool:
    """Print a figure with its lower bound; returns whether it holds."""
    return _item(name, figure, f">= {wanted:.3f}", figure >= wanted)


def at_most(name: str, figure: float, wanted: float) -> bool:
    """Print a figure with its upper bound; returns whether it holds."""
    return _item(name, figure, f"<= {wanted:.3f}", figure <= wanted)


def show(name: str, figure: float) -> None:
    """Print a figure without a bound: ours divided by theirs."""
    print(f"{name:34} {figure:12.3f}   {'':18} shown")


def _item(name: str, figure: float, wanted: str, holds: bool) -> bool:
    print(f"{name:34} {figure:12.3f}   {wanted:18} {'ok' if holds else 'short'}")
    return holds


if __name__ == "__main__":
    sys.exit(main())
