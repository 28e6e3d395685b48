"""The ``staged`` transport: moves memory of any device by way of pinned host memory.

Each side copies pieces of its device's memory to or from a pinned staging buffer, with the host
copies that its backend offers. An inner transport moves the buffers' content between the two hosts:
rdma if both have it, otherwise tcp. So NPUs, GPUs and CPUs can exchange KV even if no other
transport connects them. A side without a device needs no staging: the inner transport accesses its
memory directly. Such a side offers this transport besides others at the cost of open ports only:
its memory is not registered with the inner transport until a peer connects.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache

from mooncake_hal.errors import (
    BackendUnavailable,
    DeviceError,
    TransferError,
    TransportUnavailable,
)
from mooncake_hal.host_copies import Addresses, HostCopier, HostCopies
from mooncake_hal.negotiation import OpenedTransport, Transports
from mooncake_hal.registry import Registry
from mooncake_hal.session.authentication import encode
from mooncake_hal.session.regions import AttachedRegions
from mooncake_hal.session.session import Session
from mooncake_hal.transport import Endpoint, EndpointOptions, MemoryRegion, Transport
from mooncake_hal.transports.copy_worker import CopyWorker
from mooncake_hal.transports.rdma import rdma_plugin
from mooncake_hal.transports.session_endpoint import compare_addresses, open_endpoint
from mooncake_hal.transports.staged.staged_peer import (
    StagedPath,
    StagedPeer,
    StagingBuffer,
    open_staging,
)
from mooncake_hal.transports.staged.staged_protocol import (
    LIMITS,
    NAME,
    VERSION,
    Gather,
    OpenStaging,
    StagedEndpointInfo,
    StagingOpened,
    decode_call,
    decode_endpoint,
)
from mooncake_hal.transports.tcp import tcp_plugin

logger = logging.getLogger(__name__)

TCP, RDMA = "tcp", "rdma"

FindHostCopies = Callable[[str], HostCopies]
"""Returns the host copies of a device, given its name, such as ``"npu:0"``; raises
BackendUnavailable or DeviceError."""


@dataclass(frozen=True, slots=True)
class InnerTransport:
    """A transport that may move host memory between the two sides; the one with the highest
    priority that both have is used."""

    transport: Transport
    priority: int


class StagedTransport:
    """Stages transfers in pinned host memory on the sides that have a device.

    Args:
        find_copies: returns the host copies of an endpoint's device.
        inner: the inner transports by name, including tcp.
    """

    name = NAME
    can_revoke = True
    stops_writes_on_failure = False  # the peer may still have to execute a Scatter of it

    def __init__(self, find_copies: FindHostCopies, inner: Mapping[str, InnerTransport]) -> None:
        self._find_copies = find_copies
        self._inner = inner

    def open(self, options: EndpointOptions) -> Endpoint:
        """``options.extra`` has the settings of tcp. The inner endpoints use free ports of their
        own."""
        local = AttachedRegions("this side")
        copies = self._copies_of(options.device)
        inner = self._open_inner(options)
        data_path = StagedDataPath(copies, inner, options.device, local)
        variants = [
            f"{VERSION} {name} {variant}"
            for name, constraints in inner.constraints.items()
            for variant in constraints.variants
        ]
        return open_endpoint(data_path, local, options, variants=variants)

    def reaches(self, local: bytes, remote: bytes) -> str | None:
        return compare_addresses(
            (local, remote), NAME, VERSION, decode_endpoint, self._unreachable_reason
        )

    def _unreachable_reason(
        self, ours: StagedEndpointInfo, theirs: StagedEndpointInfo
    ) -> str | None:
        reasons = []
        for name in sorted(set(ours.inner) & set(theirs.inner) & set(self._inner)):
            reason = self._inner[name].transport.reaches(ours.inner[name], theirs.inner[name])
            if reason is None:
                return None
            reasons.append(f"{name}: {reason}")
        return "; ".join(reasons) or "no inner transport in common"

    def _copies_of(self, device: str) -> HostCopies | None:
        if device == "cpu":
            return None
        try:
            return self._find_copies(device)
        except (BackendUnavailable, DeviceError) as exc:
            raise TransportUnavailable(NAME, str(exc)) from exc

    def _open_inner(self, options: EndpointOptions) -> Transports:
        """Open the inner endpoints: tcp is required, the others are used if they are available."""
        opened = []
        with ExitStack() as undo:
            for name, inner in self._inner.items():
                is_needed = name == TCP
                extra = options.extra if is_needed else {}
                wanted = replace(options, device="cpu", port=0, extra=extra)
                try:
                    endpoint = inner.transport.open(wanted)
                except TransportUnavailable as exc:
                    if is_needed:
                        raise
                    logger.info("%s does not use %s: %s", NAME, name, exc.reason)
                    continue
                undo.callback(endpoint.close)
                opened.append(OpenedTransport(inner.transport, endpoint, inner.priority))
            undo.pop_all()
        return Transports(opened)


def load() -> StagedTransport:
    """Construct the transport."""
    inner = {TCP: InnerTransport(tcp_plugin.load(), tcp_plugin.PRIORITY)}
    if rdma_plugin.probe().ok:
        try:
            inner[RDMA] = InnerTransport(rdma_plugin.load(), rdma_plugin.PRIORITY)
        except TransportUnavailable as exc:
            logger.warning("%s uses tcp instead of rdma: %s", NAME, exc)
    return StagedTransport(lambda device: _installed().host_copies(device), inner)


@cache
def _installed() -> Registry:
    """The installed plugins, discovered once and not for every endpoint."""
    return Registry.discover()


class NullCopier:
    """The copier of a side without a device, whose memory the inner transport accesses directly."""

    def gather(self, addresses: Addresses, nbytes: Addresses, host: int) -> None:
        raise DeviceError("host memory is not copied by a device")

    def scatter(self, host: int, addresses: Addresses, nbytes: Addresses) -> None:
        raise DeviceError("host memory is not copied by a device")

    def drain(self) -> None:
        pass

    def close(self) -> None:
        pass


class HostRegions:
    """Regions of host memory, which are registered with the inner endpoints only once a connection
    exists, since registration with a NIC pins memory. Thread-safe.

    Args:
        inner: the open inner endpoints.
    """

    def __init__(self, inner: Transports) -> None:
        self._inner = inner
        self._regions: dict[int, MemoryRegion] = {}
        self._inner_keys: dict[int, dict[str, int]] = {}
        self._is_exposed = False
        self._lock = threading.Lock()

    def add(self, key: int, region: MemoryRegion) -> None:
        """Add a region."""
        with self._lock:
            if self._is_exposed:
                self._inner_keys[key] = self._inner.register_where_possible(region)
            self._regions[key] = region

    def expose(self) -> frozenset[str]:
        """Register all present and future regions with the inner endpoints. Idempotent. Returns the
        names of the inner endpoints that have registered all present ones."""
        with self._lock:
            for key, region in self._regions.items():
                if key not in self._inner_keys:
                    self._inner_keys[key] = self._inner.register_where_possible(region)
            self._is_exposed = True
            return frozenset(self._inner.names).intersection(*self._inner_keys.values())

    def remove(self, key: int) -> None:
        """Remove a region, and revoke it at the inner endpoints; does nothing if there is none with
        that key."""
        with self._lock:
            self._regions.pop(key, None)
            inner_keys = self._inner_keys.pop(key, None)
        if inner_keys is not None:
            self._inner.revoke(inner_keys)


@dataclass(frozen=True, slots=True)
class _PeerStaging:
    """Resources of a peer that connected to us: its staging buffer and copier on our side."""

    staging: StagingBuffer
    copier: HostCopier


class StagedDataPath:
    """Data path of a staged endpoint: its inner endpoints, and the copies that peers request.

    Args:
        copies: host copies of the regions' device; None if the regions are host memory.
        inner: the open inner endpoints.
        device: the device of all regions.
        local: the endpoint's own regions.
    """

    name = NAME
    version = VERSION

    def __init__(
        self,
        copies: HostCopies | None,
        inner: Transports,
        device: str,
        local: AttachedRegions,
    ) -> None:
        self._copies = copies
        self._device = device
        self._local = local
        self._inner = inner
        self._host = HostRegions(inner)
        self._served: dict[Session, _PeerStaging] = {}
        self._peers: list[StagedPeer] = []
        self._lock = threading.Lock()
        if copies is not None:  # so that what a copier compiles is ready before the first transfer
            CopyWorker(copies.copier).close()

    def info(self) -> bytes:
        return encode(StagedEndpointInfo(self._inner.addresses))

    def unreachable_reason(self, info: bytes) -> str | None:
        theirs = set(decode_endpoint(info).inner)
        if theirs & set(self._inner.names):
            return None
        return f"inner transports are {self._inner.names} here, {sorted(theirs)} there"

    def attach(self, key: int, region: MemoryRegion) -> bytes:
        """Host memory is registered with the inner endpoints once a peer is connected."""
        if region.device != self._device:
            raise TransportUnavailable(
                NAME, f"this endpoint was opened for {self._device}, not for {region.device}"
            )
        if self._copies is None:
            self._host.add(key, region)
        return b""

    def detach(self, key: int) -> None:
        """Peers' requests are served under the lock, so that they don't access the region after
        this."""
        with self._lock:
            peers = list(self._peers)
        for peer in peers:
            peer.withdraw(key)
        self._host.remove(key)

    def handle_request(self, session: Session, payload: bytes) -> bytes:
        """Copies only to and from regions that are registered at that moment."""
        call = decode_call(payload)
        with self._lock:
            if isinstance(call, OpenStaging):
                return self._open(session)
            if session not in self._served:
                raise TransferError(f"{NAME}: the staging buffer must be opened first")
            served = self._served[session]
            addresses, nbytes = LIMITS.read_pieces(call.slot, call.pieces)
            self._local.locate(addresses, nbytes)
            move = served.staging.gather if isinstance(call, Gather) else served.staging.scatter
            move(served.copier, addresses, nbytes, call.slot)
        return b""

    def session_ended(self, session: Session) -> None:
        with self._lock:
            served = self._served.pop(session, None)
        if served is not None:
            served.copier.close()
            served.staging.close()

    def connect(self, session: Session, info: bytes, timeout: float) -> StagedPeer:
        with ExitStack() as undo:
            ours, usable = self._prepare()
            if ours is not None:
                undo.callback(ours.close)
            theirs = open_staging(session)
            offered = {name: at for name, at in theirs.inner.items() if name in usable}
            inner = self._inner.connect(offered, timeout=timeout).peer
            undo.callback(inner.close)
            worker: CopyWorker[HostCopier] = CopyWorker(
                NullCopier if self._copies is None else self._copies.copier
            )
            undo.pop_all()
        path = StagedPath(inner, ours, theirs.address)
        peer = StagedPeer(session, self._local, worker, path)
        with self._lock:
            self._peers = [known for known in self._peers if not known.closed] + [peer]
        return peer

    def close(self) -> None:
        self._inner.close()

    def _open(self, session: Session) -> bytes:
        if session in self._served:
            raise TransferError(f"{NAME}: the staging buffer is already open")
        staging, usable = self._prepare()
        inner = {name: at for name, at in self._inner.addresses.items() if name in usable}
        if staging is None or self._copies is None:
            return encode(StagingOpened(None, inner))
        with ExitStack() as undo:
            undo.callback(staging.close)
            self._served[session] = _PeerStaging(staging, self._copies.copier())
            undo.pop_all()
        return encode(StagingOpened(staging.address, inner))

    def _prepare(self) -> tuple[StagingBuffer | None, frozenset[str]]:
        """Register this side's memory with the inner endpoints: a new staging buffer, which is
        returned, or the host memory's regions. Also returns the names of the inner endpoints that
        could register it, over which alone this connection's KV can move."""
        if self._copies is not None:
            staging = StagingBuffer.allocate(self._copies, self._inner)
            return staging, staging.inner
        return None, self._host.expose()
