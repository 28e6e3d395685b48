"""What the scheduler tells the workers to do in one step, and what they answer.

Workers keep each request's tokens and sampling state from ``admitted`` until ``retired``, so a
step's plan grows with the batch and not with the requests' histories. Every rank gets the same
plan, and every rank samples the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mooncake_engine.messages import TokenLogprobs
from mooncake_engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class AdmittedRequest:
    """A request that begins to run, or runs again after preemption (replacing what was known).

    Args:
        request_id: key for the later messages.
        token_ids: all tokens known so far: the prompt, then any outputs.
        num_prompt_tokens: how many of them are the prompt.
        sampling: how to choose its tokens.
        seed: resolved seed; with the output position it fixes each random choice.
        block_ids: its block table so far.
        sends_kv: its KV goes to a peer as it is computed.
    """

    request_id: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int
    block_ids: tuple[int, ...]
    sends_kv: bool = False


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One sequence's share of a step.

    Args:
        request_id: which.
        start: position of the first token to run; everything before it has its KV.
        count: how many tokens to run.
        new_block_ids: blocks to append to its block table before the step.
        is_sampling: whether a token is sampled after the last one.
    """

    request_id: str
    start: int
    count: int
    new_block_ids: tuple[int, ...] = ()
    is_sampling: bool = True


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Sequences with ``count == 1`` that sample come first.

    Args:
        step: counts up from 0.
        retired: requests to forget, before anything else.
        admitted: requests to learn.
        block_copies: ``(source, target)`` blocks to copy before running (copy on write).
        sequences: what to run; may be empty.
    """

    step: int
    retired: tuple[str, ...] = ()
    admitted: tuple[AdmittedRequest, ...] = ()
    block_copies: tuple[tuple[int, int], ...] = ()
    sequences: tuple[ScheduledSequence, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens that the step runs."""
        return sum(sequence.count for sequence in self.sequences)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A sampled token and, if its request asked, its log probabilities."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of a plan, keyed by request id.

    Args:
        step: the plan's.
        tokens: one for every sequence that sampled.
        prompt_logprobs: of the prompt tokens that follow those which ran, where asked for.
        failed: requests that can't go on, and why; their tokens mean nothing.
    """

    step: int
    tokens: dict[str, SampledToken]
    prompt_logprobs: dict[str, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
