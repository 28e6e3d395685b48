"""The staged side of an endpoint: its inner tcp endpoint, and copies for peers that ask."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import replace

from mooncake_hal.errors import TransferError, TransportUnavailable
from mooncake_hal.transport import EndpointOptions, MemoryRegion, Transport
from mooncake_hal.transports.control.session import Session
from mooncake_hal.transports.control.table import AttachedRegions
from mooncake_hal.transports.handshake import encode
from mooncake_hal_cuda.copying.copier import Copies, HostCopier
from mooncake_hal_cuda.copying.worker import Worker
from mooncake_hal_cuda.staged.messages import (
    NAME,
    VERSION,
    EndpointFacts,
    Gather,
    OpenStaging,
    Staging,
    decode_call,
    decode_facts,
    pieces_of,
)
from mooncake_hal_cuda.staged.peer import Path, StagedPeer, open_staging
from mooncake_hal_cuda.staged.staging import Gpu, PinnedBuffer


class StagedDriver:
    """See ``mooncake_hal.transports.control.endpoint.Driver``.

    Args:
        gpu: the device of all regions, or None if they are host memory.
        inner: tcp.
        options: how to open the endpoint.
        local: the endpoint's own regions.
    """

    name = NAME
    version = VERSION

    def __init__(
        self,
        gpu: Gpu | None,
        inner: Transport,
        options: EndpointOptions,
        local: AttachedRegions,
    ) -> None:
        self._gpu = gpu
        self._device = options.device
        self._local = local
        self._transport = inner
        self._inner = inner.open(replace(options, device="cpu", port=0))
        self._inner_keys: dict[int, int] = {}
        self._served: dict[Session, tuple[PinnedBuffer, Copies]] = {}
        self._peers: list[StagedPeer] = []
        self._lock = threading.Lock()
        self._worker = Worker(HostCopier if gpu is None else gpu.copier)

    def facts(self) -> bytes:
        """See ``Driver``."""
        return encode(EndpointFacts(self._inner.address, self._gpu is None))

    def unreachable(self, facts: bytes) -> str | None:
        """See ``Driver``."""
        return self._transport.reaches(self._inner.address, decode_facts(facts).inner)

    def attach(self, key: int, region: MemoryRegion) -> bytes:
        """See ``Driver``: host memory is the inner endpoint's."""
        if region.device != self._device:
            raise TransportUnavailable(
                NAME, f"this endpoint was opened for {self._device}, not for {region.device}"
            )
        if self._gpu is None:
            self._inner_keys[key] = self._inner.register(region)
        return b""

    def detach(self, key: int) -> None:
        """See ``Driver``. The lock is held while a peer is served: nobody touches it after this."""
        with self._lock:
            peers = list(self._peers)
        for peer in peers:
            peer.withdraw(key)
        if (inner_key := self._inner_keys.pop(key, None)) is not None:
            self._inner.revoke(inner_key)

    def answer(self, session: Session, payload: bytes) -> bytes:
        """See ``Driver``: packs and unpacks, in regions that are live at that moment."""
        call = decode_call(payload)
        with self._lock:
            if isinstance(call, OpenStaging):
                return self._open(session)
            if session not in self._served:
                raise TransferError(f"{NAME}: staging is opened first")
            staging, copier = self._served[session]
            addresses, nbytes = pieces_of(call)
            self._local.locate(addresses, nbytes)
            move = staging.gather if isinstance(call, Gather) else staging.scatter
            move(copier, addresses, nbytes, call.slot)
        return b""

    def departed(self, session: Session) -> None:
        """See ``Driver``."""
        with self._lock:
            served = self._served.pop(session, None)
        if served is not None:
            served[1].close()
            served[0].close()

    def dial(self, session: Session, facts: bytes, timeout: float) -> StagedPeer:
        """See ``Driver``."""
        theirs = decode_facts(facts)
        with ExitStack() as undo:
            inner = self._inner.connect(theirs.inner, timeout=timeout)
            undo.callback(inner.close)
            ours = None
            if self._gpu is not None:
                ours = PinnedBuffer.allocate(self._gpu, self._inner)
                undo.callback(ours.close)
            path = Path(inner, ours, None if theirs.is_host else open_staging(session))
            undo.pop_all()
        peer = StagedPeer(session, self._local, self._worker, path)
        with self._lock:
            self._peers = [known for known in self._peers if not known.closed] + [peer]
        return peer

    def close(self) -> None:
        """See ``Driver``."""
        self._worker.close()
        self._inner.close()

    def _open(self, session: Session) -> bytes:
        if self._gpu is None or session in self._served:
            raise TransferError(f"{NAME}: there is no staging to open, or it is open")
        staging = PinnedBuffer.allocate(self._gpu, self._inner)
        self._served[session] = staging, self._gpu.copier()
        return encode(Staging(staging.address))
