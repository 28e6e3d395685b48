"""The side channel on loopback: answers, repeats, and what strangers can't break."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
import zmq
import zmq.asyncio

from mooncake_engine.errors import HandshakeRefused, KVTransferError, PortTaken
from mooncake_engine.kv_transfer.protocol import (
    AnyMessage,
    Done,
    LeaseStatus,
    Reject,
    Renewed,
    Status,
    seal,
    unseal,
)
from mooncake_engine.kv_transfer.side_channel import SideChannelClient, SideChannelServer

HOST = "127.0.0.1"
SECRET = b"secret"


def held(message: AnyMessage) -> AnyMessage:
    return Status(message.ticket, LeaseStatus.HELD)


def refusing(message: AnyMessage) -> AnyMessage:
    raise HandshakeRefused("model differs: m1, m2")


@asynccontextmanager
async def serving(
    handler: Callable[[AnyMessage], AnyMessage] = held,
) -> AsyncIterator[tuple[zmq.asyncio.Context, int]]:
    context = zmq.asyncio.Context()
    server = SideChannelServer(context, HOST, [0], SECRET, handler)
    task = asyncio.create_task(server.serve())
    try:
        yield context, server.port
        assert not task.done()
    finally:
        task.cancel()
        server.close()
        context.destroy(linger=0)


@asynccontextmanager
async def asking(
    context: zmq.asyncio.Context, port: int, secret: bytes = SECRET
) -> AsyncIterator[SideChannelClient]:
    client = SideChannelClient(context, HOST, port, secret)
    task = asyncio.create_task(client.receive())
    try:
        yield client
    finally:
        task.cancel()
        client.close("the test ends")


async def ask(client: SideChannelClient, try_timeout_s: float = 2.0) -> LeaseStatus:
    answer = await client.ask(
        lambda ticket: Done(ticket, "a", "me"), Status, tries=2, try_timeout_s=try_timeout_s
    )
    return answer.status


def test_a_question_is_answered() -> None:
    async def main() -> None:
        async with serving() as (context, port), asking(context, port) as client:
            answers = await asyncio.gather(*(ask(client) for _ in range(20)))
            assert set(answers) == {LeaseStatus.HELD}

    asyncio.run(main())


def test_a_refusal_reaches_the_one_who_asked() -> None:
    async def main() -> None:
        async with serving(refusing) as (context, port), asking(context, port) as client:
            with pytest.raises(HandshakeRefused, match="refused: model differs: m1, m2"):
                await ask(client)

    asyncio.run(main())


def test_an_answer_of_another_kind_is_an_error() -> None:
    async def main() -> None:
        def odd(message: AnyMessage) -> AnyMessage:
            return Renewed(message.ticket, ())

        async with serving(odd) as (context, port), asking(context, port) as client:
            with pytest.raises(KVTransferError, match="answered Renewed, not Status"):
                await ask(client)

    asyncio.run(main())


def test_another_secret_gets_no_answer_and_says_what_it_may_be() -> None:
    async def main() -> None:
        async with serving() as (context, port), asking(context, port, b"other") as client:
            with pytest.raises(KVTransferError, match="or has another secret"):
                await ask(client, try_timeout_s=0.05)

    asyncio.run(main())


def test_a_lost_question_is_asked_again_and_a_repeated_answer_ignored() -> None:
    async def main() -> None:
        context = zmq.asyncio.Context()
        router = context.socket(zmq.ROUTER)
        port = router.bind_to_random_port(f"tcp://{HOST}")
        async with asking(context, port) as client:
            answer = asyncio.create_task(ask(client, try_timeout_s=0.1))
            await router.recv_multipart()  # lost
            name, frame = await router.recv_multipart()
            ticket = unseal(frame, SECRET).ticket
            for _ in range(2):
                await router.send_multipart([name, seal(held(Done(ticket, "a", "me")), SECRET)])
            assert await answer is LeaseStatus.HELD
        context.destroy(linger=0)

    asyncio.run(main())


def sealed(payload: bytes) -> bytes:
    return hmac.digest(SECRET, payload, "sha256") + payload


MALFORMED = [
    [b""],
    [b"x" * 20],
    [b"x" * 100],
    [b"one", b"two", b"three"],
    [sealed(b"\xc1")],
    [sealed(msgspec.msgpack.encode({"kind": "shutdown", "ticket": 1}))],
    [sealed(b"\x83\xa4kind\xa4done\xa6ticket\x01\xaarequest_id\xa2\xff\xfe")],
    [sealed(b"\x83\xa4kind\xa4done\xa6ticket\x01\xa1x" + b"\x91" * 5000 + b"\x01")],
    [b"\0" * (17 << 20)],
]


@pytest.mark.parametrize("frames", MALFORMED, ids=range(len(MALFORMED)))
def test_a_malformed_message_hurts_nobody_else(frames: list[bytes]) -> None:
    async def main() -> None:
        async with serving() as (context, port), asking(context, port) as client:
            stranger = context.socket(zmq.DEALER)
            stranger.connect(f"tcp://{HOST}:{port}")
            await stranger.send_multipart(frames)
            assert await ask(client) is LeaseStatus.HELD
            stranger.close(linger=0)

    asyncio.run(main())


def test_a_malformed_message_gets_a_typed_reject() -> None:
    async def main() -> None:
        async with serving() as (context, port):
            stranger = context.socket(zmq.DEALER)
            stranger.connect(f"tcp://{HOST}:{port}")
            await stranger.send(sealed(b"\xc1"))
            answer = unseal(await stranger.recv(), SECRET)
            assert isinstance(answer, Reject)
            assert "not a message of protocol 2" in answer.reason
            stranger.close(linger=0)

    asyncio.run(main())


def test_a_taken_port_is_named() -> None:
    async def main() -> None:
        async with serving() as (context, port):
            with pytest.raises(PortTaken, match=f"on 127.0.0.1 can't be bound: port {port}: Addr"):
                SideChannelServer(context, HOST, [port], SECRET, held)

    asyncio.run(main())


@pytest.mark.parametrize("host", ["two words", "*", "a/b", "\0"])
def test_an_impossible_host_is_an_error_of_the_transfer(host: str) -> None:
    context = zmq.asyncio.Context()
    with pytest.raises(KVTransferError, match="is no address of a side channel"):
        SideChannelClient(context, host, 80, SECRET)
    context.destroy(linger=0)


def test_closing_tells_those_who_wait() -> None:
    async def main() -> None:
        context = zmq.asyncio.Context()
        router = context.socket(zmq.ROUTER)
        port = router.bind_to_random_port(f"tcp://{HOST}")
        async with asking(context, port) as client:
            waiting = [asyncio.create_task(ask(client, try_timeout_s=30.0)) for _ in range(2)]
            await router.recv_multipart()
            client.close("the test ends")
            for task in waiting:
                with pytest.raises(KVTransferError, match="was given up"):
                    await asyncio.wait_for(task, 5.0)
            with pytest.raises(KVTransferError, match="was given up"):
                await ask(client)
        context.destroy(linger=0)

    asyncio.run(main())
