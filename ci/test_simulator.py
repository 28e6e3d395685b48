"""Compares real engines with the simulator: the same requests, two prefill and two decode
instances.

python ci/test_simulator.py [--requests N] [--rate PER_S] [--bound SHARE]

Starts examples/tiny-llama four times behind the proxy with --policy cost, and measures it as
``mooncake-conductor calibrate --through`` does. Then sends a trace (growing sessions, Poisson
arrivals, fixed seed) in real time, and replays the same trace in the simulator with the measured
costs. Prints both sides' TTFT and TBT as seen by clients, mean and P90, with signed errors. Exits 0
only if all errors are within the bound (15 %).

Scheduler, prefix cache, transfer, HTTP and proxy are the real ones. The device is the paced one,
which takes its step times like a device separate from the host, so that four instances fit on a
host with two cores. On the CPU backend they would compete for the cores, which the simulator
doesn't model.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from support.programs import TINY_LLAMA, Program

from mooncake_conductor.calibration.live_instance import LiveInstance, TimedCompletion
from mooncake_conductor.calibration.measured_costs import CalibrationPlan, DeviceRow, calibrate
from mooncake_conductor.calibration.serving_path import measure_path
from mooncake_conductor.conductor import ConductorSettings
from mooncake_conductor.index.holder_sets import Tier
from mooncake_conductor.index.prompt_keys import CHUNK_TOKENS, token_keys
from mooncake_conductor.simulator.simulation import Cluster, RequestRecord, Simulation
from mooncake_conductor.simulator.trace_file import TraceRequest

PLAN = CalibrationPlan(
    (64, 128, 256, 512, 1024, 1536), batches=(1, 2, 4), decode_context=(128, 768)
)
NUM_BLOCKS = 4096
NUM_WARM_UP = 50
"""Number of requests after which the proxy has learned its instances' costs."""
PACE = "5000 100"
"""Microseconds per layer: for a step's decodes, and per prompt token. The model has four layers."""
ENGINE = ["--model", str(TINY_LLAMA), "--threads", "1", "--swap-space", "0", "--backend", "paced"]
ENGINE += ["--async-scheduling", "--core-process", "--num-kv-blocks", str(NUM_BLOCKS)]
# Instances reuse only what the conductor's index counts: whole chunks.
ENGINE += ["--block-size", str(CHUNK_TOKENS)]
OF_ROLE = {"prefill": ["--max-num-seqs", "1"], "decode": []}
"""Prefill instances compute one prompt at a time, like the simulator's prefill nodes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Deployment:
    """URLs of the proxy and the instances."""

    prefill: str
    decode: str
    proxy: str


@contextmanager
def deployed(folder: Path) -> Iterator[Deployment]:
    """Start two prefill and two decode instances and a proxy, stopped when the block ends."""
    secret = folder / "secret"
    secret.touch(mode=0o600)
    secret.write_text(random.randbytes(32).hex())
    with ExitStack() as stack:

        def start(name: str, argv: list[str]) -> Program:
            log = folder / f"{name}.log"
            program = Program(argv, log, {"MOONCAKE_HAL_PACED": PACE})
            stack.callback(program.close)
            return program

        serve = ["mooncake_engine.cli", "serve", "--port", "0", "--kv-secret-file", str(secret)]
        started = [
            (role, start(f"{role}-{index}", [*serve, "--role", role, *ENGINE, *OF_ROLE[role]]))
            for role in OF_ROLE
            for index in range(2)
        ]
        proxy_argv, urls = ["mooncake_proxy", "--port", "0", "--policy", "cost"], {}
        for role, program in started:
            urls[role] = "http://127.0.0.1:" + program.wait_for("ready ").rsplit(":", 1)[1]
            proxy_argv += [f"--{role}", urls[role]]
        said = start("proxy", proxy_argv).wait_for("listens on ")
        yield Deployment(urls["prefill"], urls["decode"], said.split("listens on ")[1])


def measure(deployment: Deployment) -> DeviceRow:
    """Measure the costs of prompts on P, steps on D, and transfers between them."""
    one_at_a_time = dataclasses.replace(PLAN, batches=(1,), decode_context=(128,))
    prefill = calibrate("here", LiveInstance(deployment.prefill), one_at_a_time)
    only_steps = dataclasses.replace(PLAN, prompt_tokens=(128,))
    decode = calibrate("here", LiveInstance(deployment.decode), only_steps)
    row = msgspec.structs.replace(
        decode,
        fixed=prefill.fixed,
        per_token=prefill.per_token,
        per_token_squared=prefill.per_token_squared,
        prefill_error=prefill.prefill_error,
    )
    return measure_path(row, LiveInstance(deployment.proxy), PLAN)


def make_trace(
    count: int, per_second: float, seed: int = 7
) -> list[tuple[TraceRequest, list[int]]]:
    """Requests with their token ids: two thirds continue an earlier prompt."""
    rng, now, sessions = random.Random(seed), 0.0, []
    made: list[tuple[TraceRequest, list[int]]] = []
    for _ in range(count):
        now += rng.expovariate(per_second)
        tokens = list(rng.choice(sessions[-20:])) if sessions and rng.random() < 0.66 else []
        if len(tokens) > 1200:
            tokens = []
        tokens += [rng.randrange(8, 200) for _ in range(rng.randrange(100, 400))]
        sessions.append(tokens)
        request = TraceRequest(now, len(tokens), rng.randrange(8, 40), token_keys(tokens))
        made.append((request, tokens))
    return made


def send(url: str, trace: list[tuple[TraceRequest, list[int]]]) -> list[TimedCompletion]:
    """Send the trace in real time; returns the completions."""
    instance, begin = LiveInstance(url), time.perf_counter()
    gate = threading.Event()

    def one(entry: tuple[TraceRequest, list[int]]) -> TimedCompletion:
        request, tokens = entry
        gate.wait(max(begin + request.at_s - time.perf_counter(), 0.0))
        return instance.complete(tokens, request.num_output)

    with ThreadPoolExecutor(len(trace)) as pool:
        return list(pool.map(one, trace))


def simulate(row: DeviceRow, trace: list[TraceRequest]) -> list[RequestRecord]:
    """Replay the trace in the simulator; returns a record per request."""
    kv_tokens = NUM_BLOCKS * CHUNK_TOKENS
    cluster = Cluster(
        2,
        2,
        row.latency,
        kv_bytes_per_token=1024.0,
        num_layers=4,
        cache_tokens=kv_tokens,
        link_gb_s=2.0,
        kv_tokens=kv_tokens,
        chunk_tokens=CHUNK_TOKENS,
        cache_tier=Tier.DEVICE,
        decode_cache_tokens=kv_tokens,
        shares_prefixes=False,
        first_token_s=row.first_token,
        hand_over_s=row.hand_over,
        join_steps=row.join_steps,
    )
    return Simulation(cluster, ConductorSettings("cost", binds_late=True)).run(trace).records


def compare(name: str, real: list[float], simulated: list[float], bound: float) -> bool:
    """Print one figure's mean and P90; returns whether both are within the bound."""
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
    parser.add_argument("--requests", type=int, default=300, help="requests of the trace (300)")
    parser.add_argument("--rate", type=float, default=8.0, help="requests per second (8)")
    parser.add_argument("--bound", type=float, default=0.15, help="bound of errors (0.15)")
    options = parser.parse_args()
    trace = make_trace(options.requests, options.rate)
    with tempfile.TemporaryDirectory() as folder, deployed(Path(folder)) as deployment:
        row = measure(deployment)
        send(deployment.proxy, make_trace(NUM_WARM_UP, options.rate, seed=8))
        done = send(deployment.proxy, trace)
    print(f"calibrated: {msgspec.json.encode(row).decode()}")
    records = simulate(row, [request for request, _ in trace])
    print(f"{'':10} {'engines':>9} {'simulated':>9}")
    ttft = [record.ttft or 0.0 for record in records]
    holds = compare("TTFT", [each.ttft for each in done], ttft, options.bound)
    gaps = [record.mean_gap or 0.0 for record in records]
    return (
        0 if compare("TBT ", [each.mean_gap for each in done], gaps, options.bound) and holds else 1
    )


if __name__ == "__main__":
    sys.exit(main())
