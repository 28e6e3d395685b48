"""Concurrent streamed completions over many connections, and the CPU time that a server spent.

The client shares the CPUs with the server that it measures, so it needs uvloop: asyncio's own loop
takes 6 ms to read what 256 streams receive in a step.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, cast

from support.programs import descendants

_TICKS = os.sysconf("SC_CLK_TCK")


class StreamReader(asyncio.Protocol):
    """One streamed completion: when it was requested and when its tokens arrived, in seconds.

    Args:
        request: its bytes.
    """

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._tail = b""
        self._has_status = False
        self.began = 0.0
        self.times: list[float] = []
        self.is_done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.began = time.perf_counter()
        cast(asyncio.WriteTransport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self.times.extend([now] * data.count(b'"text"'))
        if not self._has_status and not data.startswith(b"HTTP/1.1 200"):
            self.is_done.set_exception(ConnectionError(data[:500].decode(errors="replace")))
        self._has_status = True
        self._tail = (self._tail + data)[-32:]
        if b"[DONE]" in self._tail and not self.is_done.done():
            self.is_done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.is_done.done():
            self.is_done.set_exception(exc or ConnectionError("the stream was cut"))


async def stream_all(
    port: int, num_streams: int, num_tokens: int, more: Mapping[str, Any] | None = None
) -> list[list[float]]:
    """Arrival times of each stream's tokens, in seconds; ``more`` are further request fields."""
    fields = {"prompt": "a" * 16, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    readers = await stream_each(port, [fields | dict(more or {})] * num_streams)
    return [reader.times for reader in readers]


async def stream_each(port: int, requests: Sequence[Mapping[str, Any]]) -> list[StreamReader]:
    """Run all streams concurrently; each request is given by its fields, except for ``stream``.

    Raises:
        ConnectionError: an answer has another status than 200, or is truncated.
    """
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(asyncio.sleep, 0.1)  # until all connections have been closed
        readers = []
        for fields in requests:
            body = json.dumps({**fields, "stream": True})
            request = (
                "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}"
            ).encode()
            transport, reader = await loop.create_connection(
                partial(StreamReader, request), "127.0.0.1", port
            )
            stack.callback(transport.close)
            readers.append(reader)
        await asyncio.gather(*(reader.is_done for reader in readers))
    return readers


def shared_time(times: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Start and end of the time in which all streams run."""
    return max(stream[0] for stream in times), min(stream[-1] for stream in times)


def steady_rate(times: Sequence[Sequence[float]]) -> float:
    """Tokens per second while all streams run; 0 if they never all do."""
    start, end = shared_time(times)
    if end <= start:
        return 0.0
    return sum(start < at <= end for stream in times for at in stream) / (end - start)


def cpu_seconds(pid: int) -> float:
    """CPU seconds of a process and all of its descendants so far."""
    pids = [pid, *descendants(pid)]
    stats = (Path(f"/proc/{found}/stat").read_text().rpartition(")")[2].split() for found in pids)
    return sum(int(fields[11]) + int(fields[12]) for fields in stats) / _TICKS
