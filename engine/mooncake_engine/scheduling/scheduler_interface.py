"""The scheduler's limits, and its interfaces to the connector and to the KVCache pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mooncake_engine.scheduling.request import Request
from mooncake_kv.config import LoadFailurePolicy
from mooncake_kv.params import KVTransferDict, PrefixSource
from mooncake_kv.pool.pool_costs import LoadCosts
from mooncake_kv.pool.pool_events import (
    ChunkSource,
    LoadRequest,
    PoolStats,
    SaveRequest,
    StoreReport,
)
from mooncake_kv.store.chunk_store import StoreStats


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of steps and requests, derived from the engine's config.

    Args:
        max_num_seqs: maximum number of sequences in one step.
        max_num_batched_tokens: maximum number of tokens in one step.
        max_model_len: maximum length of one sequence, in tokens; the KV cache holds at least one
            sequence of that length.
        eos_token_ids: tokens that end a request.
        load_failure: whether a request whose KV does not arrive is recomputed or fails.
        load_timeout_s: seconds that a request may wait for blocks to load KV into.
        watermark: fraction of the blocks that stay free for running requests when a request is
            admitted.
        delay_factor: multiple of the last prefill step's duration by which prompts are delayed, so
            that more of them are computed together; 0 admits them at once.
        max_step_tokens_with_decodes: maximum number of tokens in a step with decodes; None for no
            other bound than ``max_num_batched_tokens``.
        target_tbt_s: target duration of a step with decodes, in seconds, met by estimates from
            measured steps; None for no target.
        min_prefill_chunk: minimum number of prompt tokens in a step, unless fewer are pending, or
            all other sequences leave fewer.
        prefill_chunk_size: maximum number of tokens of one prompt in a step; None for the prompt
            divided by ``num_stages`` if there are several stages, otherwise for no bound.
        num_stages: number of pipeline stages.
        num_speculative_tokens: maximum number of draft tokens of a sequence in one step.
        max_seqs_with_drafts: maximum number of decodes in a step with draft tokens; None decides
            by measured times alone.
        uses_async_scheduling: whether workers pass a sampled token to the next step themselves, so
            that a request can be planned again before the scheduler knows the token.
        reports_received_blocks: whether plans list the blocks that peers have written, for workers
            to convert.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    load_failure: LoadFailurePolicy = LoadFailurePolicy.RECOMPUTE
    load_timeout_s: float = 120.0
    watermark: float = 0.0
    delay_factor: float = 0.0
    max_step_tokens_with_decodes: int | None = None
    target_tbt_s: float | None = None
    min_prefill_chunk: int = 1
    prefill_chunk_size: int | None = None
    num_stages: int = 1
    num_speculative_tokens: int = 0
    max_seqs_with_drafts: int | None = None
    uses_async_scheduling: bool = False
    reports_received_blocks: bool = False


class KVConnector(Protocol):
    """The scheduler's part of a connector, which moves KV between instances. No call blocks: I/O
    happens on other threads."""

    def on_new_request(self, request: Request) -> None:
        """Register a request whose KV comes from a peer (``loads_kv``) or goes to one while it is
        being computed (``sends_kv``)."""
        ...

    def start_load_kv(self, request: Request) -> None:
        """Load the part of the prompt's KV behind ``num_computed`` into the request's blocks;
        ``Scheduler.handle_load_ended`` follows. Also called if nothing is left to load, so that the
        peer can free its blocks."""
        ...

    def prefill_advanced(self, request: Request) -> None:
        """Notify that a step has computed a chunk of a ``sends_kv`` request's prompt, but not the
        last chunk."""
        ...

    def request_finished(self, request: Request, block_ids: list[int]) -> KVTransferDict | None:
        """Hold a finished prefill's blocks for a peer until ``Scheduler.release`` is called.

        Returns:
            The parameters with which the peer fetches the KV; None if the KV is pushed.
        """
        ...

    def cancel_load(self, request_id: str) -> None:
        """Cancel the load of a request's KV from a peer.

        If the load had started, ``Scheduler.handle_load_ended`` follows once it is drained.
        """
        ...

    def cancel_send(self, request_id: str) -> None:
        """Stop holding or sending a request's KV; ``Scheduler.release`` follows once no peer uses
        the blocks any more."""
        ...


class ChunkPool(Protocol):
    """The scheduler's view of the KVCache pool. No call blocks; outcomes arrive as events, in
    ``Scheduler.handle_pool_event``."""

    chunk_tokens: int
    """Tokens per chunk."""
    chunk_bytes: int
    """Bytes per chunk."""
    num_layers: int
    """Layers of the model."""
    transfer_timeout_s: float
    """Maximum duration of a load, in seconds."""
    always_loads: bool
    """Whether chunks that were found are loaded even if recomputing them is estimated to be faster.
    """
    stats: PoolStats
    """Counters."""
    load_costs: LoadCosts
    """Estimates of load durations, from completed loads."""

    @property
    def store_stats(self) -> StoreStats | None:
        """Counters of the node store in this instance; None if it has none."""
        ...

    def read_stats(self) -> PoolStats:
        """Returns a copy of ``stats`` with all gauges as they are now. Thread-safe."""
        ...

    @property
    def publishes_saves(self) -> bool:
        """Whether saved chunks are published as KV events, for which saves must include tokens."""
        ...

    @property
    def store_reports(self) -> tuple[StoreReport, ...]:
        """What routers should know of the stores: see ``PoolStores.reports``."""
        ...

    def keys(self, request: Request, num_chunks: int) -> list[bytes]:
        """Returns the keys of a request's leading chunks; it must have all their tokens."""
        ...

    def lookup(
        self,
        load_id: str,
        keys: Sequence[bytes],
        hints: Sequence[PrefixSource] = (),
        timeout_s: float = 0.0,
    ) -> Sequence[ChunkSource] | None:
        """Returns the sources of the leading chunks that were found; None if ``ChunksFound``
        follows with them.

        Args:
            load_id: id of the lookup.
            keys: keys of the chunks to find.
            hints: other stores to ask.
            timeout_s: timeout of the hinted stores' answers, in seconds.
        """
        ...

    def start_load(self, load: LoadRequest) -> None:
        """Start a load. ``PoolLoadEnded`` always follows, and ``LoadReleased`` may precede it."""
        ...

    def cancel_load(self, load_id: str, *, is_late: bool = False) -> None:
        """Cancel a load that took too long (``is_late``) or that its request needs no more;
        ``PoolLoadEnded`` follows once it is drained."""
        ...

    def save(self, save: SaveRequest) -> bool:
        """Start a save; ``ChunksCopied`` follows. Returns False if the pool rejects it: then no
        event follows."""
        ...

    def end_save(self, save_id: str, *, is_unchanged: bool) -> None:
        """Commit a save if ``is_unchanged``, that is, if the copied blocks kept their content until
        the copy was complete; otherwise discard it."""
        ...

    def stop(self) -> None:
        """Start nothing new; call this before the ranks are closed. Idempotent."""
        ...

    def close(self) -> None:
        """Release the stores; call this after the ranks are closed. Idempotent."""
        ...
