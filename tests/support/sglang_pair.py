"""Stand-ins for SGLang's prefill and decode servers: they rendezvous in rooms, or answer 400."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from support.proxy_fakes import FakeDeployment, FakeInstance, Json, ReceivedRequest

from mooncake_proxy.api.application import ProxyApplication
from mooncake_proxy.config import ProxyConfig
from mooncake_proxy.http1.http_wire import Origin
from mooncake_proxy.pool.health_checks import HealthConfig
from mooncake_proxy.pool.instances import InstanceSpec, Role

BOOTSTRAP_PORT = 9123


@dataclass
class Room:
    """The rendezvous of a request's two halves: P waits for D's reservation, D for P's KV."""

    prefilled: asyncio.Event = field(default_factory=asyncio.Event)
    claimed: asyncio.Event = field(default_factory=asyncio.Event)


class SGLangInstance(FakeInstance):
    """A prefill or decode server. All pairs share `rooms`, by (bootstrap host, port, room)."""

    def __init__(self, name: str, role: Role, rooms: dict[tuple[str, int, int], Room]) -> None:
        super().__init__(name)
        self._role = role
        self._rooms = rooms

    async def _answer(self, seen: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        if seen.path.startswith("/v1/") and self.behaviour.status == 200 and seen.body:
            await self._meet(seen.body)
        await super()._answer(seen, writer)

    async def _meet(self, body: Json) -> None:
        """Rendezvous as the schedulers do: D reserves memory, P computes and sends, D continues."""
        if self.behaviour.hangs or self.behaviour.drops:
            return
        key = (body["bootstrap_host"], body["bootstrap_port"], body["bootstrap_room"])
        room = self._rooms.setdefault(key, Room())
        if self._role is Role.PREFILL:
            await room.claimed.wait()
            room.prefilled.set()
        else:
            room.claimed.set()
            await room.prefilled.wait()


@asynccontextmanager
async def sglang_deployment(
    num_prefills: int = 1, num_decodes: int = 1, **config: Any
) -> AsyncIterator[FakeDeployment]:
    """Pairs with a proxy in front of them."""
    rooms: dict[tuple[str, int, int], Room] = {}
    prefills = [SGLangInstance(f"p{i}", Role.PREFILL, rooms) for i in range(num_prefills)]
    decodes = [SGLangInstance(f"d{i}", Role.DECODE, rooms) for i in range(num_decodes)]
    for fake in (*prefills, *decodes):
        await fake.start()
    specs = [
        InstanceSpec(Origin.parse(fake.url), Role.PREFILL, bootstrap_port=BOOTSTRAP_PORT)
        for fake in prefills
    ]
    specs += [InstanceSpec(Origin.parse(fake.url), Role.DECODE) for fake in decodes]
    settings: Json = {
        "port": 0,
        "flow": "sglang",
        "instances": tuple(specs),
        "health": HealthConfig(interval_s=0),
        "access_log": "off",
        "shutdown_timeout_s": 1.0,
    }
    app = ProxyApplication(ProxyConfig(**(settings | config)))
    await app.start()
    try:
        yield FakeDeployment(app, prefills, decodes)
    finally:
        await app.close()
        for fake in (*prefills, *decodes):
            await fake.kill()
