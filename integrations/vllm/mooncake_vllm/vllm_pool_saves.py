"""What vLLM computes goes to the KVCache pool: prompts as they are computed, all else at the end.

Others find a long prompt while its first answer is written, and a preempted request finds its own.
Nothing is taken from vLLM: blocks that are copied from while a request runs may be given up, and
what was copied from them is known to be worthless then. Once it has ended, they stay until all is
copied.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from mooncake_kv.pool.pool_events import ChunksCopied, SaveRequest
from mooncake_kv.store.chunk_keys import KVIdentity, extend_keys
from mooncake_vllm.vllm_interface import Request, SchedulerOutput
from mooncake_vllm.vllm_memory import expand_blocks

SAVED = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")
"""Endings after which all steps of a request are over but for its last token's."""
CUT_OFF = "FINISHED_ABORTED"
"""Ending of a request whose client has left, or whose text had a stop string: at any time."""


class SaveClient(Protocol):
    """``PoolClient``, as far as saving goes."""

    def save(self, save: SaveRequest) -> bool: ...
    def end_save(self, save_id: str, *, is_right: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class FirstStep:
    """A request's, after it came or was preempted.

    Args:
        num_preemptions: before it.
        num_had: tokens whose KV was there then, or will be when that step has ended.
    """

    num_preemptions: int
    num_had: int


@dataclass(slots=True, eq=False)
class SavedRequest:
    """A live request whose KV is all of the identity in use.

    Args:
        request: vLLM's.
        identity: of the KV.

    Attributes:
        keys: of the chunks so far, as far as they were needed.
        num_known: leading chunks that stores had when it was looked up.
        num_saved: those, and what was given to them since.
        first_step: its last one; None: it never ran.
        table: vLLM's blocks of it, while its prompt is not all saved.
    """

    request: Request
    identity: KVIdentity
    keys: list[bytes] = field(default_factory=list)
    num_known: int = 0
    num_saved: int = 0
    first_step: FirstStep | None = None
    table: list[int] = field(default_factory=list)

    def first_keys(self, num_chunks: int) -> list[bytes]:
        """Of its leading chunks, all of whose tokens are known. No more of them are kept: when the
        client of a session goes on, vLLM puts its new tokens in the place of the last one said."""
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
        """Whole chunks of its prompt."""
        return len(self.request.prompt_token_ids or []) // self.identity.chunk_tokens


@dataclass(frozen=True, slots=True)
class _Copy:
    """Chunks that are copied to a store: whose, and how often it had been preempted before."""

    saved: SavedRequest
    num_preemptions: int


class PoolSaves:
    """Saves of one instance. vLLM's thread gives them, the pool client's thread ends them.

    Args:
        client: takes them.
        blocks_per_page: of the layout, in one of vLLM's.
        tells_tokens: whether what is saved is published, and so has to be told with its tokens.
        report: nobody reads the blocks of a request that has ended any more, by its id.
    """

    def __init__(
        self,
        client: SaveClient,
        blocks_per_page: int,
        *,
        tells_tokens: bool,
        report: Callable[[str], None],
    ) -> None:
        self._client = client
        self._pages = blocks_per_page
        self._tells_tokens = tells_tokens
        self._report = report
        self._lock = threading.Lock()
        self._ids = count()
        self._current: dict[str, SavedRequest] = {}
        self._filling: dict[str, SavedRequest] = {}  # those that run, of whose prompt more is saved
        self._copies: dict[str, _Copy] = {}
        self._held: dict[str, SavedRequest] = {}  # ended, and their blocks are kept

    @property
    def num_under_way(self) -> int:
        """What is being copied."""
        return len(self._copies)

    @property
    def is_holding(self) -> bool:
        """Whether it is still to be reported that somebody's blocks are free."""
        return bool(self._held)

    def add(self, request: Request, identity: KVIdentity) -> None:
        """A request has come."""
        with self._lock:
            self._current[request.request_id] = SavedRequest(request, identity)

    def first_keys(self, request_id: str, num_chunks: int) -> list[bytes] | None:
        """Keys of a request's leading chunks; None where its KV is not of the identity in use."""
        saved = self._current.get(request_id)
        return None if saved is None else saved.first_keys(num_chunks)

    def note_known(self, request_id: str, num_chunks: int) -> None:
        """Stores have so many of a request's leading chunks."""
        with self._lock:
            if (saved := self._current.get(request_id)) is not None:
                saved.num_known = saved.num_saved = num_chunks

    def follow(self, step: SchedulerOutput) -> None:
        """A step is scheduled: note who begins to run, and save what those before it have computed
        of prompts."""
        for new in step.scheduled_new_reqs:
            self._begin(new.req_id, new.block_ids, new.num_computed_tokens)
        known = step.scheduled_cached_reqs
        if known.resumed_req_ids or self._filling:
            columns = (known.req_ids, known.new_block_ids, known.num_computed_tokens)
            for name, tables, num_computed in zip(*columns, strict=True):
                if name in known.resumed_req_ids:
                    self._begin(name, tables or ([],), num_computed)
                elif tables and (saved := self._filling.get(name)) is not None:
                    saved.table += tables[0]
        for name, saved in list(self._filling.items()):
            num_whole = num_computed_so_far(saved.request, saved.first_step)
            stop = min(num_whole // saved.identity.chunk_tokens, saved.num_prompt_chunks)
            is_taken = self._save(saved, saved.table, stop)
            if not is_taken or saved.num_saved >= saved.num_prompt_chunks:
                del self._filling[name]  # what is refused is offered again at the end

    def end(self, request: Request, table: Sequence[int]) -> bool:
        """A request has ended: whether its blocks have to stay until a report."""
        name = request.request_id
        self._filling.pop(name, None)
        with self._lock:
            saved = self._current.pop(name, None)
        if saved is None or not is_plain(request):
            return False
        num_whole = num_certain_tokens(request, saved.first_step)
        if not num_whole:
            return False
        giving = f"{name} {next(self._ids)}"
        with self._lock:
            self._held[name] = saved
            self._copies[giving] = _Copy(saved, request.num_preemptions)  # it is not the last yet
        self._save(saved, table, num_whole // saved.identity.chunk_tokens)
        with self._lock:
            del self._copies[giving]
            is_copied = self._is_copied_from(saved)
            if not is_copied:
                del self._held[name]
        return is_copied

    def forget(self) -> None:
        """Nothing that is live is saved any more."""
        self._filling.clear()
        with self._lock:
            self._current.clear()

    def copied(self, event: ChunksCopied) -> None:
        """A copy is over. The client's thread."""
        with self._lock:
            copy = self._copies.pop(event.save_id)
            saved, name = copy.saved, copy.saved.request.request_id
            is_held = self._held.get(name) is saved
            is_its = is_held or self._current.get(name) is saved
            is_right = is_its and saved.request.num_preemptions == copy.num_preemptions
            is_last = is_held and not self._is_copied_from(saved)
            if is_last:
                del self._held[name]
        if event.is_complete:
            self._client.end_save(event.save_id, is_right=is_right)
        if is_last:
            self._report(name)

    def _begin(self, name: str, tables: Sequence[Sequence[int]], num_had: int) -> None:
        """A request runs for the first time, or again from the beginning."""
        saved = self._current.get(name)
        if saved is None:
            return
        saved.first_step = FirstStep(saved.request.num_preemptions, num_had)
        saved.num_saved = saved.num_known  # what is copied from blocks that it has lost is dropped
        if is_plain(saved.request) and saved.num_saved < saved.num_prompt_chunks:
            saved.table = list(tables[0])
            self._filling[name] = saved

    def _save(self, saved: SavedRequest, table: Sequence[int], stop: int) -> bool:
        """Give the chunks up to ``stop`` to the pool; False: it does not take them."""
        first = saved.num_saved
        if stop <= first:
            return True
        request = saved.request
        blocks = expand_blocks(table, self._pages)
        save_id = f"{request.request_id} {next(self._ids)}"
        save = SaveRequest(
            *(save_id, saved.first_keys(stop), first, blocks, request.cache_salt or ""),
            token_ids=saved.tokens_of(first, stop) if self._tells_tokens else (),
        )
        with self._lock:
            self._copies[save_id] = _Copy(saved, request.num_preemptions)
        if self._client.save(save):
            saved.num_saved = stop
            return True
        with self._lock:
            del self._copies[save_id]
        return False

    def _is_copied_from(self, saved: SavedRequest) -> bool:
        """Under the lock."""
        return any(copy.saved is saved for copy in self._copies.values())


def is_plain(request: Request) -> bool:
    """Whether token ids and salt say all that the KV of a request depends on."""
    return (
        request.lora_request is None and request.prompt_embeds is None and not request.mm_features
    )


def num_certain_tokens(request: Request, first_step: FirstStep | None) -> int:
    """Leading tokens of a request that has ended whose KV is surely there.

    Args:
        request: which.
        first_step: its last one; None: it never ran.
    """
    if request.status.name in SAVED:
        return min(request.num_computed_tokens, count_tokens(request) - 1)
    return num_computed_so_far(request, first_step) if request.status.name == CUT_OFF else 0


def num_computed_so_far(request: Request, first_step: FirstStep | None) -> int:
    """Leading tokens of a request whose KV is surely there, whatever it is doing.

    Args:
        request: which.
        first_step: its last one; None: it never ran.
    """
    if first_step is None:
        return 0
    num_ended = request.num_computed_tokens - request.num_in_flight_tokens
    # Else what it had may be on its way: it waits for a load, or the step that brings it goes on.
    has_run = num_ended > first_step.num_had
    if not has_run or request.num_preemptions != first_step.num_preemptions:
        return 0
    return min(num_ended, count_tokens(request) - 1)


def count_tokens(request: Request) -> int:
    """Of its prompt, and said so far. The last one's own KV may not be computed, or by a step that
    has yet to end."""
    return len(request.prompt_token_ids or []) + len(request.output_token_ids)
