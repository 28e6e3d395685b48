"""Compares the host CPU time per streamed token with vLLM's, on the same kind of simulated device.

    python ci/bench_streaming.py [--rounds 3] [--streams 128,256]

Runs one instance of our engine and one of vLLM's CPU build, both with a simulated device that takes
as long per step as a large GPU (vllm_paced_worker.py), and with the same model, tokenizer and
client. Both stay up and are measured in turns, the other one being idle. CPU time is that of all
processes of an instance, from the first request to the last token. The first run installs vLLM
under .cache/. Prints one line per number of streams; exits 0 if our engine needs less, 1 if not, 77
if vLLM can't run here.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from vllm_environment import CACHE, SKIPPED, Skip
from vllm_serving import MODEL, Launch, prepare, stop, wait_until_healthy

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import uvloop  # noqa: E402
from support.figures import Figure  # noqa: E402  # tests/ is not installed
from support.paced_instances import SECONDS, STEP_MS, paced_instance  # noqa: E402
from support.streaming_client import cpu_seconds, stream_all  # noqa: E402

LOG = CACHE / "vllm-paced.log"


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", default="128,256", help="numbers of streams: 1, 32, 128, 256")
    args = parser.parse_args()
    try:
        python = prepare()
        figures = [
            compare(python, streams, args.rounds) for streams in map(int, args.streams.split(","))
        ]
    except Skip as reason:
        print(f"skipped: {reason}")
        return SKIPPED
    print(*figures, sep="\n")
    return int(not all(figure.holds for figure in figures))


def compare(python: Path, num_streams: int, rounds: int) -> Figure:
    """Our CPU time per token divided by vLLM's: the median over rounds that measure both.

    Raises:
        Skip: vLLM can't run here.
    """
    step_ms = STEP_MS[num_streams]
    with ExitStack() as stack:
        # vLLM's heads are wider, so a device's memory holds half as many blocks as elsewhere
        own = ("--served-model-name", "tiny", "--num-kv-blocks", "8192")
        port, program = stack.enter_context(paced_instance(step_ms, *own, model=MODEL))
        sides = [(port, program.process.pid), start_vllm(stack, python, step_ms)]
        for port, _ in sides:
            uvloop.run(stream_all(port, min(num_streams, 4), 8, {"model": "tiny"}))
        taken = [[measure(*side, num_streams, step_ms) for side in sides] for _ in range(rounds)]
    ours, theirs = ([turn[side] for turn in taken] for side in (0, 1))
    shown = ", ".join(
        f"{name} {median(cpu for cpu, _ in turns):.1f} µs at {median(r for _, r in turns):.0f}/s"
        for name, turns in (("ours", ours), ("vLLM", theirs))
    )
    ratio = median(a / b for (a, _), (b, _) in zip(ours, theirs, strict=True))
    name = f"host: CPU per streamed token, {num_streams} streams, by vLLM's"
    return Figure(name, ratio, 1.0, "times", at_least=False, context=shown)


def start_vllm(stack: ExitStack, python: Path, step_ms: float) -> tuple[int, int]:
    """Start vLLM with a paced worker; returns its port and process id.

    Raises:
        Skip: vLLM does not start.
    """
    words = ("--max-num-seqs", "256", "--max-num-batched-tokens", "8192")
    words += ("--distributed-executor-backend", "uni", "--disable-uvicorn-access-log")
    words += ("--worker-cls", "vllm_paced_worker.SchedulingWorker")
    environment = {
        "PYTHONPATH": str(ROOT / "ci"),
        "VLLM_PACED_STEP_MS": str(step_ms),
        "VLLM_CPU_KVCACHE_SPACE": "2",
    }
    LOG.unlink(missing_ok=True)
    launch = Launch(python, None, "nobind", LOG, words, environment)
    child = launch.start()
    stack.callback(stop, child)
    wait_until_healthy(launch.url, LOG, 300, [child])
    return launch.port, child.pid


def measure(port: int, pid: int, num_streams: int, step_ms: float) -> tuple[float, float]:
    """Run one round; returns microseconds of CPU per token, and tokens per second."""
    num_tokens = int(SECONDS * 1e3 / step_ms)
    before = cpu_seconds(pid)
    times = uvloop.run(stream_all(port, num_streams, num_tokens, {"model": "tiny"}))
    spent = cpu_seconds(pid) - before
    seconds = max(stream[-1] for stream in times) - min(stream[0] for stream in times)
    return spent * 1e6 / (num_streams * num_tokens), num_streams * num_tokens / seconds


if __name__ == "__main__":
    sys.exit(main())
