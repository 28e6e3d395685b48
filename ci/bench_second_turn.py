#!/usr/bin/env python3
"""Time to first token of a conversation's second turn: from the device's cache, the pool's memory,
its SSD, and computed again; and what saving costs a step.

    python ci/bench_second_turn.py --tokens 3000

One instance with a random model of 112 million parameters in bfloat16. Between the turns the device
forgets everything; for the SSD, the store's memory is filled with other prompts, too.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.checkpoints import (  # the path is set above
    MEDIUM,
    random_model,
    write_checkpoint,
)
from support.core_runs import random_prompt
from support.pool_engine import engine, forget, settle

from mooncake_engine.core import AddRequest, EngineCore
from mooncake_engine.messages import EngineRequest
from mooncake_engine.sampling_params import SamplingParams

_names = itertools.count()
ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


def first_token_s(core: EngineCore, prompt: tuple[int, ...]) -> tuple[float, int]:
    """Seconds until a prompt's first token, and how many of its tokens were not computed."""
    core.post(AddRequest(EngineRequest(f"b{next(_names)}", prompt, ONE)))
    began = time.perf_counter()
    while True:
        for update in core.step():
            if update.finish is not None:
                return time.perf_counter() - began, update.num_cached_tokens


def second_turn(core: EngineCore, num_tokens: int, number: int, between) -> tuple[float, int]:
    """The first turn, what happens then, and the second turn."""
    first = random_prompt(number, num_tokens)
    first_token_s(core, first)
    settle(core)
    between(core)
    return first_token_s(core, (*first, *random_prompt(number + 1, 64)))


def fill_memory(core: EngineCore, num_tokens: int) -> None:
    """Push everything out of the store's memory, but not off its SSDs."""
    for number in range(4):
        first_token_s(core, random_prompt(10_000 + number, num_tokens))
        settle(core)
        forget(core)


def step_s(core: EngineCore, num_tokens: int, number: int) -> float:
    """A whole prompt in steps, with or without a pool to save it to."""
    took, _ = first_token_s(core, random_prompt(number, num_tokens))
    settle(core)
    return took


def main() -> None:
    """Print a line per source."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=3000, help="of the first turn's prompt")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = write_checkpoint(random_model("llama", **MEDIUM), Path(scratch) / "model")
        drive = Path(scratch) / "ssd"
        drive.mkdir()
        chunk_bytes = args.tokens * 10 * 2 * 4 * 64 * 2
        options = {"dtype": "auto", "threads": 2, "num_kv_blocks": 1024, "swap_space_bytes": 0}
        sources = {
            "device cache": (f"dram={8 * chunk_bytes}", lambda core: None),
            "pool, memory": (f"dram={8 * chunk_bytes}", forget),
            "pool, SSD": (
                f"dram={2 * chunk_bytes},ssd={drive}:4GiB",
                lambda core: (forget(core), fill_memory(core, args.tokens)),
            ),
            "computed again": (None, forget),
        }
        for name, (pool, between) in sources.items():
            with engine(model, pool, **options) as core:
                second_turn(core, args.tokens, 500, between)  # learn what things cost
                runs = [second_turn(core, args.tokens, 2 * n, between) for n in range(args.rounds)]
                stats = core.stats().kv_pool
            took = statistics.median(seconds for seconds, _ in runs)
            overlap = "" if stats is None else f"  overlap {stats.overlap_ratio:.2f}"
            print(f"{name:<16} {1e3 * took:8.1f} ms  {runs[-1][1]} tokens reused{overlap}")
        compare_steps(model, args, options, chunk_bytes)


def compare_steps(model: Path, args: argparse.Namespace, options: dict, nbytes: int) -> None:
    """What saving costs a prompt's steps, in turns with an instance without a pool."""
    with (
        engine(model, None, **options) as plain,
        engine(model, f"dram={4 * nbytes}", **options) as pooled,
    ):
        without, with_pool = [], []
        for number in range(args.rounds + 1):
            without.append(step_s(plain, args.tokens, 900 + number))
            with_pool.append(step_s(pooled, args.tokens, 900 + number))
        ratio = statistics.median(with_pool[1:]) / statistics.median(without[1:])
    print(f"saving costs a prompt's steps {100 * (ratio - 1):+.1f} %")


if __name__ == "__main__":
    main()
