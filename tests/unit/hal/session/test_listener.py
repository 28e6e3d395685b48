"""The listener over blocking TCP and Unix sockets: members are served, others are bounded."""

from __future__ import annotations

import errno
import logging
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from mooncake_hal.errors import (
    AccessDenied,
    PeerLost,
    RequestRejected,
    TransferError,
    TransferTimeout,
)
from mooncake_hal.session.addressing import listen_on
from mooncake_hal.session.authentication import Credentials, fresh_epoch
from mooncake_hal.session.connection_limits import LIMITS, Limits
from mooncake_hal.session.frames import Registered, Revoked, frame
from mooncake_hal.session.listener import ACCEPT_PAUSE_SECONDS, Listener, ProvenSocket, dial
from mooncake_hal.session.session import Session, reject_requests
from mooncake_hal.transport import MemoryRegion

OURS = Credentials(b"a secret", "any", 1)
EPOCH = fresh_epoch()
QUICK = replace(LIMITS, handshake_s=0.5)


def unix() -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.bind("")  # the kernel chooses an abstract name
    sock.listen(64)
    return sock


FAMILIES = {"tcp": lambda: listen_on("127.0.0.1", 0, 64), "unix": unix}


class Echo:
    """A listener whose sessions echo requests."""

    def __init__(self, family: str, limits: Limits = LIMITS) -> None:
        self.sock = FAMILIES[family]()
        self.sessions: list[Session] = []
        self.listener = Listener(self.sock, OURS, EPOCH, self._serve, limits=limits)
        self.address = self.sock.getsockname()

    def dial(self, credentials: Credentials = OURS, timeout: float = 5.0) -> ProvenSocket:
        return dial(self.connect, str(self.address), credentials, EPOCH, timeout)

    def connect(self, timeout: float = 5.0) -> socket.socket:
        sock = socket.socket(self.sock.family)
        sock.connect(self.address)  # blocking: a full backlog of a Unix socket fails others at once
        sock.settimeout(timeout)
        return sock

    def check(self) -> None:
        """Check that a member is accepted and served."""
        session = Session(self.dial(), reject_requests)
        session.start("check")
        assert session.request(b"hello", 5.0) == b"hello"
        session.close()

    def close(self) -> None:
        for session in self.sessions:
            session.close()
        self.listener.close()

    def _serve(self, proven: ProvenSocket) -> None:
        session = Session(proven, lambda session, payload: payload)
        self.sessions.append(session)
        session.run()


@pytest.fixture
def echo() -> Iterator[Callable[..., Echo]]:
    opened: list[Echo] = []

    def begin(*arguments: object) -> Echo:
        opened.append(Echo(*arguments))  # type: ignore[arg-type]  # as the test says
        return opened[-1]

    yield begin
    for one in opened:
        one.close()


def ended(sock: socket.socket, within: float) -> float:
    """Return after how many seconds the other side ends the connection."""
    started = time.monotonic()
    sock.settimeout(within)
    try:
        while sock.recv(65536):
            pass
    except ConnectionError:
        pass
    sock.close()
    return time.monotonic() - started


@pytest.mark.parametrize("family", FAMILIES)
def test_members_are_served_and_others_are_rejected(family: str, echo: Callable[..., Echo]) -> None:
    target = echo(family)
    target.check()
    with pytest.raises(AccessDenied, match="rejected us: any: the client does not know"):
        target.dial(replace(OURS, secret=b"another"))
    with pytest.raises(PeerLost, match="has restarted"):
        dial(target.connect, "there", OURS, fresh_epoch(), 5.0)
    target.check()


@pytest.mark.parametrize("family", FAMILIES)
def test_slow_handshake_is_cut_at_its_deadline(family: str, echo: Callable[..., Echo]) -> None:
    target = echo(family, QUICK)
    sock = target.connect()
    stop = threading.Event()

    def drip() -> None:
        try:
            for byte in frame(b"x" * 4000):
                sock.sendall(bytes([byte]))
                if stop.wait(0.05):
                    return
        except OSError:
            pass

    dripping = threading.Thread(target=drip)
    dripping.start()
    assert ended(sock, 5.0) < 2.0
    stop.set()
    dripping.join()
    target.check()


def test_slow_server_is_abandoned_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            sock, _ = server.accept()
            with sock:
                try:
                    for byte in frame(b"x" * 100):
                        sock.sendall(bytes([byte]))
                        time.sleep(0.05)
                except OSError:
                    pass

        dripping = threading.Thread(target=drip)
        dripping.start()
        address, started = server.getsockname(), time.monotonic()
        with pytest.raises(TransferTimeout, match="did not finish the handshake in time"):
            dial(lambda left: socket.create_connection(address, left), "x", OURS, EPOCH, 0.3)
        assert time.monotonic() - started < 2.0
        dripping.join()


@pytest.mark.parametrize("family", FAMILIES)
def test_many_pending_handshakes_do_not_block_members(
    family: str, echo: Callable[..., Echo]
) -> None:
    target = echo(family)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    crowd: list[socket.socket] = []
    for number in range(1000):
        crowd.append(target.connect())
        if len(crowd) > 200:  # stay below the limit of descriptors
            crowd.pop(0).close()
        if number % 250 == 249:
            target.check()
    assert threading.active_count() < LIMITS.handshakes + 40
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB
    for sock in crowd:
        sock.close()


@pytest.mark.parametrize("sent", [(4097).to_bytes(4, "big"), b"\xff" * 4, b"GET / HTTP/1.1"])
def test_oversized_frame_in_a_handshake_disconnects_at_once(
    sent: bytes, echo: Callable[..., Echo]
) -> None:
    sock = echo("tcp").connect()
    sock.sendall(sent)
    assert ended(sock, 5.0) < 2.0


def test_failed_accept_is_logged_and_retried(
    echo: Callable[..., Echo], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target = echo("unix")
    failures = [OSError(errno.EMFILE, "too many")] * 3
    accept = socket.socket.accept

    def failing(sock: socket.socket) -> object:
        if failures:
            raise failures.pop()
        return accept(sock)

    monkeypatch.setattr(socket.socket, "accept", failing)
    started = time.monotonic()
    with caplog.at_level(logging.WARNING):
        target.check()
    assert time.monotonic() - started >= 3 * ACCEPT_PAUSE_SECONDS
    assert caplog.text.count("can't accept a connection") == 3


def test_thread_shortage_rejects_one_connection(
    echo: Callable[..., Echo], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = echo("tcp")
    real, shortages = threading.Thread.start, [RuntimeError("can't start new thread")]

    def start(thread: threading.Thread) -> None:
        if thread.name == "any-peer" and shortages:
            raise shortages.pop()
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(PeerLost):
        one.dial()
    assert "can't serve a connection: can't start new thread" in caplog.text
    one.check()
    assert one.listener.error is None
    one.close()


def test_member_that_never_reads_is_dropped(echo: Callable[..., Echo]) -> None:
    target = echo("unix")
    quick = replace(LIMITS, send_s=0.3)
    silent = target.dial()
    target.sessions.clear()
    ours = Session(target.dial(), reject_requests, quick)
    ours.start("ours")
    started = time.monotonic()
    with pytest.raises(PeerLost, match="broke while sending"):
        flood(silent, quick)
    assert time.monotonic() - started < 5.0
    assert ours.request(b"still served", 5.0) == b"still served"
    ours.close()
    silent.sock.close()


def flood(proven: ProvenSocket, limits: Limits) -> None:
    """Send requests without reading replies, until the session fails."""
    session = Session(proven, reject_requests, limits)
    for _ in range(1000):
        request = session.start_request(b"x" * 100_000)
        if request.done():
            request.result()


def test_session_carries_refusals_regions_and_descriptors(echo: Callable[..., Echo]) -> None:
    target = echo("unix")
    session = Session(target.dial(), reject_requests)
    session.start("ours")
    session.barrier(5.0)
    [far] = target.sessions
    with pytest.raises(RequestRejected, match="accepts no requests"):
        far.request(b"to the end that connected", 5.0)
    assert session.peer_process() > 0
    far.send(Registered(1, 4096, 64, "cpu", b"how"))
    far.barrier(5.0)
    assert session.regions.items() == [(1, MemoryRegion(4096, 64), b"how")]
    far.send(Revoked(1))
    far.barrier(5.0)
    assert session.regions.items() == []
    assert not session.is_hung_up()
    far.hang_up()
    with pytest.raises(TransferError):
        session.barrier(5.0)
    assert session.is_hung_up()
    session.close()


def test_other_user_is_denied_on_a_unix_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even with the secret: memory is passed over that socket."""
    target = Echo("unix")
    try:
        monkeypatch.setattr("mooncake_hal.session.listener.os.getuid", lambda: 4711)
        monkeypatch.setattr(
            "mooncake_hal.session.listener.peer_credentials", lambda sock: (1, 1000)
        )
        with pytest.raises(AccessDenied, match="process 1 belongs to user 1000, not 4711"):
            target.dial()
    finally:
        target.close()


def test_other_users_evict_only_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Echo("unix")
    ours = target.connect()
    ours.recv(4096)  # the challenge: it is in its handshake
    monkeypatch.setattr("mooncake_hal.session.listener.foreign_user", lambda sock: "another user")
    crowd = [target.connect() for _ in range(LIMITS.handshakes)]
    try:
        assert ended(crowd[0], 5.0) < 5.0
        ours.settimeout(0.1)
        with pytest.raises(TimeoutError):  # it would read the end
            ours.recv(1)
    finally:
        for sock in (ours, *crowd):
            sock.close()
        target.close()
