"""How much of a fast device a serving host uses: streams over HTTP from an instance whose device is
pretended and takes as long as a large GPU's. Everything but the device is real.

The step times are those of an 8 B model on one H200 at so many streams. The client shares the
processors with the instance, so it reads with uvloop: with asyncio's own loop it takes 6 ms to read
what 256 streams get in a step, and that would be the tail of the times between tokens.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import quantiles
from typing import Any, cast

import pytest
import uvloop
from support.figures import Figure, record
from support.programs import TINY_LLAMA, Program, descendants

STREAMS = {1: 5.0, 32: 6.7, 128: 10.9, 256: 16.0}
"""Streams at once -> milliseconds of a decode step."""
SECONDS = 6.0
"""Of decoding, per case."""
_TICKS = os.sysconf("SC_CLK_TCK")


@contextmanager
def paced_instance(step_ms: float) -> Iterator[tuple[int, Program]]:
    """An instance over the paced device: its port and its process."""
    num_layers = json.loads((TINY_LLAMA / "config.json").read_text())["num_hidden_layers"]
    layer_us = step_ms * 1e3 / num_layers
    argv = ["serve", "--model", str(TINY_LLAMA), "--port", "0", "--backend", "paced"]
    argv += ["--num-kv-blocks", "16384", "--threads", "1", "--swap-space", "0"]
    argv += ["--async-scheduling", "--core-process"]
    program = Program(
        ["mooncake_engine.cli", *argv], environment={"MOONCAKE_HAL_PACED": f"{layer_us} 1"}
    )
    try:
        yield int(program.wait_for("ready ").rsplit(":", 1)[1]), program
    finally:
        program.close()


class StreamReader(asyncio.Protocol):
    """One streamed completion: when its tokens came.

    Args:
        request: bytes of it.
    """

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._tail = b""
        self.times: list[float] = []
        self.is_done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.WriteTransport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self.times.extend([now] * data.count(b'"text"'))
        self._tail = (self._tail + data)[-32:]
        if b"[DONE]" in self._tail and not self.is_done.done():
            self.is_done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.is_done.done():
            self.is_done.set_exception(exc or ConnectionError("the stream was cut"))


async def stream_all(port: int, num_streams: int, num_tokens: int) -> list[list[float]]:
    """When each stream's tokens came."""
    body = json.dumps(
        {
            "prompt": "a" * 16,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
    )
    request = (
        f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n{body}"
    ).encode()
    loop = asyncio.get_running_loop()
    transports, readers = [], []
    for _ in range(num_streams):
        transport, reader = await loop.create_connection(
            lambda: StreamReader(request), "127.0.0.1", port
        )
        transports.append(transport)
        readers.append(reader)
    await asyncio.gather(*(reader.is_done for reader in readers))
    for transport in transports:
        transport.close()
    await asyncio.sleep(0.1)
    return [reader.times for reader in readers]


def cpu_seconds(program: Program) -> float:
    """Of the instance's processes, so far."""
    pids = [program.process.pid, *descendants(program.process.pid)]
    stats = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids)
    return sum(int(fields[11]) + int(fields[12]) for fields in stats) / _TICKS


@pytest.mark.parametrize(("num_streams", "step_ms"), STREAMS.items())
def test_streams_keep_the_device_busy(num_streams: int, step_ms: float, benchmark: Any) -> None:
    num_tokens = int(SECONDS * 1e3 / step_ms)
    with paced_instance(step_ms) as (port, program):
        uvloop.run(stream_all(port, min(num_streams, 4), 8))
        before = cpu_seconds(program)
        times = uvloop.run(stream_all(port, num_streams, num_tokens))
        spent = cpu_seconds(program) - before
    assert all(len(stream) == num_tokens for stream in times)
    # all streams run between these two
    start, end = max(stream[0] for stream in times), min(stream[-1] for stream in times)
    steady = sum(start < at <= end for stream in times for at in stream) / (end - start)
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
