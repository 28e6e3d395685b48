"""Measurement of a transport: bandwidth per shape, CPU time of both processes, latency."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from mooncake_hal.testing.transports_buffers import load_transport, resolve
from mooncake_hal.testing.transports_peer import PeerProcess
from mooncake_hal.transport import EndpointOptions, Spans

GIB = float(1 << 30)
TIMEOUT_S = 120.0
BUFFERS = "mooncake_hal.testing.transports_buffers:"
DEVICES = "mooncake_hal.testing.transports_device:"


@dataclass(frozen=True, slots=True)
class TransferShape:
    """The shape of a transfer.

    Args:
        total_bytes: size of the transfer.
        piece_bytes: size of each piece; if it equals ``total_bytes``, the transfer is one
            contiguous range.
    """

    total_bytes: int
    piece_bytes: int

    @property
    def pieces(self) -> int:
        """Number of pieces."""
        return max(self.total_bytes // self.piece_bytes, 1)

    def spans(self, local: int, remote: int, seed: int = 1) -> Spans:
        """Place the pieces in unrelated random orders on both sides.

        Args:
            local, remote: addresses of the buffers.
            seed: seed of the orders.
        """
        rng = np.random.default_rng(seed)
        here, there = (rng.permutation(self.pieces) * self.piece_bytes for _ in range(2))
        nbytes = np.full(self.pieces, self.piece_bytes, np.uint64)
        return Spans((here + local).astype(np.uint64), (there + remote).astype(np.uint64), nbytes)

    def __str__(self) -> str:
        if self.pieces == 1:
            return f"1 x {_size(self.piece_bytes)}"
        return f"{self.pieces:,} x {_size(self.piece_bytes)}"


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """The measured bandwidth of one shape.

    Args:
        subject: name of the mover.
        operation: ``"read"`` or ``"write"``.
        shape: the transfers' shape.
        gb_per_s: median over the rounds, in 10^9 bytes per second.
        cpu_s_per_gib: CPU seconds of both processes per 2^30 bytes.
        times_s: duration of each round in seconds.
    """

    subject: str
    operation: str
    shape: TransferShape
    gb_per_s: float
    cpu_s_per_gib: float
    times_s: tuple[float, ...]

    def faster_than(self, other: Bandwidth) -> float:
        """Return how many times as fast as ``other``: the median over rounds taken in turns."""
        moved, compared = self.shape.total_bytes, other.shape.total_bytes
        pairs = zip(self.times_s, other.times_s, strict=True)
        return median(theirs / ours for ours, theirs in pairs) * moved / compared


@dataclass(frozen=True, slots=True)
class Latency:
    """How long one small read takes, in microseconds."""

    subject: str
    nbytes: int
    p50_us: float
    p99_us: float


@dataclass(frozen=True, slots=True)
class Mover:
    """Something that moves bytes.

    Args:
        name: of it, in tables.
        prepare: takes a shape and an operation; returns what moves it once.
        other_cpu_s: CPU seconds so far of the processes other than this one that take part.
    """

    name: str
    prepare: Callable[[TransferShape, str], Callable[[], object]]
    other_cpu_s: Callable[[], float]


@contextmanager
def transport_mover(
    name: str, size: int, connections: int, *, mappable: bool, on_devices: bool = False
) -> Iterator[Mover]:
    """Open a transport between this process and a child.

    Args:
        name: name of the transport.
        size: size of the buffer on each side, in bytes.
        connections: see ``EndpointOptions``.
        mappable: whether the memory has a descriptor that the peer can map.
        on_devices: whether to use memory of the default backend's first and second device.

    Raises:
        TransferError: this host can't use the transport.
    """
    transport = load_transport(name)
    host = BUFFERS + ("mappable" if mappable else "anonymous")
    near, far = (f"{DEVICES}first", f"{DEVICES}second") if on_devices else (host, host)
    with ExitStack() as stack:
        buffer = stack.enter_context(closing(resolve(near)(size)))
        options = EndpointOptions(
            secret=b"bench", connections=connections, device=buffer.region.device
        )
        with closing(resolve(far)(1)) as one_byte:
            theirs = replace(options, device=str(one_byte.region.device))
        child = stack.enter_context(PeerProcess(name, far, theirs, size))
        buffer.put(np.ones(size, np.uint8))
        endpoint = transport.open(options)
        stack.callback(endpoint.close)
        endpoint.register(buffer.region)
        peer = endpoint.connect(child.address, timeout=TIMEOUT_S)

        def prepare(shape: TransferShape, operation: str) -> Callable[[], object]:
            spans = shape.spans(buffer.region.address, child.region.address)
            move = peer.read if operation == "read" else peer.write
            return lambda: move(spans, timeout=TIMEOUT_S).wait()

        yield Mover(name, prepare, lambda: float(child.ask(do="cpu")["seconds"]))


def compare(
    movers: Sequence[Mover], shape: TransferShape, operation: str, rounds: int
) -> dict[str, Bandwidth]:
    """Measure movers in turns, so that load on the machine affects all of them; returns results by
    name."""
    moves = {mover.name: mover.prepare(shape, operation) for mover in movers}
    for move in moves.values():
        move()  # warms up connections, page tables and caches
    times: dict[str, list[float]] = {name: [] for name in moves}
    used = dict.fromkeys(moves, 0.0)
    for _ in range(rounds):
        for mover in movers:
            before = own_cpu_s() + mover.other_cpu_s()
            times[mover.name].append(_timed(moves[mover.name]))
            used[mover.name] += own_cpu_s() + mover.other_cpu_s() - before
    moved = shape.pieces * shape.piece_bytes
    return {
        name: Bandwidth(
            name,
            operation,
            shape,
            gb_per_s=moved / median(times[name]) / 1e9,
            cpu_s_per_gib=used[name] / rounds / (moved / GIB),
            times_s=tuple(times[name]),
        )
        for name in moves
    }


def always(mover: Mover, shape: TransferShape, name: str) -> Mover:
    """Return a mover with another name that always moves ``shape``."""
    return Mover(name, lambda _, operation: mover.prepare(shape, operation), mover.other_cpu_s)


def latency(mover: Mover, nbytes: int, rounds: int) -> Latency:
    """Measure single reads of ``nbytes``."""
    move = mover.prepare(TransferShape(nbytes, nbytes), "read")
    times = sorted(_timed(move) for _ in range(rounds))
    return Latency(mover.name, nbytes, times[rounds // 2] * 1e6, times[rounds * 99 // 100] * 1e6)


def own_cpu_s() -> float:
    """CPU seconds of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _timed(move: Callable[[], object]) -> float:
    begun = time.perf_counter()
    move()
    return time.perf_counter() - begun


def _size(nbytes: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:g} {name}"
    return f"{nbytes} B"
