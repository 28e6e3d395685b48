"""Data types between the API server and the engine core: requests, updates, stats."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TypeVar

import msgspec

from mooncake_api.instance_protocol import BATCH_PRIORITY
from mooncake_engine.sampling_params import SamplingParams
from mooncake_kv.params import NO_KV_TRANSFER, KVTransferDict, KVTransferParams
from mooncake_kv.pool.pool_events import PoolStats, StoreReport
from mooncake_kv.store.chunk_store import StoreStats


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Encode token ids to travel to another process, in 4 bytes each."""
    return array("I", token_ids).tobytes()


def unpack_tokens(packed: bytes) -> tuple[int, ...]:
    """Returns packed token ids."""
    return tuple(array("I", packed))


class FinishReason(str, Enum):
    """Why a request ended; the values are the API's."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    TIMEOUT = "timeout"
    GRAMMAR = "grammar"
    """The request's own grammar can't be followed any further."""
    ERROR = "error"


class RequestClass(str, Enum):
    """The class of a request, which follows from its priority."""

    INTERACTIVE = "interactive"
    BATCH = "batch"
    """Not interactive: runs in the capacity that interactive requests leave."""

    @classmethod
    def of(cls, priority: int) -> RequestClass:
        """Returns the class of a priority."""
        return cls.BATCH if priority >= BATCH_PRIORITY else cls.INTERACTIVE


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One output to generate (``n`` > 1 is several of these).

    Args:
        request_id: id that is unique among the engine's live requests.
        prompt_token_ids: token ids of the prompt, at least one.
        sampling: sampling parameters; the front end handles ``n`` and stop strings, which the core
            ignores.
        kv_transfer_params: whether the core keeps the KV for a peer and ends after the first
            token, or loads the prompt's KV from a peer.
        priority: lower runs sooner; equal priorities are served first come, first served.
        timeout_s: seconds after which the request ends with TIMEOUT; None for no limit.
        group: name shared by the requests of one prompt (``n`` > 1), which is computed or loaded
            once for all of them.
        cache_salt: requests with different salts share no cached prefix.
        data_parallel_rank: rank that serves the request; None for the one that is likely to answer
            first.
        num_generated: how many tokens at the end of ``prompt_token_ids`` are output that another
            instance has generated. The next token is sampled as behind any other output:
            penalties, ``bad_words``, grammar and seed continue, and limits count all output.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    kv_transfer_params: KVTransferParams = NO_KV_TRANSFER
    priority: int = 0
    timeout_s: float | None = None
    group: str | None = None
    cache_salt: str = ""
    data_parallel_rank: int | None = None
    num_generated: int = 0


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Times of a request's milestones, in seconds of the core's clock (``time.monotonic``).

    Args:
        arrived_at: when the core received it.
        load_started_at, loaded_at: when its load from a peer or the KVCache pool began and
            completed; None if it had none before its first step.
        scheduled_at: when its first step was planned; None before that.
        num_preemptions: how often it was preempted.
        has_peer_token: whether a peer sampled its first token.
    """

    arrived_at: float
    load_started_at: float | None = None
    loaded_at: float | None = None
    scheduled_at: float | None = None
    num_preemptions: int = 0
    has_peer_token: bool = False


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one position (natural log, of the unmodified distribution).

    Args:
        token_id, logprob: the chosen token and its log probability.
        top: the most probable tokens and their log probabilities, best first.
        rank: rank of the chosen token, from 1; None if a peer did not report it.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None


class TokenUpdate(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The outcome of one step for one request. A Struct, because each step makes one per running
    request.

    Args:
        request_id: the request.
        token_ids: new tokens, in order; a decode instance's first update begins with the token
            that the prefill instance sampled.
        logprobs: log probabilities, one per new token, if the request asked for them.
        finish: why the request ended; set on its last update only.
        stop_token_id: the stop token that ended it, if one did (also in ``token_ids``).
        error: message for the client if ``finish`` is ERROR, GRAMMAR or TIMEOUT.
        num_cached_tokens: prompt tokens that were cached, here or at the prefill instance; set
            when ``times`` is.
        kv_transfer_params: with ``finish`` on a prefill instance, the parameters for the decode
            instance.
        prompt_logprobs: log probabilities of the next prompt tokens, from the second one on, if
            the request asked for them; all precede the first output token.
        times: milestones; set with the first two tokens and with ``finish``.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    kv_transfer_params: KVTransferDict | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    times: RequestTimes | None = None


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Static facts about an engine, known once it is loaded.

    Args:
        max_model_len: maximum length of a sequence, prompt and output together, in tokens.
        vocab_size: size of the vocabulary; token ids are below it.
        eos_token_ids: tokens that end a request unless ``ignore_eos``.
        num_kv_blocks, block_size: size of the KV cache, in blocks and tokens per block.
        engine_id: the engine's id among its peers; a restarted engine has another one.
        lends_kv: whether peers can read its KV.
        dp_size: number of data-parallel ranks, which divide the blocks among them.
    """

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_kv_blocks: int
    block_size: int
    engine_id: str
    lends_kv: bool = True
    dp_size: int = 1


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Counters of speculative decoding.

    Args:
        num_drafts: how often a sequence had draft tokens in a step.
        num_draft_tokens: number of draft tokens.
        accepted_at: how often the first, the second, ... draft token was accepted.
    """

    num_drafts: int
    num_draft_tokens: int
    accepted_at: tuple[int, ...]

    @property
    def num_accepted_tokens(self) -> int:
        """Draft tokens that were accepted."""
        return sum(self.accepted_at)


@dataclass(slots=True)
class StepSizes:
    """A histogram of steps by their number of tokens, of prompts and outputs together.

    Args:
        num_tokens: tokens of all steps.
        num_steps: entry i counts the steps of more than 2**(i - 1) and at most 2**i tokens; the
            last entry includes all larger ones.
    """

    num_tokens: int = 0
    num_steps: list[int] = field(default_factory=lambda: [0] * 16)

    def note(self, num_tokens: int) -> None:
        """Count a step of ``num_tokens`` tokens, at least one."""
        self.num_tokens += num_tokens
        self.num_steps[min((num_tokens - 1).bit_length(), len(self.num_steps) - 1)] += 1


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """The load of an instance's experts since its start.

    Args:
        tokens: tokens per expert, by layer.
        imbalance: tokens of the busiest rank over the mean of all ranks, averaged over the layers,
            since the last placement of the experts.
        num_sent_rows: hidden states that the first rank of each stage sent to other ranks' experts.
        num_placements: number of new placements of experts, in the stage with the most.
        num_moved: experts that the first rank of each stage received from other ranks in these
            placements, summed over the layers.
    """

    tokens: dict[int, tuple[int, ...]]
    imbalance: float
    num_sent_rows: int
    num_placements: int = 0
    num_moved: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of all experts: each token counts once per chosen expert and layer."""
        return sum(sum(tokens) for tokens in self.tokens.values())

    @classmethod
    def of_stages(cls, loads: Sequence[ExpertLoad]) -> ExpertLoad | None:
        """Combines the loads of pipeline stages, each of its own layers; None without experts."""
        num_layers = sum(len(load.tokens) for load in loads)
        if not num_layers:
            return None
        return cls(
            {layer: tokens for load in loads for layer, tokens in sorted(load.tokens.items())},
            sum(load.imbalance * len(load.tokens) for load in loads) / num_layers,
            sum(load.num_sent_rows for load in loads),
            max(load.num_placements for load in loads),
            sum(load.num_moved for load in loads),
        )


LOCAL_COMPUTE, LOCAL_HIT = "local_compute", "local_cache_hit"
EXTERNAL_SOURCES = ("host", "p2p", "disk", "external_unspecified")
"""Where loaded KV came from, in vLLM's words: memory of the instance's own node store, a peer, that
store's SSDs, another store."""
PROMPT_TOKEN_SOURCES = (LOCAL_COMPUTE, LOCAL_HIT, *EXTERNAL_SOURCES)
"""Where the KV of a prompt's tokens came from: computed, from the prefix cache or another choice of
the same prompt, or loaded."""

WaitedSeconds = dict[str, dict[str, float]]
"""Seconds waited, by group of ranks and collective, such as ``["experts"]["all_to_all"]``."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot for metrics: counters, except the gauges of requests by state and of KV usage.

    Args:
        num_running, num_waiting: requests that run, and all others.
        num_swapped, num_loading: waiting requests whose KV is in host memory, or is being loaded.
        kv_cache_usage: fraction of the KV blocks in use, 0 to 1.
        num_preemptions: preempted requests, by swap or recomputation.
        num_swap_outs: preempted requests whose KV was swapped out to host memory.
        num_shared_blocks: blocks that were freed because another block has the same content.
        prefix_cache_queries, prefix_cache_hits: tokens looked up in the prefix cache, and found.
        prompt_tokens, generation_tokens: prompt tokens of requests that began to run, and tokens
            generated.
        prompt_tokens_by_source: the former by key of ``PROMPT_TOKEN_SOURCES``.
        step_sizes: histogram of steps by number of tokens.
        kv_byte_seconds: bytes of KV times seconds that they were held, by field of ``HeldBlocks``.
        kv_transfer: the connector's figures by name, such as ``bytes_received``.
        speculation: counters of speculative decoding; None if it is off.
        kv_pool: counters of the KVCache pool; None without one.
        pool_store: counters of the node store in this instance, which its data-parallel ranks
            share; None without one.
        experts: load of experts that are divided over ranks; None without such experts.
        waited_s: for each rank, time that its host has waited in collectives; empty if there is
            only one rank, and in the sum over data-parallel ranks.
        pool_stores: what routers should know of the stores that it uses; see
            ``PoolStores.reports``.
        by_dp_rank: snapshots of the data-parallel ranks, without ``experts``, of which each has the
            same counts; empty if there is only one.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_swapped: int = 0
    num_loading: int = 0
    kv_cache_usage: float = 0.0
    num_preemptions: int = 0
    num_swap_outs: int = 0
    num_shared_blocks: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prompt_tokens_by_source: dict[str, int] = field(default_factory=dict)
    step_sizes: StepSizes = field(default_factory=StepSizes)
    kv_byte_seconds: dict[str, float] = field(default_factory=dict)
    kv_transfer: dict[str, float] = field(default_factory=dict)
    speculation: SpeculationStats | None = None
    kv_pool: PoolStats | None = None
    pool_store: StoreStats | None = None
    experts: ExpertLoad | None = None
    waited_s: tuple[WaitedSeconds, ...] = ()
    pool_stores: tuple[StoreReport, ...] = ()
    by_dp_rank: tuple[EngineStats, ...] = ()


def total_stats(parts: Sequence[EngineStats]) -> EngineStats:
    """Returns the snapshot of all data-parallel ranks together, which includes that of each.

    Args:
        parts: snapshots of the ranks, at least one.
    """
    sizes = StepSizes()
    for part in parts:
        sizes.num_tokens += part.step_sizes.num_tokens
        counts = zip(sizes.num_steps, part.step_sizes.num_steps, strict=True)
        sizes.num_steps = [sum(pair) for pair in counts]
    summed = {name: sum(getattr(part, name) for part in parts) for name in _SUMMED}
    return EngineStats(
        **summed,
        kv_cache_usage=sum(part.kv_cache_usage for part in parts) / len(parts),
        step_sizes=sizes,
        prompt_tokens_by_source=_summed([part.prompt_tokens_by_source for part in parts]),
        kv_byte_seconds=_summed([part.kv_byte_seconds for part in parts]),
        kv_transfer=_summed([part.kv_transfer for part in parts]),
        speculation=_total_speculation([part.speculation for part in parts if part.speculation]),
        kv_pool=_total_pool([part.kv_pool for part in parts if part.kv_pool]),
        experts=_total_experts([part.experts for part in parts if part.experts]),
        pool_store=parts[0].pool_store,
        pool_stores=parts[0].pool_stores,
        by_dp_rank=tuple(replace(part, experts=None) for part in parts),
    )


_SUMMED = (
    *("num_running", "num_waiting", "num_swapped", "num_loading"),
    *("num_preemptions", "num_swap_outs", "num_shared_blocks"),
    *("prefix_cache_queries", "prefix_cache_hits", "prompt_tokens", "generation_tokens"),
)


Number = TypeVar("Number", int, float)


def _summed(parts: Sequence[dict[str, Number]]) -> dict[str, Number]:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(part.get(name, 0) for part in parts) for name in names}


def _total_speculation(parts: Sequence[SpeculationStats]) -> SpeculationStats | None:
    if not parts:
        return None
    accepted = zip(*(part.accepted_at for part in parts), strict=True)
    return SpeculationStats(
        sum(part.num_drafts for part in parts),
        sum(part.num_draft_tokens for part in parts),
        tuple(sum(counts) for counts in accepted),
    )


def _total_pool(parts: Sequence[PoolStats]) -> PoolStats | None:
    return sum(parts[1:], parts[0]) if parts else None


def _total_experts(parts: Sequence[ExpertLoad]) -> ExpertLoad | None:
    """Combines the ranks' counts. Each rank counts the choices of all ranks' tokens, so ``tokens``
    of one is enough, but only its own sent rows and moved experts, which are summed up."""
    if not parts:
        return None
    sums = {
        name: sum(getattr(part, name) for part in parts) for name in ("num_sent_rows", "num_moved")
    }
    return replace(parts[0], **sums)
