"""Protocols for the parts of vLLM's objects that the connectors use; they use nothing else of them.

``tests/contract/vllm`` checks them against the sources of every supported release.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

NULL_BLOCK = 0
"""Id of the placeholder in vLLM's block tables for blocks that were dropped."""
HIT_SOURCES = HOST, DISK, P2P, UNSPECIFIED = "HOST", "DISK", "P2P", "EXTERNAL_UNSPECIFIED"
"""Members of ``vllm.v1.metrics.cache_hit_source.CacheHitSource``, which vLLM has since 0.32. The
last one is also that of stores elsewhere."""


class RequestStatus(Protocol):
    """``vllm.v1.request.RequestStatus``."""

    @property
    def name(self) -> str:
        """Such as ``FINISHED_LENGTH_CAPPED``."""
        ...


class PlaceholderRange(Protocol):
    """``vllm.multimodal.inputs.PlaceholderRange``: the tokens in a prompt that stand for an item of
    media, from ``offset`` on."""

    @property
    def offset(self) -> int:
        """The first one's position."""
        ...


class MultiModalFeatureSpec(Protocol):
    """``vllm.multimodal.inputs.MultiModalFeatureSpec``: an item of media, such as a picture."""

    @property
    def mm_position(self) -> PlaceholderRange:
        """Its tokens in the prompt."""
        ...


class Request(Protocol):
    """``vllm.v1.request.Request``.

    ``num_computed_tokens`` includes the tokens of scheduled steps that have not run yet, and of a
    load in flight. ``num_in_flight_tokens`` counts the tokens of steps that have not ended,
    including steps that were scheduled before a preemption. ``skip_reading_prefix_cache``: all of
    its prompt has to be computed, such as for the log probabilities of the prompt. vLLM 0.30 leaves
    it to connectors to find nothing for such a request.
    """

    request_id: str
    prompt_token_ids: list[int] | None
    cache_salt: str | None
    prompt_embeds: Any
    mm_features: Sequence[MultiModalFeatureSpec]
    lora_request: Any
    kv_transfer_params: dict[str, Any] | None
    num_computed_tokens: int
    num_in_flight_tokens: int
    num_preemptions: int
    abort_immediately: bool
    skip_reading_prefix_cache: bool

    @property
    def status(self) -> RequestStatus:
        """The request's status."""
        ...

    @property
    def output_token_ids(self) -> Sequence[int]:
        """The tokens sampled so far."""
        ...


class NewRequest(Protocol):
    """``vllm.v1.core.sched.output.NewRequestData``: a request that runs for the first time."""

    req_id: str
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int


class CachedRequests(Protocol):
    """``vllm.v1.core.sched.output.CachedRequestData``: requests that the workers know already.

    For those in ``resumed_req_ids``, which restart, ``new_block_ids`` is the whole block table.
    """

    req_ids: list[str]
    resumed_req_ids: set[str]
    new_block_ids: list[tuple[list[int], ...] | None]
    num_computed_tokens: list[int]


class SchedulerOutput(Protocol):
    """``vllm.v1.core.sched.output.SchedulerOutput``: a step."""

    scheduled_cached_reqs: CachedRequests
    num_scheduled_tokens: dict[str, int]

    @property
    def scheduled_new_reqs(self) -> Sequence[NewRequest]:
        """Requests that run for the first time."""
        ...


class KVCacheBlocks(Protocol):
    """``vllm.v1.core.kv_cache_manager.KVCacheBlocks``."""

    def get_block_ids(self) -> tuple[list[int], ...]:
        """A block table per KV cache group."""
        ...


class BlockPool(Protocol):
    """``vllm.v1.core.block_pool.BlockPool``: the blocks of all KV-cache groups, by id.

    A block with references is neither reused nor counted as free.
    """

    blocks: Sequence[object]
    num_gpu_blocks: int

    def touch(self, blocks: Sequence[object]) -> None:
        """Add a reference to each block."""
        ...

    def free_blocks(self, ordered_blocks: Iterable[object]) -> None:
        """Drop a reference to each block; those without one can be reused, the first ones
        first."""
        ...

    @property
    def cached_block_hash_to_block(self) -> object:
        """The blocks by hash. Each reset of the prefix cache, of which vLLM does not notify
        connectors, replaces it by another object."""
        ...
