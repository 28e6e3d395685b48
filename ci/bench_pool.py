"""Benchmarks the KVCache pool.

python ci/bench_pool.py                     # speed against memcpy, transports, fio and other stores
python ci/bench_pool.py --policies TRACE... # hit rates of eviction policies against the optimum
python ci/bench_pool.py --copies TRACE...   # several stores: which fetches should leave a copy

Traces are Mooncake's: https://github.com/kvcache-ai/Mooncake, FAST25-release/traces. Exits 0 if all
bounds hold, 77 if fio or another store can't be installed and all bounds that could be measured
hold.
"""

from __future__ import annotations

import argparse
import math
import shutil
import subprocess
import sys
from pathlib import Path

from mooncake_kv.store.copy_replay import RULES, read_timed_trace, replay_copies
from mooncake_kv.store.eviction import DEFAULT_POLICY, POLICIES, make_policy
from mooncake_kv.store.trace_replay import (
    read_trace,
    replay,
    replay_optimum,
    saved_seconds_bound,
)

ROOT = Path(__file__).resolve().parent.parent
CAPACITIES = (1_000, 10_000, 30_000, 50_000, 100_000, math.inf)
SKIPPED = 77
STORES = ((4, 2_000), (4, 6_000), (8, 6_000))
"""Number of stores, and capacity of each in blocks of 512 tokens (6,000: 1 TB for a 70 B model)."""
LINKS_GB_S = (1.0, 3.0, 12.5)
BLOCK_GB = 512 * 327_680 / 1e9
MAX_BEHIND = 0.05
"""How much slower the rule ``worth`` may be than the better of copying always and never."""


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policies", nargs="+", type=Path, metavar="TRACE")
    parser.add_argument("--capacities", nargs="+", type=float, default=CAPACITIES, metavar="BLOCKS")
    parser.add_argument("--copies", nargs="+", type=Path, metavar="TRACE")
    parser.add_argument("--rounds", type=int, default=9, help="rounds per peer (9)")
    parser.add_argument("--without-peers", action="store_true")
    parser.add_argument("--only-peers", action="store_true")
    args = parser.parse_args()
    if args.copies:
        return compare_copies(args.copies)
    if args.policies:
        return compare_policies(args.policies, args.capacities)
    return compare_speed(args)


def compare_speed(args: argparse.Namespace) -> int:
    """Measure the figures with bounds, then compare with other stores."""
    unmeasured: list[str] = []
    status = 0
    if not args.only_peers:
        if missing := install_fio():
            unmeasured.append(f"SSDs beside fio: {missing}")
        command = [sys.executable, str(ROOT / "ci" / "bench.py"), "tests/benchmarks/pool"]
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
    if not args.without_peers:
        from bench_pool_beside import beside_peers

        items = beside_peers(args.rounds, unmeasured)
        for item in items:
            print(item)
        status = status or int(not all(item.holds for item in items))
    for reason in unmeasured:
        print(f"skipped: {reason}")
    return status or (SKIPPED if unmeasured else 0)


def install_fio() -> str:
    """Install fio; returns why that failed, empty if it is available."""
    if shutil.which("fio"):
        return ""
    command = [str(ROOT / "ci" / "apt-install"), "fio"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if shutil.which("fio") else done.stderr.strip() or "fio can't be installed"


def compare_policies(traces: list[Path], capacities: list[float]) -> int:
    """Print hit rates and saved computation by policy, and the default policy's gap to the optimum.

    Returns 1 if one of our own policies has fewer hits than LRU, or saves less computation.
    """
    status = 0
    print(f"{'trace':<28} {'blocks':>8} {'optimum':>12}", *(f"{name:>15}" for name in POLICIES),
          f"{'gap':>13}")  # fmt: skip
    for path in traces:
        requests = read_trace(path)
        for capacity in capacities:
            best = replay_optimum(requests, capacity)
            found = {name: replay(requests, make_policy(name), capacity) for name in POLICIES}
            cells = [f"{r.hit_rate:>8.4f}/{r.saved_rate:.4f}" for r in found.values()]
            bound = saved_seconds_bound(requests, capacity)
            ours, lru = found[DEFAULT_POLICY], found["lru"]
            optimum = f"{best.hit_rate:.3f}/{bound / best.seconds:.3f}"
            hits_gap = 1 - ours.num_hits / max(1, best.num_hits)
            gap = f"{hits_gap:>6.1%}/{max(0.0, 1 - ours.saved_seconds / (bound or 1)):.1%}"
            print(f"{path.name:<28} {capacity:>8g} {optimum:>12}", *cells, gap, flush=True)
            for name in (DEFAULT_POLICY, "hit-density"):
                own = found[name]
                if own.num_hits < lru.num_hits or own.saved_seconds < lru.saved_seconds:
                    print(f"{name} has fewer hits or saves less than lru", file=sys.stderr)
                    status = 1
    return status


def compare_copies(traces: list[Path]) -> int:
    """Print compute and transfer seconds by rule; returns 1 if ``worth`` is far behind the best."""
    status = 0
    print(f"{'trace':<28} {'stores':>6} {'blocks':>7} {'GB/s':>5}", *(f"{r:>24}" for r in RULES))
    for path in traces:
        requests, times = read_timed_trace(path)
        for num_stores, capacity in STORES:
            for link in LINKS_GB_S:
                found = {
                    rule: replay_copies(
                        requests,
                        times,
                        rule,
                        num_stores=num_stores,
                        capacity=capacity,
                        refetch_s=BLOCK_GB / link,
                    )
                    for rule in RULES
                }
                cells = [
                    f"{r.compute_s:>9.0f} + {r.fetch_s:>5.0f} s{r.num_copies:>6}"
                    for r in found.values()
                ]
                print(
                    f"{path.name:<28} {num_stores:>6} {capacity:>7} {link:>5g}", *cells, flush=True
                )
                best = min(found["never"].total_s, found["always"].total_s)
                if found["worth"].total_s > best * (1 + MAX_BEHIND):
                    print("the rule worth is far behind the best rule", file=sys.stderr)
                    status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
