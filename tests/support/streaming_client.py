"""Streamed completions read by many connections at once, and what the server's processors paid.

The client shares the processors with what it measures, so it wants uvloop: with asyncio's own loop
it takes 6 ms to read what 256 streams get in a step.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from support.programs import descendants

_TICKS = os.sysconf("SC_CLK_TCK")


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


async def stream_all(
    port: int, num_streams: int, num_tokens: int, more: Mapping[str, Any] | None = None
) -> list[list[float]]:
    """When each stream's tokens came, in seconds; ``more`` are further fields of the request."""
    fields = {"prompt": "a" * 16, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    body = json.dumps({**fields, "stream": True, **(more or {})})
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


def cpu_seconds(pid: int) -> float:
    """Of a process and all that it has started, so far."""
    pids = [pid, *descendants(pid)]
    stats = (Path(f"/proc/{found}/stat").read_text().rpartition(")")[2].split() for found in pids)
    return sum(int(fields[11]) + int(fields[12]) for fields in stats) / _TICKS
