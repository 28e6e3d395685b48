"""The ``staged`` transport: GPU memory through pinned host memory, over tcp; no special network."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from mooncake_hal.errors import DeviceError, TransferError, TransportUnavailable
from mooncake_hal.session.authentication import encode
from mooncake_hal.session.regions import AttachedRegions
from mooncake_hal.session.session import Session
from mooncake_hal.transport import Endpoint, EndpointOptions, MemoryRegion, Transport
from mooncake_hal.transports.session_endpoint import compare_addresses, open_endpoint
from mooncake_hal.transports.tcp.tcp_transport import load as load_tcp
from mooncake_hal_cuda.libcuda import CudaDriver
from mooncake_hal_cuda.transports.copy_worker import CopyWorker
from mooncake_hal_cuda.transports.cuda_ipc import device_index
from mooncake_hal_cuda.transports.device_copier import (
    DeviceCopier,
    HostCopier,
    MakeCopier,
    SpanCopier,
)
from mooncake_hal_cuda.transports.staged_peer import (
    Gpu,
    StagedPath,
    StagedPeer,
    StagingBuffer,
    open_staging,
)
from mooncake_hal_cuda.transports.staged_protocol import (
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


class StagedTransport:
    """Copies through pinned host memory on both sides, and over tcp between them.

    Args:
        load_driver: called for endpoints of a device; DeviceError where there is no hardware.
        make_copier: another one only in tests.
    """

    name = NAME
    can_revoke = True

    def __init__(
        self, load_driver: Callable[[], CudaDriver], make_copier: MakeCopier = DeviceCopier
    ) -> None:
        self._load_driver = load_driver
        self._make_copier = make_copier
        self._tcp: Transport = load_tcp()

    def open(self, options: EndpointOptions) -> Endpoint:
        """Extra settings are those of tcp, which takes a free port of its own."""
        local = AttachedRegions("this side")
        driver = StagedDataPath(self._gpu(options.device), self._tcp, options, local)
        return open_endpoint(driver, local, options)

    def reaches(self, local: bytes, remote: bytes) -> str | None:
        return compare_addresses(
            (local, remote), NAME, VERSION, decode_endpoint, self._why_unreachable
        )

    def _why_unreachable(self, ours: StagedEndpointInfo, theirs: StagedEndpointInfo) -> str | None:
        return self._tcp.reaches(ours.inner, theirs.inner)

    def _gpu(self, device: str) -> Gpu | None:
        if device == "cpu":
            return None
        index = device_index(device)
        try:
            return Gpu(self._load_driver(), index, self._make_copier)
        except DeviceError as exc:
            raise TransportUnavailable(NAME, str(exc)) from exc


def load() -> StagedTransport:
    """Construct the transport."""
    return StagedTransport(CudaDriver)


class StagedDataPath:
    """An endpoint's inner tcp endpoint, and the copies that its peers ask for.

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
        self._served: dict[Session, tuple[StagingBuffer, SpanCopier]] = {}
        self._peers: list[StagedPeer] = []
        self._lock = threading.Lock()
        self._worker = CopyWorker(HostCopier if gpu is None else gpu.copier)

    def info(self) -> bytes:
        return encode(StagedEndpointInfo(self._inner.address, self._gpu is None))

    def unreachable_reason(self, info: bytes) -> str | None:
        return self._transport.reaches(self._inner.address, decode_endpoint(info).inner)

    def attach(self, key: int, region: MemoryRegion) -> bytes:
        """Host memory is the inner endpoint's."""
        if region.device != self._device:
            raise TransportUnavailable(
                NAME, f"this endpoint was opened for {self._device}, not for {region.device}"
            )
        if self._gpu is None:
            self._inner_keys[key] = self._inner.register(region)
        return b""

    def detach(self, key: int) -> None:
        """Peers are served under the lock, so that the region is not touched after this."""
        with self._lock:
            peers = list(self._peers)
        for peer in peers:
            peer.withdraw(key)
        if (inner_key := self._inner_keys.pop(key, None)) is not None:
            self._inner.revoke(inner_key)

    def handle_request(self, session: Session, payload: bytes) -> bytes:
        """Packs and unpacks, in regions that are live at that moment."""
        call = decode_call(payload)
        with self._lock:
            if isinstance(call, OpenStaging):
                return self._open(session)
            if session not in self._served:
                raise TransferError(f"{NAME}: staging is opened first")
            staging, copier = self._served[session]
            addresses, nbytes = LIMITS.read_pieces(call.slot, call.addresses, call.nbytes)
            self._local.locate(addresses, nbytes)
            move = staging.gather if isinstance(call, Gather) else staging.scatter
            move(copier, addresses, nbytes, call.slot)
        return b""

    def session_ended(self, session: Session) -> None:
        with self._lock:
            served = self._served.pop(session, None)
        if served is not None:
            served[1].close()
            served[0].close()

    def connect(self, session: Session, info: bytes, timeout: float) -> StagedPeer:
        theirs = decode_endpoint(info)
        with ExitStack() as undo:
            inner = self._inner.connect(theirs.inner, timeout=timeout)
            undo.callback(inner.close)
            ours = None
            if self._gpu is not None:
                ours = StagingBuffer.allocate(self._gpu, self._inner)
                undo.callback(ours.close)
            path = StagedPath(inner, ours, None if theirs.is_host else open_staging(session))
            undo.pop_all()
        peer = StagedPeer(session, self._local, self._worker, path)
        with self._lock:
            self._peers = [known for known in self._peers if not known.closed] + [peer]
        return peer

    def close(self) -> None:
        self._worker.close()
        self._inner.close()

    def _open(self, session: Session) -> bytes:
        if self._gpu is None or session in self._served:
            raise TransferError(f"{NAME}: there is no staging to open, or it is open")
        staging = StagingBuffer.allocate(self._gpu, self._inner)
        self._served[session] = staging, self._gpu.copier()
        return encode(StagingOpened(staging.address))
