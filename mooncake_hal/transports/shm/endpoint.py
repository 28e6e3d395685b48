"""An shm endpoint: its regions, its clients, its peers, and the thread that serves them."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import logging
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable

from mooncake_hal.errors import (
    AccessDenied,
    PeerLost,
    TransferError,
    TransferTimeout,
    TransportUnavailable,
)
from mooncake_hal.transport import EndpointOptions, MemoryRegion
from mooncake_hal.transports import handshake
from mooncake_hal.transports.regions import RegionTable
from mooncake_hal.transports.shm import control, host
from mooncake_hal.transports.shm.connecting import connect
from mooncake_hal.transports.shm.copier import Copier
from mooncake_hal.transports.shm.copying import Workers
from mooncake_hal.transports.shm.mapping import seal
from mooncake_hal.transports.shm.peer import ShmPeer

logger = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 10.0
REVOKE_SECONDS = 30.0
ACCEPT_PAUSE_SECONDS = 0.05
"""After a refused accept, such as for want of descriptors: trying at once would spin."""

MAX_STRANGERS = 64
"""How many connections may be open that have not proved anything yet."""


class Client:
    """A connection that another endpoint opened to this one."""

    def __init__(self, connection: socket.socket, challenge: handshake.Challenge) -> None:
        self.connection = connection
        self.challenge = challenge
        self.is_proved = False
        self.expires = time.monotonic() + HANDSHAKE_SECONDS
        self.revoking: dict[int, threading.Event] = {}

    def released(self) -> None:
        """Nothing here can touch our memory any more."""
        for event in list(self.revoking.values()):
            event.set()


class ShmEndpoint:
    """See ``mooncake_hal.transport.Endpoint``. ``_lock`` orders what the clients are told."""

    def __init__(self, options: EndpointOptions, copier: Copier) -> None:
        self._deployment = handshake.Deployment(options.secret, control.NAME, control.VERSION)
        self._epoch = handshake.fresh_epoch()
        self._cookie = ctypes.create_string_buffer(secrets.token_bytes(8), 8)
        self._table = RegionTable("this side")
        self._lock = threading.Lock()
        self._next_key = 1
        self._closed = False
        self._is_stopped = False
        self._error: BaseException | None = None
        self._clients: dict[int, Client] = {}
        self._peers: dict[int, ShmPeer] = {}
        self._listener = control.new_socket()
        name = f"mooncake-hal-{secrets.token_hex(16)}"
        self._listener.bind(f"\0{name}")
        self._listener.listen(128)
        self._address = handshake.encode(_own_address(self._epoch, name))
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake, selectors.EVENT_READ, self._run_posted)
        self._posted: collections.deque[Callable[[], None]] = collections.deque()
        self._workers = Workers(options.connections, "mooncake-shm-copy", copier)
        self._thread = threading.Thread(target=self._serve, name="mooncake-shm", daemon=True)
        self._thread.start()

    # -- the contract ---------------------------------------------------------------------------

    @property
    def transport(self) -> str:
        """See ``Endpoint``."""
        return control.NAME

    @property
    def address(self) -> bytes:
        """See ``Endpoint``."""
        return self._address

    def register(self, region: MemoryRegion) -> int:
        """See ``Endpoint``.

        Raises:
            TransportUnavailable: the region is not in host memory.
        """
        if region.device != "cpu":
            raise TransportUnavailable(control.NAME, f"it can't reach memory of {region.device}")
        unmappable = seal(region)
        if region.fd is not None and unmappable:
            logger.warning("shm: a region is not shared by mapping: %s", unmappable)
        with self._lock:
            self._check_open()
            key, self._next_key = self._next_key, self._next_key + 1
            self._table.add(key, region)
            for client in self._proved():
                self._tell(client, region, key)
        return key

    def revoke(self, key: int) -> None:
        """See ``Endpoint``.

        Raises:
            RegionUnknown, RegionRevoked: the key is no region's.
            TransferTimeout: a client does not answer though it is alive; it may be stopped.
        """
        with self._lock:
            self._check_open()
            self._table.revoke(key)
            waiting = self._ask_to_stop([key])
        for peer in list(self._peers.values()):
            peer.forget_local(key)
        if not _all_set(waiting, REVOKE_SECONDS):
            raise TransferTimeout(
                f"shm: a client did not give up region {key} within {REVOKE_SECONDS:g} s; "
                "its process may be stopped. End it before the memory is used for something else"
            )

    def connect(self, address: bytes, *, timeout: float) -> ShmPeer:
        """See ``Endpoint``."""
        with self._lock:
            self._check_open()
        wanted = handshake.decode_address(address, control.Address, control.NAME)
        peer = connect(wanted, self._deployment, self._table, self._workers, timeout)
        with self._lock:
            if not self._closed:
                self._peers[peer.connection.fileno()] = peer
                self._post(lambda: self._watch(peer))
                return peer
        peer.close()
        peer.connection.close()
        raise PeerLost("shm: this endpoint is closed")

    def close(self) -> None:
        """See ``Endpoint``."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            keys = [key for key, _ in self._table.items()]
            waiting = self._ask_to_stop(keys)
        for peer in list(self._peers.values()):
            peer.close()
        if not _all_set(waiting, control.SEND_SECONDS):
            logger.warning("shm: closing, though a client has not given up our memory yet")
        self._post(self._stop)
        self._thread.join()
        self._workers.close()

    # -- telling clients ------------------------------------------------------------------------

    def _proved(self) -> list[Client]:
        return [client for client in self._clients.values() if client.is_proved]

    def _tell(self, client: Client, region: MemoryRegion, key: int) -> None:
        fd = region.fd if seal(region) is None else None
        offer = control.Offer(
            key, region.address, region.nbytes, fd is not None, region.fd_offset if fd else 0
        )
        with contextlib.suppress(PeerLost):  # the service thread sees the end and drops it
            control.send(client.connection, offer, fd)

    def _ask_to_stop(self, keys: list[int]) -> list[threading.Event]:
        waiting = []
        for client in self._proved():
            for key in keys:
                event = client.revoking[key] = threading.Event()
                waiting.append(event)
                with contextlib.suppress(PeerLost):  # dropping the client sets the event
                    control.send(client.connection, control.Revoke(key))
        return waiting

    def _check_open(self) -> None:
        if self._error is not None:
            raise TransferError("shm: the endpoint's service thread failed") from self._error
        if self._closed:
            raise PeerLost("shm: this endpoint is closed")

    # -- the service thread ---------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._is_stopped:
                for key, _ in self._selector.select(HANDSHAKE_SECONDS):
                    if not self._is_stopped:  # what comes after a stop is closed already
                        key.data()
                self._expire_strangers()
        except Exception as exc:
            logger.exception("shm: the endpoint's service thread failed")
            self._error = exc
            self._stop()

    def _post(self, task: Callable[[], None]) -> None:
        self._posted.append(task)
        os.eventfd_write(self._wake, 1)

    def _run_posted(self) -> None:
        os.eventfd_read(self._wake)
        while self._posted:
            self._posted.popleft()()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as exc:
            logger.warning("shm: can't accept a connection: %s", exc)
            time.sleep(ACCEPT_PAUSE_SECONDS)
            return
        strangers = len(self._clients) - len(self._proved())
        if strangers >= MAX_STRANGERS or self._closed:
            connection.close()
            return
        connection.settimeout(control.SEND_SECONDS)
        client = Client(connection, self._deployment.challenge(self._epoch))
        self._clients[connection.fileno()] = client
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._hear(client))
        try:
            control.send(connection, client.challenge)
        except PeerLost:
            self._drop(client)

    def _hear(self, client: Client) -> None:
        try:
            data, fds = control.receive(client.connection)
            for fd in fds:  # clients have nothing to share
                socket.close(fd)
            if client.is_proved:
                self._answer(client, control.decode_to_server(data))
            else:
                self._admit(client, handshake.decode(data, handshake.Hello))
        except PeerLost:
            self._drop(client)
        except TransferError as exc:
            logger.warning("shm: refused a client (pid %d): %s", _pid(client), exc)
            with contextlib.suppress(PeerLost):
                control.send(client.connection, handshake.Welcome(refusal=str(exc)))
            self._drop(client)

    def _admit(self, client: Client, hello: handshake.Hello) -> None:
        welcome = self._deployment.check_client(client.challenge, hello)
        who = control.credentials(client.connection)
        if who.uid not in (os.getuid(), 0):
            raise AccessDenied(f"process {who.pid} belongs to user {who.uid}, not {os.getuid()}")
        with self._lock:
            control.send(client.connection, welcome)
            for key, region in self._table.items():
                self._tell(client, region, key)
            probe = ctypes.addressof(self._cookie)
            control.send(client.connection, control.Synced(0, probe, self._cookie.raw))
            client.is_proved = True

    def _answer(self, client: Client, message: control.ToServer) -> None:
        if isinstance(message, control.Sync):
            with self._lock:
                control.send(client.connection, control.Synced(message.token))
        elif event := client.revoking.pop(message.key, None):
            event.set()

    def _watch(self, peer: ShmPeer) -> None:
        self._selector.register(
            peer.connection, selectors.EVENT_READ, lambda: self._hear_peer(peer)
        )

    def _hear_peer(self, peer: ShmPeer) -> None:
        try:
            peer.handle()
        except TransferError as exc:
            peer.lose(exc)
            self._peers.pop(peer.connection.fileno(), None)
            self._selector.unregister(peer.connection)
            peer.connection.close()

    def _expire_strangers(self) -> None:
        now = time.monotonic()
        for client in list(self._clients.values()):
            if not client.is_proved and now > client.expires:
                self._drop(client)

    def _drop(self, client: Client) -> None:
        with self._lock:
            self._clients.pop(client.connection.fileno(), None)
            self._selector.unregister(client.connection)
            client.connection.close()
            client.released()

    def _stop(self) -> None:
        """Close every descriptor; the loop ends after this."""
        self._is_stopped = True
        for client in list(self._clients.values()):
            self._drop(client)
        for peer in list(self._peers.values()):
            peer.lose(PeerLost("shm: this endpoint is closed"))
            peer.connection.close()
        self._peers.clear()
        self._listener.close()
        for key in list(self._selector.get_map().values()):
            self._selector.unregister(key.fileobj)
        self._selector.close()
        os.close(self._wake)


def _own_address(epoch: bytes, name: str) -> control.Address:
    return control.Address(
        version=control.VERSION,
        host=host.host_identity(),
        epoch=epoch,
        socket=name,
        pid=os.getpid(),
    )


def _all_set(events: list[threading.Event], timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    return all(event.wait(max(deadline - time.monotonic(), 0)) for event in events)


def _pid(client: Client) -> int:
    return control.credentials(client.connection).pid
