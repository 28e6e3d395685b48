"""Simulation of coupled instances, which prefill and decode in one batch, as a baseline.

As in vLLM, a step computes a chunk of the oldest prompt and one token of every decoding sequence;
prefixes are reused from the instance's own device memory. A load balancer sends each request to the
instance with the fewest tokens to prefill, then the fewest sequences. There is no conductor and no
KVCache pool.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from mooncake_conductor.cost.latency_model import LatencyModel
from mooncake_conductor.simulator.engine_models import ChunkCache, Decoded, DecodeNode
from mooncake_conductor.simulator.simulation import (
    Cluster,
    RequestRecord,
    SimulationResult,
    new_records,
)
from mooncake_conductor.simulator.trace_file import TraceRequest

WHOLE_PROMPTS = 1 << 40
"""More tokens per step than any prompt has: no chunked prefill."""


@dataclass(slots=True)
class _Prefill:
    """A prompt on a coupled instance."""

    number: int
    request: TraceRequest
    num_done: int = -1
    num_reused: int = 0


class CoupledNode(DecodeNode):
    """One coupled instance.

    Args:
        latency: latency model of the instance.
        cluster: provides batch size, memory and chunk size.
        step_tokens: prompt tokens that one step computes.
    """

    def __init__(self, latency: LatencyModel, cluster: Cluster, step_tokens: int) -> None:
        super().__init__(latency, cluster.max_batch, cluster.kv_tokens)
        self.cache = ChunkCache(cluster.kv_tokens // cluster.chunk_tokens)
        self.prompts: deque[_Prefill] = deque()
        self.first_tokens: list[tuple[int, float, int, float]] = []
        self.num_queued_tokens = 0
        self._chunk_tokens = cluster.chunk_tokens
        self._step_tokens = step_tokens

    def prefill(self, number: int, request: TraceRequest, now: float) -> None:
        """Queue a request. The running step ends without it."""
        if not self.prompts:
            if self._running and self._at < now:
                self._take_steps(1, self.step_s)
            self._at = max(self._at, now)
        self.prompts.append(_Prefill(number, request))
        self.num_queued_tokens += request.num_input

    def advance(self, now: float) -> list[Decoded]:
        """Run steps until ``now``; first tokens are appended to ``first_tokens``."""
        finished = self._pop_finished()
        while (head := self._head()) is not None:
            seconds = self._mixed_seconds(head)
            if self._at + seconds > now + 1e-9:
                return finished
            self._take_steps(1, seconds)
            self._compute(head)
            finished += self._pop_finished()
            if not self.prompts and not self._running:
                self._at = max(self._at, now)
        return finished + super().advance(now)

    def next_event(self) -> float | None:
        """Time of the next end of a step with a prompt, or of the next batch change."""
        head = self._head()
        return super().next_event() if head is None else self._at + self._mixed_seconds(head)

    def _head(self) -> _Prefill | None:
        """The oldest prompt, if its sequence fits into the batch."""
        if not self.prompts:
            return None
        head = self.prompts[0]
        if head.num_done < 0:
            request = head.request
            if not self._fits(("", request.num_input, request.num_output)):
                return None
            held = self.cache.prefix(request.keys) * self._chunk_tokens
            head.num_done = head.num_reused = min(held, request.num_input - 1)
        return head

    def _mixed_seconds(self, head: _Prefill) -> float:
        """Seconds of a step with a prompt, whose compute hides the reading of weights."""
        end = min(head.num_done + self._step_tokens, head.request.num_input)
        costs = self._latency
        prompt = costs.prefill_seconds(end, head.num_done) - costs.fixed
        if end == head.request.num_input:
            prompt += costs.fixed
        if not self._running:
            return prompt
        return max(prompt, costs.step) + self.step_s - costs.step

    def _compute(self, head: _Prefill) -> None:
        """Note that a step has computed its part of a prompt, and maybe the first token."""
        request = head.request
        before = head.num_done
        head.num_done = min(before + self._step_tokens, request.num_input)
        if head.num_done < request.num_input:
            return
        self.prompts.popleft()
        self.num_queued_tokens -= request.num_input
        self.cache.insert(request.keys)
        seconds = self._latency.prefill_seconds(request.num_input, head.num_reused)
        self.first_tokens.append((head.number, self._at, head.num_reused, seconds))
        if request.num_output > 1:
            self._join(str(head.number), request.num_input + 1, request.num_output - 1)


class CoupledSimulation:
    """Replays requests on coupled instances.

    Args:
        cluster: the cluster; all its nodes become coupled instances.
        step_tokens: prompt tokens that one step computes.
    """

    def __init__(self, cluster: Cluster, step_tokens: int) -> None:
        self._cluster = cluster
        size = cluster.num_prefill + cluster.num_decode
        self._nodes = [CoupledNode(cluster.latency, cluster, step_tokens) for _ in range(size)]
        self._events: list[tuple[float, int, int]] = []
        self._order = count()
        self._records: list[RequestRecord] = []
        self._planned: dict[int, float] = {}

    def run(
        self, requests: Sequence[TraceRequest], progress: Callable[[float], None] | None = None
    ) -> SimulationResult:
        """Replay until the last request has ended. Turns arrive by their times, not in a loop."""
        self._records = new_records(requests, self._cluster.latency)
        steps = max(len(requests) // 100, 1)
        for number, request in enumerate(requests):
            while self._events and self._events[0][0] <= request.at_s:
                self._wake(*heapq.heappop(self._events))
            self._arrive(number, request)
            if progress is not None and number % steps == 0:
                progress(number / len(requests))
        while self._events:
            self._wake(*heapq.heappop(self._events))
        ended = max((record.ended_at or 0.0 for record in self._records), default=0.0)
        return SimulationResult(self._records, ended_at=ended)

    def _arrive(self, number: int, request: TraceRequest) -> None:
        loads = [(node.num_queued_tokens, node.num_running) for node in self._nodes]
        chosen = loads.index(min(loads))
        node = self._nodes[chosen]
        self._records[number].prefill = self._records[number].decode = f"c{chosen}"
        self._collect(node, request.at_s)
        node.prefill(number, request, request.at_s)
        self._plan(chosen)

    def _wake(self, time: float, order: int, chosen: int) -> None:
        if self._planned.get(chosen) == time:
            del self._planned[chosen]
            self._collect(self._nodes[chosen], time)
            self._plan(chosen)

    def _plan(self, chosen: int) -> None:
        """Schedule the next batch change of an instance."""
        when = self._nodes[chosen].next_event()
        if when is not None and self._planned.get(chosen) != when:
            self._planned[chosen] = when
            heapq.heappush(self._events, (when, next(self._order), chosen))

    def _collect(self, node: CoupledNode, now: float) -> None:
        finished = node.advance(now)
        for number, at, reused, seconds in node.first_tokens:
            record = self._records[number]
            record.ttft, record.num_reused = at - record.arrived_at, reused
            record.prefill_s = seconds
            if record.num_output == 1:
                record.ended_at = at
        node.first_tokens.clear()
        for decoded in finished:
            record = self._records[int(decoded.request_id)]
            record.mean_tbt, record.tail_tbt = decoded.mean_tbt, decoded.tail_tbt
            record.ended_at = decoded.ended_at
