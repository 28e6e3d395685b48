"""The ``cuda_ipc`` transport: KV from GPU to GPU of one host, by mapping the peer's memory."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch

from mooncake_hal.errors import (
    CapabilityError,
    DeviceError,
    PeerLost,
    RegionRevoked,
    TransferError,
    TransferTimeout,
    TransportUnavailable,
)
from mooncake_hal.session.authentication import encode
from mooncake_hal.session.regions import AttachedRegions
from mooncake_hal.session.session import Session
from mooncake_hal.transport import Endpoint, EndpointOptions, MemoryRegion
from mooncake_hal.transports.copy_worker import CopyWorker
from mooncake_hal.transports.session_endpoint import compare_addresses, open_endpoint
from mooncake_hal_cuda.libcuda import CudaDriver
from mooncake_hal_cuda.memory.memory_kinds import DeviceSharing
from mooncake_hal_cuda.memory.virtual_memory import HandleType
from mooncake_hal_cuda.transports.device_copier import (
    BETWEEN,
    WITHIN,
    DeviceCopier,
    MakeCopier,
    SpanCopier,
)
from mooncake_hal_cuda.transports.ipc_peer import IpcPeer, PeerMappings, send_descriptor
from mooncake_hal_cuda.transports.ipc_protocol import (
    NAME,
    VERSION,
    IpcEndpointInfo,
    IpcRegionInfo,
    decode_call,
    decode_endpoint,
    own_endpoint_info,
    unreachable_reason,
)

logger = logging.getLogger(__name__)


class IpcTransport:
    """A transport in which this process copies from and to the peer's mapped memory.

    A revoked region accepts no new transfers, but a copy that has started is not stopped.

    Args:
        sharing: the driver, and the memory kind of each device.
        make_copier: makes copiers; replaced only in tests.
    """

    name = NAME
    can_revoke = False
    stops_writes_on_failure = False  # a device may still be copying after its process was killed

    def __init__(self, sharing: DeviceSharing, make_copier: MakeCopier = DeviceCopier) -> None:
        self._sharing = sharing
        self._make_copier = make_copier

    def open(self, options: EndpointOptions) -> Endpoint:
        if options.extra:
            raise ValueError(f"{NAME} has no extra settings, got {sorted(options.extra)}")
        local = AttachedRegions("this side")
        driver = IpcDataPath(self._sharing, options, local, self._make_copier)
        return open_endpoint(driver, local, options)

    def reaches(self, local: bytes, remote: bytes) -> str | None:
        compare = partial(unmappable_reason, self._sharing)
        return compare_addresses((local, remote), NAME, VERSION, decode_endpoint, compare)


def load() -> IpcTransport:
    """Load the driver and construct the transport.

    Raises:
        TransportUnavailable: the driver does not load.
    """
    try:
        return IpcTransport(DeviceSharing(CudaDriver()))
    except DeviceError as exc:
        raise TransportUnavailable(NAME, str(exc)) from exc


class IpcDataPath:
    """The data path of an endpoint: its device, its registered memory, and the peers that it
    connects to.

    Args:
        sharing: the driver, and the memory kind of each device.
        options: options of the endpoint; ``device`` must be a CUDA device.
        local: the endpoint's own regions.
        make_copier: makes copiers; replaced only in tests.

    Raises:
        TransportUnavailable: the device is not a CUDA device, or can't be used.
    """

    name = NAME
    version = VERSION

    def __init__(
        self,
        sharing: DeviceSharing,
        options: EndpointOptions,
        local: AttachedRegions,
        make_copier: MakeCopier = DeviceCopier,
    ) -> None:
        self._sharing = sharing
        self._driver = driver = sharing.driver
        self._index = index = device_index(options.device)
        self._local = local
        self._bases: dict[int, int] = {}
        self._peers: list[IpcPeer] = []
        self._lock = threading.Lock()
        try:
            self._info = own_endpoint_info(driver.uuid(index), sharing.of(index).domain)
        except (DeviceError, CapabilityError) as exc:
            raise TransportUnavailable(NAME, f"{options.device}: {exc}") from exc
        device = torch.device(options.device)
        self._make_copier: Callable[[], SpanCopier] = partial(make_copier, driver, device, index)
        # compiles the copy kernels before the first transfer
        CopyWorker(self._make_copier).close()

    def info(self) -> bytes:
        return encode(self._info)

    def unreachable_reason(self, info: bytes) -> str | None:
        return unmappable_reason(self._sharing, self._info, decode_endpoint(info))

    def attach(self, key: int, region: MemoryRegion) -> bytes:
        """Describe the allocation that contains the region, with all of its handles."""
        index = device_index(region.device)
        try:
            self._driver.bind(index)
            base, nbytes = self._driver.allocation_of(region.address)
            offset = region.address - base
            # of memory that is mapped in pieces (torch's expandable segments, other allocators) the
            # driver reports one piece, and only that one has the handles
            if offset + region.nbytes > nbytes:
                raise DeviceError(f"{region.nbytes} bytes at {offset} of an allocation of {nbytes}")
            name = self._name(base, nbytes, offset)
        except DeviceError as exc:
            raise TransportUnavailable(
                NAME, f"memory of {region.device} can't be shared, was it allocated whole? {exc}"
            ) from exc
        with self._lock:
            self._bases[key] = base
        return encode(name)

    def detach(self, key: int) -> None:
        with self._lock:
            self._bases.pop(key, None)
            peers = list(self._peers)
        for peer in peers:
            peer.withdraw(key)

    def handle_request(self, session: Session, payload: bytes) -> bytes:
        """Send a descriptor of a live region to a peer that asks for it."""
        call = decode_call(payload)
        with self._lock:
            base = self._bases.get(call.key)
        if base is None:
            raise RegionRevoked(f"{NAME}: there is no region {call.key} to send a descriptor of")
        self._driver.bind(self._index)
        descriptor = self._sharing.virtual.export_descriptor(base)
        try:
            send_descriptor(call.mailbox, call.token, descriptor)
        finally:
            os.close(descriptor)
        return b""

    def session_ended(self, session: Session) -> None:
        pass  # no resources are held per peer

    def connect(self, session: Session, info: bytes, timeout: float) -> IpcPeer:
        """Map all regions of the peer, so that errors occur here and not in a transfer.

        Raises:
            TransportUnavailable: the devices have no peer access.
        """
        theirs = decode_endpoint(info)
        mappings = PeerMappings(self._sharing, self._index, session, self._info, theirs)
        with ExitStack() as undo:
            undo.callback(mappings.close)
            for key, region, attachment in session.regions.items():
                _map_if_live(session, mappings, key, region.address, attachment, timeout)
            worker = CopyWorker(self._make_copier)
            undo.pop_all()
        route = WITHIN if theirs.device == self._info.device else BETWEEN
        peer = IpcPeer(session, self._local, worker, mappings, route)
        with self._lock:
            self._peers = [known for known in self._peers if not known.closed] + [peer]
        return peer

    def close(self) -> None:
        pass  # each peer has closed its own worker

    def _name(self, base: int, nbytes: int, offset: int) -> IpcRegionInfo:
        types = self._sharing.virtual.handle_types(base)
        if types is None:
            return IpcRegionInfo(offset, nbytes, ipc=self._driver.export(base))
        if not types:
            raise DeviceError("it was made without a way to share it")
        fabric, has_descriptor = b"", HandleType.POSIX_FILE_DESCRIPTOR in types
        if HandleType.FABRIC in types:
            try:
                fabric = self._sharing.virtual.export_fabric(base)
            except DeviceError as exc:
                if not has_descriptor:
                    raise
                logger.warning("other hosts can't map memory of cuda:%d: %s", self._index, exc)
        return IpcRegionInfo(offset, nbytes, fabric=fabric, has_descriptor=has_descriptor)


def unmappable_reason(
    sharing: DeviceSharing, ours: IpcEndpointInfo, theirs: IpcEndpointInfo
) -> str | None:
    """The reason why our device can't access the peer's memory, or None."""
    return unreachable_reason(ours, theirs) or sharing.no_access_reason(ours.device, theirs.device)


def _map_if_live(
    session: Session,
    mappings: PeerMappings,
    key: int,
    start: int,
    attachment: bytes,
    timeout: float,
) -> None:
    """Map a region; do nothing if the peer revokes it meanwhile."""
    try:
        mappings.base(key, start, attachment)
    except (PeerLost, TransferTimeout, TransportUnavailable):
        raise
    except TransferError:
        session.barrier(timeout)  # afterwards, all earlier revocations have been received
        if key in (live for live, _, _ in session.regions.items()):
            raise


def device_index(device: str) -> int:
    """The device index in a name such as ``"cuda:1"``.

    Raises:
        TransportUnavailable: the device is not a CUDA device.
    """
    kind, _, number = device.partition(":")
    if kind != "cuda" or not (number or "0").isdigit():
        raise TransportUnavailable(NAME, f"it moves memory of cuda devices, not of {device}")
    return int(number or "0")
