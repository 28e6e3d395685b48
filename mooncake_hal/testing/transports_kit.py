"""What all suites of transports share: a pair of connected endpoints, buffers, and comparisons."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mooncake_hal.testing.transports_buffers import (
    Buffer,
    ScatteredPieces,
    load_transport,
    resolve,
)
from mooncake_hal.transport import Endpoint, EndpointOptions, MemoryRegion, Peer, Spans, Transport

KIB = 1024
MIB = 1024 * KIB


@contextmanager
def raises(*kinds: type[Exception]) -> Iterator[None]:
    """Check that the body raises one of ``kinds``, with a message."""
    try:
        yield
    except kinds as exc:
        require_message(exc)
        return
    raise AssertionError(f"none of {[kind.__name__ for kind in kinds]} was raised")


def one_span(local: int, remote: int, nbytes: int) -> Spans:
    """Return a single piece as Spans."""
    return Spans(*(np.array([value], np.uint64) for value in (local, remote, nbytes)))


def stripes(num_tokens: int, nbytes: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the offsets of one rank's tokens: packed, and interleaved with another rank's."""
    dense = np.arange(num_tokens, dtype=np.int64) * nbytes
    return dense, 2 * dense + nbytes


@dataclass(slots=True)
class Pair:
    """Two connected endpoints of one process, with a registered buffer each."""

    near: Endpoint
    far: Endpoint
    peer: Peer
    here: Buffer
    there: Buffer
    key_here: int
    key_there: int

    def whole(self, nbytes: int) -> Spans:
        """Return a single span: the first ``nbytes`` of both buffers."""
        return one_span(self.here.region.address, self.there.region.address, nbytes)

    def spans(self, pieces: ScatteredPieces) -> Spans:
        """Return pieces as addresses of this pair's buffers."""
        return pieces.spans(self.here.region, self.there.region)


class TransportKit:
    """What the suites need to know about a transport; subclasses set the class attributes.

    Args:
        loader: ``"package.module:callable"`` that returns the transport.
        allocator: ``"package.module:callable"`` that takes a size and returns a Buffer.
        timeout: seconds that an ordinary transfer may take on the slowest machine.
        large: size in bytes of a transfer that takes at least several milliseconds; a slow
            transport can use less.
        moves_4_gib: whether to try transfers of more than 4 GiB, which reuse a few MiB of memory;
            False if that would take too long.
        registers_4_gib: whether to try regions of more than 4 GiB, of which a few KiB are used;
            False if the device has less.
        any_region_address: whether a region may begin at any address; False if it must begin at a
            page of the device's memory.
        checks_secret: whether the transport authenticates peers; False for an adapter whose engine
            can't.
        reports_revoked: whether revoked regions have another error than unknown ones.
    """

    loader: ClassVar[str]
    allocator: ClassVar[str] = "mooncake_hal.testing.transports_buffers:anonymous"
    timeout: ClassVar[float] = 30.0
    large: ClassVar[int] = 48 * MIB
    moves_4_gib: ClassVar[bool] = True
    registers_4_gib: ClassVar[bool] = True
    any_region_address: ClassVar[bool] = True
    checks_secret: ClassVar[bool] = True
    reports_revoked: ClassVar[bool] = True

    def setup_method(self) -> None:
        """Start each case with no open endpoints or buffers."""
        self.stack = ExitStack()
        self.rng = np.random.default_rng(7)
        self.transport: Transport = load_transport(self.loader)

    def teardown_method(self) -> None:
        """Close everything that the case opened, newest first."""
        self.stack.close()

    def options(self) -> EndpointOptions:
        """Return the options of the suite's endpoints; override it for another host or device."""
        return EndpointOptions(secret=b"conformance")

    def open(self, **changes: Any) -> Endpoint:
        """Open an endpoint that is closed at the end of the case."""
        endpoint = self.transport.open(replace(self.options(), **changes))
        self.stack.callback(endpoint.close)
        return endpoint

    def buffer(self, nbytes: int) -> Buffer:
        """Allocate a buffer of random bytes that is freed at the end of the case."""
        buffer: Buffer = resolve(self.allocator)(nbytes)
        self.stack.callback(buffer.close)
        buffer.put(self.rng.integers(0, 256, nbytes, np.uint8))
        return buffer

    def pair(
        self, nbytes: int = MIB, part: Callable[[MemoryRegion], MemoryRegion] = lambda whole: whole
    ) -> Pair:
        """Open two connected endpoints with a registered buffer each, or that part of it."""
        here, there = self.buffer(nbytes), self.buffer(nbytes)
        near, far = self.open(), self.open()
        key_here, key_there = near.register(part(here.region)), far.register(part(there.region))
        peer = near.connect(far.address, timeout=self.timeout)
        return Pair(near, far, peer, here, there, key_here, key_there)

    def read(self, peer: Peer, spans: Spans) -> None:
        """Read and wait."""
        peer.read(spans, timeout=self.timeout).wait()

    def write(self, peer: Peer, spans: Spans) -> None:
        """Write and wait."""
        peer.write(spans, timeout=self.timeout).wait()

    def check_moves(self, pair: Pair, pieces: ScatteredPieces) -> None:
        """Read, then write the pieces, and compare both whole buffers after each."""
        spans = pair.spans(pieces)
        here, there = pair.here.get(), pair.there.get()
        self.read(pair.peer, spans)
        expected = pieces.after_read(here, there)
        assert_same(pair.here.get(), expected, "the near buffer after a read")
        assert_same(pair.there.get(), there, "the far buffer after a read")
        fresh = self.rng.integers(0, 256, len(here), np.uint8)
        pair.here.put(fresh)
        self.write(pair.peer, spans)
        assert_same(
            pair.there.get(), pieces.after_write(fresh, there), "the far buffer after a write"
        )
        assert_same(pair.here.get(), fresh, "the near buffer after a write")


def assert_same(found: NDArray[np.uint8], wanted: NDArray[np.uint8], what: str) -> None:
    wrong = np.flatnonzero(found != wanted)
    if len(wrong):
        raise AssertionError(f"{what}: {len(wrong)} bytes differ, the first at {wrong[0]}")


def require_message(error: Exception) -> None:
    if not str(error):
        raise AssertionError(f"{type(error).__name__} says nothing")
