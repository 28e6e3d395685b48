"""Scheduler limits, and the connector interface that the scheduler calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mooncake_engine.scheduling.request import Request
from mooncake_kv.config import LoadFailurePolicy
from mooncake_kv.kv_events import KVEventEndpoints
from mooncake_kv.params import KVTransferDict, PrefixSource
from mooncake_kv.pool.pool_costs import LoadCosts
from mooncake_kv.pool.pool_events import (
    ChunkSource,
    LoadRequest,
    PoolStats,
    SaveRequest,
    StoreLocation,
)
from mooncake_kv.store.chunk_store import StoreStats


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What bounds a step and a request.

    Args:
        max_num_seqs: sequences in one step.
        max_num_batched_tokens: tokens in one step.
        max_model_len: tokens of one sequence; the pool has room for at least one such.
        eos_token_ids: tokens that end a request.
        load_failure: what becomes of a request whose KV does not arrive.
        load_timeout_s: how long a request may wait for blocks to load KV into.
        watermark: share of the blocks that admitting a request leaves free for those that run.
        delay_factor: a prompt waits that many times the duration of the last step that computed
            prompts, so that more are computed together; 0 admits at once.
        max_step_tokens_with_decodes: tokens in a step with decodes; None for as many as in any.
        target_tbt_s: how long a step with decodes should take at most, by what steps have taken;
            None does not look at that.
        min_prefill_chunk: tokens of a prompt in a step, unless it has fewer left, or all other
            sequences leave it less.
        prefill_chunk_size: most tokens of one prompt in a step; None for a stage's share of it with
            several stages, else what there is.
        num_stages: pipeline stages.
        num_speculative_tokens: draft tokens that a sequence may have in one step.
        most_seqs_with_drafts: steps of more decodes have no draft tokens; None: by measured time
            alone.
        uses_async_scheduling: workers hand a sampled token to the next step themselves, so that a
            request may be planned again before its token is known here.
        reports_received_blocks: plans say which blocks peers have written, so that workers
            convert them.
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
    most_seqs_with_drafts: int | None = None
    uses_async_scheduling: bool = False
    reports_received_blocks: bool = False


class KVConnector(Protocol):
    """Moves KV. Calls return at once; I/O is elsewhere."""

    def on_new_request(self, request: Request) -> None:
        """A request has come whose KV comes from a peer (``loads_kv``) or leaves as it is computed
        (``sends_kv``)."""
        ...

    def start_load_kv(self, request: Request) -> None:
        """Load the prompt's KV that is not ``num_computed`` yet into the request's blocks;
        ``Scheduler.load_ended`` follows. Comes also where nothing is left to load: the peer's
        blocks are free then."""
        ...

    def prefill_advanced(self, request: Request) -> None:
        """A step has computed a part of a prompt whose KV leaves as it is computed, and not the
        last one."""
        ...

    def request_finished(self, request: Request, block_ids: list[int]) -> KVTransferDict | None:
        """Hold a finished prefill's blocks for a peer until ``Scheduler.release`` is called.

        Returns:
            What the peer needs to fetch the KV; None if it is sent there.
        """
        ...

    def cancel_load(self, request_id: str) -> None:
        """Give up on a request whose KV was to come from a peer.

        If a load was started, ``Scheduler.load_ended`` follows when it is drained.
        """
        ...

    def cancel_send(self, request_id: str) -> None:
        """Stop holding or sending; ``Scheduler.release`` follows when nobody uses the blocks."""
        ...


class ChunkPool(Protocol):
    """The KVCache pool. Calls return at once; what comes of them is told to the scheduler."""

    chunk_tokens: int
    """Tokens per chunk."""
    chunk_bytes: int
    """Bytes per chunk."""
    num_layers: int
    """Of the model."""
    transfer_timeout_s: float
    """Most seconds of a load."""
    always_loads: bool
    """Whether what is found is loaded even where computing it is estimated to be faster."""
    stats: PoolStats
    """Counters."""
    load_costs: LoadCosts
    """What loads took."""

    @property
    def home_location(self) -> StoreLocation | None:
        """Where other instances find what this one saves; None if they can't."""
        ...

    @property
    def store_stats(self) -> StoreStats | None:
        """What the store in this instance counts; None if there is none."""
        ...

    @property
    def publishes_saves(self) -> bool:
        """Whether what is saved is published, and so has to be told with its tokens."""
        ...

    @property
    def kv_event_endpoints(self) -> KVEventEndpoints | None:
        """Where it is published; None if it is not."""
        ...

    def keys(self, request: Request, num_chunks: int) -> list[bytes]:
        """Names of a request's leading chunks, all of whose tokens it has."""
        ...

    def lookup(
        self,
        load_id: str,
        keys: Sequence[bytes],
        hints: Sequence[PrefixSource] = (),
        patience_s: float = 0.0,
    ) -> Sequence[ChunkSource] | None:
        """Where the leading ones of these are; None: ``ChunksFound`` follows.

        Args:
            load_id: of the look-up.
            keys: to be found.
            hints: other stores to ask, for ``patience_s`` at most.
        """
        ...

    def start_load(self, load: LoadRequest) -> None:
        """Load; ``PoolLoadEnded`` follows, whatever happens, maybe ``LoadReleased`` before."""
        ...

    def cancel_load(self, load_id: str) -> None:
        """A load is no longer wanted; ``PoolLoadEnded`` follows when it is drained."""
        ...

    def save(self, save: SaveRequest) -> bool:
        """Save; ``ChunksCopied`` follows. False: it does not, nothing is saved."""
        ...

    def end_save(self, save_id: str, *, is_right: bool) -> None:
        """Whether the blocks that were copied are still what they were."""
        ...

    def stop(self) -> None:
        """Begin nothing any more; before the ranks are closed. Idempotent."""
        ...

    def close(self) -> None:
        """Give the stores back; after the ranks are closed. Idempotent."""
        ...
