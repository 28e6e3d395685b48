"""Data types between the API server and the engine core: requests, updates, stats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import msgspec

from mooncake_engine.sampling_params import SamplingParams
from mooncake_kv.kv_events import KVEventEndpoints
from mooncake_kv.params import NO_KV_TRANSFER, KVTransferDict, KVTransferParams
from mooncake_kv.pool.pool_events import PoolStats, StoreLocation
from mooncake_kv.store.chunk_store import StoreStats


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
    """What a request's priority makes of it."""

    INTERACTIVE = "interactive"
    BATCH = "batch"
    """Nobody waits for it: it runs in what the others leave."""

    @classmethod
    def of(cls, priority: int) -> RequestClass:
        """The class of a priority."""
        return cls.BATCH if priority >= BATCH_PRIORITY else cls.INTERACTIVE


BATCH_PRIORITY = 1000
"""Requests of this priority, or of a larger number, are batch work."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One output to generate (``n`` > 1 is several of these).

    Args:
        request_id: unique among the engine's live requests.
        prompt_token_ids: at least one.
        sampling: ``n`` and stop strings are the front end's business and ignored by the core.
        kv_transfer_params: whether the core keeps the KV for a peer and ends after the first
            token, or loads the prompt's KV from one.
        priority: lower is sooner; equal priorities are served first come, first served.
        timeout_s: the request ends with TIMEOUT if it takes longer; None for no limit.
        group: a name that the requests of one prompt (``n`` > 1) share: the prompt is
            computed or loaded once for all of them.
        cache_salt: requests of another salt share no cached prefix with it.
        data_parallel_rank: which one serves it; None for the one that is likely to be the first.
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


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """When a request came on, in seconds of the core's clock (``time.monotonic``).

    Args:
        arrived: taken in by the core.
        load_started, loaded: its KV began to come from a peer, and was there; None if it did not.
        scheduled: its first step began; None if none did.
    """

    arrived: float
    load_started: float | None = None
    loaded: float | None = None
    scheduled: float | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one position (natural log, of the unmodified distribution).

    Args:
        token_id, logprob: the chosen token.
        top: the most probable tokens and their log probabilities, best first.
        rank: of the chosen token, from 1; None where a peer has not told.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None


class TokenUpdate(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """What one step did for one request. A Struct, because a step makes one per running request.

    Args:
        request_id: which.
        token_ids: new tokens, in order; a decode instance's first update begins with the token
            that the prefill instance sampled.
        logprobs: one per new token, if asked for.
        finish: set on the last update of a request, and only there.
        stop_token_id: the stop token that ended it, if one did (also in ``token_ids``).
        error: words for the client when ``finish`` is ERROR, GRAMMAR or TIMEOUT.
        num_cached_tokens: prompt tokens that needed no computing here or at the prefill instance;
            said with ``times``.
        kv_transfer_params: with ``finish`` on a prefill instance, what the decode instance needs.
        prompt_logprobs: of the next prompt tokens, from the second one on, if asked for; all of
            them come before the first token.
        times: with the first two tokens and with ``finish``.
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
    """What is known about an engine once it is loaded, and never changes.

    Args:
        max_model_len: longest sequence, prompt and answer together, in tokens.
        vocab_size: token ids are below this.
        eos_token_ids: tokens that end a request unless ``ignore_eos``.
        num_kv_blocks, block_size: the KV pool, in blocks and tokens per block.
        engine_id: this engine's name among its peers; a restarted engine has another one.
        lends_kv: whether peers can read its KV.
        dp_size: data-parallel ranks; each has its share of the blocks.
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
    """Counts of speculative decoding; they only grow.

    Args:
        num_drafts: times that a sequence had draft tokens.
        num_draft_tokens: how many.
        accepted_at: how often the first draft token was accepted, the second one, and so on.
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
    """How many tokens steps have run, prompts' and answers', by powers of two.

    Args:
        num_tokens: in all steps together.
        num_steps: entry i counts steps of at most 2**i tokens that no entry before it counts; the
            last one takes all that are larger.
    """

    num_tokens: int = 0
    num_steps: list[int] = field(default_factory=lambda: [0] * 16)

    def note(self, num_tokens: int) -> None:
        """A step of ``num_tokens`` tokens, at least one."""
        self.num_tokens += num_tokens
        self.num_steps[min((num_tokens - 1).bit_length(), len(self.num_steps) - 1)] += 1


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """What the experts of an instance got since its start.

    Args:
        tokens: by layer and expert.
        imbalance: tokens of the busiest part over the mean, the mean of all layers, since experts
            are where they are.
        num_sent_rows: hidden states that the first rank of each stage sent other ranks' experts.
        num_placements: how often experts were placed anew, in the stage where most often.
        num_moved: experts that came to the first rank of each stage from others then, layer by
            layer.
    """

    tokens: dict[int, tuple[int, ...]]
    imbalance: float
    num_sent_rows: int
    num_placements: int = 0
    num_moved: int = 0

    @property
    def num_tokens(self) -> int:
        """Choices: each token counts once per expert and layer."""
        return sum(sum(tokens) for tokens in self.tokens.values())

    @classmethod
    def of_stages(cls, loads: Sequence[ExpertLoad]) -> ExpertLoad | None:
        """Of what each pipeline stage with experts says of its own layers; None if none does."""
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


WaitedSeconds = dict[str, dict[str, float]]
"""Seconds by group of ranks and collective, such as ``["experts"]["all_to_all"]``."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot for metrics: counters, but for the gauges of requests by state and KV usage.

    Args:
        num_running, num_waiting: requests in steps, and queued for them.
        num_swapped, num_loading: of these those whose KV is in host memory, or comes from a peer.
        kv_cache_usage: share of the KV blocks in use, 0 to 1.
        num_preemptions: requests that gave their blocks up for older ones, by swap or recompute.
        num_swap_outs: those of them whose KV went to host memory.
        num_shared_blocks: blocks given back as others had the same content.
        prefix_cache_queries, prefix_cache_hits: prompt tokens looked up and found.
        prompt_tokens, generation_tokens: processed and sampled.
        step_sizes: how large the steps were.
        kv_byte_seconds: bytes of KV times seconds that they were held, by ``HeldBlocks``' names.
        kv_transfer: the connector's figures by name, e.g. ``bytes_received``.
        speculation: of speculative decoding; None where it is off.
        kv_pool: of the KVCache pool; None without one.
        pool_store: of the node store in this instance, which its data-parallel ranks share; None
            without one.
        experts: what experts got that are divided over ranks; None without such.
        waited_s: by rank, what its host has waited in collectives; empty where there is one, and of
            all data-parallel ranks together.
        pool_home: where other instances find what this one saves there; None if they can't.
        pool_kv_events: where what is saved there is published; None if it is not.
        by_dp_rank: the same of each data-parallel rank; empty if there is one.
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
    step_sizes: StepSizes = field(default_factory=StepSizes)
    kv_byte_seconds: dict[str, float] = field(default_factory=dict)
    kv_transfer: dict[str, float] = field(default_factory=dict)
    speculation: SpeculationStats | None = None
    kv_pool: PoolStats | None = None
    pool_store: StoreStats | None = None
    experts: ExpertLoad | None = None
    waited_s: tuple[WaitedSeconds, ...] = ()
    pool_home: StoreLocation | None = None
    pool_kv_events: KVEventEndpoints | None = None
    by_dp_rank: tuple[EngineStats, ...] = ()


def total_stats(parts: Sequence[EngineStats]) -> EngineStats:
    """Of all data-parallel ranks together, and of each.

    Args:
        parts: of each, at least one.
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
        kv_byte_seconds=_summed([part.kv_byte_seconds for part in parts]),
        kv_transfer=_summed([part.kv_transfer for part in parts]),
        speculation=_total_speculation([part.speculation for part in parts if part.speculation]),
        kv_pool=_total_pool([part.kv_pool for part in parts if part.kv_pool]),
        experts=_total_experts([part.experts for part in parts if part.experts]),
        pool_store=parts[0].pool_store,
        pool_home=parts[0].pool_home,
        pool_kv_events=parts[0].pool_kv_events,
        by_dp_rank=tuple(parts),
    )


_SUMMED = (
    *("num_running", "num_waiting", "num_swapped", "num_loading"),
    *("num_preemptions", "num_swap_outs", "num_shared_blocks"),
    *("prefix_cache_queries", "prefix_cache_hits", "prompt_tokens", "generation_tokens"),
)


def _summed(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(part.get(name, 0.0) for part in parts) for name in names}


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
    """Each rank counts what all ranks' tokens choose, and what it sends and gets itself."""
    if not parts:
        return None
    sums = {
        name: sum(getattr(part, name) for part in parts) for name in ("num_sent_rows", "num_moved")
    }
    return replace(parts[0], **sums)
