"""The client's side of the staged transport: transfers by way of pinned staging buffers."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from mooncake_hal.host_copies import Addresses, HostCopier, HostCopies
from mooncake_hal.negotiation import Transports
from mooncake_hal.session.authentication import decode, encode
from mooncake_hal.session.regions import AttachedRegions
from mooncake_hal.session.session import Session
from mooncake_hal.transport import MemoryRegion, Peer, Spans
from mooncake_hal.transports.copy_worker import CopyWorker, InFlightPart
from mooncake_hal.transports.copying_peer import CopyingPeer, seconds_left
from mooncake_hal.transports.staged.staged_protocol import (
    SLOT_BYTES,
    SLOTS,
    Gather,
    OpenStaging,
    Scatter,
    StagingOpened,
)
from mooncake_hal.transports.staging import PackedPieces, packed_addresses

SETUP_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class StagingBuffer:
    """Pinned memory that is registered with the inner endpoints, divided into slots; the owner
    closes it once.

    Args:
        address: address of the first byte in this process.
        inner: names of the inner endpoints that it is registered with.
        undo: revokes and frees the memory.
    """

    address: int
    inner: frozenset[str]
    undo: ExitStack

    @classmethod
    def allocate(cls, copies: HostCopies, inner: Transports) -> StagingBuffer:
        """Allocate and register SLOTS slots; raises DeviceError, OutOfMemory or
        TransportUnavailable."""
        with ExitStack() as undo:
            pinned = copies.allocate_pinned(SLOTS * SLOT_BYTES)
            undo.callback(pinned.close)
            region = MemoryRegion(pinned.address, pinned.nbytes)
            keys = inner.register_where_possible(region)
            undo.callback(inner.revoke, keys)
            return cls(pinned.address, frozenset(keys), undo.pop_all())

    def slot(self, number: int) -> int:
        """Address of a slot."""
        return self.address + number * SLOT_BYTES

    def gather(
        self, copier: HostCopier, addresses: Addresses, nbytes: Addresses, slot: int
    ) -> None:
        """Copy pieces of device memory to a slot, packed; blocks until it is done."""
        copier.gather(addresses, nbytes, self.slot(slot))
        copier.drain()

    def scatter(
        self, copier: HostCopier, addresses: Addresses, nbytes: Addresses, slot: int
    ) -> None:
        """Copy the packed content of a slot to pieces of device memory; blocks until it is done."""
        copier.scatter(self.slot(slot), addresses, nbytes)
        copier.drain()

    def close(self) -> None:
        """Revoke and free the memory."""
        self.undo.close()


@dataclass(frozen=True, slots=True)
class StagedPath:
    """The path between our memory and the peer's.

    Args:
        inner: the inner transport's connection between the two processes.
        ours: our staging buffer; None if our regions are host memory.
        theirs: address of the peer's staging buffer; None if its regions are host memory.
    """

    inner: Peer
    ours: StagingBuffer | None
    theirs: int | None

    def spans(self, part: Spans, slot: int) -> Spans:
        """The spans that the inner connection moves for a part: on a side that is staged, their
        addresses are in the slot."""
        local, remote = part.local, part.remote
        if self.ours is not None:
            local = packed_addresses(self.ours.slot(slot), part.nbytes)
        if self.theirs is not None:
            remote = packed_addresses(self.theirs + slot * SLOT_BYTES, part.nbytes)
        return joined(local, remote, part.nbytes)


class StagedPeer(CopyingPeer[HostCopier]):
    """Moves parts of up to SLOT_BYTES: packs, sends and unpacks them. While one part is sent, the
    previous one is unpacked or the next one is packed.

    Args:
        session: session to the other end; closed with the peer.
        local: this endpoint's regions.
        worker: executes the transfers; closed with the peer.
        path: path to the other end; closed with the peer.
    """

    def __init__(
        self,
        session: Session,
        local: AttachedRegions,
        worker: CopyWorker[HostCopier],
        path: StagedPath,
    ) -> None:
        super().__init__(session, local, worker, SLOT_BYTES)
        self._path = path
        self._next_slot = 0

    def _read(self, part: Spans, deadline: float, copier: HostCopier) -> InFlightPart:
        self._locate(part, deadline)
        slot, ours = self._take_slot(), self._path.ours
        if self._path.theirs is not None:
            self._call(Gather, part, slot, deadline)
        spans = self._path.spans(part, slot)
        transfer = self._path.inner.read(spans, timeout=seconds_left(deadline))

        def finish() -> None:
            transfer.wait()
            if ours is not None:
                ours.scatter(copier, part.local, part.nbytes, slot)

        return InFlightPart(finish, transfer.cancel)

    def _write(self, part: Spans, deadline: float, copier: HostCopier) -> InFlightPart:
        self._locate(part, deadline)
        slot, ours = self._take_slot(), self._path.ours
        if ours is not None:
            ours.gather(copier, part.local, part.nbytes, slot)
        spans = self._path.spans(part, slot)
        transfer = self._path.inner.write(spans, timeout=seconds_left(deadline))

        def finish() -> None:
            transfer.wait()
            if self._path.theirs is not None:
                self._call(Scatter, part, slot, deadline)

        return InFlightPart(finish, transfer.cancel)

    def _take_slot(self) -> int:
        """Return the next slot; its previous part was finished before the latest part started."""
        slot = self._next_slot
        self._next_slot = (slot + 1) % SLOTS
        return slot

    def _let_go(self) -> None:
        self._path.inner.close()
        if self._path.ours is not None:
            self._path.ours.close()

    def _call(self, kind: type[Gather | Scatter], part: Spans, slot: int, deadline: float) -> None:
        call = kind(PackedPieces.of(part.remote, part.nbytes), slot)
        with self._asking(part, deadline):
            self._session.request(encode(call), seconds_left(deadline))


def open_staging(session: Session) -> StagingOpened:
    """Ask the peer to set up its side of the connection."""
    return decode(session.request(encode(OpenStaging()), SETUP_SECONDS), StagingOpened)


def joined(local: Addresses, remote: Addresses, nbytes: Addresses) -> Spans:
    """Return the pieces as spans; as a single one if they are packed on both sides."""
    spans = Spans(local, remote, nbytes)
    together = np.diff(local) == nbytes[:-1]
    if len(nbytes) > 1 and (together & (np.diff(remote) == nbytes[:-1])).all():
        return Spans(local[:1], remote[:1], nbytes.sum(keepdims=True, dtype=np.uint64))
    return spans
