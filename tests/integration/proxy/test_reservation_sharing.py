"""Worker processes that share instances exchange their reservations."""

from __future__ import annotations

import asyncio
import socket
from contextlib import AsyncExitStack

import pytest
import uvloop
from support.proxy_conductor import conductor_of, settings
from support.proxy_fakes import FakeDeployment, fake_deployment
from support.proxy_fakes_client import BODY, post

from mooncake_proxy.ops import worker_link
from mooncake_proxy.ops.worker_link import (
    ReservationMessage,
    WorkerExited,
    WorkerLink,
    WorkerLoads,
    decode_message,
    encode_message,
)


async def received(link: socket.socket, s: FakeDeployment) -> list[ReservationMessage]:
    """The reservation messages of the worker, until it has nothing more to send."""
    found: list[ReservationMessage] = []
    while True:
        await asyncio.sleep(0.02)
        try:
            message = decode_message(link.recv(1 << 20))
        except BlockingIOError:
            if found:
                return found
            continue
        if isinstance(message, ReservationMessage):
            found.append(message)


def as_other(message: ReservationMessage) -> bytes:
    """The same message as if another process had sent it."""
    reports = bytes(message.report).replace(message.owner.encode(), b"another")
    return encode_message(ReservationMessage(7, "another", type(message.report)(reports)))


def test_reservations_are_exchanged_and_counted() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        ours.setblocking(False)
        async with AsyncExitStack() as stack:
            s = await stack.enter_async_context(fake_deployment(2, 1, **settings("cost")))
            link = WorkerLink(0, theirs)
            link.open(s.app.routers, s.app.admission, s.app.process.tenants.limits)
            stack.callback(ours.close)
            stack.callback(link.close)
            s.prefill.behaviour.delay_s = s.prefills[1].behaviour.delay_s = 1.0
            body = BODY | {"prompt": list(range(640)), "stream": True}
            asked = asyncio.ensure_future(post(s, body))
            [placed] = await received(ours, s)
            fleet = conductor_of(s).pairs.conductor
            assert len(fleet.book) == 1
            ours.send(as_other(placed).replace(b'"request_id":"', b'"request_id":"other-'))
            await asyncio.sleep(0.05)
            assert len(fleet.book) == 2
            assert (await asked).status_code == 200
            reports = b"".join(bytes(each.report) for each in await received(ours, s))
            assert b'"finished"' in reports
            assert b"another" not in reports, "only the owner sends its reservations"
            assert len(fleet.book) == 1
            ours.send(encode_message(WorkerExited(7)))
            await asyncio.sleep(0.05)
            assert len(fleet.book) == 0

    uvloop.run(main())


def test_loads_and_reservations_are_sent_repeatedly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Datagrams that a slow worker missed are made up for soon."""
    monkeypatch.setattr(worker_link, "COUNTS_EVERY", 2)
    monkeypatch.setattr(worker_link, "SNAPSHOT_EVERY", 3)

    async def main() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        async with AsyncExitStack() as stack:
            s = await stack.enter_async_context(fake_deployment(1, 1, **settings("cost")))
            link = WorkerLink(0, theirs)
            link.open(s.app.routers, s.app.admission, s.app.process.tenants.limits)
            stack.callback(ours.close)
            stack.callback(link.close)
            s.prefill.behaviour.hangs = True
            asked = asyncio.ensure_future(post(s, BODY | {"prompt": list(range(640))}))
            await received(ours, s)
            sending = asyncio.ensure_future(link.run())
            loads: list[WorkerLoads] = []
            snapshot = b""
            while len(loads) < 3 or b'"reserved"' not in snapshot:
                message = decode_message(await loop.sock_recv(ours, 1 << 20))
                if isinstance(message, WorkerLoads):
                    loads.append(message)
                elif isinstance(message, ReservationMessage):
                    snapshot += bytes(message.report)
            assert loads[-1] == loads[-2]
            assert b'"begins_snapshot":true' in snapshot
            sending.cancel()
            asked.cancel()

    uvloop.run(main())
