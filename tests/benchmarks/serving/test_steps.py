"""Decode steps of an executor, without scheduler or HTTP, compared with the device's read
bandwidth."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from support.decoding import Decoder
from support.figures import Figure, record
from support.served_streams import SAMPLINGS, SHARE_OF_LIMIT, STREAMS, Served, bandwidth, request_of

from mooncake_engine.config import EngineConfig
from mooncake_engine.execution.engine_plan import make_plan
from mooncake_engine.execution.executor import InProcessExecutor
from mooncake_engine.sampling_params import SamplingParams
from mooncake_hal.backend import Backend

pytestmark = pytest.mark.timeout(900)
CONTEXT, WARM_UP, STEPS, PROFILED = 512, 4, 40, 8
ROOM = WARM_UP + STEPS + PROFILED
BLOCK_SLACK = 128
"""Most unused token slots in a sequence's last block, on any backend."""


@pytest.fixture(scope="module")
def executor(served: Served, backend: Backend) -> Iterator[InProcessExecutor]:
    tokens = max(STREAMS) * (served.shape.length(CONTEXT) + ROOM + BLOCK_SLACK)
    config = EngineConfig(
        served.directory,
        backend=served.backend,
        dtype="bfloat16",
        kv_cache_bytes=tokens * served.shape.token_bytes,
        max_num_seqs=max(STREAMS),
        swap_space_bytes=0,
    )
    with closing(InProcessExecutor(make_plan(config, backend), backend)) as loaded:
        loaded.warm_up()
        yield loaded


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("rows", STREAMS)
def test_steps(
    benchmark: Any,
    backend: Backend,
    served: Served,
    executor: InProcessExecutor,
    rows: int,
    sampling: str,
) -> None:
    """A step waits for its tokens, so the host's share is included; details list the kernels'
    share."""
    shape = served.shape
    context = shape.length(CONTEXT)
    prompts = [tuple(request_of(shape, context, 1, sampling)["prompt"]) for _ in range(rows)]
    how = SamplingParams(**SAMPLINGS[sampling])
    with closing(Decoder(executor, prompts, ROOM, sampling=how)) as decoder:
        step = seconds_of_steps(backend, decoder)
        kernels = seconds_of_kernels(backend, decoder)
    rate = bandwidth(served.backend, shape.copy_bytes)
    limit = shape.step_seconds(rate, rows, context + ROOM // 2)
    shown = f"{step * 1e3:.2f} ms, {rows / step:.0f} tokens/s"
    shown += f", kernels {kernels * 1e3:.2f} ms" if kernels else ""
    title = f"a decode step, {sampling}, {rows} x {context}"
    record(benchmark, Figure(title, limit / step, SHARE_OF_LIMIT, "of limit", context=shown))
    benchmark.pedantic(lambda: None, rounds=1)


def seconds_of_steps(backend: Backend, decoder: Decoder) -> float:
    """Mean seconds of one step."""
    for _ in range(WARM_UP):
        decoder.step()
    backend.runtime.synchronize(0)
    started = time.perf_counter()
    for _ in range(STEPS):
        decoder.step()
    backend.runtime.synchronize(0)
    return (time.perf_counter() - started) / STEPS


def seconds_of_kernels(backend: Backend, decoder: Decoder) -> float:
    """Sum of a step's kernel times; 0 if torch's profiler reports none."""
    if backend.runtime.device(0).type != "cuda":
        return 0.0
    from support.cuda_timing import seconds_in_kernels

    return seconds_in_kernels(decoder.step, PROFILED)
