"""Saves what vLLM computes to the KVCache pool: prompts while they are computed, the rest when the
request ends.

So other requests find a long prompt while its first answer is still generated, and a preempted
request finds its own. While a request runs, vLLM may free blocks that are being copied; such a copy
is detected and discarded. Chunks that the store has no memory for, or whose copy failed, are
offered once more when the request ends. After that its blocks are held until all copies are
complete.

Blocks of sliding windows, which vLLM frees as the window moves, are held from the step that fills a
chunk until the chunk is saved (``WindowBlocks``). So with windows, chunks of the answer, too, are
saved while it is computed, and each chunk is offered once.

Chunks that contain media, and all after them, are not saved: their token ids don't say which media
they are. vLLM itself gives the blocks before them the same hashes as without media.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from mooncake_kv.pool.pool_events import ChunksCopied, SaveRequest
from mooncake_kv.store.chunk_keys import KVIdentity, extend_keys
from mooncake_vllm.vllm_interface import Request, SchedulerOutput
from mooncake_vllm.vllm_memory import join_tables
from mooncake_vllm.vllm_window_blocks import WindowBlocks

COMPLETED = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION")
"""Finish statuses after which all steps of a request, except that of its last token, are over."""
ABORTED = "FINISHED_ABORTED"
"""Finish status of a request whose client has left, or whose text contains a stop string. It can
end at any time."""


class SaveClient(Protocol):
    """The part of ``PoolClient`` that saves."""

    def save(self, save: SaveRequest) -> bool: ...
    def end_save(self, save_id: str, *, is_unchanged: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class FirstStep:
    """The first step of a request after its arrival or a preemption.

    Args:
        num_preemptions: the request's number of preemptions before the step.
        num_initial_tokens: tokens whose KV existed at that step, or will exist when it has ended.
    """

    num_preemptions: int
    num_initial_tokens: int

    def has_been_preempted(self, request: Request) -> bool:
        """Whether the request was preempted after this step, and so has lost its blocks."""
        return request.num_preemptions != self.num_preemptions


@dataclass(slots=True, eq=False)
class SavedRequest:
    """A live request, all of whose KV has the current identity.

    Args:
        request: vLLM's request.
        identity: identity of its KV.

    Attributes:
        keys: keys of its leading chunks, as far as they were needed.
        num_known: leading chunks that stores had at the look-up.
        num_saved: these, plus the chunks that were saved since, up to the first refused one.
        was_refused: whether the store had no memory for a chunk, or a copy failed, since the latest
            first step.
        first_step: its latest first step, which was in its first turn if it is a session; None if
            it never ran.
        tables: its vLLM block tables, while it has chunks to save before it ends.
        held: the held blocks of sliding windows, by the chunk that waits to be saved.
        num_held: leading chunks that stores have, are saved, or whose blocks are held.
        can_hold: whether blocks of further chunks may be held.
    """

    request: Request
    identity: KVIdentity
    keys: list[bytes] = field(default_factory=list)
    num_known: int = 0
    num_saved: int = 0
    was_refused: bool = False
    first_step: FirstStep | None = None
    tables: list[list[int]] = field(default_factory=list)
    held: dict[int, list[int]] = field(default_factory=dict)
    num_held: int = 0
    can_hold: bool = True

    def first_keys(self, num_chunks: int) -> list[bytes]:
        """The keys of its leading chunks, all of whose tokens are known. No further keys are
        cached: when the client of a session continues, vLLM replaces the last output token by the
        new tokens."""
        if num_chunks > len(self.keys):
            root = self.identity.root(self.request.cache_salt or "")
            parent = self.keys[-1] if self.keys else root
            new = self.tokens_of(len(self.keys), num_chunks)
            self.keys += extend_keys(self.identity, parent, new)
        return self.keys[:num_chunks]

    def tokens_of(self, first: int, stop: int) -> list[int]:
        """The tokens of its chunks from ``first`` to ``stop``."""
        size = self.identity.chunk_tokens
        tokens = [*(self.request.prompt_token_ids or []), *self.request.output_token_ids]
        return tokens[first * size : stop * size]

    @property
    def num_prompt_chunks(self) -> int:
        """Number of whole chunks in its prompt that may be saved."""
        return self.num_plain_chunks(len(self.request.prompt_token_ids or []))

    def num_plain_chunks(self, num_tokens: int = sys.maxsize) -> int:
        """Number of whole chunks in its first tokens that may be saved."""
        return min(num_tokens, num_plain_tokens(self.request)) // self.identity.chunk_tokens

    def take_held(self, stop: int) -> list[int]:
        """Remove and return the held blocks of the chunks before ``stop``."""
        chunks = [chunk for chunk in self.held if chunk < stop]
        return [block for chunk in chunks for block in self.held.pop(chunk)]

    def drop_uncomputed(self) -> list[int]:
        """Remove and return the held blocks of chunks that no step computes: drafts were rejected,
        or a session's turn has ended. vLLM still has them."""
        return self.drop_held_from(self.request.num_computed_tokens // self.identity.chunk_tokens)

    def drop_held_from(self, first: int) -> list[int]:
        """Remove and return the held blocks of a chunk and those after it."""
        late = [chunk for chunk in self.held if chunk >= first]
        self.num_held -= len(late)
        return [block for chunk in late for block in self.held.pop(chunk)]

    def drop_held(self) -> list[int]:
        """Remove and return all held blocks, whose chunks are not saved."""
        blocks = self.take_held(self.num_held)
        self.num_held = self.num_saved
        return blocks


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy of chunks to a store: the request, its number of preemptions before, and the blocks
    that are held for the copy."""

    saved: SavedRequest
    num_preemptions: int
    held: Sequence[int] = ()


class PoolSaves:
    """The saves of one instance. They are started on vLLM's thread, and completed on the pool
    client's thread.

    Args:
        client: the pool's client.
        blocks_per_page: blocks of the layout per vLLM block.
        windows: holds blocks of sliding windows.
        publishes_tokens: returns whether saved chunks may be published, which needs their tokens.
        report: called with the id of an ended request when its blocks are no longer read.
    """

    def __init__(
        self,
        client: SaveClient,
        blocks_per_page: int,
        windows: WindowBlocks,
        *,
        publishes_tokens: Callable[[], bool],
        report: Callable[[str], None],
    ) -> None:
        self._client = client
        self._blocks_per_page = blocks_per_page
        self._windows = windows
        self._publishes_tokens = publishes_tokens
        self._report = report
        self._lock = threading.Lock()
        self._ids = count()
        self._current: dict[str, SavedRequest] = {}
        self._filling: dict[str, SavedRequest] = {}  # running, with chunks to save before they end
        self._copies: dict[str, _Copy] = {}
        self._held: dict[str, SavedRequest] = {}  # ended; their blocks are held

    @property
    def num_in_flight(self) -> int:
        """Number of copies in flight."""
        return len(self._copies)

    @property
    def is_holding(self) -> bool:
        """Whether the release of an ended request's blocks is still to be reported."""
        return bool(self._held)

    def add(self, request: Request, identity: KVIdentity) -> None:
        """Add a new request."""
        with self._lock:
            self._current[request.request_id] = SavedRequest(request, identity)

    def first_keys(self, request_id: str, num_chunks: int) -> list[bytes] | None:
        """Keys of a request's leading chunks; None if its KV has not the current identity."""
        saved = self._current.get(request_id)
        return None if saved is None else saved.first_keys(num_chunks)

    def note_known(self, request_id: str, num_chunks: int) -> None:
        """Record how many of a request's leading chunks stores have."""
        with self._lock:
            if (saved := self._current.get(request_id)) is not None:
                saved.num_known = saved.num_saved = num_chunks

    def process_step(self, step: SchedulerOutput) -> None:
        """Process a scheduled step: record the requests that begin to run, and save what earlier
        steps have computed."""
        self._windows.free_released()
        for new in step.scheduled_new_reqs:
            self._begin(new.req_id, new.block_ids, new.num_computed_tokens)
            if (saved := self._filling.get(new.req_id)) is not None:
                num_scheduled = step.num_scheduled_tokens[new.req_id]
                self._hold(saved, new.num_computed_tokens + num_scheduled)
        if step.scheduled_cached_reqs.resumed_req_ids or self._filling:
            self._process_known(step)
        if not step.num_scheduled_tokens:  # vLLM is paused, or waits
            for saved in self._filling.values():
                self._windows.release(saved.drop_uncomputed())
        for name, saved in list(self._filling.items()):
            if not self._save_computed(saved):
                del self._filling[name]  # rejected chunks are offered again when the request ends
                self._windows.release(saved.drop_held())

    def _process_known(self, step: SchedulerOutput) -> None:
        """Process the requests of a step that the workers know already: some restart, and others
        have new blocks."""
        known = step.scheduled_cached_reqs
        columns = (known.req_ids, known.new_block_ids, known.num_computed_tokens)
        for name, tables, num_computed in zip(*columns, strict=True):
            is_restart = name in known.resumed_req_ids
            if is_restart:
                self._begin(name, tables or (), num_computed)
            if (saved := self._filling.get(name)) is None:
                continue
            if tables and not is_restart:
                for table, new_blocks in zip(saved.tables, tables, strict=True):
                    table += new_blocks
            self._hold(saved, num_computed + step.num_scheduled_tokens[name])

    def end(self, request: Request, tables: Sequence[Sequence[int]]) -> bool:
        """Process the end of a request; returns whether its blocks must be held until a report.

        Args:
            request: the request.
            tables: its block tables.
        """
        self._filling.pop(request.request_id, None)
        with self._lock:
            saved = self._current.pop(request.request_id, None)
        if saved is None:
            return False
        num_whole = num_certain_tokens(request, saved.first_step)
        stop = saved.num_plain_chunks(num_whole)
        if self._windows.exist:
            # vLLM's own tables have lost the blocks that the windows have passed.
            tables, stop = saved.tables, min(stop, saved.num_held)
        is_held = bool(num_whole) and self._save_rest(saved, tables, stop)
        self._windows.release(saved.drop_held())
        self._windows.free_released()
        return is_held

    def _save_rest(self, saved: SavedRequest, tables: Sequence[Sequence[int]], stop: int) -> bool:
        """Save the chunks of an ended request up to ``stop``; returns whether any copy of it is in
        flight. Then its blocks are held."""
        name = saved.request.request_id
        placeholder = f"{name} {next(self._ids)}"
        with self._lock:
            self._held[name] = saved
            # so no copy is the last
            self._copies[placeholder] = _Copy(saved, saved.request.num_preemptions)
        self._save(saved, tables, stop)
        with self._lock:
            del self._copies[placeholder]
            is_copied = self._is_copied_from(saved)
            if not is_copied:
                del self._held[name]
        return is_copied

    def forget(self) -> None:
        """Stop saving all live requests."""
        for saved in self._filling.values():
            self._windows.release(saved.drop_held())
        self._windows.free_released()
        self._filling.clear()
        with self._lock:
            self._current.clear()

    def copied(self, event: ChunksCopied) -> None:
        """Process the end of a copy. The client's thread."""
        with self._lock:
            copy = self._copies.pop(event.save_id)
            saved, name = copy.saved, copy.saved.request.request_id
            is_held = self._held.get(name) is saved
            is_current = is_held or self._current.get(name) is saved
            is_same_run = saved.request.num_preemptions == copy.num_preemptions
            is_unchanged = is_current and is_same_run
            is_last = is_held and not self._is_copied_from(saved)
            if event.refused_chunk is not None and is_same_run:
                saved.num_saved = min(saved.num_saved, event.refused_chunk)
                saved.was_refused = True
            if is_last:
                del self._held[name]
        self._windows.release(copy.held)
        if event.is_complete:
            self._client.end_save(event.save_id, is_unchanged=is_unchanged)
        if is_last:
            self._report(name)

    def _begin(self, name: str, tables: Sequence[Sequence[int]], num_initial_tokens: int) -> None:
        """Record that a request runs for the first time, restarts, or, if it is a session,
        continues with its client's next turn, whose blocks follow those of the turns before."""
        saved = self._current.get(name)
        if saved is None:
            return
        request, began = saved.request, saved.first_step
        has_no_blocks = began is None or began.has_been_preempted(request)
        with self._lock:
            is_unsaved = has_no_blocks or saved.was_refused
            if has_no_blocks:
                saved.first_step = FirstStep(request.num_preemptions, num_initial_tokens)
                saved.num_saved = saved.num_known  # copies from blocks that it lost are discarded
            saved.was_refused = False
        if is_unsaved:
            self._windows.release(saved.drop_held())
        # The new turn of a session may bring media, from the middle of a chunk on.
        self._windows.release(saved.drop_held_from(saved.num_plain_chunks()))
        saved.can_hold = True
        last = saved.num_plain_chunks() if self._windows.exist else saved.num_prompt_chunks
        if saved.num_saved < last:
            saved.tables = [list(table) for table in tables]
            for chunk, blocks in saved.held.items():
                self._windows.restore(saved.tables, chunk, blocks)
            self._filling[name] = saved
        else:
            self._filling.pop(name, None)

    def _hold(self, saved: SavedRequest, num_scheduled: int) -> None:
        """Hold the blocks of sliding windows of the chunks that a request's scheduled steps fill.

        Args:
            saved: the request.
            num_scheduled: leading tokens that are computed once its scheduled steps have ended.
        """
        if not self._windows.exist:
            return
        num_filled = saved.num_plain_chunks(num_scheduled)
        while saved.can_hold and saved.num_held < num_filled:
            blocks = self._windows.hold(saved.tables, saved.num_held)
            if blocks is None:  # later chunks can't be loaded without this one
                saved.can_hold = False
            else:
                saved.held[saved.num_held] = blocks
                saved.num_held += 1

    def _save_computed(self, saved: SavedRequest) -> bool:
        """Save the chunks of a running request that ended steps have computed; returns whether
        there may be more before it ends."""
        began = saved.first_step
        if saved.was_refused or began is None or began.has_been_preempted(saved.request):
            return False
        num_whole = num_computed_so_far(saved.request, saved.first_step)
        last = saved.num_held if self._windows.exist else saved.num_prompt_chunks
        stop = min(saved.num_plain_chunks(num_whole), last)
        may_have_more = stop < last or (self._windows.exist and saved.can_hold)
        return self._save(saved, saved.tables, stop) and may_have_more

    def _save(self, saved: SavedRequest, tables: Sequence[Sequence[int]], stop: int) -> bool:
        """Offer the chunks up to ``stop`` to the pool; returns False if it refuses them at
        once."""
        num_saved = saved.num_saved
        first = min(saved.held, default=stop) if self._windows.exist else num_saved
        if stop <= first:
            return True
        request = saved.request
        blocks, held = join_tables(tables, self._blocks_per_page), saved.take_held(stop)
        save_id = f"{request.request_id} {next(self._ids)}"
        save = SaveRequest(
            save_id,
            saved.first_keys(stop),
            first_chunk=first,
            block_ids=blocks,
            tenant=request.cache_salt or "",
            token_ids=saved.tokens_of(first, stop) if self._publishes_tokens() else (),
        )
        with self._lock:
            self._copies[save_id] = _Copy(saved, request.num_preemptions, held)
            if saved.num_saved == num_saved:  # no earlier save was refused meanwhile
                saved.num_saved = stop  # before the store's answer, which may take it back
        if self._client.save(save):
            return True
        with self._lock:
            del self._copies[save_id]
            saved.num_saved = min(saved.num_saved, first)
        self._windows.release(held)
        return False

    def _is_copied_from(self, saved: SavedRequest) -> bool:
        """Whether a copy of this request is in flight. The lock is held."""
        return any(copy.saved is saved for copy in self._copies.values())


def num_plain_tokens(request: Request) -> int:
    """Number of leading tokens whose KV depends on nothing but token ids and the cache salt; if all
    of a request's do, a number that no request has."""
    if request.lora_request is not None or request.prompt_embeds is not None:
        return 0
    return min((each.mm_position.offset for each in request.mm_features), default=sys.maxsize)


def num_certain_tokens(request: Request, first_step: FirstStep | None) -> int:
    """Number of leading tokens of an ended request whose KV is certainly computed.

    Args:
        request: the request.
        first_step: its latest first step; None if it never ran.
    """
    if request.status.name in COMPLETED:
        return min(request.num_computed_tokens, count_tokens(request) - 1)
    return num_computed_so_far(request, first_step) if request.status.name == ABORTED else 0


def num_computed_so_far(request: Request, first_step: FirstStep | None) -> int:
    """Number of leading tokens of a request whose KV is certainly computed, in any state.

    Args:
        request: the request.
        first_step: its latest first step; None if it never ran.
    """
    if first_step is None:
        return 0
    num_ended = request.num_computed_tokens - request.num_in_flight_tokens
    # Otherwise its first tokens' KV may not exist yet: their load, or their step, may be in flight.
    has_run = num_ended > first_step.num_initial_tokens
    if not has_run or first_step.has_been_preempted(request):
        return 0
    return min(num_ended, count_tokens(request) - 1)


def count_tokens(request: Request) -> int:
    """Number of tokens in a request's prompt and output so far. The KV of the last one may not be
    computed yet, or may be computed by a step in flight."""
    return len(request.prompt_token_ids or []) + len(request.output_token_ids)
