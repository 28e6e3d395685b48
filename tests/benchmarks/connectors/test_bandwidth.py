"""The pull connector's bandwidth between instances of this host, compared with the host's limit.

Timed on the decode side, from the command to its ranks until the last of them has every byte:
planning, messages and threads included, the model's work excluded. The copying threads use as much
CPU as those of the limit; other load on the host only adds time, to either, so the faster quarter
of the rounds is compared.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from statistics import quantiles

import pytest
from support.byte_tokenizer import write_byte_tokenizer
from support.checkpoints import random_model, write_checkpoint
from support.figures import Figure, record
from support.pd import Instance, ask, pair, prefill

from mooncake_engine.sampling_params import SamplingParams
from mooncake_hal.bench.machine_limits import memcpy_mover, stream_mover
from mooncake_hal.bench.transfer_speed import TransferShape

TOKENS = 2048
ROUNDS = 16
SHAPE = {
    "vocab_size": 258,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "dtype": "bfloat16",
}
KV_BYTES = TOKENS * 16 * 2 * 8 * 128 * 2
OPTIONS = {
    "num_kv_blocks": 2 * TOKENS // 16 + 8,
    "prefix_caching": False,
    "lease_s": 60.0,
    "transfer_timeout_s": 60.0,
}
TWO_TOKENS = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wide") / "model"
    return write_byte_tokenizer(write_checkpoint(random_model("llama", **SHAPE), directory))


def prompt(seed: int) -> tuple[int, ...]:
    return tuple((seed * 31 + position * 7) % 250 + 3 for position in range(TOKENS))


async def load_seconds(decode: Instance, params: dict, seed: int) -> float:
    """Transfer one prompt; returns the duration of the load over all ranks."""
    before = decode.stat("load_seconds")
    await ask(decode, prompt(seed), TWO_TOKENS, params)
    return decode.stat("load_seconds") - before


def measure(model: Path, transport: str, sizes: tuple[int, int]) -> tuple[float, float]:
    """GB/s of the connector and of the host's limit, in turns in one run; see the module's
    docstring."""

    async def scenario(move: Callable[[], object]) -> list[tuple[float, float]]:
        options = {**OPTIONS, "transports": (transport,)}
        times = []
        async with pair(
            model,
            prefill={**options, "tp_size": sizes[0]},
            decode={**options, "tp_size": sizes[1]},
        ) as both:
            for seed in range(ROUNDS + 2):  # the first two touch the memory for the first time
                params = await prefill(both.prefill, prompt(seed))
                loaded = await load_seconds(both.decode, params, seed)
                times.append((loaded, seconds_of(move)))
        return times[2:]

    limit = memcpy_mover if transport == "shm" else stream_mover
    with limit(KV_BYTES, 2) as mover:
        move = mover.prepare(TransferShape(KV_BYTES, KV_BYTES), "read")
        move()
        times = asyncio.run(scenario(move))
    loads, moves = (quantiles(column, n=4)[0] for column in zip(*times, strict=True))
    return KV_BYTES / loads / 1e9, KV_BYTES / moves / 1e9


def seconds_of(move: Callable[[], object]) -> float:
    """Duration of a call in seconds."""
    started = time.perf_counter()
    move()
    return time.perf_counter() - started


@pytest.mark.parametrize(
    ("transport", "sizes", "wanted"),
    [
        ("shm", (1, 1), 0.8),
        ("shm", (2, 2), 0.8),
        ("shm", (4, 2), 0.6),
        ("shm", (2, 4), 0.6),
        ("tcp", (1, 1), 0.8),
    ],
)
def test_bandwidth(
    benchmark, model: Path, transport: str, sizes: tuple[int, int], wanted: float
) -> None:
    speeds: list[tuple[float, float]] = []
    benchmark.pedantic(lambda: speeds.append(measure(model, transport, sizes)), rounds=1)
    found, best = speeds[0]
    record(
        benchmark,
        Figure(
            f"connector over {transport}, P_tp {sizes[0]}, D_tp {sizes[1]}",
            found / best,
            wanted,
            "of memcpy" if transport == "shm" else "of a plain stream",
            context=f"{found:.2f} of {best:.2f} GB/s, {KV_BYTES >> 20} MiB",
        ),
    )


def test_concurrent_loads_are_not_slower_than_sequential_ones(benchmark, model: Path) -> None:
    many = 64
    short = tuple(range(3, 3 + 128))

    async def scenario() -> tuple[float, float]:
        options = {**OPTIONS, "num_kv_blocks": many * 10 + 8, "transports": ("shm",)}
        async with pair(model, prefill=options, decode=options) as both:
            elapsed = []
            for is_parallel in (False, True, False, True):
                params = [await prefill(both.prefill, short) for _ in range(many)]
                started = time.perf_counter()
                if is_parallel:
                    loads = (ask(both.decode, short, TWO_TOKENS, p) for p in params)
                    await asyncio.gather(*loads)
                else:
                    for one in params:
                        await ask(both.decode, short, TWO_TOKENS, one)
                elapsed.append(time.perf_counter() - started)
        return elapsed[2], elapsed[3]

    times: list[tuple[float, float]] = []
    benchmark.pedantic(lambda: times.append(asyncio.run(scenario())), rounds=1)
    one_by_one, together = times[0]
    record(
        benchmark,
        Figure(
            f"{many} hand-overs at once against one after another",
            together / one_by_one,
            1.0,
            "times",
            at_least=False,
            context=f"{together:.2f} s against {one_by_one:.2f} s",
        ),
    )
