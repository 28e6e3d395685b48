"""Measures how much memory a rank needs besides its KV, by running the largest possible steps."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Protocol

from mooncake_engine.config import EngineConfig
from mooncake_engine.errors import ConfigError
from mooncake_engine.execution.engine_plan import EnginePlan
from mooncake_engine.execution.model_runner import ModelRunner
from mooncake_engine.kv_cache.kv_cache_memory import KVCacheSize
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.scheduling.step_plan import NewRequest, ScheduledSequence, StepPlan
from mooncake_hal.backend import Runtime

logger = logging.getLogger(__name__)

_GIB = 1 << 30


class CapturesGraphs(Protocol):
    """A graph runner."""

    def capture(self, max_sizes: int | None = None) -> int:
        """Capture the ``max_sizes`` largest graphs, or all; returns the number not yet captured."""
        ...


def profiling_kv_cache_size(plan: EnginePlan) -> KVCacheSize:
    """Just enough blocks for the longest sequence of the largest step; all sequences share them."""
    num_tokens = _prompt_lengths(plan)[0] + _tokens_after_prompt(plan.config)
    block_size = plan.block_size.tokens
    num_scratch_blocks = plan.num_scratch_blocks
    return KVCacheSize(
        -(-num_tokens // block_size), block_size, num_scratch_blocks=num_scratch_blocks
    )


def largest_steps(plan: EnginePlan) -> list[StepPlan]:
    """The steps that may take the most memory, each for a reason of its own:

    * prompts: as many tokens as possible over as many sequences as possible, all of which sample;
    * as many decodes as possible, one of them with the longest context, for which attention uses
      the most splits;
    * the last chunk of the longest prompt, whose attention may gather, unpack or decompress the KV
      of the whole context;
    * with speculative decoding, as many sequences with draft tokens as fit into a step.

    All KV goes to the same few blocks, as its values do not matter.
    """
    prompts = _largest_prompts(plan)
    decodes = _largest_decodes(plan)
    chunk = _largest_chunk(plan)
    if plan.config.speculation is None:
        return [prompts, decodes, chunk]
    drafts = _largest_drafts(plan, plan.config.speculation.num_speculative_tokens)
    return [prompts, decodes, chunk, drafts]


def _largest_prompts(plan: EnginePlan) -> StepPlan:
    lengths = _prompt_lengths(plan)
    return StepPlan(
        0,
        new_requests=_requests(plan, lengths),
        sequences=tuple(
            ScheduledSequence(name, 0, length)
            for name, length in zip(_NAMES, lengths, strict=False)
        ),
    )


def _largest_decodes(plan: EnginePlan) -> StepPlan:
    lengths = [length + 1 for length in _prompt_lengths(plan)]
    lengths[0] = _longest_prompt(plan)
    return StepPlan(
        1,
        new_requests=_requests(plan, lengths),
        sequences=tuple(
            ScheduledSequence(name, length - 1, 1)
            for name, length in zip(_NAMES, lengths, strict=False)
        ),
    )


def _largest_chunk(plan: EnginePlan) -> StepPlan:
    """The last chunk of the longest prompt, with as many tokens as a step takes."""
    length = _longest_prompt(plan)
    num_tokens = min(length, plan.config.max_num_batched_tokens)
    return StepPlan(
        2,
        new_requests=_requests(plan, [length]),
        sequences=(ScheduledSequence(next(iter(_NAMES)), length - num_tokens, num_tokens),),
    )


def _largest_drafts(plan: EnginePlan, most: int) -> StepPlan:
    """As many sequences with ``most`` draft tokens as fit, and one with the remaining tokens."""
    budget = plan.config.max_num_batched_tokens
    lengths = [length + 1 for length in _prompt_lengths(plan)][: -(-budget // (1 + most))]
    sequences = []
    for name, length in zip(_NAMES, lengths, strict=False):
        num_draft_tokens = min(most, budget - 1)
        sequences.append(ScheduledSequence(name, length - 1, 1, num_draft_tokens=num_draft_tokens))
        budget -= 1 + num_draft_tokens
    return StepPlan(3, new_requests=_requests(plan, lengths), sequences=tuple(sequences))


def _requests(plan: EnginePlan, lengths: Sequence[int]) -> tuple[NewRequest, ...]:
    """Requests of the given lengths, whose block tables repeat the few blocks of the pool."""
    sampling = SamplingParams(temperature=1.0, top_p=0.9)
    num_blocks, num_after = (
        profiling_kv_cache_size(plan).num_blocks,
        _tokens_after_prompt(plan.config),
    )
    requests = []
    for token, (name, length) in enumerate(zip(_NAMES, lengths, strict=False)):
        tokens = (token,) * length  # a different token per request, so that no work is shared
        table_blocks = -(-(length + num_after) // plan.block_size.tokens)
        blocks = tuple(index % num_blocks for index in range(min(table_blocks, plan.max_blocks)))
        requests.append(NewRequest(name, tokens, length, sampling, 0, blocks))
    return tuple(requests)


def _prompt_lengths(plan: EnginePlan) -> list[int]:
    """The tokens of the largest step divided over as many sequences as possible. The first ones get
    the remainder; none is longer than the longest prompt."""
    config = plan.config
    num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
    share, rest = divmod(config.max_num_batched_tokens, num_seqs)
    longest = _longest_prompt(plan)
    return [min(share + (index < rest), longest) for index in range(num_seqs)]


def _longest_prompt(plan: EnginePlan) -> int:
    return max(1, plan.max_model_len - _tokens_after_prompt(plan.config))


def _tokens_after_prompt(config: EngineConfig) -> int:
    """The tokens that a sequence runs after its prompt: one, and the draft tokens."""
    speculation = config.speculation
    return 1 + (0 if speculation is None else speculation.num_speculative_tokens)


class _Names:
    """Request ids ``profile-0``, ``profile-1``, …, which all plans share."""

    def __iter__(self) -> Iterator[str]:
        return (f"profile-{index}" for index in count())


_NAMES = _Names()


def measure_peak(
    runner: ModelRunner,
    plans: Sequence[StepPlan],
    graphs: Sequence[CapturesGraphs],
    runtime: Runtime,
    index: int,
) -> int:
    """Peak bytes of device memory while the plans run, weights included, plus the memory of
    captured graphs, which hold theirs as long as they exist.

    On a device that is not the host, only the two largest graphs of each kind are captured. The
    others share the memory of the first, and each is assumed to take as much beyond that as the
    second did. On the host graphs share no memory, so all are captured.
    """
    gc.collect()  # an earlier engine in this process may hold memory in reference cycles
    runtime.reset_peak(index)
    for plan in plans:
        runner.run(plan)
    runtime.synchronize(index)
    if runtime.device(index).type == "cpu":
        for each in graphs:
            each.capture()
        return runtime.peak_bytes(index)
    remaining_bytes = 0
    for each in graphs:
        each.capture(1)
        before = runtime.memory_info(index).free_bytes
        num_left = each.capture(2)
        remaining_bytes += num_left * max(before - runtime.memory_info(index).free_bytes, 0)
    runtime.synchronize(index)
    return runtime.peak_bytes(index) + remaining_bytes


def memory_for_kv(config: EngineConfig, runtime: Runtime, index: int, peak_bytes: int) -> int:
    """Bytes of device memory that are left for a rank's KV.

    Args:
        config: config of the instance, which limits the share of the memory that may be used.
        runtime: reports the device's memory.
        index: index of the device. If the host has a single one, its ranks share it.
        peak_bytes: peak memory of the rank without KV.

    Raises:
        ConfigError: no memory is left.
    """
    info = runtime.memory_info(index)
    num_sharing = config.num_ranks_per_node if len(runtime.devices()) == 1 else 1
    share = memory_utilization(config) * info.total_bytes / num_sharing
    free = (info.free_bytes - _KEPT_FREE * info.total_bytes) / num_sharing
    left = int(min(share - peak_bytes, free))
    logger.info(
        "device %d: of %.2f GiB for this rank, weights and the largest step take %.2f GiB; "
        "%.2f GiB are left for KV",
        index,
        share / _GIB,
        peak_bytes / _GIB,
        max(left, 0) / _GIB,
    )
    if share <= peak_bytes:
        raise ConfigError(
            f"memory_utilization {memory_utilization(config):g} allows {share / _GIB:.2f} GiB, "
            f"but weights and the largest step take {peak_bytes / _GIB:.2f} GiB: raise it, lower "
            "max_num_batched_tokens, or use more ranks"
        )
    if left <= 0:
        raise ConfigError(
            f"device {index} has {info.free_bytes / _GIB:.2f} GiB free beside weights and the "
            f"largest step, of which {_KEPT_FREE * info.total_bytes / _GIB:.2f} GiB stay free: "
            "end what else uses it"
        )
    if free < share - peak_bytes:
        logger.warning(
            "device %d: other processes hold memory that memory_utilization %g counts on; KV gets "
            "%.2f GiB less",
            index,
            memory_utilization(config),
            (share - peak_bytes - left) / _GIB,
        )
    return left


def memory_utilization(config: EngineConfig) -> float:
    """The share of the device's memory that the engine may use."""
    return DEFAULT_UTILIZATION if config.memory_utilization is None else config.memory_utilization


_KEPT_FREE = 1 / 64
"""The share of a device's memory that KV leaves free where other processes hold more than
``memory_utilization`` leaves them: libraries allocate beyond the measured peak."""
DEFAULT_UTILIZATION = 0.9
"""The default share of the memory of a device that is not the host."""
