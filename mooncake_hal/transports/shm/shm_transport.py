"""The shm transport: accesses regions of this host's processes through mappings and system calls.

Control messages go over sessions on Unix sockets, which also carry the regions' descriptors. The
process that starts a transfer copies the bytes itself, without any help of the other process. So
revoking a region waits until every peer has confirmed that it stopped accessing it.
"""

from __future__ import annotations

import ctypes
import logging
import os
import secrets
import threading
from functools import cached_property

import msgspec

from mooncake_hal.errors import TransferError, TransportUnavailable
from mooncake_hal.session.addressing import host_identity
from mooncake_hal.session.authentication import UNREADABLE, decode, encode
from mooncake_hal.session.processes import start_time
from mooncake_hal.session.regions import AttachedRegions
from mooncake_hal.session.session import Session
from mooncake_hal.transport import Endpoint, EndpointOptions, MemoryRegion
from mooncake_hal.transports.session_endpoint import compare_addresses, open_endpoint
from mooncake_hal.transports.shm.process_memory import (
    allow_peer_access,
    explain_refused_call,
    seal_size,
)
from mooncake_hal.transports.shm.shm_copying import CopyThreads, NumpyCopier, ShmCopier, best_copier
from mooncake_hal.transports.shm.shm_peer import NAME, RemoteProcess, SharedRange, ShmPeer

logger = logging.getLogger(__name__)

VERSION = 2

REVOKE_SECONDS = 30.0
"""Timeout for peers to confirm a revocation, in seconds. A peer that is alive and does not confirm
may have been stopped (SIGSTOP)."""

PROBE = b"probe"
"""The only request of the protocol; the reply is a Probe."""


class ShmInfo(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The info that an endpoint publishes: its ``host_identity``, and its pid for messages only."""

    host: str
    pid: int


class Probe(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Eight random bytes and their address: a peer that can read them there accesses the right
    process."""

    address: int
    cookie: bytes


class ShmDataPath:
    """Data path to other processes of this host.

    Args:
        local: the endpoint's own regions.
        copier: copies the bytes.
        num_threads: number of threads for large copies.
    """

    name = NAME
    version = VERSION

    def __init__(self, local: AttachedRegions, copier: ShmCopier, num_threads: int) -> None:
        self._local = local
        self._cookie = ctypes.create_string_buffer(secrets.token_bytes(8), 8)
        self._copy_threads = CopyThreads(num_threads, "mooncake-shm-copy", copier)
        self._lock = threading.Lock()
        self._peers: list[ShmPeer] = []

    def info(self) -> bytes:
        return encode(ShmInfo(host_identity(), os.getpid()))

    def unreachable_reason(self, info: bytes) -> str | None:
        return unreachable_reason(ShmInfo(host_identity(), os.getpid()), decode_info(info))

    def attach(self, key: int, region: MemoryRegion) -> bytes:
        if region.device != "cpu":
            raise TransportUnavailable(NAME, f"it can't reach memory of {region.device}")
        unmappable = seal_size(region)
        if region.fd is not None and unmappable:
            logger.warning("shm: a region is not shared by mapping: %s", unmappable)
        return encode(SharedRange(unmappable is None, region.fd_offset))

    def detach(self, key: int) -> None:
        with self._lock:
            peers = list(self._peers)
        for peer in peers:
            peer.forget_local(key)

    def handle_request(self, session: Session, payload: bytes) -> bytes:
        if payload != PROBE:
            raise TransferError(f"a peer may ask {PROBE!r}, not {payload[:40]!r}")
        return encode(Probe(ctypes.addressof(self._cookie), self._cookie.raw))

    def session_ended(self, session: Session) -> None:
        pass

    def connect(self, session: Session, info: bytes, timeout: float) -> ShmPeer:
        probe = decode(session.request(PROBE, timeout), Probe)
        remote = examine(session.peer_process(), probe, self._copy_threads.copier)
        peer = ShmPeer(session, remote, self._local, self._copy_threads)
        with self._lock:
            self._peers = [known for known in self._peers if not known.closed] + [peer]
        try:
            session.watch_regions(peer)
            if reason := peer.unreachable_region():
                raise TransportUnavailable(NAME, reason)
        except TransferError:
            peer.close()
            raise
        return peer

    def close(self) -> None:
        self._copy_threads.close()


class ShmTransport:
    """Reads and writes between processes of one host.

    Args:
        copier: copies the bytes; None: see ``best_copier``.
    """

    name = NAME
    can_revoke = True
    stops_writes_on_failure = True  # the writer's own threads copy

    def __init__(self, copier: ShmCopier | None = None) -> None:
        self._given = copier

    def open(self, options: EndpointOptions) -> Endpoint:
        """Open an endpoint; ``options.connections`` is the number of copy threads.

        Raises:
            ValueError: ``options.extra`` is not empty, or ``options.connections`` is below 1.
        """
        if options.extra:
            raise ValueError(f"shm has no extra settings, got {sorted(options.extra)}")
        if options.connections < 1:
            raise ValueError(f"connections must be 1 or more, got {options.connections}")
        allow_peer_access()
        local = AttachedRegions("this side")
        data_path = ShmDataPath(local, self._copier, options.connections)
        return open_endpoint(
            data_path, local, options, shared_fd=shared_fd, confirm_s=REVOKE_SECONDS
        )

    def reaches(self, local: bytes, remote: bytes) -> str | None:
        addresses = (local, remote)
        return compare_addresses(addresses, NAME, VERSION, decode_info, unreachable_reason)

    @cached_property
    def _copier(self) -> ShmCopier:
        return self._given or best_copier()


def shared_fd(region: MemoryRegion) -> int | None:
    """Return the descriptor with which peers may map a region, or None.

    Descriptors of files that can shrink are never shared: a peer could kill us by shrinking one.
    """
    return region.fd if seal_size(region) is None else None


def decode_info(data: bytes) -> ShmInfo:
    """Decode an endpoint's published info; raises TransferError if it is invalid."""
    try:
        return msgspec.msgpack.decode(data, type=ShmInfo)
    except UNREADABLE as exc:
        raise TransferError(f"this is not the info of an shm endpoint: {exc}") from exc


def unreachable_reason(ours: ShmInfo, theirs: ShmInfo) -> str | None:
    """Return why two processes can't access each other's memory, or None if they may."""
    if ours.host != theirs.host:
        return "the peer is on another host or in another network namespace"
    return None


def examine(pid: int, probe: Probe, copier: ShmCopier) -> RemoteProcess:
    """Test whether process_vm_readv accesses the right process.

    Args:
        pid: the peer's pid according to the kernel; 0 if it is outside our pid namespace.
        probe: the peer's reply to PROBE.
        copier: makes the call.
    """
    if pid == 0:
        return RemoteProcess(0, None, "the peer's process is not visible in our pid namespace")
    found = ctypes.create_string_buffer(8)
    failed = copier.call_one(pid, 0, ctypes.addressof(found), probe.address, 8)
    refusal = None
    if failed:
        refusal = explain_refused_call(pid)
    elif found.raw != probe.cookie:
        refusal = f"process {pid} is not the one that replied"
    return RemoteProcess(pid, start_time(pid), refusal)


def load() -> ShmTransport:
    """Construct the transport."""
    return ShmTransport()


def load_interpreted() -> ShmTransport:
    """Construct the transport without compiled code, as on a host without a compiler."""
    return ShmTransport(NumpyCopier())
