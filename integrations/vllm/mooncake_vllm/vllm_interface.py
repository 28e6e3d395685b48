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
    """``vllm.v1.request.Request``."""

    request_id: str
    prompt_token_ids: list[int] | None
    prompt_embeds: Any
    mm_features: Sequence[Any]
    lora_request: Any
    kv_transfer_params: dict[str, Any] | None
    num_computed_tokens: int
    abort_immediately: bool

    @property
    def status(self) -> RequestStatus:
        """Where it stands."""
        ...

    @property
    def output_token_ids(self) -> Sequence[int]:
        """What has been sampled."""
        ...


class KVCacheBlocks(Protocol):
    """``vllm.v1.core.kv_cache_manager.KVCacheBlocks``."""

    def get_block_ids(self) -> tuple[list[int], ...]:
        """A block table per KV cache group."""
        ...
