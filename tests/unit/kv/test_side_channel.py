"""The side channel on loopback: replies, retries, and peers without the secret."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import msgspec
import pytest
from support.pd_relay import Relay, relay

from mooncake_hal.errors import PeerLost
from mooncake_hal.session.aio import AsyncListener, AsyncSession, connect, listen
from mooncake_hal.session.frames import frame
from mooncake_kv import side_channel
from mooncake_kv.errors import (
    HandshakeRefused,
    KVTransferError,
    SessionRefused,
    SideChannelPortInUse,
)
from mooncake_kv.io_loop import IoLoop
from mooncake_kv.protocol import (
    PROTOCOL_VERSION,
    AnyMessage,
    Done,
    LeaseReply,
    LeaseStatus,
    Reject,
    Renewed,
    decode,
)
from mooncake_kv.side_channel import SideChannelClient, SideChannelServer, credentials_of

HOST = "127.0.0.1"
SECRET = b"secret"
NO_MESSAGE = f"not a message of protocol {PROTOCOL_VERSION}"


def held(message: AnyMessage) -> AnyMessage:
    return LeaseReply(message.ticket, LeaseStatus.HELD)


def refusing(message: AnyMessage) -> AnyMessage:
    raise HandshakeRefused("model differs: m1, m2")


async def settle() -> None:
    """Give closed connections the time to finish."""
    await asyncio.sleep(0.02)


@asynccontextmanager
async def serving(
    handler: Callable[[AnyMessage], AnyMessage] = held, port: int = 0
) -> AsyncIterator[int]:
    server = await SideChannelServer.listen(HOST, [port], SECRET, handler)
    try:
        yield server.port
    finally:
        server.close()
        await settle()


@asynccontextmanager
async def connected_client(
    port: int, secret: bytes = SECRET, host: str = HOST
) -> AsyncIterator[SideChannelClient]:
    client = SideChannelClient(host, port, secret)
    try:
        yield client
    finally:
        client.close("the test ends")
        await settle()


@asynccontextmanager
async def relayed(port: int) -> AsyncIterator[tuple[Relay, SideChannelClient]]:
    """A client that reaches the side channel through a relay, which may lose messages."""
    async with relay(HOST, port, SECRET) as between, connected_client(between.port) as client:
        yield between, client


@asynccontextmanager
async def silent_server() -> AsyncIterator[tuple[int, list[StreamWriter]]]:
    """A server that accepts connections and never sends anything; yields the connections as
    well."""
    accepted: list[StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: accepted.append(writer), HOST, 0)
    try:
        yield server.sockets[0].getsockname()[1], accepted
    finally:
        server.close()
        for writer in accepted:
            writer.transport.abort()
        await settle()


async def ask(client: SideChannelClient, try_timeout_s: float = 2.0) -> LeaseStatus:
    answer = await client.ask(
        lambda ticket: Done(ticket, "a", "me"), LeaseReply, tries=2, try_timeout_s=try_timeout_s
    )
    return answer.status


def test_request_gets_its_reply() -> None:
    async def main() -> None:
        async with serving() as port, connected_client(port) as client:
            answers = await asyncio.gather(*(ask(client) for _ in range(20)))
            assert set(answers) == {LeaseStatus.HELD}

    asyncio.run(main())


def test_concurrent_first_requests_share_one_connection() -> None:
    async def main() -> None:
        server = await SideChannelServer.listen(HOST, [0], SECRET, held)
        listener = server._listener
        assert isinstance(listener, AsyncListener)
        async with connected_client(server.port) as client:
            first = asyncio.create_task(ask(client))
            others = [asyncio.create_task(ask(client)) for _ in range(4)]
            await asyncio.sleep(0)
            first.cancel()  # and leaves the connection to the others
            assert await asyncio.gather(*others) == [LeaseStatus.HELD] * 4
            assert len(listener.sessions) == 1
        server.close()
        await settle()

    asyncio.run(main())


def test_ipv6() -> None:
    async def main() -> None:
        server = await SideChannelServer.listen("::1", [0], SECRET, held)
        async with connected_client(server.port, host="::1") as client:
            assert client.url == f"tcp://[::1]:{server.port}"
            assert await ask(client) is LeaseStatus.HELD
        server.close()
        await settle()

    asyncio.run(main())


def test_rejection_reaches_its_requester() -> None:
    async def main() -> None:
        async with serving(refusing) as port, connected_client(port) as client:
            with pytest.raises(HandshakeRefused, match="refused: model differs: m1, m2"):
                await ask(client)

    asyncio.run(main())


def test_reply_of_other_type_is_an_error() -> None:
    async def main() -> None:
        def odd(message: AnyMessage) -> AnyMessage:
            return Renewed(message.ticket, ())

        async with serving(odd) as port, connected_client(port) as client:
            with pytest.raises(KVTransferError, match="answered Renewed, not LeaseReply"):
                await ask(client)

    asyncio.run(main())


def test_malformed_reply_is_an_error() -> None:
    def nonsense(session: AsyncSession, payload: bytes) -> bytes:
        return b"\xc1"

    async def main() -> None:
        listener = await listen(HOST, [0], credentials_of(SECRET), nonsense)
        async with connected_client(listener.port) as client:
            with pytest.raises(KVTransferError, match=f"answered with {NO_MESSAGE}"):
                await ask(client)
        listener.close()
        await settle()

    asyncio.run(main())


def test_handler_that_fails_ends_only_the_requesters_session(
    caplog: pytest.LogCaptureFixture,
) -> None:
    is_broken = True

    def failing(message: AnyMessage) -> AnyMessage:
        if is_broken:
            raise ZeroDivisionError("nobody thought of it")
        return held(message)

    async def main() -> None:
        nonlocal is_broken
        server = await SideChannelServer.listen(HOST, [0], SECRET, failing)
        async with connected_client(server.port) as client, connected_client(server.port) as other:
            with pytest.raises(KVTransferError, match="did not answer"):
                await ask(client, try_timeout_s=0.2)
            is_broken = False
            await ask(other)
            await ask(client)
        assert "nobody thought of it" in caplog.text
        server.close()
        await settle()

    asyncio.run(main())


def test_another_secret_fails_immediately_with_advice() -> None:
    async def main() -> None:
        async with serving() as port, connected_client(port, b"other") as client:
            began = time.monotonic()
            with pytest.raises(SessionRefused, match="has another secret; give every instance"):
                await ask(client, try_timeout_s=30.0)
            assert time.monotonic() - began < 10.0

    asyncio.run(main())


def test_another_version_fails_immediately_with_advice() -> None:
    async def main() -> None:
        older = replace(credentials_of(SECRET), version=2)
        listener = await listen(HOST, [0], older, lambda session, payload: payload)
        async with connected_client(listener.port) as client:
            pattern = f"we speak version {PROTOCOL_VERSION}, the peer 2; run one release"
            with pytest.raises(SessionRefused, match=pattern):
                await ask(client, try_timeout_s=30.0)
        listener.close()
        await settle()

    asyncio.run(main())


def test_lost_request_is_retried_and_repeated_reply_ignored() -> None:
    async def main() -> None:
        fates = iter([[], [0.0], [0.0, 0.0]])  # lost; retried; answered twice
        async with serving() as port, relayed(port) as (between, client):
            between.delivery = lambda kind: next(fates, [0.0])
            assert await ask(client, try_timeout_s=0.2) is LeaseStatus.HELD
            assert between.seen == ["done", "done", "leasereply"]
            assert await ask(client) is LeaseStatus.HELD, "the second reply is ignored"

    asyncio.run(main())


def test_late_reply_is_accepted() -> None:
    async def main() -> None:
        fates = iter([[0.3], []])  # the retry is lost
        async with serving() as port, relayed(port) as (between, client):
            between.delivery = lambda kind: next(fates, [0.0])
            assert await ask(client, try_timeout_s=0.25) is LeaseStatus.HELD
            assert between.seen == ["done", "done", "leasereply"]

    asyncio.run(main())


def test_missing_reply_times_out() -> None:
    async def main() -> None:
        async with silent_server() as (silent, _), connected_client(silent) as client:
            with pytest.raises(KVTransferError, match=r"did not answer within 0\.4 s"):
                await asyncio.wait_for(ask(client, try_timeout_s=0.2), 5.0)

    asyncio.run(main())


def test_refused_connection_to_a_new_peer_fails_immediately() -> None:
    async def main() -> None:
        async with serving() as absent:
            pass
        async with connected_client(absent) as client:
            with pytest.raises(KVTransferError, match="nothing listens at peer"):
                await asyncio.wait_for(ask(client, try_timeout_s=30.0), 5.0)

    asyncio.run(main())


def test_reconnects_to_absent_peer_back_off(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    async def refused(*arguments: object, **options: object) -> AsyncSession:
        tried.append(asyncio.get_running_loop().time())
        raise PeerLost("nobody listens")

    async def main() -> None:
        monkeypatch.setattr(side_channel, "connect", refused)
        client = SideChannelClient(HOST, 1, SECRET)
        asked = [asyncio.create_task(ask(client, try_timeout_s=1.0)) for _ in range(10)]
        for each in asked:
            with pytest.raises(KVTransferError, match="did not answer"):
                await each
        client.close("the test ends")

    asyncio.run(main())
    assert 2 < len(tried) < 8  # the backoff grows, and is shared by all callers


def test_peer_restarted_at_same_port_is_reconnected() -> None:
    async def main() -> None:
        async with serving() as port:
            client = SideChannelClient(HOST, port, SECRET)
            assert await ask(client) is LeaseStatus.HELD
        asked = asyncio.create_task(ask(client))
        await asyncio.sleep(0.2)  # while nothing listens
        async with serving(port=port):
            assert await asked is LeaseStatus.HELD
            assert await ask(client) is LeaseStatus.HELD
            client.close("the test ends")

    asyncio.run(main())


MALFORMED = [
    b"",
    b"x" * 20,
    b"x" * 100,
    b"\xc1",
    msgspec.msgpack.encode({"kind": "shutdown", "ticket": 1}),
    b"\x83\xa4kind\xa4done\xa6ticket\x01\xaarequest_id\xa2\xff\xfe",
    b"\x83\xa4kind\xa4done\xa6ticket\x01\xa1x" + b"\x91" * 5000 + b"\x01",
]


@pytest.mark.parametrize("payload", MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_message_gets_a_typed_reject(payload: bytes) -> None:
    async def main() -> None:
        async with serving() as port, connected_client(port) as client:
            member = await connect(HOST, port, credentials_of(SECRET), timeout=5.0)
            for _ in range(2):
                answer = decode(await member.request(payload, timeout=5.0))
                assert isinstance(answer, Reject)
                assert answer.reason.startswith((NO_MESSAGE, "a frame of 0"))
            assert await ask(client) is LeaseStatus.HELD
            member.close()

    asyncio.run(main())


STRANGE = [
    b"x" * 100,
    b"GET / HTTP/1.1\r\n\r\n",
    frame(b""),
    frame(b"\x80"),
    frame(os.urandom(4000)),
    b"\0" * (17 << 20),
    b"\xff" * 8,
]


@pytest.mark.parametrize("sent", STRANGE, ids=range(len(STRANGE)))
def test_unauthenticated_bytes_affect_no_session(sent: bytes) -> None:
    async def main() -> None:
        async with serving() as port, connected_client(port) as client:
            _, writer = await asyncio.open_connection(HOST, port)
            writer.write(sent)
            assert await ask(client) is LeaseStatus.HELD
            with suppress(OSError):
                await writer.drain()
            assert await ask(client) is LeaseStatus.HELD
            writer.transport.abort()

    asyncio.run(main())


def test_flood_of_pending_handshakes_does_not_block_peers() -> None:
    async def main() -> None:
        async with serving() as port:
            crowd: list[tuple[StreamReader, StreamWriter]] = []
            for _ in range(200):
                crowd.append(await asyncio.open_connection(HOST, port))
                crowd[-1][1].write(frame(b"x" * 4096)[:100])
            async with connected_client(port) as client:
                assert await ask(client) is LeaseStatus.HELD
            for _, writer in crowd:
                writer.transport.abort()

    asyncio.run(main())


def test_oversized_message_raises_its_own_error() -> None:
    async def main() -> None:
        async with serving() as port, connected_client(port) as client:
            long = "x" * (17 << 20)
            with pytest.raises(KVTransferError, match="is too long"):
                await client.ask(lambda ticket: Done(ticket, long, "me"), LeaseReply)
            assert await ask(client) is LeaseStatus.HELD

    asyncio.run(main())


def test_taken_port_error_names_port() -> None:
    async def main() -> None:
        async with serving() as port:
            with pytest.raises(
                SideChannelPortInUse, match=f"on 127.0.0.1 can't be bound: port {port}: Addr"
            ):
                await SideChannelServer.listen(HOST, [port], SECRET, held)
            with pytest.raises(SideChannelPortInUse, match="2 ports tried, the last: port"):
                await SideChannelServer.listen(HOST, [port, port], SECRET, held)
            server = await SideChannelServer.listen(HOST, [port, 0], SECRET, held)
            assert server.port not in (port, 0)
            server.close()

    asyncio.run(main())


def test_foreign_listen_host_error_names_host() -> None:
    async def main() -> None:
        pattern = r"on 192\.0\.2\.1 can't be bound: can't listen on 192\.0\.2\.1 port 0"
        with pytest.raises(SideChannelPortInUse, match=pattern):
            await SideChannelServer.listen("192.0.2.1", [0], SECRET, held)

    asyncio.run(main())


@pytest.mark.parametrize("host", ["two words", "*", "a/b", "\0", "", "x" * 64, "a..b", "::z"])
def test_invalid_host_is_a_transfer_error(host: str) -> None:
    with pytest.raises(KVTransferError, match="is not a valid side channel address"):
        SideChannelClient(host, 80, SECRET)


@pytest.mark.parametrize("host", ["localhost", "node-7.cluster.local", "::1", "10.0.0.7", "a_b."])
def test_names_and_addresses_are_valid_hosts(host: str) -> None:
    SideChannelClient(host, 80, SECRET)


def test_close_fails_requests_in_flight() -> None:
    async def main() -> None:
        async with serving() as port, relayed(port) as (between, client):
            between.delivery = lambda kind: []
            await check_closing(client, lambda: bool(between.seen))

    asyncio.run(main())


def test_close_fails_requests_that_wait_for_a_connection() -> None:
    async def main() -> None:
        async with silent_server() as (port, accepted), connected_client(port) as client:
            await check_closing(client, lambda: bool(accepted))

    asyncio.run(main())


async def check_closing(client: SideChannelClient, is_asked: Callable[[], bool]) -> None:
    waiting = [asyncio.create_task(ask(client, try_timeout_s=30.0)) for _ in range(2)]
    while not is_asked():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    client.close("the test ends")
    for task in waiting:
        with pytest.raises(KVTransferError, match="was closed: the test ends"):
            await asyncio.wait_for(task, 5.0)
    with pytest.raises(KVTransferError, match="was closed: the test ends"):
        await ask(client)


def test_loop_stopped_during_connect_leaves_no_task(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gc.collect()  # objects left by other tests do not count
    caplog.clear()
    end_while_connecting()
    gc.collect()
    found = [record.message for record in caplog.records if "pending" in record.message]
    assert not found, found


def end_while_connecting() -> None:
    io = IoLoop("test", lambda name, exc: None, lambda dead: None)
    with socket.create_server((HOST, 0)) as listener:  # accepts connections and sends nothing
        client = SideChannelClient(HOST, listener.getsockname()[1], SECRET)

        async def begin() -> None:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(ask(client), 0.05)

        def end() -> None:
            client.close("the test ends")
            asyncio.get_running_loop().stop()

        io.run(begin(), 5.0)
        io.call("r", end)
        io.close()
