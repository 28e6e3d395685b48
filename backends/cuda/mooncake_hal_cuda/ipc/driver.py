"""The CUDA side of an endpoint: its device, its registered memory, and the peers it dials."""

from __future__ import annotations

import threading

import torch

from mooncake_hal.errors import DeviceError, TransferError, TransportUnavailable
from mooncake_hal.transport import EndpointOptions, MemoryRegion
from mooncake_hal.transports.control.session import Session
from mooncake_hal.transports.control.table import AttachedRegions
from mooncake_hal.transports.handshake import encode
from mooncake_hal_cuda.copying.copier import Copier, MakeCopier
from mooncake_hal_cuda.copying.worker import Worker
from mooncake_hal_cuda.driver import CudaDriver
from mooncake_hal_cuda.ipc.facts import (
    NAME,
    VERSION,
    RegionName,
    decode_facts,
    own_facts,
    process_identity,
    why_unreachable,
)
from mooncake_hal_cuda.ipc.peer import IpcPeer, Mappings


class IpcDriver:
    """See ``mooncake_hal.transports.control.endpoint.Driver``.

    Args:
        driver: of the hardware.
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
        driver: CudaDriver,
        options: EndpointOptions,
        local: AttachedRegions,
        make_copier: MakeCopier = Copier,
    ) -> None:
        self._driver = driver
        self._index = index = device_index(options.device)
        self._local = local
        self._peers: list[IpcPeer] = []
        self._lock = threading.Lock()
        try:
            self._facts = own_facts(driver.uuid(index))
        except DeviceError as exc:
            raise TransportUnavailable(NAME, f"{options.device}: {exc}") from exc
        device = torch.device(options.device)
        self._worker = Worker(lambda: make_copier(driver, device, index))

    def facts(self) -> bytes:
        """See ``Driver``."""
        return encode(self._facts)

    def unreachable(self, facts: bytes) -> str | None:
        """See ``Driver``."""
        return why_unreachable(self._facts, decode_facts(facts))

    def attach(self, key: int, region: MemoryRegion) -> bytes:
        """See ``Driver``: names the allocation around the region."""
        index = device_index(region.device)
        try:
            self._driver.bind(index)
            base, _ = self._driver.allocation_of(region.address)
            return encode(RegionName(self._driver.export(base), region.address - base))
        except DeviceError as exc:
            raise TransportUnavailable(
                NAME, f"memory of {region.device} can't be shared, was it allocated whole? {exc}"
            ) from exc

    def detach(self, key: int) -> None:
        """See ``Driver``."""
        with self._lock:
            peers = list(self._peers)
        for peer in peers:
            peer.withdraw(key)

    def answer(self, session: Session, payload: bytes) -> bytes:
        """See ``Driver``: there is nothing to ask."""
        raise TransferError(f"{NAME} answers no calls")

    def departed(self, session: Session) -> None:
        """See ``Driver``: nothing is held for a peer."""

    def dial(self, session: Session, facts: bytes, timeout: float) -> IpcPeer:
        """See ``Driver``. Maps what the peer has registered, to fail here and not later.

        Raises:
            TransportUnavailable: the devices have no peer access.
        """
        is_own = decode_facts(facts).process == process_identity()
        mappings = Mappings(self._driver, self._index, is_own)
        try:
            for key, region, attachment in session.regions.items():
                mappings.base(key, region.address, attachment)
        except TransferError:
            mappings.close()
            raise
        peer = IpcPeer(session, self._local, self._worker, mappings)
        with self._lock:
            self._peers = [known for known in self._peers if not known.closed] + [peer]
        return peer

    def close(self) -> None:
        """See ``Driver``."""
        self._worker.close()


def device_index(device: str) -> int:
    """The number in ``"cuda:1"``.

    Raises:
        TransportUnavailable: it is no device of CUDA.
    """
    kind, _, number = device.partition(":")
    if kind != "cuda" or not (number or "0").isdigit():
        raise TransportUnavailable(NAME, f"it moves memory of cuda devices, not of {device}")
    return int(number or "0")
