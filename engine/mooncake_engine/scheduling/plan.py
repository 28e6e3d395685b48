"""What the scheduler tells the workers to do in one step, and what they answer.

Workers keep each request's tokens and sampling state from ``admitted`` until ``retired``, so a
step's plan grows with the batch and not with the requests' histories. Every rank gets the same
plan, and every rank samples the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

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


class ScheduledSequence(msgspec.Struct, frozen=True, gc=False):
    """One sequence's share of a step. A Struct, because a step makes one per running request.

    Args:
        request_id: which.
        start: position of the first token to run; everything before it has its KV.
        count: how many tokens to run.
        new_block_ids: blocks to append to its block table before the step.
        is_sampling: whether a token is sampled after the last one.
        new_blocks_at: where in its table they go; None is at its end. Blocks from there on are its
            own no more: one that was copied on write, or some that were lent for guesses.
        siblings: requests that sample from the same logits; all their tokens so far are the same.
        num_guesses: so many tokens at most may be guessed after the last one and run with it; the
            table has room for them.
    """

    request_id: str
    start: int
    count: int
    new_block_ids: tuple[int, ...] = ()
    is_sampling: bool = True
    new_blocks_at: int | None = None
    siblings: tuple[str, ...] = ()
    num_guesses: int = 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Sequences with ``count == 1`` that sample come first.

    Args:
        step: counts up from 0.
        retired: requests to forget, before anything else.
        admitted: requests to learn.
        swap_outs: ``(block, host block)`` to copy to host memory, before any other copy.
        swap_ins: ``(host block, block)`` to copy back from there, next.
        block_copies: ``(source, target)`` blocks to copy then, before running (copy on write).
        sequences: what to run; may be empty.
        arrived_blocks: those that peers have written since the last plan that had some, to be
            brought into the form that the workers keep KV in, before any copy.
    """

    step: int
    retired: tuple[str, ...] = ()
    admitted: tuple[AdmittedRequest, ...] = ()
    swap_outs: tuple[tuple[int, int], ...] = ()
    swap_ins: tuple[tuple[int, int], ...] = ()
    block_copies: tuple[tuple[int, int], ...] = ()
    sequences: tuple[ScheduledSequence, ...] = ()
    arrived_blocks: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens that the step runs at most."""
        return sum(sequence.count + sequence.num_guesses for sequence in self.sequences)

    @property
    def is_empty(self) -> bool:
        """Whether workers have nothing to do, copies of blocks included, and nobody to forget."""
        has_copies = self.swap_outs or self.swap_ins or self.block_copies
        return not (self.sequences or has_copies or self.retired)

    @property
    def reads_freed_blocks(self) -> bool:
        """Whether it copies from blocks that may have been given up since it was planned."""
        return bool(self.swap_outs or self.block_copies)


class SampledToken(msgspec.Struct, frozen=True, gc=False):
    """A sampled token and, if its request asked, its log probabilities."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of a plan, keyed by request id.

    Args:
        step: the plan's.
        tokens: of every sequence that sampled: the guesses that were accepted, and one more.
        prompt_logprobs: of the prompt tokens that follow those which ran, where asked for.
        failed: requests that can't go on, and why; their tokens mean nothing.
        guessed: how many tokens were guessed, where any were.
    """

    step: int
    tokens: dict[str, tuple[SampledToken, ...]]
    prompt_logprobs: dict[str, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    guessed: dict[str, int] = field(default_factory=dict)
