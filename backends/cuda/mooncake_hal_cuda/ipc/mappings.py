"""A peer's memory, mapped into this process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import closing

from mooncake_hal.errors import DeviceError, TransportUnavailable
from mooncake_hal.transports.control.session import Session
from mooncake_hal.transports.handshake import encode
from mooncake_hal_cuda.ipc.descriptors import Mailbox
from mooncake_hal_cuda.ipc.facts import (
    NAME,
    EndpointFacts,
    RegionName,
    SendDescriptor,
    decode_name,
    way_to,
)
from mooncake_hal_cuda.sharing.choice import MemoryKind
from mooncake_hal_cuda.sharing.devices import DeviceSharing
from mooncake_hal_cuda.sharing.virtual import Mapped

ASK_SECONDS = 10.0


class Mappings:
    """The peer's regions as this process sees them.

    Args:
        sharing: maps them, for device ``index``.
        index: of the device that is going to copy.
        session: to the peer, which is asked for descriptors.
        ours, theirs: what the two endpoints publish.
    """

    def __init__(
        self,
        sharing: DeviceSharing,
        index: int,
        session: Session,
        ours: EndpointFacts,
        theirs: EndpointFacts,
    ) -> None:
        self._sharing = sharing
        self._index = index
        self._session = session
        self._is_own = ours.process == theirs.process
        self._is_same_host = ours.host == theirs.host
        self._bases: dict[int, int] = {}
        self._mapped: dict[int, Mapped] = {}
        self._lock = threading.Lock()
        self._open: dict[MemoryKind, Callable[[int, RegionName], Mapped]] = {
            MemoryKind.IPC: self._open_name,
            MemoryKind.DESCRIPTOR: self._open_descriptor,
            MemoryKind.FABRIC: self._open_fabric,
        }

    def base(self, key: int, start: int, attachment: bytes) -> int:
        """Where region ``key``, which begins at ``start`` over there, begins here.

        Raises:
            TransportUnavailable: this process can't map it.
            PeerLost, TransferTimeout: the peer was asked for a descriptor, and did not send it.
            TransferError: it refused; the region may have been revoked meanwhile.
        """
        with self._lock:
            if key not in self._bases:
                name = decode_name(attachment)
                try:
                    self._sharing.driver.bind(self._index)
                    self._bases[key] = self._map(key, start, name)
                except DeviceError as exc:
                    raise TransportUnavailable(NAME, f"the peer's memory: {exc}") from exc
            return self._bases[key]

    def has_others(self, live: set[int]) -> bool:
        """Whether anything but the ``live`` regions is mapped."""
        with self._lock:
            return not self._bases.keys() <= live

    def forget(self, live: set[int]) -> None:
        """Unmap all but the ``live`` regions, of which nothing is being copied."""
        with self._lock:
            for key in self._bases.keys() - live:
                del self._bases[key]
                if key in self._mapped:
                    self._mapped.pop(key).close()

    def close(self) -> None:
        """Unmap everything; the owner's memory is then its own again."""
        self.forget(set())

    def _map(self, key: int, start: int, name: RegionName) -> int:
        if self._is_own:  # our addresses are good as they are, if the device may use them
            if not name.ipc:
                self._sharing.virtual.grant(start - name.offset, name.nbytes, self._index)
            return start
        way = way_to(name, is_same_host=self._is_same_host)
        self._mapped[key] = self._open[way](key, name)
        return self._mapped[key].address + name.offset

    def _open_name(self, key: int, name: RegionName) -> Mapped:
        driver = self._sharing.driver
        address = driver.open(name.ipc)

        def close() -> None:
            driver.bind(self._index)
            driver.close(address)

        return Mapped(address, close)

    def _open_fabric(self, key: int, name: RegionName) -> Mapped:
        return self._sharing.virtual.open_fabric(name.fabric, name.nbytes, self._index)

    def _open_descriptor(self, key: int, name: RegionName) -> Mapped:
        with closing(Mailbox()) as mailbox:
            wanted = SendDescriptor(key, mailbox.name, mailbox.token)
            self._session.call(encode(wanted), ASK_SECONDS)
            descriptor = mailbox.receive(ASK_SECONDS)
        try:
            return self._sharing.virtual.open_descriptor(descriptor, name.nbytes, self._index)
        finally:
            os.close(descriptor)  # what is mapped stays
