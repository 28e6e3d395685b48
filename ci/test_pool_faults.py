#!/usr/bin/env python3
"""Injects faults into the KVCache pool, each into a store process under ordinary traffic.

In the first run, three ranks put and get chunks continuously over shm and tcp, and compare every
byte of every hit. In the second, an engine with ``--kv-pool`` answers prompts whose KV only the
store has, and all tokens are compared with those of an engine without a pool. Prints a row per
fault: operations, hits, misses, wrong results, stuck operations, handles leaked after all users
left, and the longest operation. Exits 0 only if wrong, stuck and leaked are 0 in every row, and the
traffic has hits again after each fault.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.pool_faults import FAULTS, FaultyPool  # noqa: E402  # tests/ is not installed
from support.pool_traffic import PoolTraffic, Tally  # noqa: E402

TRAFFIC = ("ranks", "engine")


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=tuple(FAULTS), metavar="FAULT")
    parser.add_argument("--traffic", nargs="+", choices=TRAFFIC, default=TRAFFIC)
    parser.add_argument("--list", action="store_true", help="print the faults")
    args = parser.parse_args()
    if args.list:
        for name, fault in FAULTS.items():
            print(f"{name:<18} {fault.__doc__}")
        return 0
    os.chdir(ROOT)
    logging.basicConfig(level=logging.ERROR)  # lost stores are expected here
    began = time.monotonic()
    print(f"{'':<7}{'fault':<54} {'tries':>6} {'hits':>7} {'misses':>7} {'wrong':>6} {'stuck':>6} "
          f"{'leaked':>7} {'longest':>8}")  # fmt: skip
    faults = args.only or list(FAULTS)
    is_good = all([run(name, traffic) for traffic in args.traffic for name in faults])
    print(f"{time.monotonic() - began:.0f} s; {'all passed' if is_good else 'FAILED'}")
    return 0 if is_good else 1


def run(name: str, traffic: str) -> bool:
    """Run one fault and print its row; returns whether it passed."""
    fault = FAULTS[name]
    start = PoolTraffic
    if traffic == "engine":
        from support.pool_engine_traffic import EngineTraffic as start
    with tempfile.TemporaryDirectory() as directory, FaultyPool(Path(directory), start) as pool:
        has_begun = pool.traffic.await_hits()
        complaint = "" if has_begun else "no hits before the fault"
        try:
            fault(pool)
        except AssertionError as exc:
            complaint = complaint or f"{exc}" or "the fault could not be injected"
        if not pool.traffic.await_hits():
            complaint = complaint or "no hits after the fault"
        tally: Tally = pool.traffic.end()
        leaked = pool.leaked_handles()
    counts = f"{tally.tries:>6} {tally.hits:>7} {tally.misses:>7} {tally.wrong:>6} {tally.stuck:>6}"
    times = f"{leaked:>7} {tally.longest_s:>6.1f} s"
    print(f"{traffic:<7}{fault.__doc__:<54} {counts} {times}  {complaint}", flush=True)
    return not (tally.wrong or tally.stuck or leaked or complaint)


if __name__ == "__main__":
    sys.exit(main())
