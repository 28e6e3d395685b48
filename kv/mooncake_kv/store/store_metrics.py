"""The Prometheus metrics of a store process: its counters and gauges, at ``/metrics`` of a port.

One thread with an asyncio loop serves the requests, one per connection, with at most
MAX_CONNECTIONS open. The metrics contain no keys or tenants. There is no authentication: every
client that reaches the port may read them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
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
STATS_AGE_S = 0.5
"""Maximum age in seconds of what a request gets: reading the counters holds the store's lock, and
every client that reaches the port may ask for them as often as it can."""

STORE_PREFIX = "mooncake_store_"
_PUT_REFUSALS = tuple(each.value for each in PutRefusal if each is not PutRefusal.UNREACHABLE)
_LOAD_REFUSALS = tuple(name for name in _PUT_REFUSALS if name != PutRefusal.LOW_VALUE.value)

_HELP = {
    "capacity_bytes": "Bytes of memory (dram) and of SSDs that the store may fill, by tier.",
    "used_bytes": "Bytes that are not free now, by tier; of memory also those being written and in "
    "quarantine.",
    "chunks": "Chunks stored now, by tier; one may be in both.",
    "staging_chunks": "Chunks being written to memory now, by clients or by loads from SSDs.",
    "pins": "Read handles in force now, of clients and of writes to SSDs, each of which keeps a "
    "chunk from eviction.",
    "quarantine_bytes": "Bytes of freed memory not reused yet, since a client past its deadline "
    "might still access them.",
    "leaked_bytes": "Bytes of memory held now by writers that are past their deadline, or gone, "
    "and have not ended their write.",
    "probed_keys_total": "Chunks that clients have looked up.",
    "hits_total": "Chunks that clients asked to read and got a handle for, by tier.",
    "misses_total": "Chunks that clients asked to read and got no handle for.",
    "read_bytes_total": "Bytes of the chunks that clients got a handle for.",
    "puts_total": "Chunks put in memory by clients, or by loads from SSDs.",
    "put_bytes_total": "Bytes of the chunks put in memory by clients, or by loads from SSDs.",
    "aborted_puts_total": "Writes of chunks to memory that were given up, or that missed their "
    "deadline.",
    "refused_puts_total": "Chunks of clients that got no memory to be written to, by reason: "
    "present (stored already), staging (being written), no_space, over_quota, too_large, low_value "
    "(a copy worth less than what it would evict).",
    "evictions_total": "Chunks evicted from memory, by reason: room (for others), copy (of another "
    "store's chunk), quota (of a tenant), drop (by a client).",
    "leaked_handles_total": "Handles that clients had not given back by their deadline, by kind: "
    "read or write.",
    "invalid_reads_total": "Reads whose handle was not in force any more when they ended: clients "
    "drop the bytes.",
    "ssd_written_bytes_total": "Bytes of records written to SSDs.",
    "ssd_write_limit_bytes_per_day": "Bytes that may be written to all SSDs per day; absent "
    "without a limit.",
    "ssd_write_budget_bytes": "Bytes that the limit per day allows to write to SSDs now; absent "
    "without a limit.",
    "ssd_read_bytes_total": "Bytes of records read from SSDs.",
    "ssd_corrupt_total": "Records on SSDs that failed their checksum, and were removed.",
    "ssd_errors_total": "Reads and writes of SSDs that failed with an I/O error, and files that "
    "could not be read at start.",
    "ssd_hung_drives": "SSDs with an operation past its timeout now, by kind: read or write.",
    "ssd_unscanned_drives": "SSDs whose files have not all been read since the start.",
    "ssd_refused_loads_total": "Chunks on SSDs that got no memory to be loaded to, and so are "
    "misses, by reason: present (but the client has no handle left), staging (being written), "
    "no_space, over_quota, too_large.",
    "ssd_skipped_total": "Chunks not written to SSDs, by reason: first_touch (not used again yet), "
    "budget (of the day), busy, unscanned, hung, full, too_large.",
}
"""What each metric counts, in which unit, and its label's values."""

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
    rows = {
        "capacity_bytes": _tiers(stats.capacity_bytes, stats.ssd_capacity_bytes),
        "used_bytes": _tiers(used, stats.ssd_bytes),
        "chunks": _tiers(stats.num_chunks, stats.ssd_chunks),
        "staging_chunks": _one(stats.num_staging),
        "pins": _one(stats.num_pins),
        "quarantine_bytes": _one(stats.quarantine_bytes),
        "leaked_bytes": _one(stats.abandoned_bytes),
        "probed_keys_total": _one(stats.num_probes),
        "hits_total": _tiers(stats.num_dram_hits, stats.num_ssd_hits),
        "misses_total": _one(stats.num_misses),
        "read_bytes_total": _one(stats.pinned_bytes),
        "puts_total": _one(stats.num_puts),
        "put_bytes_total": _one(stats.put_bytes),
        "aborted_puts_total": _one(stats.num_aborts),
        "refused_puts_total": _by(
            "reason", dict.fromkeys(_PUT_REFUSALS, 0) | stats.num_refused_puts
        ),
        "evictions_total": _by("reason", dict.fromkeys(EVICTION_REASONS, 0) | stats.num_evicted),
        "leaked_handles_total": _by(
            "kind", {"read": stats.num_expired_reads, "write": stats.num_expired_writes}
        ),
        "invalid_reads_total": _one(stats.num_invalid_reads),
        **_ssd_rows(stats),
    }
    return [Family(name, _HELP[name], found) for name, found in rows.items()]


def _ssd_rows(stats: StoreStats) -> dict[str, Rows]:
    hung = {"read": stats.num_ssd_hung_reads, "write": stats.num_ssd_hung_writes}
    skipped = dict.fromkeys(SSD_SKIP_REASONS, 0) | stats.num_ssd_skipped
    refused_loads = dict.fromkeys(_LOAD_REFUSALS, 0) | stats.num_refused_loads
    per_day = stats.ssd_write_bytes_per_day
    return {
        "ssd_written_bytes_total": _one(stats.ssd_written_bytes),
        "ssd_write_limit_bytes_per_day": _one(per_day) if per_day else {},
        "ssd_write_budget_bytes": _one(stats.ssd_budget_bytes) if per_day else {},
        "ssd_read_bytes_total": _one(stats.ssd_read_bytes),
        "ssd_corrupt_total": _one(stats.num_ssd_corrupt),
        "ssd_errors_total": _one(stats.num_ssd_errors),
        "ssd_hung_drives": _by("kind", hung),
        "ssd_unscanned_drives": _one(stats.num_ssd_unscanned),
        "ssd_refused_loads_total": _by("reason", refused_loads),
        "ssd_skipped_total": _by("reason", skipped),
    }


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
        self._text: tuple[float, bytes] | None = None  # the last one, and when it was made
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
        if self._server is not None and self._loop.is_alive:
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
            now = time.monotonic()
            if self._text is None or now - self._text[0] > STATS_AGE_S:
                self._text = now, prometheus_text(self._stats()).encode()
            body, status = self._text[1], b"200 OK"
        else:
            body, status = b"not found, try GET /metrics\n", b"404 Not Found"
        kind = b"text/plain; version=0.0.4; charset=utf-8"
        return (
            b"HTTP/1.1 %b\r\nContent-Type: %b\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b"
            % (status, kind, len(body), body)
        )

    def _failed(self, error: ConnectorDead) -> None:
        """The server's loop has failed. Ignored: the store serves on without metrics."""
