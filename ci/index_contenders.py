"""Fills and queries one index of chunks, ours or Dynamo's RadixTree, and prints figures as JSON.

python ci/index_contenders.py conductor|dynamo [--chunks N]

ci/bench_conductor.py runs it once per index, each time in a separate process and environment. Both
indexes get the same prompts of 64 chunks: each prompt is stored by one of 8 workers, every fourth
also by a second one. Events are encoded beforehand in the form that the index reads (msgpack as in
vLLM, Dynamo's JSON); decoding is measured. Memory is the growth of the process.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

CHUNKS = 64
WORKERS = 8
LOOKUPS = 3000


def prompts(num_chunks: int) -> Iterator[tuple[int, list[int]]]:
    """Pairs of a worker and the chunk keys of a prompt that it stores."""
    rng = random.Random(1)
    for number in range(num_chunks // CHUNKS):
        keys = [rng.getrandbits(63) for _ in range(CHUNKS)]
        yield number % WORKERS, keys
        if number % 4 == 0:
            yield (number + 1) % WORKERS, keys


def dynamo() -> tuple[Callable[[int, list[int]], bytes], Callable[[int, bytes], None], Callable]:
    """Dynamo's index: functions that encode an event, apply it, and look up a prompt."""
    from dynamo._core import RadixTree

    tree = RadixTree()

    def encode(number: int, keys: list[int]) -> bytes:
        blocks = [{"block_hash": key, "tokens_hash": key} for key in keys]
        stored = {"parent_hash": None, "start_position": 0, "blocks": blocks}
        event = {"event_id": number, "dp_rank": 0, "data": {"stored": stored}}
        return json.dumps(event).encode()

    def lookup(keys: list[int]) -> int:
        return max(tree.find_matches(keys).scores.values())

    return encode, tree.apply_event, lookup


def conductor() -> tuple[Callable[[int, list[int]], bytes], Callable[[int, bytes], None], Callable]:
    """Our index: functions that encode an event, apply it, and look up a prompt."""
    import msgspec

    from mooncake_conductor.index.chunk_index import ChunkIndex
    from mooncake_conductor.index.event_stream import EventStream
    from mooncake_conductor.index.kv_event_messages import decode_batch

    index = ChunkIndex(WORKERS)
    streams = [EventStream(index, slot) for slot in range(WORKERS)]

    def encode(number: int, keys: list[int]) -> bytes:
        event = {"type": "BlockStored", "block_hashes": keys, "parent_block_hash": None}
        event |= {"token_ids": [], "block_size": 16, "lora_id": None, "medium": "GPU"}
        return msgspec.msgpack.encode([float(number), [event], 0])

    def apply(worker: int, event: bytes) -> None:
        stream = streams[worker]
        stream.receive(stream.expected, decode_batch(event))

    def lookup(keys: list[int]) -> int:
        return index.match(keys, now=0.0).pool

    return encode, apply, lookup


def memory_bytes() -> int:
    """Private resident memory of this process."""
    fields = Path("/proc/self/smaps_rollup").read_text().split("\n")
    found = {line.split(":")[0]: line.split()[1] for line in fields if line.startswith("Private")}
    return 1024 * sum(int(value) for value in found.values())


def measure(kind: str, num_chunks: int) -> dict[str, float]:
    """Fill the index in parts, and look up prompts; returns the figures."""
    encode, apply, lookup = (dynamo if kind == "dynamo" else conductor)()
    stored = list(prompts(CHUNKS * 32))
    for number, (worker, keys) in enumerate(stored):
        apply(worker, encode(number, keys))
    before, seconds, num_events, part = memory_bytes(), 0.0, 0, []
    kept: list[list[int]] = []
    for number, (worker, keys) in enumerate(prompts(num_chunks)):
        part.append((worker, encode(number, keys)))
        if number % 97 == 0:
            kept.append(keys)
        if len(part) == 500:
            begin = time.perf_counter()
            for worker_of, event in part:
                apply(worker_of, event)
            seconds += time.perf_counter() - begin
            num_events += len(part)
            part.clear()
    for worker_of, event in part:
        apply(worker_of, event)
    held = memory_bytes() - before - sum(8 * CHUNKS + 32 * CHUNKS for _ in kept)
    rng, elapsed = random.Random(2), []
    for _ in range(LOOKUPS):
        keys = rng.choice(kept)
        begin = time.perf_counter()
        found = lookup(keys)
        elapsed.append(time.perf_counter() - begin)
        if found != CHUNKS:
            sys.exit(f"{kind} found {found} of {CHUNKS} chunks that are held")
    num_held = sum(len(keys) for _, keys in prompts(num_chunks))
    return {
        "lookup_us": 1e6 * median(elapsed),
        "chunks_per_s": CHUNKS * num_events / seconds,
        "bytes_per_copy": held / num_held,
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=["conductor", "dynamo"])
    parser.add_argument("--chunks", type=int, default=1_000_000, help="distinct chunks (1000000)")
    options = parser.parse_args()
    print(json.dumps(measure(options.kind, options.chunks)))


if __name__ == "__main__":
    main()
