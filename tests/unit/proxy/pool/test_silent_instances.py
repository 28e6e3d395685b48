"""Requests in flight on an instance that answers no health check: which fail, and which stay."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest

from mooncake_proxy.errors import UpstreamTimeout
from mooncake_proxy.http1.connection_pool import sweep_timeouts
from mooncake_proxy.http1.http_wire import Origin
from mooncake_proxy.http1.upstream_connection import ClientContext, UpstreamConnection
from mooncake_proxy.pool.health_checks import HealthChecker, HealthConfig
from mooncake_proxy.pool.instances import Instance, InstanceSpec, Role
from mooncake_proxy.pool.model_pools import ModelPools

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
TOKEN = b"5\r\ntoken\r\n"


class Server:
    """An instance whose health a test sets; it sends streams only what the test says."""

    def __init__(self) -> None:
        # None: it does not answer.
        self.health: bytes | None = b"200 OK"
        self.streams: list[asyncio.StreamWriter] = []
        self.tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while request := await reader.readuntil(b"\r\n\r\n"):
                if b"/stream" in request:
                    self.streams.append(writer)
                elif self.health is not None:
                    writer.write(b"HTTP/1.1 %b\r\ncontent-length: 2\r\n\r\n{}" % self.health)
        except (asyncio.IncompleteReadError, ConnectionResetError):
            writer.close()


class Bench:
    """Two instances of a role, and checks of them."""

    def __init__(self, pools: ModelPools, server: Server, instance: Instance) -> None:
        self.server, self.instance = server, instance
        config = HealthConfig(timeout_s=0.05, fall=3)
        self._checker = HealthChecker(config, pools, lambda _: None, lambda _: None)
        self.context = instance.connections.context

    @contextmanager
    def silent(self) -> Iterator[asyncio.Future[UpstreamConnection]]:
        """A request that gets no byte."""
        exchange = self.instance.connections.exchange(
            b"GET /stream HTTP/1.1\r\nhost: i\r\n\r\n",
            self.context.loop.time() + 60.0,
            await_body=True,
        )
        asked = asyncio.ensure_future(exchange)
        yield asked
        asked.cancel()

    async def arrived(self, num_streams: int) -> None:
        for _ in range(500):
            if len(self.server.streams) >= num_streams:
                return
            await asyncio.sleep(0.01)
        raise AssertionError("the request has not arrived")

    async def check(self, rounds: int = 1) -> None:
        """Checks whose deadlines pass, as the sweep would see to."""
        for _ in range(rounds):
            checking = asyncio.ensure_future(self._checker.check_all())
            while not checking.done():
                await asyncio.wait({checking}, timeout=0.02)
                sweep_timeouts(self.context)
            await checking


@asynccontextmanager
async def bench(*, has_other: bool = True) -> AsyncIterator[Bench]:
    servers = [Server(), Server()]
    listeners = [await asyncio.start_server(each.serve, "127.0.0.1", 0) for each in servers]
    ports = [each.sockets[0].getsockname()[1] for each in listeners]
    pools = ModelPools(ClientContext())
    instances = [
        pools.add(InstanceSpec(Origin("http", "127.0.0.1", port), role))
        for port, role in zip(
            ports, (Role.DECODE, Role.DECODE if has_other else Role.PREFILL), strict=True
        )
    ]
    try:
        yield Bench(pools, servers[0], instances[0])
    finally:
        pools.close()
        for listener in listeners:
            listener.close()
        for writer in (*servers[0].streams, *servers[1].streams):
            writer.transport.abort()
        await asyncio.sleep(0.05)


def test_request_fails_with_the_verdict_if_nothing_has_come_since_the_first_failed_check() -> None:
    async def main() -> None:
        async with bench() as it:
            await it.check()
            with it.silent() as asked:
                await it.arrived(1)
                it.server.health = None
                await it.check(2)
                assert it.instance.is_up
                assert not asked.done(), "a verdict takes three checks"
                await it.check()
                assert not it.instance.is_up
                with pytest.raises(UpstreamTimeout, match="no health check is answered"):
                    await asyncio.wait_for(asked, 5.0)

    asyncio.run(main())


def test_stream_of_a_slow_instance_goes_on() -> None:
    async def main() -> None:
        async with bench() as it:
            await it.check()
            with it.silent() as asked:
                await it.arrived(1)
                it.server.health = None
                await it.check()
                it.server.streams[0].write(HEAD + TOKEN)
                await it.check(6)
                assert not it.instance.is_up
                it.server.streams[0].write(TOKEN + b"0\r\n\r\n")
                with await asyncio.wait_for(asked, 5.0) as answer:
                    assert answer.body == b"tokentoken"

    asyncio.run(main())


def test_request_sent_between_two_failed_checks_outlasts_as_many() -> None:
    async def main() -> None:
        async with bench() as it:
            await it.check()
            it.server.health = None
            await it.check(2)
            with it.silent() as asked:
                await it.arrived(1)
                await it.check(2)
                assert not it.instance.is_up
                assert not asked.done()
                await it.check()
                with pytest.raises(UpstreamTimeout):
                    await asyncio.wait_for(asked, 5.0)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("health", "has_other"), [(b"503 Busy", True), (None, False)], ids=["busy", "no other instance"]
)
def test_request_stays(health: bytes | None, *, has_other: bool) -> None:
    """On an instance that answers its checks, and where nobody else could take it."""

    async def main() -> None:
        async with bench(has_other=has_other) as it:
            await it.check()
            with it.silent() as asked:
                await it.arrived(1)
                it.server.health = health
                await it.check(5)
                assert not it.instance.is_up
                assert not asked.done()

    asyncio.run(main())
