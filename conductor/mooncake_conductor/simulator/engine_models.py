"""Models of engines: a prefill node with its chunk cache, and a decode node with its batch."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mooncake_conductor.cost.latency_model import LatencyModel

_CLOCK_S = 1e-9
"""Times that differ by less are considered equal, because of rounding errors."""
_TAIL_SHARE = 0.1
"""A request's TBT is the mean of the longest tenth of its gaps, as in FAST'25."""


class ChunkCache:
    """An LRU cache of chunks. The end of a prompt is evicted before its beginning.

    Args:
        num_chunks: capacity in chunks.
    """

    def __init__(self, num_chunks: int) -> None:
        self.num_chunks = num_chunks
        self._order: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def prefix(self, keys: Sequence[int]) -> int:
        """Number of leading chunks that are cached."""
        order = self._order
        return next((at for at, key in enumerate(keys) if key not in order), len(keys))

    def touch(self, keys: Sequence[int]) -> None:
        """Mark cached chunks as used now."""
        order = self._order
        for key in reversed(keys):
            if key in order:
                order.move_to_end(key)

    def insert(self, keys: Sequence[int]) -> tuple[list[int], list[int]]:
        """Insert chunks, or mark them as used now. Returns (new chunks, evicted chunks)."""
        order = self._order
        new = []
        for key in reversed(keys):
            if key not in order:
                new.append(key)
                order[key] = None
            else:
                order.move_to_end(key)
        evicted = []
        while len(order) > self.num_chunks:
            evicted.append(order.popitem(last=False)[0])
        return new, evicted

    @property
    def victim(self) -> int | None:
        """The chunk that would be evicted next; None while there is free space."""
        is_full = len(self._order) >= self.num_chunks
        return next(iter(self._order), None) if is_full else None


@dataclass(slots=True)
class PrefillJob:
    """A request on a prefill node.

    Args:
        request_id: the request.
        num_tokens: tokens of its prompt.
        keys: keys of its chunks.
        num_fetched: leading tokens that are fetched from other nodes.
        loaded_at: time at which those have arrived.
        keeps_copy: whether they stay in the cache.
        num_reused: tokens that are not computed, set at the start.
        started_at: start of the prefill.
        compute_s: seconds of computation.
        ends_at: end of the prefill.
    """

    request_id: str
    num_tokens: int
    keys: tuple[int, ...]
    num_fetched: int = 0
    loaded_at: float = 0.0
    keeps_copy: bool = True
    num_reused: int = 0
    started_at: float = 0.0
    compute_s: float = 0.0
    ends_at: float = 0.0


class PrefillNode:
    """A node that runs one prefill at a time, in FIFO order; KV loads overlap layer by layer.

    Args:
        latency: latency model of the node.
        cache: its chunk cache.
        chunk_tokens: tokens per chunk.
        chunk_load_s: seconds to load a chunk from the cache to device memory.
        num_layers: layers of the model.
    """

    def __init__(
        self,
        latency: LatencyModel,
        cache: ChunkCache,
        *,
        chunk_tokens: int,
        chunk_load_s: float,
        num_layers: int,
    ) -> None:
        self.cache = cache
        self.running: PrefillJob | None = None
        self.queue: deque[PrefillJob] = deque()
        self._latency = latency
        self._chunk_tokens = chunk_tokens
        self._chunk_load_s = chunk_load_s
        self._num_layers = num_layers

    def start_next(self, now: float) -> PrefillJob | None:
        """Start the next prefill if the node is idle. The cache is looked up now."""
        if self.running is not None or not self.queue:
            return None
        job = self.running = self.queue.popleft()
        local = self.cache.prefix(job.keys)
        tokens = min(local * self._chunk_tokens, job.num_tokens - 1)
        job.num_reused = max(tokens, job.num_fetched)
        job.started_at = now
        job.compute_s = self._latency.prefill_seconds(job.num_tokens, job.num_reused)
        fetched = max(job.loaded_at - now, 0.0) if job.num_fetched > tokens else 0.0
        load = max(fetched, local * self._chunk_load_s)
        job.ends_at = now + max(job.compute_s, load + job.compute_s / self._num_layers)
        return job

    def finish(self) -> tuple[PrefillJob, list[int], list[int]]:
        """End the running prefill. Returns (job, new chunks in the cache, evicted chunks)."""
        job, self.running = self.running, None
        assert job is not None, "no prefill is running"
        kept: Iterable[int] = job.keys
        if job.num_fetched and not job.keeps_copy:
            first = job.num_fetched // self._chunk_tokens
            here = self.cache.prefix(job.keys)
            kept = (*job.keys[:here], *job.keys[max(first, here) :])
        new, evicted = self.cache.insert(tuple(kept))
        return job, new, evicted


@dataclass(frozen=True, slots=True)
class Decoded:
    """A request that a decode node has finished.

    Args:
        request_id: the request.
        joined_at: time at which it joined the batch.
        ended_at: time of its last token.
        mean_tbt: mean seconds per step.
        tail_tbt: mean seconds of the longest tenth of its steps.
    """

    request_id: str
    joined_at: float
    ended_at: float
    mean_tbt: float
    tail_tbt: float


class DecodeNode:
    """A node with a continuous decode batch.

    Only changes of the batch are events. Between them the time of k steps has a closed form,
    because each step's context is longer by one token per sequence.

    Args:
        latency: latency model of the node.
        max_batch: sequences in the batch.
        kv_tokens: tokens of KV that fit.
        join_steps: further steps, besides the running one, until a new sequence joins other ones:
            an engine checks for new requests between steps, and may have planned the next step.
    """

    def __init__(
        self, latency: LatencyModel, max_batch: int, kv_tokens: int, join_steps: int = 0
    ) -> None:
        self.waiting: deque[tuple[str, int, int]] = deque()
        self._join_steps = join_steps
        self._joins_at: deque[int] = deque()
        self.num_steps = 0
        self._latency = latency
        self._max_batch = max_batch
        self._kv_tokens = kv_tokens
        self._at = 0.0
        self._context = 0
        self._reserved = 0
        self._running: list[tuple[int, int, float, str, int]] = []
        self._segments: deque[tuple[int, float]] = deque()

    @property
    def num_running(self) -> int:
        """Sequences in the batch."""
        return len(self._running)

    @property
    def step_s(self) -> float:
        """Seconds of the next step."""
        return self._latency.step_seconds(len(self._running), self._context)

    def add(self, request_id: str, num_tokens: int, num_output: int) -> None:
        """Queue a request whose KV has arrived; it joins the batch between steps, if it fits.

        Its arrival time is that of the next ``advance``.
        """
        self.waiting.append((request_id, num_tokens, num_output))

    def advance(self, now: float) -> list[Decoded]:
        """Run steps until ``now``, and admit waiting requests that fit. Returns finished ones."""
        finished: list[Decoded] = []
        while self._running:
            to_finish = self._running[0][0] - self.num_steps
            steps = min(self._steps_until(now), to_finish)
            self._step(steps)
            if steps < to_finish:
                break
            finished += self._pop_finished()
        if not self._running:
            self._at = max(self._at, now)
        self._admit(now)
        return finished

    def next_event(self) -> float | None:
        """Time of the next change of the batch without new requests; None if idle."""
        if not self._running:
            return None
        to_finish = self._running[0][0] - self.num_steps
        if self.waiting and self._fits(self.waiting[0]):
            to_join = max(self._joins_at[0] - self.num_steps, 1)
            return self._at + self._duration(min(to_join, to_finish))
        return self._at + self._duration(to_finish)

    def _admit(self, now: float) -> None:
        """Admit waiting requests between two steps, if they fit and have waited `join_steps`."""
        is_idle = not self._running
        is_in_step = not is_idle and self._at < now - _CLOCK_S
        while len(self._joins_at) < len(self.waiting):
            self._joins_at.append(self.num_steps + self._join_steps + is_in_step)
        if is_in_step:
            return
        while self.waiting and self._fits(self.waiting[0]):
            if not is_idle and self._joins_at[0] > self.num_steps:
                return
            self._joins_at.popleft()
            self._join(*self.waiting.popleft())

    def _join(self, request_id: str, num_tokens: int, num_output: int) -> None:
        """Add a sequence, which decodes from the next step on."""
        self._context += num_tokens
        self._reserved += num_tokens + num_output
        entry = (self.num_steps + num_output, self.num_steps, self._at, request_id, num_tokens)
        heapq.heappush(self._running, entry)

    def _fits(self, entry: tuple[str, int, int]) -> bool:
        needed = self._reserved + entry[1] + entry[2]
        has_memory = needed <= self._kv_tokens or not self._running
        return len(self._running) < self._max_batch and has_memory

    def _pop_finished(self) -> list[Decoded]:
        finished = []
        while self._running and self._running[0][0] <= self.num_steps:
            last, first, joined_at, request_id, num_tokens = heapq.heappop(self._running)
            steps = last - first
            self._context -= num_tokens + steps
            self._reserved -= num_tokens + steps
            mean = (self._at - joined_at) / steps
            tail = self._tail(first, steps)
            finished.append(Decoded(request_id, joined_at, self._at, mean, tail))
        oldest = min((entry[1] for entry in self._running), default=self.num_steps)
        while self._segments and self._segments[0][0] <= oldest:
            self._segments.popleft()
        return finished

    def _tail(self, first: int, steps: int) -> float:
        """Mean of the longest tenth of the last ``steps`` steps."""
        parts, end = [], self.num_steps
        segments = list(self._segments)
        for at in range(len(segments) - 1, -1, -1):
            begin = segments[at - 1][0] if at else 0
            begin = max(begin, first)
            if end > begin:
                parts.append((segments[at][1], end - begin))
            end = min(end, begin)
            if end <= first:
                break
        left = wanted = max(1, math.ceil(_TAIL_SHARE * steps))
        total = 0.0
        for seconds, count in sorted(parts, reverse=True):
            taken = min(count, left)
            total += taken * seconds
            left -= taken
            if not left:
                break
        return total / (wanted - left)

    def _step(self, count: int) -> None:
        if not count:
            return
        self._take_steps(count, self._duration(count))

    def _take_steps(self, count: int, seconds: float) -> None:
        self._at += seconds
        self.num_steps += count
        self._context += count * len(self._running)
        self._segments.append((self.num_steps, seconds / count))

    def _duration(self, count: int) -> float:
        """Seconds of the next ``count`` steps."""
        slope = self._latency.step_per_context_token * len(self._running)
        return count * self.step_s + slope * count * (count - 1) / 2

    def _steps_until(self, now: float) -> int:
        """Number of steps that end by ``now``, with the current batch."""
        left = now - self._at
        if left <= 0:
            return 0
        half = self._latency.step_per_context_token * len(self._running) / 2
        linear = self.step_s - half
        # The numerically stable root: the other form cancels if context costs almost nothing.
        found = 2 * left / (linear + math.sqrt(linear * linear + 4 * half * left))
        count = int(found + 1e-9)
        while count and self._duration(count) > left + 1e-9:
            count -= 1
        return count
