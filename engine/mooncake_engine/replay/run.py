"""Replays a trace: sends every request in its time, and waits for all answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

from mooncake_engine.errors import EngineError
from mooncake_engine.progress import ProgressBar
from mooncake_engine.replay.client import Client
from mooncake_engine.replay.measure import Record
from mooncake_engine.replay.pacing import Pacing
from mooncake_engine.replay.prompts import PromptWriter
from mooncake_engine.replay.trace import TraceRequest

_LEAD_S = 1.0
"""Long enough to write a prompt, short enough not to hold all of them."""


class NothingAnswered(EngineError):
    """Every request of a replay failed."""


@dataclass(frozen=True, slots=True)
class Replay:
    """What to send, to whom, and when.

    Args:
        requests: of the trace, lengths as they are to be.
        client: the endpoint.
        writer: makes the prompts.
        pacing: makes the times.
    """

    requests: Sequence[TraceRequest]
    client: Client
    writer: PromptWriter
    pacing: Pacing

    async def run(self, bar: ProgressBar) -> list[Record]:
        """Send everything; the records are in the trace's order.

        Raises:
            NothingAnswered: with the first reason.
        """
        times = self.pacing.times_s(self.requests)
        start = time.perf_counter() + _LEAD_S
        limit = self.pacing.concurrency
        room = nullcontext() if limit is None else asyncio.Semaphore(limit)
        num_done = 0

        async def one(index: int) -> Record:
            nonlocal num_done
            async with room:
                record = await self._ask(index, start + times[index])
            num_done += 1
            bar("replaying", num_done / len(times))
            return record

        records = await asyncio.gather(*(one(index) for index in range(len(times))))
        if all(record.error is not None for record in records):
            raise NothingAnswered(f"no request was answered; the first one: {records[0].error}")
        return records

    async def _ask(self, index: int, at_s: float) -> Record:
        """One request, at its time or at once. Its prompt is written shortly before, aside."""
        request = self.requests[index]
        await asyncio.sleep(at_s - time.perf_counter() - _LEAD_S)
        prompt = await asyncio.to_thread(self.writer.write, request, index)
        if self.pacing.concurrency is None:
            await asyncio.sleep(at_s - time.perf_counter())
        else:
            at_s = time.perf_counter()
        record = Record(index, at_s)
        await self.client.ask(prompt, request.num_output, record)
        return record


def scaled(requests: Sequence[TraceRequest], scale: float) -> list[TraceRequest]:
    """The same requests with lengths multiplied, at least one token each."""
    return [
        replace(
            request,
            num_input=max(1, round(request.num_input * scale)),
            num_output=max(1, round(request.num_output * scale)),
        )
        for request in requests
    ]
