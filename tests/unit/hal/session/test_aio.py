"""Sessions on an event loop: requests, refusals, and peers that are slow, hostile or silent."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from mooncake_hal.errors import (
    AccessDenied,
    HalError,
    PeerLost,
    PortsExhausted,
    RequestNotSent,
    RequestRejected,
    TransferTimeout,
    VersionMismatch,
)
from mooncake_hal.session.aio import AsyncListener, AsyncSession, connect, listen
from mooncake_hal.session.authentication import Credentials, fresh_epoch
from mooncake_hal.session.connection_limits import LIMITS
from mooncake_hal.session.frames import LENGTH_BYTES, Seals, SessionRequest, frame
from mooncake_hal.session.listener import run_handshake

OURS = Credentials(b"a secret", "side channel", 1)
QUICK = replace(LIMITS, handshake_s=0.3, send_s=0.3, keepalive_s=0.1, send_buffer_bytes=1 << 16)
HOST = "127.0.0.1"


def echo(session: AsyncSession, payload: bytes) -> bytes:
    """Echo a payload, or refuse it or fail as it asks."""
    if payload == b"refuse":
        raise HalError("because")
    if payload == b"fail":
        raise ZeroDivisionError
    return payload


def run(case: Callable[[AsyncListener], Awaitable[None]], limits: object = LIMITS) -> None:
    """Run a case against a listener that echoes."""

    async def main() -> None:
        listener = await listen(HOST, [0], OURS, echo, limits=limits)  # type: ignore[arg-type]
        try:
            await asyncio.wait_for(case(listener), 20)
        finally:
            listener.close()
            await asyncio.sleep(0)

    asyncio.run(main())


async def ends(sock: socket.socket, within: float) -> bytes:
    """Receive until the other side ends the connection."""
    loop, found = asyncio.get_running_loop(), b""

    async def receive() -> bytes:
        nonlocal found
        try:
            while part := await loop.sock_recv(sock, 65536):
                found += part
        except ConnectionError:
            pass
        return found

    return await asyncio.wait_for(receive(), within)


async def dialled(listener: AsyncListener) -> socket.socket:
    """Connect below the protocol."""
    sock = socket.socket()
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (HOST, listener.port))
    return sock


def test_requests_are_answered_or_refused() -> None:
    async def case(listener: AsyncListener) -> None:
        session = await connect(HOST, listener.port, OURS, timeout=5)
        assert session.peer_epoch == listener.epoch
        big = b"x" * (1 << 20)
        replies = await asyncio.gather(*(session.request(big, timeout=5) for _ in range(8)))
        assert replies == [big] * 8
        with pytest.raises(RequestRejected, match=r"^because$"):
            await session.request(b"refuse", timeout=5)
        assert await session.request(b"still there", timeout=5) == b"still there"
        session.close()
        assert "this side closed" in str(await session.closed)
        with pytest.raises(PeerLost, match="this side closed"):
            await session.request(b"late", timeout=5)

    run(case)


def test_failing_handler_ends_only_its_session() -> None:
    async def case(listener: AsyncListener) -> None:
        session, other = [await connect(HOST, listener.port, OURS, timeout=5) for _ in range(2)]
        with pytest.raises(PeerLost):
            await session.request(b"fail", timeout=5)
        assert await other.request(b"ok", timeout=5) == b"ok"

    run(case)


@pytest.mark.parametrize(
    ("credentials", "epoch", "error", "reason"),
    [
        (replace(OURS, secret=b"other"), None, AccessDenied, "does not know this deployment"),
        (replace(OURS, version=2), None, VersionMismatch, "we speak version 2, the peer 1"),
        (OURS, b"e" * 16, PeerLost, "has restarted"),
    ],
)
def test_client_with_other_credentials_or_epoch_is_rejected(
    credentials: Credentials, epoch: bytes | None, error: type[HalError], reason: str
) -> None:
    async def case(listener: AsyncListener) -> None:
        with pytest.raises(error, match=reason):
            await connect(HOST, listener.port, credentials, timeout=5, epoch=epoch)
        assert not listener.sessions

    run(case)


def test_connecting_to_a_closed_port_is_a_lost_peer() -> None:
    async def main() -> None:
        with socket.socket() as unused:
            unused.bind((HOST, 0))
            with pytest.raises(PeerLost, match="can't connect"):
                await connect(HOST, unused.getsockname()[1], OURS, timeout=5)

    asyncio.run(main())


@pytest.mark.parametrize("host", ["a..b", "x" * 64, "10.0.0.1\0", "\udcff"])
def test_invalid_host_name_is_a_lost_peer(host: str) -> None:
    async def main() -> None:
        with pytest.raises(PeerLost, match=r"can't connect to '.*' port 7701"):
            await connect(host, 7701, OURS, timeout=5)

    asyncio.run(main())


def test_cancelled_connect_leaves_no_session() -> None:
    async def case(listener: AsyncListener) -> None:
        for num_rounds in range(40):
            connecting = asyncio.ensure_future(connect(HOST, listener.port, OURS, timeout=5))
            for _ in range(num_rounds):
                await asyncio.sleep(0)
            connecting.cancel()
            done = await asyncio.gather(connecting, return_exceptions=True)
            if isinstance(done[0], AsyncSession):
                done[0].close()
        await asyncio.sleep(0.1)
        assert not listener.sessions

    run(case)


def test_silent_server_times_out() -> None:
    async def main() -> None:
        silent = socket.create_server((HOST, 0))
        with pytest.raises(TransferTimeout, match=r"did not reply within 0\.2 s"):
            await connect(HOST, silent.getsockname()[1], OURS, timeout=0.2)
        silent.close()

    asyncio.run(main())


def test_first_free_port_is_used_for_ipv6() -> None:
    async def main() -> None:
        first = await listen("::1", [0], OURS, echo)
        second = await listen("::1", [first.port, 0], OURS, echo)
        session = await connect("::1", second.port, OURS, timeout=5)
        assert await session.request(b"six", timeout=5) == b"six"
        with pytest.raises(PortsExhausted, match="all ports"):
            await listen("::1", [first.port, second.port], OURS, echo)
        for end in (session, first, second):
            end.close()

    asyncio.run(main())


def test_closing_the_listener_ends_its_sessions() -> None:
    async def case(listener: AsyncListener) -> None:
        session = await connect(HOST, listener.port, OURS, timeout=5)
        listener.close()
        assert isinstance(await session.closed, PeerLost)

    run(case)


def test_slow_handshake_is_cut_at_its_deadline() -> None:
    async def case(listener: AsyncListener) -> None:
        sock = await dialled(listener)
        dripping = asyncio.ensure_future(drip(sock))
        await ends(sock, 2.0)
        dripping.cancel()
        sock.close()

    async def drip(sock: socket.socket) -> None:
        for byte in frame(b"x" * 4000):
            await asyncio.get_running_loop().sock_sendall(sock, bytes([byte]))
            await asyncio.sleep(0.05)

    run(case, QUICK)


def test_many_pending_handshakes_do_not_block_members() -> None:
    async def case(listener: AsyncListener) -> None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        crowd = []
        for number in range(1000):
            sock = await dialled(listener)
            sock.send(frame(b"x" * 4096)[:4000])
            crowd.append(sock)
            if len(crowd) > 200:  # stay below the limit of descriptors
                crowd.pop(0).close()
            if number % 250 == 0:
                session = await connect(HOST, listener.port, OURS, timeout=5)
                assert await session.request(b"hello", timeout=5) == b"hello"
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < 64 * 1024  # KiB
        for sock in crowd:
            sock.close()

    run(case)


@pytest.mark.parametrize(
    "sent", [(4097).to_bytes(4, "big"), b"\xff" * 4, frame(b""), frame(b"\x80"), b"GET / HTTP/1.1"]
)
def test_invalid_bytes_in_a_handshake_disconnect(sent: bytes) -> None:
    async def case(listener: AsyncListener) -> None:
        sock = await dialled(listener)
        await asyncio.get_running_loop().sock_sendall(sock, sent)
        await ends(sock, 5.0)
        sock.close()

    run(case)


async def member(listener: AsyncListener) -> tuple[socket.socket, Seals]:
    """Authenticate below the session layer, to misbehave afterwards."""

    def work() -> tuple[socket.socket, Seals]:
        sock = socket.create_connection((HOST, listener.port))
        proven = run_handshake(sock, OURS.connect(None), time.monotonic() + 5)
        sock.setblocking(False)
        return sock, Seals.of_client(proven)

    return await asyncio.to_thread(work)


@pytest.mark.parametrize("attack", ["replay", "inject", "oversize"])
def test_forged_frames_end_the_session(attack: str) -> None:
    handled = []

    def count(session: AsyncSession, payload: bytes) -> bytes:
        handled.append(payload)
        return payload

    async def main() -> None:
        listener = await listen(HOST, [0], OURS, count)
        sock, seals = await member(listener)
        first = seals.outgoing.seal(SessionRequest(1, b"once"))
        second = {
            "replay": first,
            "inject": frame(b"\0" * 16 + b"\x93\xa7request"),
            "oversize": ((16 << 20) + 1).to_bytes(LENGTH_BYTES, "big"),
        }[attack]
        await asyncio.get_running_loop().sock_sendall(sock, first + second)
        await ends(sock, 5.0)
        assert handled == [b"once"]
        sock.close()
        listener.close()

    asyncio.run(main())


def test_member_that_never_reads_is_dropped_with_bounded_memory() -> None:
    limits = replace(QUICK, frame_bytes=1 << 20, keepalive_s=60.0)

    async def case(listener: AsyncListener) -> None:
        other = await connect(HOST, listener.port, OURS, timeout=5)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        sock, seals = await member(listener)
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ConnectionError):
            for number in range(10_000):
                data = seals.outgoing.seal(SessionRequest(number, b"x" * 100_000))
                await asyncio.wait_for(loop.sock_sendall(sock, data), 10)
        assert len(listener.sessions) == 1
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB
        assert await other.request(b"hello", timeout=5) == b"hello"
        sock.close()

    run(case, limits)


def test_silent_member_is_lost() -> None:
    async def case(listener: AsyncListener) -> None:
        session = await connect(HOST, listener.port, OURS, timeout=5, limits=QUICK)
        sock, _ = await member(listener)
        await asyncio.sleep(1.0)
        assert not session.closed.done()  # it replies to pings
        assert len(listener.sessions) == 1
        sock.close()

    run(case, QUICK)


@pytest.mark.parametrize("beyond", [0, 1])
def test_oversized_request_is_not_sent_and_fails_alone(beyond: int) -> None:
    async def case(listener: AsyncListener) -> None:
        limits = replace(LIMITS, frame_bytes=4096)
        session = await connect(HOST, listener.port, OURS, timeout=5, limits=limits)
        waiting = asyncio.ensure_future(session.request(b"x", timeout=5))
        longest = bytes(4096 - 128 + beyond)
        if beyond:
            with pytest.raises(RequestNotSent, match="3969 bytes is too long for one frame"):
                await session.request(longest, timeout=5)
        else:
            assert await session.request(longest, timeout=5) == longest
        assert await waiting == b"x"
        assert not session.closed.done()
        session.close()

    run(case)


def test_requests_without_a_reply_are_bounded() -> None:
    async def main() -> None:
        silent = asyncio.Event()

        async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            steps = OURS.accept(fresh_epoch())
            writer.write(frame(next(steps).message))
            size = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
            writer.write(frame(steps.send(await reader.readexactly(size)).message))
            await silent.wait()
            writer.close()

        server = await asyncio.start_server(mute, HOST, 0)
        port = server.sockets[0].getsockname()[1]
        limits = replace(LIMITS, outstanding=2)
        session = await connect(HOST, port, OURS, timeout=5, limits=limits)
        waiting = [asyncio.ensure_future(session.request(b"x", timeout=5)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(RequestNotSent, match="2 requests to the peer are outstanding"):
            await session.request(b"y", timeout=5)
        for one in waiting:
            one.cancel()
        await asyncio.sleep(0)
        with pytest.raises(TransferTimeout, match=r"did not reply within 0\.05 s"):
            await session.request(b"y", timeout=0.05)
        session.close()
        silent.set()
        server.close()
        await asyncio.sleep(0.05)

    asyncio.run(main())
