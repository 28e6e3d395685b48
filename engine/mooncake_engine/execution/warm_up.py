"""Warm-up steps: they run before the first request, so that requests don't wait for compilation.

A kernel is compiled when it is first called, which takes seconds. If that happens in the core's
thread, all requests wait; in the copy thread, those that need the copy wait.
"""

from __future__ import annotations

from collections.abc import Iterator

from mooncake_engine.execution.engine_plan import EnginePlan
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.scheduling.step_plan import NewRequest, ScheduledSequence, StepPlan

WARM_UP = "warm-up"
"""Id of the warm-up requests, which run one at a time."""
_MIXED = "warm-up mixed"
"""Id of the request whose prompt runs in one step with a decode of the other one."""
_GREEDY = SamplingParams(temperature=0.0)
_SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, top_k=20)


def warm_up_requests(
    plan: EnginePlan, num_blocks: int, *, compiles: bool
) -> Iterator[tuple[StepPlan, StepPlan]]:
    """Yield a prompt step and a decode step per warm-up request. The caller must remove the
    requests of a pair before it runs the next pair. Their KV may go to any block, as no other
    request holds one yet.

    Args:
        plan: the engine plan.
        num_blocks: number of blocks in the pool.
        compiles: whether kernels are compiled at their first call. If so, there is also a request
            that samples; one whose decode runs in one step with a prompt, as steps of decodes only
            may be replayed from graphs; and a prompt of each power of two, because the kernels of
            experts and attention are chosen by the number of tokens.
    """
    block_tokens = plan.block_size.tokens
    speculation = plan.config.speculation
    most_draft_tokens = speculation.num_speculative_tokens if speculation else 0
    num_tokens = min(block_tokens, plan.max_model_len)
    num_draft_tokens = min(most_draft_tokens, max(num_tokens - 2, 0))
    length = num_tokens - 1 - num_draft_tokens
    if length < 1:
        return
    yield _steps(plan, length, num_draft_tokens, _GREEDY, num_blocks)
    if not compiles:
        return
    yield _steps(plan, length, num_draft_tokens, _SAMPLED, num_blocks)
    mixed_length = min(num_tokens, plan.config.max_num_batched_tokens - 1 - num_draft_tokens)
    if mixed_length > 1:  # a prompt of one token would run as a decode
        prompt, decode = _steps(plan, length, num_draft_tokens, _GREEDY, num_blocks)
        request = NewRequest(
            _MIXED, (0,) * mixed_length, mixed_length, _GREEDY, 0, (num_blocks - 1,)
        )
        sequences = (*decode.sequences, ScheduledSequence(_MIXED, 0, mixed_length))
        yield prompt, StepPlan(0, new_requests=(request,), sequences=sequences)
    longest = min(
        plan.config.max_num_batched_tokens,
        plan.max_model_len - 1 - num_draft_tokens,
        num_blocks * block_tokens - 1 - num_draft_tokens,
    )
    length = 2 * block_tokens
    while length <= longest:
        yield _steps(plan, length, num_draft_tokens, _GREEDY, num_blocks)
        length *= 2


def copy_steps(num_host_blocks: int) -> Iterator[StepPlan]:
    """Steps that copy block 0 to itself and, if there are host blocks, swap it out and in."""
    yield StepPlan(0, block_copies=((0, 0),))
    if num_host_blocks:
        yield StepPlan(0, swap_outs=((0, 0),), drains_copies=True)
        yield StepPlan(0, swap_ins=((0, 0),), drains_copies=True)


def _steps(
    plan: EnginePlan, length: int, num_draft_tokens: int, sampling: SamplingParams, num_blocks: int
) -> tuple[StepPlan, StepPlan]:
    num_held = -(-(length + 1 + num_draft_tokens) // plan.block_size.tokens)
    blocks = tuple(range(min(num_held, num_blocks)))
    request = NewRequest(WARM_UP, (0,) * length, length, sampling, 0, blocks)
    prompt = ScheduledSequence(WARM_UP, 0, length)
    decode = ScheduledSequence(WARM_UP, length, 1, num_draft_tokens=num_draft_tokens)
    return (
        StepPlan(0, new_requests=(request,), sequences=(prompt,)),
        StepPlan(0, sequences=(decode,)),
    )
