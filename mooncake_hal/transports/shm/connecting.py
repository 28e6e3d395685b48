"""Opening a connection to an shm endpoint."""

from __future__ import annotations

import ctypes
import socket

from mooncake_hal.errors import PeerLost, TransferTimeout, TransportUnavailable, VersionMismatch
from mooncake_hal.transports import handshake
from mooncake_hal.transports.regions import RegionTable
from mooncake_hal.transports.shm import control, host
from mooncake_hal.transports.shm.copier import Copier
from mooncake_hal.transports.shm.copying import Workers
from mooncake_hal.transports.shm.peer import Remote, ShmPeer

Offers = list[tuple[control.Offer, list[int]]]


def connect(
    address: control.Address,
    deployment: handshake.Deployment,
    local: RegionTable,
    workers: Workers,
    timeout: float,
) -> ShmPeer:
    """Connect, prove who we are, and learn what the peer has registered.

    Raises:
        TransferError: see ``Endpoint.connect``.
    """
    if address.version != control.VERSION:
        raise VersionMismatch(
            f"shm: we speak version {control.VERSION}, the peer {address.version}; "
            "run one release of mooncake-hal on both"
        )
    reason = out_of_reach(address)
    if reason is not None:
        raise TransportUnavailable(control.NAME, reason)
    connection = control.new_socket(timeout)
    try:
        return _connect(connection, address, deployment, local, workers)
    except TimeoutError as exc:
        connection.close()
        raise TransferTimeout(f"shm: the peer did not answer within {timeout:g} s") from exc
    except BaseException:
        connection.close()
        raise


def out_of_reach(address: control.Address) -> str | None:
    """Say why an address can't be reached from this process, or None."""
    if address.host != host.host_identity():
        return "the peer is on another host or in another network namespace"
    return None


def _connect(
    connection: socket.socket,
    address: control.Address,
    deployment: handshake.Deployment,
    local: RegionTable,
    workers: Workers,
) -> ShmPeer:
    try:
        connection.connect(f"\0{address.socket}")
    except TimeoutError:
        raise
    except OSError as exc:
        raise PeerLost(f"shm: process {address.pid} does not answer: {exc.strerror}") from exc
    _shake_hands(connection, address, deployment)
    offers: Offers = []
    try:
        probe = _collect(connection, offers)
        remote = _examine(connection, probe, workers.copier)
        peer = ShmPeer(connection, remote, local, workers)
        for offer, fds in offers:
            peer.offered(offer, fds)
    finally:
        for _, fds in offers:
            for fd in fds:
                socket.close(fd)
    if reason := peer.unreachable_region():
        peer.close()
        raise TransportUnavailable(control.NAME, reason)
    connection.settimeout(control.SEND_SECONDS)
    return peer


def _shake_hands(
    connection: socket.socket, address: control.Address, deployment: handshake.Deployment
) -> None:
    challenge = handshake.decode(control.receive(connection)[0], handshake.Challenge)
    hello = deployment.answer(challenge, address.epoch)
    control.send(connection, hello)
    welcome = handshake.decode(control.receive(connection)[0], handshake.Welcome)
    deployment.check_server(challenge, hello, welcome)


def _collect(connection: socket.socket, offers: Offers) -> control.Synced:
    """Receive the peer's regions into ``offers``, up to the mark that ends them."""
    while True:
        data, fds = control.receive(connection)
        message = control.decode_to_client(data)
        if isinstance(message, control.Offer):
            offers.append((message, fds))
        elif isinstance(message, control.Synced):
            return message
        else:  # a region that was revoked while we were being told
            offers[:] = [item for item in offers if item[0].key != message.key]
            control.send(connection, control.Revoked(message.key))


def _examine(connection: socket.socket, probe: control.Synced, copier: Copier) -> Remote:
    """Find out by trying whether process_vm_readv reaches the right process."""
    pid = control.credentials(connection).pid
    if pid == 0:
        return Remote(0, None, "the peer's process is not visible in our pid namespace")
    found = ctypes.create_string_buffer(8)
    failed = copier.call_one(pid, 0, ctypes.addressof(found), probe.probe, 8)
    refusal = None
    if failed:
        refusal = host.explain_refused_call(pid)
    elif found.raw != probe.cookie:
        refusal = f"process {pid} is not the one that answered"
    return Remote(pid, host.start_time(pid), refusal)
