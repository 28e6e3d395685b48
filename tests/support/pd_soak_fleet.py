"""The instances of a soak: two of each role, one in this process, one in a process of its own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import httpx
from support.pd import DEFAULT_BLOCKS, Answer, Instance, ask, instance
from support.pd_processes import Served, body_of, serving
from support.pd_relay import Relay, relay
from support.pd_transport import NAME
from support.push import LAYERWISE

from mooncake_engine.config import Role
from mooncake_engine.messages import FinishReason
from mooncake_engine.sampling_params import SamplingParams
from mooncake_hal.testing.backends import free_port
from mooncake_kv.params import KVTransferDict

LEASE_S = 1.5
TRANSFER_TIMEOUT_S = 2.0
EARLY_CHUNK = 32


@dataclass(frozen=True)
class Case:
    """A request and a single instance's answer to it."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    expected: tuple[int, ...]


class SoakInstance(Protocol):
    """An instance in this process or in another one."""

    async def answer(
        self,
        case: Case,
        params: KVTransferDict,
        seen: list[int],
        *,
        max_tokens: int,
        group: str | None = None,
    ) -> Answer:
        """Send a request; ``seen`` gets the tokens as they arrive, if the instance streams.
        ``group`` is the one that it shares with other choices of its prompt, if the instance is in
        this process."""
        ...

    async def abort(self, request_id: str) -> None:
        """Release the KV that is held under that id."""
        ...


@dataclass
class LocalInstance:
    """An instance in this process; peers reach its side channel through its relay, if any."""

    instance: Instance
    relay: Relay | None = None

    async def answer(
        self,
        case: Case,
        params: KVTransferDict,
        seen: list[int],
        *,
        max_tokens: int,
        group: str | None = None,
    ) -> Answer:
        answer = await ask(
            self.instance,
            case.prompt,
            replace(case.sampling, max_tokens=max_tokens),
            params,
            lambda update: seen.extend(update.token_ids),
            group=group,
        )
        if answer.params is not None and self.relay is not None:
            answer.params = {**answer.params, "remote_port": self.relay.port}
        return answer

    async def abort(self, request_id: str) -> None:
        self.instance.engine.abort(request_id)


@dataclass
class RemoteInstance:
    """An instance in a process of its own, which can be killed and restarted."""

    model: Path
    role: Role
    options: tuple[str, ...]
    served: Served | None = None
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def start(self) -> None:
        """Start it on the ports in its options."""
        context = serving(self.model, self.role.value, *self.options)
        self.served = await asyncio.to_thread(context.__enter__)
        self._stack.push(context)

    async def kill(self) -> None:
        """Kill it with SIGKILL."""
        assert self.served is not None
        victim, self.served = self.served, None
        await asyncio.to_thread(victim.kill)
        await self.stop()

    async def stop(self) -> None:
        """Clean up what is left of it."""
        await self._stack.aclose()

    async def answer(
        self,
        case: Case,
        params: KVTransferDict,
        seen: list[int],
        *,
        max_tokens: int,
        group: str | None = None,
    ) -> Answer:
        body = body_of(case.prompt, replace(case.sampling, max_tokens=max_tokens), params)
        found = await self._running().complete(body)
        [choice] = found["choices"]
        finish = FinishReason(choice["finish_reason"])
        seen.extend(choice["token_ids"])
        return Answer(choice["token_ids"], finish=finish, params=found.get("kv_transfer_params"))

    async def abort(self, request_id: str) -> None:
        url = f"{self._running().url}/abort"
        async with httpx.AsyncClient() as client:
            await client.post(url, json={"request_id": request_id})

    def _running(self) -> Served:
        if self.served is None:
            raise httpx.ConnectError("killed, and not yet back")
        return self.served


@dataclass
class SoakFleet:
    """All instances, and the relay in front of the one in this process that receives requests
    first: the decode instance if it reserves blocks before the prefill (``decode_first``: push and
    early pull), else the prefill instance."""

    connector: str
    decode_first: bool
    prefill: tuple[LocalInstance, RemoteInstance]
    decode: tuple[LocalInstance, RemoteInstance]
    relay: Relay
    relayed_port: int


@asynccontextmanager
async def soak_fleet(
    model: Path, connector: str, *, pulls_early: bool = False
) -> AsyncIterator[SoakFleet]:
    """Two instances of each role for the duration of a block."""
    local = {
        "connector": connector,
        "transports": (NAME,),
        "lease_s": LEASE_S,
        "transfer_timeout_s": TRANSFER_TIMEOUT_S,
        "num_kv_blocks": DEFAULT_BLOCKS,
    }
    remote = ["--kv-connector", connector, "--transport", NAME, "--lease-seconds", str(LEASE_S)]
    remote += ["--transfer-timeout-seconds", str(TRANSFER_TIMEOUT_S)]
    if pulls_early:  # several chunks, so that D reads before the whole prompt is computed
        local["max_num_batched_tokens"] = EARLY_CHUNK
        remote += ["--max-num-batched-tokens", str(EARLY_CHUNK)]
    os.environ["MOONCAKE_TEST_GATE"] = "chaos"
    ports = {role: free_port() for role in (Role.PREFILL, Role.DECODE)}
    decode_first = pulls_early or connector == LAYERWISE
    asked = Role.DECODE if decode_first else Role.PREFILL
    async with AsyncExitStack() as stack:
        first, second = [
            await stack.enter_async_context(instance(model, role, **local, port=port))
            for role, port in ports.items()
        ]
        between = await stack.enter_async_context(relay("127.0.0.1", ports[asked]))
        others = [
            RemoteInstance(model, role, (*remote, "--kv-port", str(free_port()))) for role in ports
        ]
        for other in others:
            stack.push_async_callback(other.stop)
            await other.start()
        yield SoakFleet(
            connector,
            decode_first,
            (LocalInstance(first, between if asked is Role.PREFILL else None), others[0]),
            (LocalInstance(second), others[1]),
            between,
            ports[asked],
        )
