#!/usr/bin/env python3
"""Measures the TTFT of a conversation's second turn, by the source of the first turn's KV.

Sources are the device's cache, the pool's memory, the pool's SSD, and recomputation. Also measures
what saving costs a step.

    python ci/bench_second_turn.py --tokens 3072 --chunk 64

Runs one instance with a random model of 112 million parameters in bfloat16. Between the two turns,
other requests with ten times as much KV as the device can hold are served, except when the device's
own cache is measured. For the SSD, the pool's memory is twice the device's, and each first turn is
served twice, since chunks are written to SSDs on their second use. ``--layers 30`` selects a deeper
model.

    python ci/bench_second_turn.py --only-visible

Measures only how much of the load time stays visible when a prompt's prefix is loaded layer by
layer while the rest is computed, with a model that has much KV and little to compute. Exits 0 only
if all bounds hold.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.checkpoints import (  # the path is set above
    MEDIUM,
    random_model,
    write_checkpoint,
)
from support.core_runs import random_prompt
from support.figures import Figure
from support.pool_engine import engine, forget, settle

from mooncake_engine.core import EngineCore
from mooncake_engine.core_messages import AddRequest
from mooncake_engine.messages import EngineRequest
from mooncake_engine.sampling_params import SamplingParams
from mooncake_kv.pool.pool_events import PoolStats

_names = itertools.count()
_numbers = itertools.count(1)
ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
BLOCK = 16
LAYER_TOKEN_BYTES = 2 * 2 * MEDIUM["num_key_value_heads"] * MEDIUM["head_dim"]
WIDE = MEDIUM | {
    "vocab_size": 2000,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 32,
}
"""A model with much KV and little to compute: 256 KiB per token in float32, in 128-byte pieces."""
WIDE_PREFIXES, WIDE_REST, WIDE_CHUNK = (512, 1024), 2, 64
"""Tokens of the prefixes, of the rest, and per chunk. With the first prefix, loading takes somewhat
less time than computing; with the second, about as long."""
VISIBLE_ROUNDS = 15
CACHE_BYTES = 128 << 20
"""Bytes; more than a core's caches hold."""
WARM_UP = 3
SPOOL_S = 2.0
"""Seconds after a chunk's second use in which its background write to SSDs completes."""
Prompt = tuple[int, ...]


@dataclass(frozen=True)
class Turns:
    """The conversations that are measured.

    Args:
        tokens: prompt length of the first turn.
        turn: number of tokens that the second turn adds.
        conversations: number of conversations, measured one by one; the median counts.
        layers: number of the model's layers.
    """

    tokens: int
    turn: int
    conversations: int
    layers: int

    @property
    def device_bytes(self) -> int:
        """KV memory of the device."""
        return self.device_tokens * self.layers * LAYER_TOKEN_BYTES

    @property
    def device_tokens(self) -> int:
        """KV capacity of the device: 1.25 prompts."""
        return (self.tokens + self.turn) * 5 // 4 // BLOCK * BLOCK

    def prompts(self) -> list[Prompt]:
        """New first turns, which are in no cache."""
        return [random_prompt(next(_numbers), self.tokens) for _ in range(self.conversations)]

    def second(self, first: Prompt) -> Prompt:
        """The next turn of a conversation."""
        return (*first, *random_prompt(next(_numbers), self.turn))


def first_token_s(core: EngineCore, prompt: Prompt) -> tuple[float, int]:
    """Seconds until a prompt's first token, and how many of its tokens were not computed."""
    (name,) = post(core, prompt)
    return finish(core, [name])[name]


def serve(core: EngineCore, prompts: Sequence[Prompt]) -> None:
    """Serve prompts, and wait until all of them are saved."""
    for prompt in prompts:
        first_token_s(core, prompt)
    settle(core)


def other_traffic(core: EngineCore, turns: Turns) -> None:
    """Serve other prompts with ten times the tokens that the device can hold."""
    count = -(-10 * turns.device_tokens // turns.tokens)
    serve(core, [random_prompt(next(_numbers), turns.tokens) for _ in range(count)])


@dataclass(frozen=True)
class Measured:
    """Results of the second turns.

    Args:
        ms: median TTFT.
        share: fraction of the first turn's tokens whose KV was reused.
        overlap: of the loading time that computing could hide, the fraction that it did hide.
    """

    ms: float
    share: float
    overlap: float = 1.0

    @classmethod
    def of(cls, runs: Sequence[tuple[float, int]], turns: Turns, overlap: float = 1.0) -> Measured:
        """Summarise results of ``first_token_s``."""
        elapsed = statistics.median(seconds for seconds, _ in runs)
        share = statistics.median(cached for _, cached in runs) / turns.tokens
        return cls(1e3 * elapsed, share, overlap)


def second_turns(core: EngineCore, turns: Turns, firsts: Sequence[Prompt]) -> Measured:
    """Measure second turns, after a warm-up conversation from which the engine learns its costs."""
    first_token_s(core, turns.second(firsts[0]))
    before = core.stats().kv_pool
    runs = [first_token_s(core, turns.second(first)) for first in firsts[1:]]
    overlap = 1.0 if before is None else pool_stats(core).since(before).overlap_ratio
    return Measured.of(runs, turns, overlap)


def from_device(core: EngineCore, turns: Turns) -> Measured:
    runs = []
    for first in turns.prompts():
        serve(core, [first])
        runs.append(first_token_s(core, turns.second(first)))
    return Measured.of(runs[1:], turns)


def from_memory(core: EngineCore, turns: Turns) -> Measured:
    firsts = turns.prompts()
    serve(core, firsts)
    other_traffic(core, turns)
    return second_turns(core, turns, firsts)


def from_ssd(core: EngineCore, turns: Turns) -> Measured:
    firsts = turns.prompts()
    for first in firsts:
        serve(core, [first])
        forget(core)
        serve(core, [first])
        time.sleep(SPOOL_S)
    other_traffic(core, turns)
    return second_turns(core, turns, firsts)


def computed(core: EngineCore, turns: Turns) -> Measured:
    return second_turns(core, turns, turns.prompts())


def measure(model: Path, turns: Turns, chunk: int, drive: Path, *, threads: int) -> list[Figure]:
    """Measure each source in a separate engine and print a line for it; returns the figures."""
    device_bytes = turns.device_bytes
    sources = {
        "device's cache": (None, from_device),
        "pool, memory": (f"dram={24 * device_bytes},chunk={chunk}", from_memory),
        "pool, SSD": (f"dram={2 * device_bytes},ssd={drive}:4GiB,chunk={chunk}", from_ssd),
        "computed again": (None, computed),
    }
    options = {"dtype": "auto", "threads": threads, "swap_space_bytes": 0}
    options["num_kv_blocks"] = turns.device_tokens // BLOCK
    found: dict[str, Measured] = {}
    for name, (pool, run) in sources.items():
        began = time.monotonic()
        with engine(model, pool, **options) as core:
            measured = found[name] = run(core, turns)
            stats = core.stats().kv_pool
        notes = "" if stats is None else f", overlap {measured.overlap:.2f}, {stats}"
        print(
            f"{name:<16} {measured.ms:8.1f} ms  {100 * measured.share:3.0f} % of the first turn"
            f" reused{notes}  ({time.monotonic() - began:.0f} s)",
            flush=True,
        )
    memory, ssd = found["pool, memory"], found["pool, SSD"]
    by_device, by_computed = (
        memory.ms / found["device's cache"].ms,
        ssd.ms / found["computed again"].ms,
    )
    where = f"{turns.tokens} and {turns.turn} tokens, chunks of {chunk}, {turns.layers} layers"
    return [
        Figure("second turn from memory, by device's cache", by_device, 1.3, "times", False, where),
        Figure("second turn from SSD, by computed again", by_computed, 1.0, "times", False, where),
        Figure("loading that is hidden, from memory", memory.overlap, 0.8, "", True, where),
        Figure("loading that is hidden, from SSD", ssd.overlap, 0.8, "", True, where),
        compare_steps(model, turns, options, f"dram={24 * device_bytes},chunk={chunk}"),
    ]


@dataclass(frozen=True)
class Visible:
    """Times of one round, in seconds.

    Args:
        load: to load a whole prefix while nothing is computed.
        compute: TTFT with the prefix in the device's cache.
        both: TTFT while the prefix is loaded layer by layer.
        load_beside, compute_beside: as ``load`` and ``compute``, for two unrelated prompts at the
            same time.
    """

    load: float
    compute: float
    both: float
    load_beside: float
    compute_beside: float

    @property
    def ratio(self) -> float:
        """``both`` divided by the longer of load and compute, measured side by side in the same
        round. On this host the two share memory and its caches; no schedule could recover the time
        that they cost each other."""
        return self.both / max(self.load_beside, self.compute_beside)

    @property
    def ratio_alone(self) -> float:
        """``both`` divided by the longer of load and compute, each measured alone."""
        return self.both / max(self.load, self.compute)


def visible_load(model: Path, prefix: int, *, threads: int) -> Figure:
    """TTFT with a layer-by-layer load of the prefix, divided by the longer of load and compute.

    Each round measures all of them, with cold CPU caches, and yields its own ratio, so that other
    load on the host affects all of them alike.
    """
    first, other = (random_prompt(next(_numbers), prefix) for _ in range(2))
    options = {"dtype": "float32", "threads": threads, "swap_space_bytes": 0}
    options["num_kv_blocks"] = 3 * prefix // BLOCK
    pool = f"dram=1GiB,chunk={WIDE_CHUNK},load=always"
    with reserve_core() as take_core, engine(model, pool, **options) as core:
        take_core()
        serve(core, [first, other])
        rounds = [visible_round(core, first, other) for _ in range(VISIBLE_ROUNDS + WARM_UP)]
    load, compute, both, load_beside, compute_beside, alone, ratio = (
        statistics.median(getattr(each, name) for each in rounds[WARM_UP:])
        for name in (
            *("load", "compute", "both", "load_beside", "compute_beside"),
            *("ratio_alone", "ratio"),
        )
    )
    where = (
        f"{prefix} tokens: {1e3 * both:.1f} ms; side by side load {1e3 * load_beside:.1f}, compute "
        f"{1e3 * compute_beside:.1f}; alone {1e3 * load:.1f} and {1e3 * compute:.1f}, {alone:.2f} "
        "times"
    )
    return Figure("visible, by the longer of load and compute", ratio, 1.1, "times", False, where)


def visible_round(core: EngineCore, first: Prompt, other: Prompt) -> Visible:
    """One round of ``visible_load``."""
    forget(core)
    evict_cpu_caches()
    load = whole_load_s(core, next_turn(first))
    forget(core)
    evict_cpu_caches()
    both = first_token_s(core, next_turn(first))[0]
    evict_cpu_caches()
    compute = first_token_s(core, next_turn(first))[0]
    evict_cpu_caches()
    load_beside, compute_beside = side_by_side_s(core, next_turn(other), next_turn(first))
    return Visible(load, compute, both, load_beside, compute_beside)


def next_turn(first: Prompt) -> Prompt:
    """A prompt with that prefix and a few more tokens."""
    return (*first, *random_prompt(next(_numbers), WIDE_REST))


def evict_cpu_caches() -> None:
    """Evict the CPU caches, so that a measurement does not profit from the one before it."""
    np.ones(CACHE_BYTES // 8).sum()


@contextmanager
def reserve_core() -> Iterator[Callable[[], None]]:
    """Reserve a CPU core for computing; the calling thread moves to it when it calls the result.

    Threads that are started before that call get the other cores, so that copies take no time from
    computing, as with a real device.
    """
    cores = os.sched_getaffinity(0)
    first = {min(cores)}
    os.sched_setaffinity(0, cores - first or cores)
    try:
        yield lambda: os.sched_setaffinity(0, first)
    finally:
        os.sched_setaffinity(0, cores)


def whole_load_s(core: EngineCore, prompt: Prompt) -> float:
    """Seconds to load a prompt's prefix while nothing is computed: a prompt with several sequences
    is scheduled only when its prefix is loaded completely."""
    before = pool_stats(core).load_seconds
    finish(core, post(core, prompt, num_answers=2))
    return pool_stats(core).load_seconds - before


def side_by_side_s(core: EngineCore, loaded: Prompt, computed: Prompt) -> tuple[float, float]:
    """``whole_load_s`` of one prompt, and meanwhile the TTFT of another prompt whose prefix is in
    the device's cache."""
    before = pool_stats(core).load_seconds
    names = [*post(core, loaded, num_answers=2), *post(core, computed)]
    compute, _ = finish(core, names)[names[-1]]
    return pool_stats(core).load_seconds - before, compute


def post(core: EngineCore, prompt: Prompt, *, num_answers: int = 1) -> list[str]:
    """Post requests for one token each; returns their ids."""
    group = f"b{next(_names)}"
    names = [f"{group}-{number}" for number in range(num_answers)]
    for name in names:
        shared = group if num_answers > 1 else None
        core.post(AddRequest(EngineRequest(name, prompt, ONE, group=shared)))
    return names


def finish(core: EngineCore, names: Sequence[str]) -> dict[str, tuple[float, int]]:
    """Step until these requests have finished; returns, for each, the seconds from now and the
    number of its tokens that were not computed."""
    began, ended = time.perf_counter(), dict[str, tuple[float, int]]()
    while len(ended) < len(names):
        for update in core.step():
            if update.finish is not None:
                seconds = time.perf_counter() - began
                ended[update.request_id] = seconds, update.num_cached_tokens
    return ended


def pool_stats(core: EngineCore) -> PoolStats:
    stats = core.stats().kv_pool
    assert stats is not None, "the engine has a pool"
    return stats


def compare_steps(model: Path, turns: Turns, options: dict, pool: str) -> Figure:
    """Cost of saving a prompt: TTFT with a pool divided by TTFT without, measured in turns."""
    without, with_pool = [], []
    with engine(model, None, **options) as plain, engine(model, pool, **options) as pooled:
        for _ in range(2 * turns.conversations):
            prompt = random_prompt(next(_numbers), turns.tokens)
            without.append(first_token_s(plain, prompt)[0])
            with_pool.append(first_token_s(pooled, prompt)[0])
            settle(pooled)
    ratio = statistics.median(with_pool[1:]) / statistics.median(without[1:])
    return Figure("a prompt that is saved, by one that is not", ratio, 1.03, "times", False)


def main() -> int:
    """Print a line per source, and the figures with their bounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=3072, help="tokens of the first turn")
    parser.add_argument("--turn", type=int, default=128, help="tokens that the second turn adds")
    parser.add_argument("--chunk", type=int, default=64, help="tokens per chunk of the pool")
    parser.add_argument("--conversations", type=int, default=5)
    parser.add_argument("--layers", type=int, default=MEDIUM["num_hidden_layers"])
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="threads that compute; with one per core, copies would compete with computing, unlike "
        "on a device apart from the host (default: 1)",
    )
    parser.add_argument("--only-visible", action="store_true", help="only visible load time")
    args = parser.parse_args()
    turns = Turns(args.tokens, args.turn, args.conversations + 1, args.layers)
    cache = Path(__file__).parents[1] / ".cache"  # on a disk: /tmp may be memory
    cache.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        figures = []
        if not args.only_visible:
            deep = MEDIUM | {"num_hidden_layers": args.layers}
            model = write_checkpoint(random_model("llama", **deep), Path(scratch) / "model")
            drive = Path(scratch) / "ssd"
            drive.mkdir()
            figures += measure(model, turns, args.chunk, drive, threads=args.threads)
        wide = write_checkpoint(random_model("llama", **WIDE), Path(scratch) / "wide")
        figures += [visible_load(wide, n, threads=args.threads) for n in WIDE_PREFIXES]
    for figure in figures:
        print(figure)
    return 0 if all(figure.holds for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
