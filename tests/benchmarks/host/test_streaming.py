"""How much of a fast device a serving host can use.

Streams over HTTP from an instance whose simulated device takes as long as a large GPU. Everything
except the device is real.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from statistics import median, quantiles
from typing import Any

import pytest
import uvloop
from support.figures import Figure, record
from support.paced_instances import SECONDS, STEP_MS, paced_instance, proxied
from support.streaming_client import cpu_seconds, shared_time, steady_rate, stream_all

PD_STREAMS = (32, 128)
DRAFTED_STREAMS = (1, 32)
DRAFTED_STEPS = 380
"""Decode steps: with five tokens each, an answer as long as the model's context."""
NUM_FIRST_TOKENS = 20
"""Number of sequential requests to each side."""


@contextmanager
def paced_pair(step_ms: float) -> Iterator[int]:
    """A prefill and a decode instance on such devices, and a proxy: its port."""
    with (
        paced_instance(step_ms, "--role", "prefill") as (prefill, _),
        paced_instance(step_ms, "--role", "decode") as (decode, _),
        proxied(prefill, decode) as port,
    ):
        yield port


def first_token_ms(port: int) -> float:
    """Milliseconds until a single request's first token."""
    start = time.perf_counter()
    return 1e3 * (uvloop.run(stream_all(port, 1, 2))[0][0] - start)


@pytest.mark.parametrize(("num_streams", "step_ms"), STEP_MS.items())
def test_streams_keep_the_device_busy(num_streams: int, step_ms: float, benchmark: Any) -> None:
    num_tokens = int(SECONDS * 1e3 / step_ms)
    with paced_instance(step_ms) as (port, program):
        uvloop.run(stream_all(port, min(num_streams, 4), 8))
        before = cpu_seconds(program.process.pid)
        times = uvloop.run(stream_all(port, num_streams, num_tokens))
        spent = cpu_seconds(program.process.pid) - before
    assert all(len(stream) == num_tokens for stream in times)
    steady = steady_rate(times)
    start, end = shared_time(times)
    wanted = num_streams * 1e3 / step_ms
    gaps = [(b, 1e3 * (b - a)) for stream in times for a, b in pairwise(stream)]
    p99_ms = quantiles([gap for _, gap in gaps], n=100)[98]
    steady_p99_ms = quantiles([gap for at, gap in gaps if start < at <= end], n=100)[98]
    cpu_us = spent * 1e6 / (num_streams * num_tokens)
    name = f"host: {num_streams} streams, steps of {step_ms:g} ms"
    shown = f"{steady:.0f} of {wanted:.0f} tokens/s"
    record(benchmark, Figure(name, steady / wanted, 0.97, "of it", context=shown))
    shown = f"p99 {p99_ms:.1f} ms; {steady_p99_ms:.1f} ms while all streams run"
    record(
        benchmark,
        Figure(f"{name}, p99 between tokens", p99_ms / step_ms, 1.3, "steps", False, shown),
    )
    if num_streams >= 128:
        record(benchmark, Figure(f"{name}, CPU per token", cpu_us, 25, "µs", at_least=False))
    benchmark.pedantic(lambda: None, rounds=1)


def test_speculation_does_not_slow_many_streams(benchmark: Any) -> None:
    """An instance that drafts for a single stream only: with more streams it uses async scheduling,
    as without speculation. Its last stream is drafted and receives several tokens at once."""
    num_streams, step_ms = 128, STEP_MS[128]
    num_tokens = int(SECONDS * 1e3 / step_ms)
    drafts = ["--speculative-method", "ngram", "--speculative-disable-by-batch-size", "1"]
    with paced_instance(step_ms, *drafts) as (port, _):
        uvloop.run(stream_all(port, 4, 8))
        times = uvloop.run(stream_all(port, num_streams, num_tokens))
    steady, wanted = steady_rate(times), num_streams * 1e3 / step_ms
    name = f"host: {num_streams} streams beyond those that are drafted, steps of {step_ms:g} ms"
    shown = f"{steady:.0f} of {wanted:.0f} tokens/s"
    record(benchmark, Figure(name, steady / wanted, 0.97, "of it", context=shown))
    benchmark.pedantic(lambda: None, rounds=1)


@pytest.mark.parametrize("num_streams", DRAFTED_STREAMS)
def test_steps_with_drafts_keep_the_device_busy(num_streams: int, benchmark: Any) -> None:
    """Every draft token is accepted, so each step returns five tokens per stream, in one chunk."""
    step_ms, num_drafts = STEP_MS[num_streams], 4
    drafts = ["--speculative-method", "ngram", "--num-speculative-tokens", str(num_drafts)]
    with paced_instance(step_ms, *drafts) as (port, _):
        uvloop.run(stream_all(port, 4, 8))
        times = uvloop.run(stream_all(port, num_streams, DRAFTED_STEPS * (1 + num_drafts)))
    assert all(DRAFTED_STEPS <= len(stream) < 1.1 * DRAFTED_STEPS for stream in times)
    steady, wanted = steady_rate(times), num_streams * 1e3 / step_ms
    name = f"host: {num_streams} streams with {num_drafts} drafts each, steps of {step_ms:g} ms"
    shown = f"{steady:.0f} of {wanted:.0f} chunks/s"
    record(benchmark, Figure(name, steady / wanted, 0.7, "of it", context=shown))
    benchmark.pedantic(lambda: None, rounds=1)


@pytest.mark.parametrize("num_streams", PD_STREAMS)
def test_pair_keeps_decode_device_busy(num_streams: int, benchmark: Any) -> None:
    step_ms = STEP_MS[num_streams]
    num_tokens = int(SECONDS * 1e3 / step_ms)
    with paced_pair(step_ms) as port:
        uvloop.run(stream_all(port, 4, 8))
        times = uvloop.run(stream_all(port, num_streams, num_tokens))
    assert all(len(stream) == num_tokens for stream in times)
    steady, wanted = steady_rate(times), num_streams * 1e3 / step_ms
    name = f"host: PD, {num_streams} streams, steps of {step_ms:g} ms"
    shown = f"{steady:.0f} of {wanted:.0f} tokens/s"
    record(benchmark, Figure(name, steady / wanted, 0.97, "of it", context=shown))
    benchmark.pedantic(lambda: None, rounds=1)


def test_pair_adds_little_to_first_token(benchmark: Any) -> None:
    step_ms = STEP_MS[1]
    with paced_instance(step_ms) as (alone, _), paced_pair(step_ms) as apart:
        for port in (alone, apart):
            uvloop.run(stream_all(port, 4, 8))
        seen = [[first_token_ms(port) for port in (alone, apart)] for _ in range(NUM_FIRST_TOKENS)]
    single, pair = (median(column) for column in zip(*seen, strict=True))
    shown = f"alone {single:.1f} ms, apart {pair:.1f} ms"
    name = "host: PD adds to the first token"
    record(benchmark, Figure(name, pair - single, 5, "ms", at_least=False, context=shown))
    benchmark.pedantic(lambda: None, rounds=1)
