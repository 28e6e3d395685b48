"""A peer of ``cuda_ipc``: receives its descriptors, maps its memory, and copies from and to it."""

from __future__ import annotations

import hmac
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing

import numpy as np

from mooncake_hal.errors import DeviceError, PeerLost, TransferTimeout, TransportUnavailable
from mooncake_hal.host_copies import Addresses
from mooncake_hal.session.authentication import encode
from mooncake_hal.session.regions import AttachedRegions
from mooncake_hal.session.session import Session
from mooncake_hal.transport import Spans
from mooncake_hal.transports.copy_worker import CopyWorker, InFlightPart
from mooncake_hal.transports.copying_peer import CopyingPeer
from mooncake_hal_cuda.memory.memory_kinds import DeviceSharing, MemoryKind
from mooncake_hal_cuda.memory.virtual_memory import Mapped
from mooncake_hal_cuda.transports.device_copier import CopyRoute, SpanCopier
from mooncake_hal_cuda.transports.ipc_protocol import (
    NAME,
    IpcEndpointInfo,
    IpcRegionInfo,
    SendDescriptor,
    decode_region,
    mapping_kind,
)

TOKEN_BYTES = 32
SEND_SECONDS = 5.0

MAX_SILENT = 64
"""Open connections to a mailbox that have sent nothing; with more, the oldest is closed."""

ASK_SECONDS = 10.0
PIECE_BYTES = 256 << 20
"""Bytes copied between two checks of the deadline: about 1 ms on NVLink, 10 ms on PCIe. While one
part is copied, the next one is prepared."""


class DescriptorMailbox:
    """An abstract socket that receives one descriptor; the caller closes it."""

    def __init__(self) -> None:
        self.name = f"mooncake-hal-cuda-{secrets.token_hex(16)}"
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen(MAX_SILENT)

    def receive(self, timeout: float) -> int:
        """Wait for the descriptor, which the caller closes.

        Raises:
            TransferTimeout: no descriptor was received within ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        silent: list[socket.socket] = []
        try:
            while (left := deadline - time.monotonic()) > 0:
                for connection in self._wait(silent, left):
                    silent.remove(connection)
                    with connection:
                        if (descriptor := self._read(connection)) is not None:
                            return descriptor
                if len(silent) > MAX_SILENT:
                    silent.pop(0).close()
        finally:
            for connection in silent:
                connection.close()
        raise TransferTimeout(f"received no descriptor of the peer's memory within {timeout:.3g} s")

    def close(self) -> None:
        """Stop receiving."""
        self._listener.close()

    def _wait(self, silent: list[socket.socket], seconds: float) -> list[socket.socket]:
        """Wait for a message or a connection. All connections are waited for together, as any
        process of this host can open one and send nothing.

        Args:
            silent: the connections, oldest first; a new one is added.

        Returns:
            Those that have sent something, or were closed by the other side.
        """
        poll = select.poll()
        for each in (self._listener, *silent):
            poll.register(each, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(seconds * 1000)}
        spoken = [each for each in silent if each.fileno() in ready]
        if self._listener.fileno() in ready:
            silent.append(self._listener.accept()[0])
        return spoken

    def _read(self, connection: socket.socket) -> int | None:
        """The descriptor, or None if the message has another token: any process of this host can
        send one."""
        try:
            token, found, _, _ = socket.recv_fds(
                connection, TOKEN_BYTES + 1, 1, socket.MSG_CMSG_CLOEXEC
            )
        except OSError:
            return None
        if len(found) == 1 and hmac.compare_digest(token, self.token):
            return found[0]
        for descriptor in found:
            os.close(descriptor)
        return None


def send_descriptor(name: str, token: bytes, descriptor: int) -> None:
    """Send a descriptor to a mailbox; the caller's descriptor stays open.

    Raises:
        PeerLost: the mailbox does not exist any more, or does not accept the descriptor.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as sender:
        sender.settimeout(SEND_SECONDS)
        try:
            sender.connect(f"\0{name}")
            socket.send_fds(sender, [token], [descriptor])
        except OSError as exc:
            raise PeerLost(f"the peer did not accept a descriptor of our memory: {exc}") from exc


class PeerMappings:
    """The peer's regions, as mapped in this process.

    Args:
        sharing: maps the regions, for device ``index``.
        index: index of the device that copies.
        session: session with the peer, for requests of descriptors.
        ours, theirs: published info of the two endpoints.
    """

    def __init__(
        self,
        sharing: DeviceSharing,
        index: int,
        session: Session,
        ours: IpcEndpointInfo,
        theirs: IpcEndpointInfo,
    ) -> None:
        self._sharing = sharing
        self._index = index
        self._session = session
        self._devices = ours.device, theirs.device
        self._is_own = ours.process == theirs.process
        self._is_same_host = ours.host == theirs.host
        self._bases: dict[int, int] = {}
        self._mapped: dict[int, Mapped] = {}
        self._lock = threading.Lock()
        self._open: dict[MemoryKind, Callable[[int, IpcRegionInfo], Mapped]] = {
            MemoryKind.IPC: self._open_name,
            MemoryKind.DESCRIPTOR: self._open_descriptor,
            MemoryKind.FABRIC: self._open_fabric,
        }

    def base(self, key: int, start: int, attachment: bytes) -> int:
        """The address in this process of region ``key``, whose address in the peer is ``start``;
        maps the region if necessary.

        Raises:
            TransportUnavailable: this process can't map the region.
            PeerLost, TransferTimeout: the peer did not send a descriptor that it was asked for.
            TransferError: the peer refused; the region may have been revoked meanwhile.
        """
        with self._lock:
            if key not in self._bases:
                name = decode_region(attachment)
                try:
                    self._sharing.driver.bind(self._index)
                    self._bases[key] = self._map(key, start, name)
                except (DeviceError, OSError) as exc:  # OSError: no descriptors are left, for one
                    raise TransportUnavailable(NAME, f"the peer's memory: {exc}") from exc
            return self._bases[key]

    def has_others(self, live: set[int]) -> bool:
        """Whether any region is mapped that is not ``live``."""
        with self._lock:
            return not self._bases.keys() <= live

    def forget(self, live: set[int]) -> None:
        """Unmap all regions that are not ``live``; no copy from or to them may be in flight."""
        with self._lock:
            for key in self._bases.keys() - live:
                del self._bases[key]
                if key in self._mapped:
                    self._mapped.pop(key).close()

    def close(self) -> None:
        """Unmap all regions, so that their owner can free the memory."""
        self.forget(set())

    def _map(self, key: int, start: int, name: IpcRegionInfo) -> int:
        # in our own process the addresses are valid here, if the device has access
        if self._is_own:
            if name.ipc:
                self._sharing.enable_access(*self._devices)
            else:
                self._sharing.virtual.grant(start - name.offset, name.nbytes, self._index)
            return start
        way = mapping_kind(name, is_same_host=self._is_same_host)
        self._mapped[key] = self._open[way](key, name)
        return self._mapped[key].address + name.offset

    def _open_name(self, key: int, name: IpcRegionInfo) -> Mapped:
        driver = self._sharing.driver
        address = driver.open(name.ipc)

        def close() -> None:
            driver.bind(self._index)
            driver.close(address)

        return Mapped(address, close)

    def _open_fabric(self, key: int, name: IpcRegionInfo) -> Mapped:
        return self._sharing.virtual.open_fabric(name.fabric, name.nbytes, self._index)

    def _open_descriptor(self, key: int, name: IpcRegionInfo) -> Mapped:
        with closing(DescriptorMailbox()) as mailbox:
            wanted = SendDescriptor(key, mailbox.name, mailbox.token)
            self._session.request(encode(wanted), ASK_SECONDS)
            descriptor = mailbox.receive(ASK_SECONDS)
        try:
            return self._sharing.virtual.open_descriptor(descriptor, name.nbytes, self._index)
        finally:
            os.close(descriptor)  # the mapping remains valid


class IpcPeer(CopyingPeer[SpanCopier]):
    """A peer whose memory is mapped in this process.

    Args:
        session: session with the peer; closed with this object.
        local: our own regions.
        worker: thread that copies; closed with this object.
        mappings: mapped regions of the peer.
        route: connection between the two devices.
    """

    def __init__(
        self,
        session: Session,
        local: AttachedRegions,
        worker: CopyWorker[SpanCopier],
        mappings: PeerMappings,
        route: CopyRoute,
    ) -> None:
        super().__init__(session, local, worker, PIECE_BYTES)
        self._mappings = mappings
        self._route = route

    def _read(self, part: Spans, deadline: float, copier: SpanCopier) -> InFlightPart:
        theirs = self._mapped(part, deadline, copier)
        copier.copy(part.local, theirs, part.nbytes, self._route)
        return _until(copier.mark())

    def _write(self, part: Spans, deadline: float, copier: SpanCopier) -> InFlightPart:
        theirs = self._mapped(part, deadline, copier)
        copier.copy(theirs, part.local, part.nbytes, self._route)
        return _until(copier.mark())

    def _confirm(self, spans: Spans, deadline: float) -> None:
        """Check that the peer is alive and has not revoked the regions: its memory stays mapped
        either way, so that a copy would not fail."""
        self._session.barrier(max(0.0, deadline - time.monotonic()))
        self._session.regions.locate(spans.remote, spans.nbytes)

    def _let_go(self) -> None:
        self._mappings.close()

    def _mapped(self, part: Spans, deadline: float, copier: SpanCopier) -> Addresses:
        """Addresses in this process of the remote pieces: [n]."""
        index, at = self._locate(part, deadline)
        live = set(index.keys)
        if self._mappings.has_others(live):
            copier.drain()  # a copy of the previous part may still use them
            self._mappings.forget(live)
        used = index.touched(at)
        attachments = self._session.regions.attachments(index.keys)
        regions = zip(index.keys, index.starts, attachments, strict=True)
        with self._asking(part, deadline):
            shifts = [
                self._mappings.base(key, start, name) - start if key in used else 0
                for key, start, name in regions
            ]
        moved: Addresses = part.remote + np.array(shifts, np.int64).astype(np.uint64)[at]
        return moved


def _until(copied: Callable[[], None]) -> InFlightPart:
    """A part that can't be cancelled: finishing and draining both wait for its copies."""
    return InFlightPart(copied, copied)
