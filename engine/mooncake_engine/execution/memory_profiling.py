"""How much memory a rank needs besides its KV: measured by running the largest possible step."""

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
from mooncake_engine.kv_cache.kv_pool import PoolSize
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.scheduling.step_plan import NewRequest, ScheduledSequence, StepPlan
from mooncake_hal.backend import Runtime

logger = logging.getLogger(__name__)

_GIB = 1 << 30


class CapturesGraphs(Protocol):
    """What replays steps."""

    def capture(self, most: int | None = None) -> int:
        """Capture the ``most`` largest graphs, or all; how many are left."""
        ...


def profiling_pool_size(plan: EnginePlan) -> PoolSize:
    """Just enough blocks for the longest sequence of the largest step: all sequences write to
    them."""
    num_tokens = _prompt_lengths(plan)[0] + _tokens_ahead(plan.config)
    block_size = plan.block_size.tokens
    num_scratch_blocks = plan.num_scratch_blocks
    return PoolSize(-(-num_tokens // block_size), block_size, num_scratch_blocks=num_scratch_blocks)


def largest_steps(plan: EnginePlan) -> list[StepPlan]:
    """Steps that take the most memory, each in its own way: prompts, as many tokens over as many
    sequences as there may be, all of which sample; as many decodes, one of them behind the longest
    context, for which attention has the most splits; the last chunk of the longest prompt, whose
    attention may gather, unpack or decompress all that lies before it; where tokens are drafted,
    then as many of these with drafts as a step has room for.

    Their KV goes to the same few blocks, over and over: what it holds does not matter.
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
    """As much of one prompt as a step takes, behind the longest context."""
    length = _longest_prompt(plan)
    num_tokens = min(length, plan.config.max_num_batched_tokens)
    return StepPlan(
        2,
        new_requests=_requests(plan, [length]),
        sequences=(ScheduledSequence(next(iter(_NAMES)), length - num_tokens, num_tokens),),
    )


def _largest_drafts(plan: EnginePlan, most: int) -> StepPlan:
    """As many sequences with ``most`` draft tokens as fit, and one with what is left."""
    budget = plan.config.max_num_batched_tokens
    lengths = [length + 1 for length in _prompt_lengths(plan)][: -(-budget // (1 + most))]
    sequences = []
    for name, length in zip(_NAMES, lengths, strict=False):
        num_draft_tokens = min(most, budget - 1)
        sequences.append(ScheduledSequence(name, length - 1, 1, num_draft_tokens=num_draft_tokens))
        budget -= 1 + num_draft_tokens
    return StepPlan(3, new_requests=_requests(plan, lengths), sequences=tuple(sequences))


def _requests(plan: EnginePlan, lengths: Sequence[int]) -> tuple[NewRequest, ...]:
    """Requests with so many tokens, whose blocks are the few that there are, over and over."""
    sampling = SamplingParams(temperature=1.0, top_p=0.9)
    num_blocks, ahead = profiling_pool_size(plan).num_blocks, _tokens_ahead(plan.config)
    requests = []
    for token, (name, length) in enumerate(zip(_NAMES, lengths, strict=False)):
        tokens = (token,) * length  # different, so that none is spared any work
        table_blocks = -(-(length + ahead) // plan.block_size.tokens)
        blocks = tuple(index % num_blocks for index in range(min(table_blocks, plan.max_blocks)))
        requests.append(NewRequest(name, tokens, length, sampling, 0, blocks))
    return tuple(requests)


def _prompt_lengths(plan: EnginePlan) -> list[int]:
    """The tokens of the largest step over as many sequences as there may be, remainders to the
    first of them; none is longer than a sequence may be."""
    config = plan.config
    num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
    share, rest = divmod(config.max_num_batched_tokens, num_seqs)
    longest = _longest_prompt(plan)
    return [min(share + (index < rest), longest) for index in range(num_seqs)]


def _longest_prompt(plan: EnginePlan) -> int:
    return max(1, plan.max_model_len - _tokens_ahead(plan.config))


def _tokens_ahead(config: EngineConfig) -> int:
    """What a sequence runs behind its prompt: one token, and drafts."""
    speculation = config.speculation
    return 1 + (0 if speculation is None else speculation.num_speculative_tokens)


class _Names:
    """``profile-0``, ``profile-1``, …: the same in every plan."""

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
    """Bytes of the device that are taken at most while the plans run, weights included, and behind
    them by captured graphs, whose memory is their own as long as they are there.

    On a device with memory of its own the two largest graphs of each kind are captured: the others
    fit into the memory of the first, and what each takes besides is what the second has taken.
    A host's have no memory in common: all are captured.
    """
    gc.collect()  # an earlier engine of this process may hold memory in cycles of references
    runtime.reset_peak(index)
    for plan in plans:
        runner.run(plan)
    runtime.synchronize(index)
    if runtime.device(index).type == "cpu":
        for each in graphs:
            each.capture()
        return runtime.peak_bytes(index)
    still_to_come = 0
    for each in graphs:
        each.capture(1)
        before = runtime.memory_info(index).free_bytes
        num_left = each.capture(2)
        still_to_come += num_left * max(before - runtime.memory_info(index).free_bytes, 0)
    runtime.synchronize(index)
    return runtime.peak_bytes(index) + still_to_come


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
    num_sharing = config.num_ranks_per_node if len(runtime.devices()) == 1 else 1
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
