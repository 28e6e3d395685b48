"""Instances that behave like the simulator's nodes, behind sockets: a proxy in front of them serves
the cluster that ``mooncake-conductor simulate`` models."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from support.proxy_fakes import (
    STREAM_HEAD,
    Behaviour,
    FakeDeployment,
    FakeInstance,
    Json,
    ReceivedRequest,
    _respond,
    fake_deployment_of,
)

from mooncake_conductor.cost.link_calendar import LinkCalendar
from mooncake_conductor.index.prompt_keys import token_keys
from mooncake_conductor.simulator.engine_models import (
    ChunkCache,
    DecodeNode,
    PrefillJob,
    PrefillNode,
)
from mooncake_conductor.simulator.simulation import Cluster


class _SimulatedInstance(FakeInstance):
    """Does not watch for disconnects, which would be slow at a thousand requests per second."""

    async def _answer_watched(
        self, seen: ReceivedRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await self._answer(seen, writer)


class SimulatedPrefill(_SimulatedInstance):
    """A P that computes like a ``PrefillNode``."""

    def __init__(self, name: str, cluster: Cluster) -> None:
        super().__init__(name, Behaviour())
        self._node = PrefillNode(
            cluster.latency,
            ChunkCache(cluster.cache_tokens // cluster.chunk_tokens),
            chunk_tokens=cluster.chunk_tokens,
            chunk_load_s=0.0,
            num_layers=cluster.num_layers,
        )
        self._done: dict[str, asyncio.Future[PrefillJob]] = {}

    async def _answer(self, seen: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        prompt = seen.body.get("prompt")
        if not prompt:
            await super()._answer(seen, writer)
            return
        name = seen.headers["x-request-id"]
        self._done[name] = asyncio.get_running_loop().create_future()
        self._node.queue.append(PrefillJob(name, len(prompt), token_keys(prompt)))
        self._start()
        job = await self._done[name]
        del self._done[name]
        answer = self._prefilled(seen)
        answer["kv_transfer_params"] |= {
            "num_prompt_tokens": job.num_tokens,
            "remote_cached_tokens": job.num_reused,
        }
        _respond(writer, 200, answer)
        await writer.drain()

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        job = self._node.start_next(loop.time())
        if job is not None:
            loop.call_at(job.ends_at, self._end)

    def _end(self) -> None:
        job, _, _ = self._node.finish()
        self._done[job.request_id].set_result(job)
        self._start()


class SimulatedDecode(_SimulatedInstance):
    """A D that pulls KV over the cluster's links and steps like a ``DecodeNode``. It sends its
    first event once the KV has arrived, and its tokens once it has all of them."""

    def __init__(self, name: str, slot: int, cluster: Cluster, links: LinkCalendar) -> None:
        super().__init__(name, Behaviour())
        self._slot = slot
        self._cluster = cluster
        self._links = links
        self._node = DecodeNode(cluster.latency, cluster.max_batch, cluster.kv_tokens)
        self._cache = ChunkCache(cluster.decode_cache_tokens // cluster.chunk_tokens)
        self._done: dict[str, asyncio.Future[None]] = {}
        self._wake_at = math.inf

    async def _answer(self, seen: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        prompt = seen.body.get("prompt")
        if not prompt:
            await super()._answer(seen, writer)
            return
        params: Json = seen.body["kv_transfer_params"]
        writer.write(STREAM_HEAD)
        keys = token_keys(prompt)
        num_held = self._cache.prefix(keys) * self._cluster.chunk_tokens
        await self._pull(int(params["remote_engine_id"][1:]), len(prompt) - num_held)
        self._cache.insert(keys)
        first, *others = self._events(seen, params)
        _write_chunk(writer, first)
        name = seen.headers["x-request-id"]
        self._done[name] = asyncio.get_running_loop().create_future()
        self._node.add(name, len(prompt) + 1, seen.body["max_tokens"] - 1)
        self._wake()
        await self._done[name]
        del self._done[name]
        for event in others:
            _write_chunk(writer, event)
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async def _pull(self, source: int, num_tokens: int) -> None:
        loop = asyncio.get_running_loop()
        num_bytes = num_tokens * self._cluster.kv_bytes_per_token
        there = self._links.book(source, self._slot, num_bytes, loop.time()).done
        arrived = loop.create_future()
        loop.call_at(there, arrived.set_result, None)
        await arrived

    def _wake(self) -> None:
        """Wake the node as the simulation does: step until now, again when the batch changes."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        for decoded in self._node.advance(now):
            self._done[decoded.request_id].set_result(None)
        when = self._node.next_event()
        if when is not None and (when < self._wake_at or self._wake_at <= now):
            self._wake_at = when
            loop.call_at(max(when, now), self._wake_if_due, when)

    def _wake_if_due(self, when: float) -> None:
        if self._wake_at == when:
            self._wake_at = math.inf
            self._wake()


def _write_chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


@asynccontextmanager
async def simulated_deployment(cluster: Cluster, **config: Any) -> AsyncIterator[FakeDeployment]:
    """A proxy in front of a cluster's nodes."""
    num_slots = cluster.num_prefill + cluster.num_decode
    links = LinkCalendar([cluster.link_gb_s * 1e9] * num_slots, 0.002)
    prefills = [SimulatedPrefill(f"p{index}", cluster) for index in range(cluster.num_prefill)]
    decodes = [
        SimulatedDecode(f"d{index}", cluster.num_prefill + index, cluster, links)
        for index in range(cluster.num_decode)
    ]
    async with fake_deployment_of(prefills, decodes, **config) as running:
        yield running
