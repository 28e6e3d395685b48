"""The contract of a KV transport: endpoints, peers, spans and transfers.

A transport moves bytes between registered memory of two processes with one-sided reads and
writes. What is moved is given as arrays of spans, never as one Python object per piece.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mooncake_hal.port_range import PortRange


class TransferState(Enum):
    """Where a transfer stands."""

    PENDING = auto()
    DONE = auto()
    FAILED = auto()


@dataclass(frozen=True, slots=True)
class MemoryRegion:
    """A contiguous piece of memory, on any device.

    Args:
        address: first byte, as this process (or its device) sees it.
        nbytes: length.
        device: ``"cpu"`` or the backend's name of the device, such as ``"cuda:0"``.
        fd: a descriptor that another process of this host can map, where the memory has one
            (a memfd, a VMM handle); owned by the allocator of the region.
        fd_offset: where in the descriptor's file the region begins, in bytes.
    """

    address: int
    nbytes: int
    device: str = "cpu"
    fd: int | None = None
    fd_offset: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Pieces to move, as three arrays of equal length; addresses are absolute.

    Args:
        local: [n] uint64, where each piece lies in this process.
        remote: [n] uint64, where it lies in the peer, in the peer's own addresses.
        nbytes: [n] uint64, its length; all greater than zero.
    """

    local: NDArray[np.uint64]
    remote: NDArray[np.uint64]
    nbytes: NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.nbytes)

    @property
    def total_bytes(self) -> int:
        """Bytes of all the pieces together."""
        return int(self.nbytes.sum())


@dataclass(frozen=True, slots=True)
class EndpointOptions:
    """How to open an endpoint.

    Args:
        host: address to listen on; loopback unless the operator says otherwise.
        advertise_host: address that peers connect to, when it differs from ``host``.
        port: port to listen on; 0 takes a free one.
        port_range: where to take that from; None: anywhere.
        secret: shared by all instances of a deployment. A peer proves that it knows it before
            anything it says is honoured. Empty accepts every peer of the same (empty) secret.
        allow_no_secret: listen without one on other addresses than loopback.
        device: the device whose memory is going to be registered.
        connections: parallel connections or queue pairs per peer, where that means anything.
        extra: transport-specific settings, by name; unknown names raise.
    """

    host: str = "127.0.0.1"
    advertise_host: str | None = None
    port: int = 0
    port_range: PortRange | None = None
    secret: bytes = b""
    allow_no_secret: bool = False
    device: str = "cpu"
    connections: int = 2
    extra: dict[str, str] = field(default_factory=dict)


class Transfer(Protocol):
    """One read or write in flight. Several may be in flight per peer, in no promised order."""

    def poll(self) -> TransferState:
        """Return where the transfer stands; never blocks, never raises a transfer's failure."""
        ...

    def wait(self, timeout: float | None = None) -> None:
        """Block until the transfer is done.

        Args:
            timeout: seconds to wait here; None waits until the transfer's own deadline.

        Raises:
            TransferError: the subclass says why it failed. TransferTimeout from a ``timeout``
                given here leaves the transfer running; cancel it to end it.
        """
        ...

    def cancel(self) -> None:
        """End the transfer and drain it: when this returns, no more local bytes will change.

        A transfer that has ended already is left as it is.
        """
        ...


class Peer(Protocol):
    """A connection to one other endpoint. Methods may be called from any thread."""

    def read(self, spans: Spans, *, timeout: float) -> Transfer:
        """Start copying the remote bytes of every span to its local address.

        Local addresses must lie in regions registered with this endpoint. The spans' arrays
        must not change until the transfer has ended. ``timeout`` is in seconds, for all of it.

        Raises:
            RegionUnknown, OutOfBounds: a local span is not in registered memory. The same
                failures on the remote side come out of ``Transfer.wait``.
        """
        ...

    def write(self, spans: Spans, *, timeout: float) -> Transfer:
        """Start copying the local bytes of every span to its remote address; see ``read``."""
        ...

    def close(self) -> None:
        """Fail what is in flight (drained) and give up the connection. Idempotent."""
        ...


class Endpoint(Protocol):
    """One process's end of a transport: what it registered, and whom it is connected to."""

    @property
    def transport(self) -> str:
        """Name of the transport."""
        ...

    @property
    def address(self) -> bytes:
        """Opaque bytes to publish; a peer connects with them. Constant while open."""
        ...

    def register(self, region: MemoryRegion) -> int:
        """Let peers read and write the region; returns its key. Regions may not overlap.

        Regions registered after a peer connected are visible to that peer too.
        """
        ...

    def revoke(self, key: int) -> None:
        """Withdraw a region: when this returns, no peer reads or writes it any more.

        A transfer cut off by it fails with RegionRevoked at its owner. Where the transport
        can't enforce it (see ``Transport.can_revoke``), only new transfers are refused.
        """
        ...

    def connect(self, address: bytes, *, timeout: float) -> Peer:
        """Connect to the endpoint that published ``address``.

        Raises:
            PeerLost: nothing listens there, or it is another epoch of that endpoint.
            AccessDenied: the secrets differ.
            VersionMismatch: the protocols differ.
            TransportUnavailable: the peer is out of this transport's reach.
        """
        ...

    def close(self) -> None:
        """Close all peers, withdraw all regions, free every descriptor and thread. Idempotent."""
        ...


class Transport(Protocol):
    """A loaded transport."""

    @property
    def name(self) -> str:
        """The spec's name."""
        ...

    @property
    def can_revoke(self) -> bool:
        """Whether ``Endpoint.revoke`` stops a peer's transfers that are already in flight."""
        ...

    @property
    def ends_writes(self) -> bool:
        """Whether a write ends with its writer: once its transfer has failed, or its process has
        died, none of its bytes arrives in the peer's memory any more.

        False where a network or the peer's own process may still hold some: the peer has to keep
        its memory to itself for as long as the write could have taken.
        """
        ...

    def open(self, options: EndpointOptions) -> Endpoint:
        """Open an endpoint.

        Raises:
            TransportUnavailable: this host lacks what the transport needs.
            OSError: the host or port can't be bound.
        """
        ...

    def reaches(self, local: bytes, remote: bytes) -> str | None:
        """Say why the two endpoint addresses can't reach each other, or None if they can.

        Looks only at the addresses (same host, same fabric); does not connect.
        """
        ...
