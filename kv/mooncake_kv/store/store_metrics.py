"""The Prometheus metrics of a store process: its counters and gauges, at ``/metrics`` of a port.

One thread with an asyncio loop serves the requests, one per connection, with at most
MAX_CONNECTIONS open. The metrics contain no keys or tenants. There is no authentication: every
client that reaches the port may read them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass

from mooncake_hal.timing import timeout
from mooncake_kv.errors import ConnectorDead
from mooncake_kv.io_loop import CLOSE_TIMEOUT_S, IoLoop
from mooncake_kv.store.chunk_store import (
    EVICTION_REASONS,
    SSD_SKIP_REASONS,
    PutRefusal,
    StoreStats,
    Tier,
)

MAX_HEAD_BYTES = 8192
MAX_CONNECTIONS = 32
REQUEST_TIMEOUT_S = 5.0
START_TIMEOUT_S = 30.0

STORE_PREFIX = "mooncake_store_"
_PUT_REFUSALS = tuple(each.value for each in PutRefusal if each is not PutRefusal.UNREACHABLE)

Rows = dict[tuple[tuple[str, str], ...], float]
"""Sample values by labels."""


@dataclass(frozen=True, slots=True)
class Family:
    """A Prometheus metric family.

    Args:
        name: name without STORE_PREFIX; counters end in ``_total``.
        help: help text.
        rows: samples by labels.
    """

    name: str
    help: str
    rows: Rows

    def lines(self) -> Iterator[str]:
        """Yield the family's lines in Prometheus's text format."""
        full = STORE_PREFIX + self.name
        yield f"# HELP {full} {self.help}"
        yield f"# TYPE {full} {'counter' if full.endswith('_total') else 'gauge'}"
        for labels, value in self.rows.items():
            shown = ",".join(f'{key}="{text}"' for key, text in labels)
            yield f"{full}{{{shown}}} {value}" if labels else f"{full} {value}"


def families(stats: StoreStats) -> list[Family]:
    """A store's counters and gauges as metric families."""
    used = stats.capacity_bytes - stats.free_bytes
    expired = _by("kind", {"read": stats.num_expired_reads, "write": stats.num_expired_writes})
    refused = _by("reason", dict.fromkeys(_PUT_REFUSALS, 0) | stats.num_refused_puts)
    evicted = _by("reason", dict.fromkeys(EVICTION_REASONS, 0) | stats.num_evicted)
    return [
        Family(
            "capacity_bytes", "Capacity.", _tiers(stats.capacity_bytes, stats.ssd_capacity_bytes)
        ),
        Family("used_bytes", "Bytes in use.", _tiers(used, stats.ssd_bytes)),
        Family("chunks", "Chunks stored now.", _tiers(stats.num_chunks, stats.ssd_chunks)),
        Family("staging_chunks", "Chunks being written.", _one(stats.num_staging)),
        Family("pins", "Read handles in force.", _one(stats.num_pins)),
        Family("quarantine_bytes", "Freed, not reusable yet.", _one(stats.quarantine_bytes)),
        Family("leaked_bytes", "Held by abandoned writers.", _one(stats.abandoned_bytes)),
        Family("probed_keys_total", "Keys probed by message.", _one(stats.num_probes)),
        Family("hits_total", "Keys pinned.", _tiers(stats.num_dram_hits, stats.num_ssd_hits)),
        Family("misses_total", "Keys that could not be pinned.", _one(stats.num_misses)),
        Family("read_bytes_total", "Bytes of pinned chunks.", _one(stats.pinned_bytes)),
        Family("puts_total", "Chunks put.", _one(stats.num_puts)),
        Family("put_bytes_total", "Bytes of chunks put.", _one(stats.put_bytes)),
        Family("aborted_puts_total", "Writes aborted or expired.", _one(stats.num_aborts)),
        Family("refused_puts_total", "Puts refused, by reason.", refused),
        Family("evictions_total", "Evicted chunks, by reason.", evicted),
        Family("leaked_handles_total", "Handles that expired.", expired),
        Family(
            "invalid_reads_total", "Reads without a valid handle.", _one(stats.num_invalid_reads)
        ),
        *_ssd_families(stats),
    ]


def _ssd_families(stats: StoreStats) -> list[Family]:
    hung = _by("kind", {"read": stats.num_ssd_hung_reads, "write": stats.num_ssd_hung_writes})
    skipped = _by("reason", dict.fromkeys(SSD_SKIP_REASONS, 0) | stats.num_ssd_skipped)
    per_day = stats.ssd_write_bytes_per_day
    limit, budget = (_one(per_day), _one(stats.ssd_budget_bytes)) if per_day else ({}, {})
    return [
        Family("ssd_written_bytes_total", "Written to SSDs.", _one(stats.ssd_written_bytes)),
        Family("ssd_write_limit_bytes_per_day", "Limit of writes to SSDs, if set.", limit),
        Family("ssd_write_budget_bytes", "What the limit allows to write now.", budget),
        Family("ssd_read_bytes_total", "Read from SSDs.", _one(stats.ssd_read_bytes)),
        Family("ssd_corrupt_total", "Damaged records.", _one(stats.num_ssd_corrupt)),
        Family("ssd_errors_total", "I/O errors.", _one(stats.num_ssd_errors)),
        Family("ssd_hung_drives", "Drives with hung reads, or writes.", hung),
        Family("ssd_unscanned_drives", "Drives being scanned.", _one(stats.num_ssd_unscanned)),
        Family("ssd_skipped_total", "Chunks not written.", skipped),
    ]


def _one(value: float) -> Rows:
    return {(): value}


def _tiers(dram: float, ssd: float) -> Rows:
    return _by("tier", {Tier.DRAM.value: dram, Tier.SSD.value: ssd})


def _by(label: str, values: Mapping[str, float]) -> Rows:
    """Samples by one label. Counters have one of every known value, 0 at first: Prometheus would
    not see the increase from no sample to the first count."""
    return {((label, name),): value for name, value in sorted(values.items())}


def prometheus_text(stats: StoreStats) -> str:
    """All families, in Prometheus's text format."""
    return "".join(f"{line}\n" for family in families(stats) for line in family.lines())


class MetricsServer:
    """An HTTP server that answers ``GET /metrics``; created by ``start``.

    Args:
        stats: reads a store's counters; thread-safe.
    """

    def __init__(self, stats: Callable[[], StoreStats]) -> None:
        self._stats = stats
        self._num_open = 0
        self._server: asyncio.Server | None = None
        self._loop = IoLoop("store-metrics", lambda *_: None, self._failed)

    @classmethod
    def start(cls, stats: Callable[[], StoreStats], host: str, port: int) -> MetricsServer:
        """Start to listen.

        Raises:
            OSError: the host or port can't be bound.
        """
        server = cls(stats)
        try:
            server._loop.run(server._listen(host, port), START_TIMEOUT_S)
        except BaseException:
            server.close()
            raise
        return server

    @property
    def port(self) -> int:
        """The TCP port of the listener."""
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        """Close the listener. Idempotent."""
        if self._server is not None:
            with contextlib.suppress(FutureTimeout):
                self._loop.run(self._close_server(self._server), CLOSE_TIMEOUT_S)
            self._server = None
        self._loop.close()

    async def _listen(self, host: str, port: int) -> None:
        self._server = await asyncio.start_server(self._serve, host, port, limit=MAX_HEAD_BYTES)

    async def _close_server(self, server: asyncio.Server) -> None:
        server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_open += 1
        try:
            if self._num_open <= MAX_CONNECTIONS:
                async with timeout(REQUEST_TIMEOUT_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(self._answer(head))
                    await writer.drain()
        except (OSError, TimeoutError, asyncio.TimeoutError, EOFError, asyncio.LimitOverrunError):
            pass  # the client sent no request, or has disconnected
        finally:
            self._num_open -= 1
            writer.close()

    def _answer(self, head: bytes) -> bytes:
        words = head.split(b"\r\n", 1)[0].split(b" ")
        if len(words) == 3 and words[0] == b"GET" and words[1].split(b"?")[0] == b"/metrics":
            body, status = prometheus_text(self._stats()).encode(), b"200 OK"
        else:
            body, status = b"not found, try GET /metrics\n", b"404 Not Found"
        kind = b"text/plain; version=0.0.4; charset=utf-8"
        return (
            b"HTTP/1.1 %b\r\nContent-Type: %b\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b"
            % (status, kind, len(body), body)
        )

    def _failed(self, error: ConnectorDead) -> None:
        """The server's loop has failed. Ignored: the store serves on without metrics."""
