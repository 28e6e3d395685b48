"""What is read of vLLM's objects, and nothing else of them is.

``tests/contract/vllm`` holds these against the sources of every release that is supported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class RequestStatus(Protocol):
    """``vllm.v1.request.RequestStatus``."""

    @property
    def name(self) -> str:
        """Such as ``FINISHED_LENGTH_CAPPED``."""
        ...


class Request(Protocol):
    """``vllm.v1.request.Request``.

    ``num_computed_tokens`` has, from when a step is scheduled, what that step will compute, and
    what a load under way will bring. ``num_in_flight_tokens`` are those of steps that have yet to
    end, also of such as were scheduled before a preemption.
    """

    request_id: str
    prompt_token_ids: list[int] | None
    cache_salt: str | None
    prompt_embeds: Any
    mm_features: Sequence[Any]
    lora_request: Any
    kv_transfer_params: dict[str, Any] | None
    num_computed_tokens: int
    num_in_flight_tokens: int
    num_preemptions: int
    abort_immediately: bool

    @property
    def status(self) -> RequestStatus:
        """Where it stands."""
        ...

    @property
    def output_token_ids(self) -> Sequence[int]:
        """What has been sampled."""
        ...


class NewRequest(Protocol):
    """``vllm.v1.core.sched.output.NewRequestData``: runs for the first time."""

    req_id: str
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int


class CachedRequests(Protocol):
    """``vllm.v1.core.sched.output.CachedRequestData``: the workers know these already.

    Of those in ``resumed_req_ids``, which start over, ``new_block_ids`` is the whole table.
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
        """Those that run for the first time."""
        ...


class KVCacheBlocks(Protocol):
    """``vllm.v1.core.kv_cache_manager.KVCacheBlocks``."""

    def get_block_ids(self) -> tuple[list[int], ...]:
        """A block table per KV cache group."""
        ...


class BlockPool(Protocol):
    """``vllm.v1.core.block_pool.BlockPool``."""

    @property
    def cached_block_hash_to_block(self) -> object:
        """Another object from each reset of its prefix cache on, which tells no connector."""
        ...
