"""Compares offline throughput with vLLM's CPU build: the same 200 requests, model and cores.

    python ci/bench_offline.py [--rounds 3]

Each engine runs in one process that loads the model once. They take turns, and each is stopped
(SIGSTOP) while the other runs, since vLLM's workers poll. The best round of each counts. The first
run installs vLLM under .cache/. Prints one line; exits 0 if our engine is at least as fast, 1 if
not, 77 if vLLM can't run here.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from vllm_environment import SKIPPED, Skip, install

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from support.figures import Figure  # noqa: E402  # tests/ is not installed

NUM_REQUESTS = 200

SIDE = """
import json, sys, time
{imports} LLM, SamplingParams
def run(llm, work):
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for _, n in work]
    outputs = llm.generate({prompts}, params, {quiet}=False)
    return sum(len(output.outputs[0].token_ids) for output in outputs)
if __name__ == "__main__":
    model, work = sys.argv[1:]
    work = json.load(open(work))
    llm = LLM(model, max_num_seqs=64, {options})
    run(llm, work.pop())
    print("ready", flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        tokens = run(llm, work.pop())
        print(json.dumps([time.perf_counter() - start, tokens]), flush=True)
"""

OURS = SIDE.format(
    imports="from mooncake_engine import",
    prompts="[prompt for prompt, _ in work]",
    quiet="shows_progress",
    options="num_kv_blocks=4096, block_size=16",
)

VLLM = SIDE.format(
    imports="from vllm import",
    prompts="[{'prompt_token_ids': prompt} for prompt, _ in work]",
    quiet="use_tqdm",
    options="max_model_len=4096, dtype='bfloat16'",
)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    try:
        peer = install()
        with ExitStack() as stack:
            figure = compare(stack, peer, rounds)
    except Skip as reason:
        print(f"skipped: {reason}")
        return SKIPPED
    print(figure)
    return int(not figure.holds)


def compare(stack: ExitStack, peer: Path, rounds: int) -> Figure:
    """Run both engines in turns."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    model, work = write_model(folder / "model"), folder / "work.json"
    work.write_text(json.dumps([mix(seed) for seed in range(rounds + 1)]))
    sides = [
        stack.enter_context(side(Path(sys.executable), OURS, (folder, model, work))),
        stack.enter_context(side(peer, VLLM, (folder, model, work))),
    ]
    taken: list[list[float]] = [[], []]
    for _ in range(rounds):
        for times, process in zip(taken, sides, strict=True):
            seconds, tokens = ask(process)
            times.append(seconds)
    ours, theirs = (min(times) for times in taken)
    context = f"{tokens / ours:.0f} against {tokens / theirs:.0f} output tokens/s of vLLM"
    name = f"engine: offline, {NUM_REQUESTS} requests, beside vLLM's CPU build"
    return Figure(name, theirs / ours, 1.0, "times", context=context)


def mix(seed: int) -> list[tuple[list[int], int]]:
    """Prompts of 16 to 512 tokens with outputs of 16 to 128; no prefix repeats between rounds."""
    chosen = random.Random(seed)
    return [
        ([chosen.randrange(3, 32000) for _ in range(chosen.randint(16, 512))], length)
        for length in (chosen.randint(16, 128) for _ in range(NUM_REQUESTS))
    ]


def write_model(folder: Path) -> Path:
    """Write a random Llama with the example's tokenizer."""
    from support.checkpoints import MEDIUM, random_model, write_checkpoint

    write_checkpoint(random_model("llama", **MEDIUM), folder)
    for source in (ROOT / "examples" / "tiny-llama").glob("token*"):
        (folder / source.name).write_bytes(source.read_bytes())
    return folder


@contextmanager
def side(
    python: Path, script: str, where: tuple[Path, Path, Path]
) -> Iterator[subprocess.Popen[str]]:
    """One engine's process, loaded, warm and stopped (SIGSTOP); terminated on exit."""
    folder, model, work = where
    program = folder / f"side-{len(script)}.py"
    program.write_text(script)
    threads = str(os.cpu_count() or 1)
    environment = os.environ | {
        "OMP_NUM_THREADS": threads,
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{int(threads) - 1}",
        "HF_HUB_OFFLINE": "1",
    }
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [str(python), str(program), str(model), str(work)]
    with subprocess.Popen(command, env=environment, start_new_session=True, **pipes) as process:
        try:
            read_until(process, "ready")
            os.killpg(process.pid, signal.SIGSTOP)
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def ask(process: subprocess.Popen[str]) -> tuple[float, int]:
    """Run one round; returns its seconds and output tokens."""
    assert process.stdin is not None
    os.killpg(process.pid, signal.SIGCONT)
    process.stdin.write("go\n")
    process.stdin.flush()
    seconds, tokens = json.loads(read_until(process, "["))
    os.killpg(process.pid, signal.SIGSTOP)
    return seconds, tokens


def read_until(process: subprocess.Popen[str], start: str) -> str:
    """The next line that starts with ``start``; other lines are the engine's own output."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(start):
            return line
    raise Skip(f"a side ended with status {process.wait()}")


if __name__ == "__main__":
    sys.exit(main())
