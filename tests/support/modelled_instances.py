"""Fake instances with a latency model's times: prefills one by one, decodes batched."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from support.proxy_fakes import (
    Behaviour,
    FakeDeployment,
    FakeInstance,
    Json,
    ReceivedRequest,
    fake_deployment_of,
)

from mooncake_conductor.cost.latency_model import LatencyModel


class ModelledInstance(FakeInstance):
    """A P that computes one prompt of token ids at a time, or a D that serves up to `max_batch`
    requests and rejects more."""

    def __init__(self, name: str, latency: LatencyModel, max_batch: int = 256) -> None:
        super().__init__(name, Behaviour())
        self._latency = latency
        self._max_batch = max_batch
        self._turn = asyncio.Lock()
        self.num_decoding = 0

    async def _answer(self, seen: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        params = seen.body.get("kv_transfer_params") or {}
        if not seen.body.get("prompt"):
            await super()._answer(seen, writer)
        elif params.get("do_remote_decode"):
            async with self._turn:
                num_tokens = len(seen.body["prompt"])
                await asyncio.sleep(self._latency.prefill_seconds(num_tokens, 0))
            await super()._answer(seen, writer)
        else:
            await self._decode_in_batch(seen, writer)

    def _params(self, seen: ReceivedRequest, held: str, position: int) -> Json:
        """Includes the number of computed tokens, from which the proxy learns costs."""
        counts = {"num_prompt_tokens": len(seen.body["prompt"]), "remote_cached_tokens": 0}
        return super()._params(seen, held, position) | counts

    async def _decode_in_batch(self, seen: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        self.num_decoding += 1
        try:
            full = self.num_decoding > self._max_batch
            self.behaviour.status = 503 if full else 200
            self.behaviour.token_delay_s = self._latency.step_seconds(self.num_decoding, 0)
            await super()._answer(seen, writer)
        finally:
            self.num_decoding -= 1


@asynccontextmanager
async def modelled_deployment(
    num_prefills: int, num_decodes: int, latency: LatencyModel, **config: Any
) -> AsyncIterator[FakeDeployment]:
    """A proxy in front of modelled instances."""
    prefills = [ModelledInstance(f"p{number}", latency) for number in range(num_prefills)]
    decodes = [ModelledInstance(f"d{number}", latency) for number in range(num_decodes)]
    async with fake_deployment_of(prefills, decodes, **config) as running:
        yield running
