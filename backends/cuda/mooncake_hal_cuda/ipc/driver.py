"""The CUDA side of an endpoint: its device, its registered memory, and the peers it dials."""

from __future__ import annotations

import os
import threading

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
from mooncake_hal.transport import EndpointOptions, MemoryRegion
from mooncake_hal.transports.control.session import Session
from mooncake_hal.transports.control.table import AttachedRegions
from mooncake_hal.transports.handshake import encode
from mooncake_hal_cuda.copying.copier import BETWEEN, WITHIN, Copier, MakeCopier
from mooncake_hal_cuda.copying.worker import Worker
from mooncake_hal_cuda.ipc.descriptors import send_descriptor
from mooncake_hal_cuda.ipc.facts import (
    NAME,
    VERSION,
    EndpointFacts,
    RegionName,
    decode_call,
    decode_facts,
    own_facts,
    why_unreachable,
)
from mooncake_hal_cuda.ipc.mappings import Mappings
from mooncake_hal_cuda.ipc.peer import IpcPeer
from mooncake_hal_cuda.sharing.devices import DeviceSharing
from mooncake_hal_cuda.sharing.virtual import HandleType


class IpcDriver:
    """See ``mooncake_hal.transports.control.endpoint.Driver``.

    Args:
        sharing: the hardware, and how its memory is shared.
        options: how to open the endpoint; ``device`` must be one of CUDA.
        local: the endpoint's own regions.
        make_copier: another one only in tests.

    Raises:
        TransportUnavailable: the device is not one of CUDA, or can't be used.
    """

    name = NAME
    version = VERSION

    def __init__(
        self,
        sharing: DeviceSharing,
        options: EndpointOptions,
        local: AttachedRegions,
        make_copier: MakeCopier = Copier,
    ) -> None:
        self._sharing = sharing
        self._driver = driver = sharing.driver
        self._index = index = device_index(options.device)
        self._local = local
        self._bases: dict[int, int] = {}
        self._peers: list[IpcPeer] = []
        self._lock = threading.Lock()
        try:
            self._facts = own_facts(driver.uuid(index), sharing.of(index).domain)
        except (DeviceError, CapabilityError) as exc:
            raise TransportUnavailable(NAME, f"{options.device}: {exc}") from exc
        device = torch.device(options.device)
        self._worker = Worker(lambda: make_copier(driver, device, index))

    def facts(self) -> bytes:
        """See ``Driver``."""
        return encode(self._facts)

    def unreachable(self, facts: bytes) -> str | None:
        """See ``Driver``."""
        return why_apart(self._sharing, self._facts, decode_facts(facts))

    def attach(self, key: int, region: MemoryRegion) -> bytes:
        """See ``Driver``: names the allocation around the region, in every way that it has."""
        index = device_index(region.device)
        try:
            self._driver.bind(index)
            base, nbytes = self._driver.allocation_of(region.address)
            name = self._name(base, nbytes, region.address - base)
        except DeviceError as exc:
            raise TransportUnavailable(
                NAME, f"memory of {region.device} can't be shared, was it allocated whole? {exc}"
            ) from exc
        with self._lock:
            self._bases[key] = base
        return encode(name)

    def detach(self, key: int) -> None:
        """See ``Driver``."""
        with self._lock:
            self._bases.pop(key, None)
            peers = list(self._peers)
        for peer in peers:
            peer.withdraw(key)

    def answer(self, session: Session, payload: bytes) -> bytes:
        """See ``Driver``: sends descriptors of live regions."""
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

    def departed(self, session: Session) -> None:
        """See ``Driver``: nothing is held for a peer."""

    def dial(self, session: Session, facts: bytes, timeout: float) -> IpcPeer:
        """See ``Driver``. Maps what the peer has registered, to fail here and not later.

        Raises:
            TransportUnavailable: the devices have no peer access.
        """
        theirs = decode_facts(facts)
        mappings = Mappings(self._sharing, self._index, session, self._facts, theirs)
        try:
            for key, region, attachment in session.regions.items():
                _map_if_live(session, mappings, (key, region.address, attachment), timeout)
        except TransferError:
            mappings.close()
            raise
        route = WITHIN if theirs.device == self._facts.device else BETWEEN
        peer = IpcPeer(session, self._local, self._worker, mappings, route)
        with self._lock:
            self._peers = [known for known in self._peers if not known.closed] + [peer]
        return peer

    def close(self) -> None:
        """See ``Driver``."""
        self._worker.close()

    def _name(self, base: int, nbytes: int, offset: int) -> RegionName:
        types = self._sharing.virtual.handle_types(base)
        if types is None:
            return RegionName(offset, nbytes, ipc=self._driver.export(base))
        if not types:
            raise DeviceError("it was made without a way to share it")
        fabric = b""
        if HandleType.FABRIC in types:
            fabric = self._sharing.virtual.export_fabric(base)
        return RegionName(
            offset,
            nbytes,
            fabric=fabric,
            has_descriptor=HandleType.POSIX_FILE_DESCRIPTOR in types,
        )


def why_apart(sharing: DeviceSharing, ours: EndpointFacts, theirs: EndpointFacts) -> str | None:
    """Say why our device does not reach the peer's memory, or None."""
    return why_unreachable(ours, theirs) or sharing.why_no_access(ours.device, theirs.device)


def _map_if_live(
    session: Session, mappings: Mappings, region: tuple[int, int, bytes], timeout: float
) -> None:
    """Map a (key, start, attachment); one that is revoked while it is asked for is no error."""
    try:
        mappings.base(*region)
    except (PeerLost, TransferTimeout, TransportUnavailable):
        raise
    except TransferError:
        session.barrier(timeout)  # what the peer has revoked we know after this
        if region[0] in (key for key, _, _ in session.regions.items()):
            raise


def device_index(device: str) -> int:
    """The number in ``"cuda:1"``.

    Raises:
        TransportUnavailable: it is no device of CUDA.
    """
    kind, _, number = device.partition(":")
    if kind != "cuda" or not (number or "0").isdigit():
        raise TransportUnavailable(NAME, f"it moves memory of cuda devices, not of {device}")
    return int(number or "0")
