"""The contract of a KV transport: endpoints, peers, spans and transfers.

A transport moves bytes between registered memory of two processes with one-sided reads and
writes. Callers describe the bytes as arrays of spans, never as one Python object per span.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mooncake_hal.port_range import PortRange


class TransferState(Enum):
    """The state of a transfer."""

    PENDING = auto()
    DONE = auto()
    FAILED = auto()


@dataclass(frozen=True, slots=True)
class MemoryRegion:
    """A contiguous piece of memory, on any device.

    Args:
        address: address of the first byte in this process (or on its device).
        nbytes: length in bytes.
        device: ``"cpu"``, or the backend's name for the device, such as ``"cuda:0"``.
        fd: a descriptor that another process of this host can map, if the memory has one (a memfd,
            a VMM handle); owned by the region's allocator.
        fd_offset: offset of the region in the descriptor's file, in bytes.
    """

    address: int
    nbytes: int
    device: str = "cpu"
    fd: int | None = None
    fd_offset: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """The byte ranges of a transfer, as three arrays of equal length; addresses are absolute.

    Args:
        local: [n] uint64, address of each span in this process.
        remote: [n] uint64, address of each span in the peer's address space.
        nbytes: [n] uint64, length of each span in bytes; all greater than zero.
    """

    local: NDArray[np.uint64]
    remote: NDArray[np.uint64]
    nbytes: NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.nbytes)

    @property
    def total_bytes(self) -> int:
        """Sum of the spans' lengths."""
        return int(self.nbytes.sum())


@dataclass(frozen=True, slots=True)
class EndpointOptions:
    """How to open an endpoint.

    Args:
        host: address to listen on; loopback unless the operator says otherwise.
        advertise_host: address that peers connect to, if it differs from ``host``.
        port: port to listen on; 0 picks a free one.
        port_range: range from which a free port is picked; None: any port.
        secret: shared secret of all instances of a deployment. A peer must prove that it knows the
            secret before any of its messages is processed. If it is empty, every peer whose secret
            is also empty is accepted.
        allow_no_secret: whether to listen on addresses other than loopback without a secret.
        device: the device whose memory will be registered.
        connections: parallel connections or queue pairs per peer, for transports that have them.
        extra: transport-specific settings by name; unknown names raise.
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
    """One read or write. Several may be in flight per peer; they complete in any order."""

    def poll(self) -> TransferState:
        """Return the transfer's state. Never blocks, and never raises the error of a failed
        transfer."""
        ...

    def wait(self, timeout: float | None = None) -> None:
        """Block until the transfer is done.

        Args:
            timeout: how long to wait, in seconds; None: until the transfer's own deadline.

        Raises:
            TransferError: the transfer failed; the subclass says why. A TransferTimeout caused by
                this call's ``timeout`` leaves the transfer in flight: call ``cancel`` to end it.
        """
        ...

    def cancel(self) -> None:
        """Cancel the transfer and drain it: once this returns, no local byte changes any more.

        Does nothing if the transfer has already completed or failed.
        """
        ...


class Peer(Protocol):
    """A connection to one other endpoint. Methods may be called from any thread."""

    def read(self, spans: Spans, *, timeout: float) -> Transfer:
        """Start copying the remote bytes of every span to its local address.

        Local addresses must lie in regions registered with this endpoint. The spans' arrays must
        not change until the transfer has completed or failed. ``timeout`` is the deadline of the
        whole transfer, in seconds from now.

        Raises:
            RegionUnknown, OutOfBounds: a local span is not in registered memory. ``Transfer.wait``
                raises the same errors for remote spans.
        """
        ...

    def write(self, spans: Spans, *, timeout: float) -> Transfer:
        """Start copying the local bytes of every span to its remote address; see ``read``."""
        ...

    def close(self) -> None:
        """Fail and drain all transfers in flight and close the connection. Idempotent."""
        ...


class Endpoint(Protocol):
    """One process's end of a transport: its registered regions and its connections to peers."""

    @property
    def transport(self) -> str:
        """Name of the transport."""
        ...

    @property
    def address(self) -> bytes:
        """Opaque bytes that peers pass to ``connect``. Constant while the endpoint is open."""
        ...

    @property
    def variants(self) -> tuple[str, ...]:
        """What it speaks: the version of its protocol, with the settings that both ends need alike,
        such as ``"4 tls"``. Endpoints that have none in common can't connect, which is then known
        before they try. Several if it speaks several; empty if that is not known."""
        ...

    def register(self, region: MemoryRegion) -> int:
        """Allow peers to read and write the region; returns its key. Regions may not overlap.

        Peers that are already connected can use the region, too.
        """
        ...

    def revoke(self, key: int) -> None:
        """Revoke a region: once this returns, no peer reads or writes it any more.

        Transfers that this interrupts fail with RegionRevoked at the peer that started them. A
        transport that can't interrupt transfers (see ``Transport.can_revoke``) rejects only new
        ones.
        """
        ...

    def connect(self, address: bytes, *, timeout: float) -> Peer:
        """Connect to the endpoint that published ``address``.

        Raises:
            PeerLost: no process listens there, or it is another epoch of that endpoint.
            AccessDenied: the secrets differ.
            VersionMismatch: the protocol versions differ.
            TransportUnavailable: this transport can't reach the peer.
        """
        ...

    def close(self) -> None:
        """Close all peers, revoke all regions, and release all descriptors and threads.
        Idempotent."""
        ...


class Transport(Protocol):
    """A loaded transport."""

    @property
    def name(self) -> str:
        """The name in the transport's spec."""
        ...

    @property
    def can_revoke(self) -> bool:
        """Whether ``Endpoint.revoke`` interrupts peers' transfers that are in flight."""
        ...

    @property
    def stops_writes_on_failure(self) -> bool:
        """Whether a write stops with its writer: once the transfer has failed, or the writer's
        process has died, no more of its bytes arrive in the peer's memory.

        False if a network or the peer's own process may still hold some of the bytes. The peer must
        then not reuse the memory for as long as the write could have taken.
        """
        ...

    def open(self, options: EndpointOptions) -> Endpoint:
        """Open an endpoint.

        Raises:
            TransportUnavailable: this host lacks something that the transport needs.
            OSError: the host or port can't be bound.
            TransferError: a thread can't be started.
        """
        ...

    def reaches(self, local: bytes, remote: bytes) -> str | None:
        """Return why the endpoints with these two addresses can't reach each other, or None if they
        can.

        Compares only the addresses (same host, same fabric); does not connect.
        """
        ...
