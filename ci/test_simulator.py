"""Real engines beside the simulator: the same requests, two prefill and two decode instances.

python ci/test_simulator.py [--requests N] [--bound SHARE]

Starts examples/tiny-llama behind the proxy, measures it as ``mooncake-conductor calibrate`` does,
sends a trace (sessions that grow, Poisson, fixed seed) in real time, and replays the same trace in
the simulator with what was measured. Prints TTFT and TBT of both, mean and P90, with signed errors.
Exits 0 only if all are within the bound (15 %). It needs a quiet machine: engines share its cores,
which the simulator's do not.
"""

from __future__ import annotations

import argparse
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

from mooncake_conductor.calibration.live_instance import LiveInstance, TimedCompletion
from mooncake_conductor.calibration.measured_costs import CalibrationPlan, DeviceRow, calibrate
from mooncake_conductor.conductor import ConductorSettings
from mooncake_conductor.simulator.simulation import Cluster, Simulation
from mooncake_conductor.simulator.trace_file import TraceRequest

ROOT = Path(__file__).resolve().parent.parent
PLAN = CalibrationPlan((128, 384, 768, 1024, 1536), batches=(1, 2, 4), decode_context=(128, 768))
CHUNK = 16
"""Tokens of an engine's block, which is what is reused."""
SMALL = {"kv_bytes_per_token": 2048.0, "num_layers": 4, "link_gb_s": 2.0, "host_gb_s": 5.0}
"""Of tiny-llama over shared memory; its transfers take well below a millisecond."""


class Deployment:
    """Engines and a proxy, started and stopped."""

    def __init__(self, folder: Path) -> None:
        self._log = (folder / "up.log").open("w+")
        options = ["--prefill", "2", "--decode", "2", "--port", "0", "--threads", "1"]
        command = [str(Path(sys.executable).parent / "mooncake-engine"), "up", *options]
        command += ["--model", "examples/tiny-llama", "--log-dir", str(folder / "logs")]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdout=self._log, stderr=subprocess.STDOUT
        )

    def url(self, timeout_s: float = 240.0) -> str:
        """The proxy's address, once it serves."""
        deadline = time.perf_counter() + timeout_s
        while time.perf_counter() < deadline and self._process.poll() is None:
            text = Path(self._log.name).read_text()
            found = re.search(r"http://[\d.]+:\d+(?=/v1)", text)
            if found:
                return found.group(0)
            time.sleep(0.2)
        sys.exit(f"the deployment did not start:\n{Path(self._log.name).read_text()[-3000:]}")

    def close(self) -> None:
        """End all of it."""
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._log.close()


def make_trace(count: int, per_second: float) -> list[tuple[TraceRequest, list[int]]]:
    """Requests with their token ids: two thirds go on with an earlier prompt."""
    rng, now, sessions = random.Random(7), 0.0, []
    made: list[tuple[TraceRequest, list[int]]] = []
    for _ in range(count):
        now += rng.expovariate(per_second)
        tokens = list(rng.choice(sessions[-20:])) if sessions and rng.random() < 0.66 else []
        if len(tokens) > 1200:
            tokens = []
        tokens += [rng.randrange(8, 200) for _ in range(rng.randrange(100, 400))]
        sessions.append(tokens)
        ends = range(CHUNK, len(tokens) + 1, CHUNK)
        keys = tuple(hash(tuple(tokens[:end])) & (2**62 - 1) for end in ends)
        made.append((TraceRequest(now, len(tokens), rng.randrange(8, 40), keys), tokens))
    return made


def send(url: str, trace: list[tuple[TraceRequest, list[int]]]) -> list[TimedCompletion]:
    """The trace in real time."""
    instance, begin = LiveInstance(url), time.perf_counter()
    gate = threading.Event()

    def one(entry: tuple[TraceRequest, list[int]]) -> TimedCompletion:
        request, tokens = entry
        gate.wait(max(begin + request.at_s - time.perf_counter(), 0.0))
        return instance.complete(tokens, request.num_output)

    with ThreadPoolExecutor(len(trace)) as pool:
        return list(pool.map(one, trace))


def simulate(row: DeviceRow, trace: list[TraceRequest]) -> tuple[list[float], list[float]]:
    """TTFT and mean TBT of every request, in the simulator."""
    cluster = Cluster(2, 2, row.latency, cache_tokens=200_000, chunk_tokens=CHUNK, **SMALL)
    records = Simulation(cluster, ConductorSettings("cost")).run(trace).records
    return [r.ttft or 0.0 for r in records], [r.mean_tbt for r in records if r.mean_tbt]


def compare(name: str, real: list[float], simulated: list[float], bound: float) -> bool:
    """Print one figure's mean and P90; whether both are within the bound."""
    holds = True
    for what, of in (("mean", np.mean), ("P90", lambda values: np.quantile(values, 0.9))):
        measured, found = 1000 * float(of(real)), 1000 * float(of(simulated))
        error = found / measured - 1
        holds &= abs(error) <= bound
        verdict = "ok" if abs(error) <= bound else "missed"
        print(f"{name} {what:5} {measured:9.2f} {found:9.2f} ms {error:+8.1%}  {verdict}")
    return holds


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=150, help="of the trace (150)")
    parser.add_argument("--rate", type=float, default=2.0, help="requests per second (2)")
    parser.add_argument("--bound", type=float, default=0.15, help="of errors (0.15)")
    options = parser.parse_args()
    trace = make_trace(options.requests, options.rate)
    with tempfile.TemporaryDirectory() as folder:
        deployment = Deployment(Path(folder))
        try:
            url = deployment.url()
            row = calibrate("here", LiveInstance(url), PLAN)
            print(
                f"calibrated: {row.latency}, off by {row.prefill_error:.0%}, {row.step_error:.0%}"
            )
            done = send(url, trace)
        finally:
            deployment.close()
    ttft, tbt = simulate(row, [replace(request) for request, _ in trace])
    print(f"{'':10} {'engines':>9} {'simulated':>9}")
    holds = compare("TTFT", [each.ttft for each in done], ttft, options.bound)
    gaps = [float(np.mean(each.gaps)) for each in done if each.gaps]
    return 0 if compare("TBT ", gaps, tbt, options.bound) and holds else 1


if __name__ == "__main__":
    sys.exit(main())
