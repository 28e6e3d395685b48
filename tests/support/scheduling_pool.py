"""A KVCache pool of a scheduler under test, whose chunks have content: what they were copied from.

A save copies the blocks' content as it is when its copy runs, and a load writes that content back,
so that wrong KV in a chunk is seen when the chunk is committed, and again when a request reads it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from support.scheduling import Slot, Worker, fingerprints

from mooncake_engine.scheduling.request import Request
from mooncake_engine.scheduling.step_plan import (
    SampledToken,
    ScheduledSequence,
    StepPlan,
    StepResult,
)
from mooncake_kv.params import PrefixSource
from mooncake_kv.pool.pool_costs import LoadCosts
from mooncake_kv.pool.pool_events import (
    ChunksCopied,
    ChunksFound,
    ChunkSource,
    LoadReleased,
    LoadRequest,
    PoolEvent,
    PoolLoadEnded,
    PoolStats,
    SaveRequest,
)
from mooncake_kv.store.chunk_keys import KVIdentity, chunk_keys
from mooncake_kv.store.chunk_store import Tier

GARBAGE = 0
"""The content of a slot that no tokens' KV was written to."""
UNREPORTED = -2
"""What a step samples from wrong KV: no request may report it."""
NEVER = 1 << 60


@dataclass(slots=True, eq=False)
class PoolLoad:
    """A load that the scheduler has started.

    Args:
        request: what it asked for.
        content: what it writes, by token position; None for a chunk that the store has lost.
        is_doomed: it writes garbage, and ends with an error.

    Attributes:
        num_chunks: leading chunks that the request has if it succeeds.
        written: the position behind the last token that it has written.
        is_cancelled: the scheduler has cancelled it.
        error: why it ended, once it has.
        released_at, ended_at: the first step that was planned after the event was handled.
    """

    request: LoadRequest
    content: dict[int, Slot]
    num_chunks: int
    written: int
    is_doomed: bool
    is_cancelled: bool = False
    is_released: bool = False
    has_ended: bool = False
    error: str | None = None
    released_at: int = NEVER
    ended_at: int = NEVER


@dataclass(slots=True, eq=False)
class PoolSave:
    """A save that the scheduler has started; ``content`` is what was copied, by position."""

    request: SaveRequest
    content: dict[int, Slot] = field(default_factory=dict)
    is_copied: bool = False
    num_chunks: int = 0


class ContentPool:
    """A ``ChunkPool`` and its ranks and store, whose events the test triggers and delivers."""

    def __init__(self, chunk_tokens: int, block_size: int) -> None:
        self.chunk_tokens, self.chunk_bytes, self.num_layers = chunk_tokens, 1000, 4
        self.transfer_timeout_s, self.always_loads = 30.0, False
        self.publishes_saves = True
        self.stats = PoolStats()
        self.load_costs = LoadCosts()
        self.answers_at_once = True
        self.is_busy = self.dooms = self.releases_at_once = False
        self.next_step = 0
        self.asked: dict[str, Sequence[bytes]] = {}
        self.loads: dict[str, PoolLoad] = {}
        self.saves: dict[str, PoolSave] = {}
        self.stored: dict[bytes, tuple[list[Slot], ChunkSource]] = {}
        self.events: deque[PoolEvent] = deque()
        self._tokens: dict[bytes, tuple[int, ...]] = {}
        self._identity = KVIdentity("model", "float32", chunk_tokens)
        self._block_size = block_size

    def fill(self, tokens: Sequence[int]) -> None:
        """Store the chunks of these tokens, as another instance would have."""
        keys = self._keys(tokens[: len(tokens) // self.chunk_tokens * self.chunk_tokens], "")
        for key in keys:
            content = fingerprints(self._tokens[key])[-self.chunk_tokens :]
            self.stored[key] = content, ChunkSource(0, Tier.DRAM)

    def keys(self, request: Request, num_chunks: int) -> list[bytes]:
        tokens = request.token_ids[: num_chunks * self.chunk_tokens]
        assert len(tokens) == num_chunks * self.chunk_tokens, "keys of unknown tokens"
        return self._keys(tokens, request.spec.cache_salt)

    def _keys(self, tokens: Sequence[int], salt: str) -> list[bytes]:
        keys = chunk_keys(self._identity, tokens, tenant_salt=salt)
        for position, key in enumerate(keys, start=1):
            self._tokens[key] = tuple(tokens[: position * self.chunk_tokens])
        return keys

    def find(self, keys: Sequence[bytes]) -> list[ChunkSource]:
        found = []
        for key in keys:
            if key not in self.stored:
                break
            found.append(self.stored[key][1])
        return found

    def lookup(
        self,
        load_id: str,
        keys: Sequence[bytes],
        hints: Sequence[PrefixSource] = (),
        timeout_s: float = 0.0,
    ) -> Sequence[ChunkSource] | None:
        if self.answers_at_once:
            return self.find(keys)
        self.asked[load_id] = keys
        return None

    def answer(self, load_id: str) -> None:
        self.events.append(ChunksFound(load_id, self.find(self.asked.pop(load_id))))

    # -- loads ------------------------------------------------------------------------------

    def start_load(self, load: LoadRequest) -> None:
        """Pin the chunks that the store still has, and keep their content."""
        assert load.load_id not in self.loads
        size, content = self.chunk_tokens, {}
        num_chunks = load.first_chunk
        while num_chunks < len(load.keys) and load.keys[num_chunks] in self.stored:
            slots, _ = self.stored[load.keys[num_chunks]]
            content |= dict(enumerate(slots, start=num_chunks * size))
            num_chunks += 1
        start = load.first_chunk * size + load.skipped_tokens
        started = PoolLoad(load, content, num_chunks, start, self.dooms)
        self.loads[load.load_id] = started
        if self.releases_at_once and load.release_layers is not None:
            self.release(started)

    def cancel_load(self, load_id: str, *, is_late: bool = False) -> None:
        if load_id in self.loads:
            self.loads[load_id].is_cancelled = True

    def write(self, load: PoolLoad, worker: Worker, num_tokens: int) -> None:
        """Write the next tokens' KV of a load."""
        stop = min(load.written + num_tokens, load.num_chunks * self.chunk_tokens)
        for position in range(load.written, stop):
            block = load.request.block_ids[position // self._block_size]
            value = GARBAGE if load.is_doomed else load.content[position]
            worker.slots[block][position % self._block_size] = value
        load.written = stop

    def is_complete(self, load: PoolLoad) -> bool:
        return load.written >= load.num_chunks * self.chunk_tokens and not load.is_doomed

    def release(self, load: PoolLoad) -> None:
        load.is_released = True
        self.events.append(LoadReleased(load.request.load_id, load.num_chunks))

    def end_load(self, load: PoolLoad, error: str | None) -> None:
        load.has_ended, load.error = True, error
        num_chunks = load.request.first_chunk if error else load.num_chunks
        self.events.append(PoolLoadEnded(load.request.load_id, num_chunks, error))

    def begin_step(self, plan: StepPlan, worker: Worker) -> None:
        """A step waits for the loads of its requests, unless they were cancelled."""
        names = {name for s in plan.sequences for name in (s.request_id, *s.siblings)}
        for load in self.loads.values():
            is_its = load.request.request_id in names
            if is_its and not load.has_ended and not load.is_cancelled:
                self.write(load, worker, NEVER)

    def may_be_wrong(self, name: str, step: int) -> bool:
        """Whether a step of this request was planned on a load that has failed or will fail."""
        return any(
            load.request.request_id == name
            and load.released_at <= step < load.ended_at
            and (load.is_doomed or load.error is not None or load.is_cancelled)
            for load in self.loads.values()
        )

    # -- saves ------------------------------------------------------------------------------

    def save(self, save: SaveRequest) -> bool:
        if self.is_busy:
            return False
        assert save.save_id not in self.saves
        size = self.chunk_tokens
        wanted = [t for key in save.keys[-1:] for t in self._tokens[key][save.first_chunk * size :]]
        assert list(save.token_ids) == wanted, "publishes other tokens"
        self.saves[save.save_id] = PoolSave(save, num_chunks=len(save.keys))
        return True

    def copy(self, save: PoolSave, worker: Worker, num_tokens: int) -> None:
        """Copy the next tokens' KV of a save."""
        request, size = save.request, self.chunk_tokens
        start = request.first_chunk * size + len(save.content)
        stop = min(start + num_tokens, save.num_chunks * size)
        for position in range(start, stop):
            block = request.block_ids[position // self._block_size]
            save.content[position] = worker.slots[block][position % self._block_size]

    def end_copy(self, save: PoolSave, refused_chunk: int | None, is_complete: bool) -> None:
        save.is_copied = True
        self.events.append(ChunksCopied(save.request.save_id, is_complete, refused_chunk))

    def end_save(self, save_id: str, *, is_unchanged: bool) -> None:
        save = self.saves[save_id]
        assert save.is_copied
        request, size = save.request, self.chunk_tokens
        if not is_unchanged:
            return
        for position in range(request.first_chunk, save.num_chunks):
            key = request.keys[position]
            found = [save.content[i] for i in range(position * size, (position + 1) * size)]
            wanted = fingerprints(self._tokens[key])[-size:]
            assert found == wanted, f"{save_id} stores wrong KV: chunk {position}"
            home = ChunkSource(0, Tier.DRAM)
            if key not in self.stored or request.copy is not None:
                self.stored[key] = found, home

    # -- events -----------------------------------------------------------------------------

    def handled(self, event: PoolEvent, *, is_unproven: bool) -> None:
        """The scheduler has handled an event; ``is_unproven`` says whether steps run its load."""
        if isinstance(event, LoadReleased):
            if is_unproven:
                self.loads[event.load_id].released_at = self.next_step
        elif isinstance(event, PoolLoadEnded):
            self.loads[event.load_id].ended_at = self.next_step
        elif isinstance(event, ChunksCopied):
            del self.saves[event.save_id]


class PooledWorker(Worker):
    """A worker whose steps wait for the loads of their requests. A step that was planned on a load
    that fails reads and writes anything, and what it samples must not be reported."""

    pool: ContentPool
    step = -1
    """The latest step that has run."""

    def execute(self, plan: StepPlan) -> StepResult:
        self.step = plan.step
        self.pool.begin_step(plan, self)
        return super().execute(plan)

    def _run(self, sequence: ScheduledSequence) -> None:
        self._may_guess = self.pool.may_be_wrong(sequence.request_id, self.step)
        super()._run(sequence)
        self._may_guess = False

    def _sample(self, name: str) -> SampledToken:
        token = super()._sample(name)
        if self.pool.may_be_wrong(name, self.step):
            self._tokens[name][-1] = UNREPORTED
            return SampledToken(UNREPORTED)
        return token

    def check(self, block_ids: Sequence[int], tokens: Sequence[int]) -> None:
        if not self._may_guess:
            super().check(block_ids, tokens)

    def _write(
        self, table: Sequence[int], tokens: Sequence[int], start: int, is_foreign: bool = False
    ) -> None:
        super()._write(table, tokens, start, is_foreign)
        if self._may_guess:
            for position in range(start, len(tokens)):
                block = table[position // self._block_size]
                self.slots[block][position % self._block_size] = GARBAGE

    _may_guess = False
