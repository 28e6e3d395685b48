"""Client disconnects: the request is cancelled on both sides in every phase, and nothing is left
over.

tests/benchmarks/proxy measures how soon (100 ms).
"""

from __future__ import annotations

import asyncio
import socket

import pytest
import uvloop
from support.proxy_fakes import fake_deployment, text_of
from support.proxy_fakes_client import BODY, post, send_raw
from support.proxy_fakes_disconnects import STAGES, disconnect

from mooncake_proxy.config import AdmissionConfig
from mooncake_proxy.http1.connection_pool import ConnectionPool
from mooncake_proxy.http1.http_wire import Origin
from mooncake_proxy.http1.upstream_connection import ClientContext


@pytest.mark.parametrize(("flow", "stage", "counted_as"), STAGES)
def test_both_sides_are_cancelled(flow: str, stage: str, counted_as: str) -> None:
    uvloop.run(disconnect(flow, stage, counted_as))


def test_client_that_leaves_queue_uses_no_slot() -> None:
    async def main() -> None:
        async with fake_deployment(admission=AdmissionConfig(max_running=1)) as s:
            s.decode.behaviour.hangs = True
            _, running = await send_raw(s, BODY)
            await s.decode.wait_for(lambda: len(s.decode.generated) == 1)
            _, waiting = await send_raw(s, BODY)
            while s.app.admission.num_waiting == 0:  # noqa: ASYNC110  # no such event
                await asyncio.sleep(0.002)
            waiting.transport.abort()
            while s.app.admission.num_waiting:  # noqa: ASYNC110  # no such event
                await asyncio.sleep(0.002)
            s.decode.behaviour.hangs = False
            running.transport.abort()
            assert (await post(s, BODY)).json()["choices"][0]["text"] == text_of(5)
            assert s.app.admission.num_running == 0
            assert s.count("disconnects", "queue") == 1

    uvloop.run(main())


def test_connection_of_cancelled_waiter_goes_to_next_waiter() -> None:
    """The waiter is cancelled between the connection's completion and its own wake-up."""

    async def main() -> None:
        accepted, ended = [], asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted.append(writer)
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi")
            await reader.read()
            writer.transport.abort()
            ended.set()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        pool = ConnectionPool(Origin.parse(f"http://127.0.0.1:{port}"), ClientContext())
        loop = asyncio.get_running_loop()

        async def connect() -> None:
            await pool.connect(loop.time() + 5)

        before = asyncio.all_tasks()
        waiting = loop.create_task(connect())
        await asyncio.sleep(0)
        [connecting] = asyncio.all_tasks() - before - {waiting}
        while not connecting.done():  # noqa: ASYNC110  # every turn of the loop counts here
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert waiting.cancelled()
        request = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
        assert await pool.fetch(request, loop.time() + 5) == b"hi"
        assert len(accepted) == 1
        pool.close()
        await ended.wait()
        server.close()

    uvloop.run(main())


def test_client_whose_host_vanishes_is_noticed() -> None:
    """As soon as one that reads nothing."""

    async def main() -> None:
        async with fake_deployment() as s:
            _, writer = await send_raw(s, BODY)
            await s.decode.wait_for(lambda: len(s.decode.generated) == 1)
            [connection] = s.app.server.connections
            assert connection._transport is not None
            sock = connection._transport.get_extra_info("socket")
            options = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
            found = [sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, o)) for o in options]
            assert found == [60, 20, 3, 120_000]
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            writer.transport.abort()

    uvloop.run(main())
