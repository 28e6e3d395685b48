"""Stands between two instances' side channels, and loses, repeats and delays what they say."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import zmq
import zmq.asyncio

Fate = Callable[[str], list[float]]
"""From a message's kind to when it is delivered, in seconds from now; once per entry."""

Send = Callable[[bytes], Awaitable[object]]
_MAC_BYTES = 32


def deliver(kind: str) -> list[float]:
    """Every message once, at once."""
    return [0.0]


def unreliable(seed: int) -> Fate:
    """A third lost, a third repeated, all of them late and out of order."""
    numbers = random.Random(seed)

    def fate(kind: str) -> list[float]:
        return [numbers.uniform(0.0, 0.15) for _ in range(numbers.choice((0, 1, 2)))]

    return fate


def losing(*kinds: str) -> Fate:
    """Everything but these."""
    return lambda kind: [] if kind in kinds else [0.0]


class Relay:
    """One listening port in front of another; ``fate`` may be changed at any time."""

    def __init__(self, context: zmq.asyncio.Context, target: str) -> None:
        self.fate: Fate = deliver
        self.seen: list[str] = []
        self._context = context
        self._target = target
        self._front = context.socket(zmq.ROUTER)
        self.port = self._front.bind_to_random_port("tcp://127.0.0.1")
        self._backs: dict[bytes, zmq.asyncio.Socket] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Relay until cancelled."""
        while True:
            client, frame = await self._front.recv_multipart()
            if client not in self._backs:
                back = self._backs[client] = self._context.socket(zmq.DEALER)
                back.connect(self._target)
                self._spawn(self._answer(client, back))
            self._send(frame, self._backs[client].send)

    async def _answer(self, client: bytes, back: zmq.asyncio.Socket) -> None:
        while True:
            frame = await back.recv()
            self._send(frame, lambda data: self._front.send_multipart([client, data]))

    def _send(self, frame: bytes, send: Send) -> None:
        kind = msgspec.msgpack.decode(frame[_MAC_BYTES:])["kind"]
        self.seen.append(kind)
        for delay in self.fate(kind):
            self._spawn(_later(delay, frame, send))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def stop(self) -> None:
        """End everything that is under way."""
        for task in self._tasks:
            task.cancel()


async def _later(delay: float, frame: bytes, send: Send) -> None:
    await asyncio.sleep(delay)
    await send(frame)


@asynccontextmanager
async def relay(host: str, port: int) -> AsyncIterator[Relay]:
    """A relay to that side channel for the length of a block."""
    context = zmq.asyncio.Context()
    between = Relay(context, f"tcp://{host}:{port}")
    task = asyncio.create_task(between.run())
    try:
        yield between
    finally:
        task.cancel()
        between.stop()
        with suppress(asyncio.CancelledError):
            await task
        context.destroy(linger=0)
