"""How much memory a rank needs besides its KV: measured by running the largest possible step."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from mooncake_engine.config import EngineConfig
from mooncake_engine.errors import ConfigError
from mooncake_engine.execution.engine_plan import EnginePlan
from mooncake_engine.execution.model_runner import ModelRunner
from mooncake_engine.kv_cache.kv_pool import PoolSize
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.scheduling.step_plan import NewRequest, ScheduledSequence, StepPlan
from mooncake_hal.backend import Runtime

logger = logging.getLogger(__name__)

_GIB = 1 << 30


def profiling_pool_size(plan: EnginePlan) -> PoolSize:
    """Just enough blocks for one sequence of the largest step: all sequences write to them."""
    num_tokens = _largest_share(plan.config) + _tokens_ahead(plan.config)
    block_size = plan.block_size.tokens
    num_scratch_blocks = plan.num_scratch_blocks
    return PoolSize(-(-num_tokens // block_size), block_size, num_scratch_blocks=num_scratch_blocks)


def largest_steps(plan: EnginePlan) -> list[StepPlan]:
    """``max_num_batched_tokens`` over ``max_num_seqs`` sequences, all of which sample; where
    tokens are drafted, then as many of them with drafts as a step has room for.

    Their KV goes to the same few blocks, over and over: it is never read.
    """
    prompts = _largest_prompts(plan)
    config, speculation = plan.config, plan.config.speculation
    if speculation is None:
        return [prompts]
    num_draft_tokens = speculation.num_speculative_tokens
    num_seqs = max(1, config.max_num_batched_tokens // (1 + num_draft_tokens))
    drafted = [
        ScheduledSequence(prompt.request_id, prompt.count, 1, num_draft_tokens=num_draft_tokens)
        for prompt in prompts.sequences[:num_seqs]
    ]
    return [prompts, StepPlan(1, sequences=tuple(drafted))]


def _largest_prompts(plan: EnginePlan) -> StepPlan:
    config = plan.config
    num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
    ahead = _tokens_ahead(config)
    length = max(1, min(_largest_share(config), plan.max_model_len - ahead))
    blocks = tuple(range(-(-(length + ahead) // plan.block_size.tokens)))
    names = [f"profile-{index}" for index in range(num_seqs)]
    sampling = SamplingParams(temperature=1.0, top_p=0.9)
    return StepPlan(
        0,
        new_requests=tuple(
            NewRequest(name, (token,) * length, length, sampling, 0, blocks)
            for token, name in enumerate(names)  # different, so that none is spared any work
        ),
        sequences=tuple(ScheduledSequence(name, 0, length) for name in names),
    )


def _largest_share(config: EngineConfig) -> int:
    """Tokens per sequence where the largest step is spread over as many as there may be."""
    return max(1, config.max_num_batched_tokens // config.max_num_seqs)


def _tokens_ahead(config: EngineConfig) -> int:
    """What a sequence of the largest step runs in another one, to see what drafts take."""
    speculation = config.speculation
    return 0 if speculation is None else 1 + speculation.num_speculative_tokens


def measure_peak(
    runner: ModelRunner, plans: Sequence[StepPlan], runtime: Runtime, index: int
) -> int:
    """Bytes of the device that are taken at most while the plans run, weights included."""
    runtime.reset_peak(index)
    for plan in plans:
        runner.run(plan)
    runtime.synchronize(index)
    return runtime.peak_bytes(index)


def memory_for_kv(config: EngineConfig, runtime: Runtime, index: int, peak_bytes: int) -> int:
    """Bytes that are left for a rank's KV.

    Args:
        config: how much of the device's memory may be used.
        runtime: knows how much there is.
        index: of the device, which ranks share if there are no more devices.
        peak_bytes: what the rank takes without KV.

    Raises:
        ConfigError: nothing is left.
    """
    info = runtime.memory_info(index)
    num_sharing = config.num_ranks if len(runtime.devices()) == 1 else 1
    share = memory_utilization(config) * info.total_bytes / num_sharing
    left = int(min(share - peak_bytes, info.free_bytes / num_sharing))
    logger.info(
        "device %d: %.2f GiB for this rank, the largest step takes %.2f GiB: %.2f GiB are for KV",
        index,
        share / _GIB,
        peak_bytes / _GIB,
        left / _GIB,
    )
    if left <= 0:
        raise ConfigError(
            f"memory_utilization {memory_utilization(config):g} allows {share / _GIB:.2f} GiB, "
            f"but weights and the largest step take {peak_bytes / _GIB:.2f} GiB: raise it, lower "
            "max_num_batched_tokens, or use more ranks"
        )
    return left


def memory_utilization(config: EngineConfig) -> float:
    """The share of the device's memory that may be used."""
    return DEFAULT_UTILIZATION if config.memory_utilization is None else config.memory_utilization


DEFAULT_UTILIZATION = 0.9
"""Of a device that has memory of its own."""
