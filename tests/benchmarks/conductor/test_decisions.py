"""The cost of a placement decision, and of a chunk in the index."""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Iterable
from statistics import median

import pytest
from support.conductor_fleets import ask, make_conductor
from support.figures import Figure, record

from mooncake_conductor.index.chunk_index import ChunkIndex
from mooncake_conductor.index.holder_sets import Tier

CHUNKS = 64


@pytest.mark.parametrize(
    ("num_instances", "num_chunks", "wanted_ms"), [(64, 1_000_000, 0.3), (1000, 10_000_000, 2.0)]
)
def test_decision(benchmark, num_instances: int, num_chunks: int, wanted_ms: float) -> None:
    conductor, rng = make_conductor(num_instances // 2, num_instances // 2), random.Random(1)
    keys = [rng.getrandbits(63) for _ in range(num_chunks)]
    for start in range(0, num_chunks, CHUNKS):
        slot = (start // CHUNKS) % (num_instances // 2)
        conductor.index.stored(slot, Tier.HOST, keys[start : start + CHUNKS])
    elapsed = []

    def decide() -> None:
        for number in range(200):
            start = rng.randrange(num_chunks // CHUNKS) * CHUNKS
            request = ask(str(number), CHUNKS)
            request = type(request)(
                str(number), request.num_tokens, tuple(keys[start : start + CHUNKS])
            )
            begin = time.perf_counter()
            conductor.route(request, now=float(number))
            elapsed.append(time.perf_counter() - begin)
            conductor.ended(str(number), now=float(number))

    benchmark.pedantic(decide, rounds=3, warmup_rounds=1)
    name = f"conductor: decision, {num_instances} instances, {num_chunks / 1e6:g} M chunks"
    record(benchmark, Figure(name, median(elapsed) * 1e3, wanted_ms, "ms", at_least=False))


def prompts(num_chunks: int) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.getrandbits(63) for _ in range(CHUNKS)] for _ in range(num_chunks // CHUNKS)]


def filled(held: Iterable[list[int]]) -> ChunkIndex:
    index = ChunkIndex(64)
    for keys in held:
        index.stored(3, Tier.HOST, keys)
    return index


# Dynamo's RadixTree: 78 µs per lookup of 64 blocks, 400,000 blocks/s, 73 B per block and worker.


def test_lookup(benchmark) -> None:
    index, rng = filled(prompts(1_000_000)), random.Random(2)
    probe = [rng.getrandbits(63) for _ in range(CHUNKS)]
    index.stored(5, Tier.HOST, probe)
    benchmark(lambda: index.match(probe, now=0.0))
    elapsed = benchmark.stats.stats.median * 1e6
    record(benchmark, Figure("conductor: lookup of 64 chunks", elapsed, 78.0, "µs", at_least=False))


def test_events(benchmark) -> None:
    held = prompts(1_000_000)
    benchmark.pedantic(lambda: filled(held), rounds=2)
    rate = len(held) * CHUNKS / benchmark.stats.stats.median
    record(benchmark, Figure("conductor: chunks stored", rate, 400e3, "1/s", at_least=True))


def test_memory(benchmark) -> None:
    num_prompts = 1_000_000 // CHUNKS

    def measure() -> float:
        rng = random.Random(1)
        tracemalloc.start()
        kept = filled([rng.getrandbits(63) for _ in range(CHUNKS)] for _ in range(num_prompts))
        num_bytes = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        return num_bytes / len(kept)

    per_chunk = benchmark.pedantic(measure, rounds=1)
    record(benchmark, Figure("conductor: memory per chunk", per_chunk, 83.0, "B", at_least=False))
