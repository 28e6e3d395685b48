"""The plan of one step, as the scheduler gives it to the workers, and their result.

Workers keep each request's tokens and sampling state from ``new_requests`` until ``removed``, so a
step's plan grows with the batch and not with the requests' histories. Every rank gets the same
plan, and every rank samples the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from mooncake_engine.kv_cache.block_manager import NO_GROWTH, BlockCopies, Growth
from mooncake_engine.messages import TokenLogprobs
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.scheduling.request import Request


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that begins to run, or runs again after preemption (replacing what was known).

    Args:
        request_id: key for the later messages.
        token_ids: all tokens known so far: the prompt, then any outputs.
        num_prompt_tokens: how many of them are the prompt.
        sampling: how to choose its tokens.
        seed: resolved seed; with the output position it fixes each random choice.
        block_ids: its block table so far.
        sends_kv: its KV goes to a peer as it is computed.
        cache_salt: see ``EngineRequest``.
    """

    request_id: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int
    block_ids: tuple[int, ...]
    sends_kv: bool = False
    cache_salt: str = ""


class ScheduledSequence(msgspec.Struct, frozen=True, gc=False):
    """One sequence's share of a step. A Struct, because a step makes one per running request.

    Args:
        request_id: which.
        start: position of the first token to run; everything before it has its KV. Where steps
            before are not over that draft tokens, it is behind those of them that are accepted.
        count: how many tokens to run.
        new_block_ids: blocks to append to its block table before the step.
        is_sampling: whether a token is sampled after the last one.
        new_blocks_at: where in its table they go; None is at its end. Blocks from there on are its
            own no more: one that was copied on write, some that were lent for draft tokens, or
            one whose content another block has, too.
        siblings: requests that sample from the same logits; all their tokens so far are the same.
        num_draft_tokens: so many tokens at most may be drafted after the last one and run with it;
            the table has room for them.
        num_unverified_drafts: what the steps before, in flight, draft at most: the sequence runs
            its newest token, at ``start`` or up to so many positions later. Whoever runs it knows
            by then, and the table has room.
    """

    request_id: str
    start: int
    count: int
    new_block_ids: tuple[int, ...] = ()
    is_sampling: bool = True
    new_blocks_at: int | None = None
    siblings: tuple[str, ...] = ()
    num_draft_tokens: int = 0
    num_unverified_drafts: int = 0


@dataclass(frozen=True, slots=True)
class ExpertRound:
    """Steps of all data-parallel ranks at once, whose experts serve each other's tokens; a rank
    without tokens only serves.

    Args:
        token_counts: what each data-parallel rank runs; where tokens are drafted, at most.
        is_dispatched: whether tokens go only to ranks that have experts of their choice. Else all
            go to every rank, which takes fewer messages; ``token_counts`` are exact then.
    """

    token_counts: tuple[int, ...]
    is_dispatched: bool

    @classmethod
    def of(cls, plans: Sequence[StepPlan], least: int) -> ExpertRound | None:
        """For these plans, one of each data-parallel rank; None if none of them runs a token.

        Args:
            plans: of the ranks, in order.
            least: tokens of a rank from which on tokens are dispatched.
        """
        counts = tuple(plan.num_tokens for plan in plans)
        if not any(counts):
            return None
        return cls(counts, max(counts) >= least or any(plan.has_drafts for plan in plans))


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Sequences with ``count == 1`` that sample come first.

    Args:
        step: counts up from 0.
        removed: requests to forget, before anything else.
        new_requests: requests that the workers don't know yet.
        swap_outs: ``(block, host block)`` to copy to host memory, before any other copy.
        swap_ins: ``(host block, block)`` to copy back from there, next.
        block_copies: ``(source, target)`` blocks to copy then, before running (copy on write).
        sequences: what to run; may be empty.
        drains_copies: whether the step is over only when all copies to and from the host are, also
            those of earlier plans, which otherwise go on beside steps.
        received_blocks: those that peers have written since the last plan that had some, to be
            brought into the form that the workers keep KV in, before any copy.
        expert_round: of the step, where experts are divided over data-parallel ranks.
    """

    step: int
    removed: tuple[str, ...] = ()
    new_requests: tuple[NewRequest, ...] = ()
    swap_outs: tuple[tuple[int, int], ...] = ()
    swap_ins: tuple[tuple[int, int], ...] = ()
    block_copies: tuple[tuple[int, int], ...] = ()
    sequences: tuple[ScheduledSequence, ...] = ()
    received_blocks: tuple[int, ...] = ()
    drains_copies: bool = False
    expert_round: ExpertRound | None = None

    @property
    def has_drafts(self) -> bool:
        """Whether tokens may be drafted."""
        return any(sequence.num_draft_tokens for sequence in self.sequences)

    @property
    def num_tokens(self) -> int:
        """Tokens that the step runs at most."""
        return sum([sequence.count + sequence.num_draft_tokens for sequence in self.sequences])

    @property
    def is_empty(self) -> bool:
        """Whether workers have nothing to do, copies of blocks and requests to forget included."""
        has_copies = self.has_host_copies or self.block_copies or self.drains_copies
        return not (self.sequences or has_copies or self.removed or self.expert_round)

    @property
    def has_host_copies(self) -> bool:
        """Whether blocks are to be copied to host memory, or back."""
        return bool(self.swap_outs or self.swap_ins)

    def touched_blocks(self) -> set[int]:
        """Blocks that change hands in it, or are copied or converted: whoever gets a block is told
        so by the plan from which on it reads or writes it."""
        touched = set(self.received_blocks)
        touched.update(block_id for pair in self.block_copies for block_id in pair)
        for new_request in self.new_requests:
            touched.update(new_request.block_ids)
        for sequence in self.sequences:
            touched.update(sequence.new_block_ids)
        return touched

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
        tokens: of every sequence that sampled: the draft tokens that were accepted, and one more.
        prompt_logprobs: of the prompt tokens that follow those which ran, where asked for.
        failed: requests that can't continue, and why; their tokens mean nothing.
        grammar_failed: the same of requests whose own grammar can't be followed any further.
        num_drafted: how many tokens were drafted, where any were.
        is_copying: whether copies to or from the host went on when the step was launched, as far
            as the reporting rank knows.
    """

    step: int
    tokens: dict[str, tuple[SampledToken, ...]]
    prompt_logprobs: dict[str, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    grammar_failed: dict[str, str] = field(default_factory=dict)
    num_drafted: dict[str, int] = field(default_factory=dict)
    is_copying: bool = False


class StepBuilder:
    """Collects a step's sequences within its token budget.

    Args:
        budget: tokens that may still be added.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._new_requests: list[NewRequest] = []
        self._decodes: list[ScheduledSequence] = []
        self._prefills: list[ScheduledSequence] = []
        self._decoding: list[Request] = []
        self._prefilling: list[Request] = []
        self._swap_outs: list[tuple[int, int]] = []
        self._swap_ins: list[tuple[int, int]] = []
        self._copies: list[tuple[int, int]] = []

    def add_new_request(self, request: Request) -> None:
        """Tell the workers about a request, with the block table that it has now."""
        request.changed_at = None
        self._new_requests.append(
            NewRequest(
                request.request_id,
                tuple(request.token_ids),
                request.num_prompt_tokens,
                request.sampling,
                request.seed,
                tuple(request.block_ids),
                request.sends_kv,
                request.spec.cache_salt,
            )
        )

    def add(
        self,
        request: Request,
        count: int,
        growth: Growth = NO_GROWTH,
        followers: Sequence[Request] = (),
    ) -> None:
        """Run the request's next ``count`` tokens, which are in flight from now on.

        Args:
            request: whose.
            count: at most what it has pending.
            growth: what its table gained since the workers heard of it.
            followers: siblings that sample their first token from its prompt.
        """
        start = request.num_computed + request.num_in_flight
        is_sampling = count == len(request.token_ids) + request.num_output_placeholders - start
        if request.changed_at is not None:
            at, request.changed_at = request.changed_at, None
            growth = Growth(at, tuple(request.block_ids[at:]), growth.copied)
        sequence = ScheduledSequence(
            request.request_id,
            start,
            count,
            growth.block_ids,
            is_sampling,
            growth.at if growth.block_ids else None,
            tuple([follower.request_id for follower in followers]) if followers else (),
            num_unverified_drafts=request.num_unverified_drafts,
        )
        request.num_in_flight += count
        request.num_output_placeholders += is_sampling
        if count == 1 and is_sampling:
            sequences, requests = self._decodes, self._decoding
        else:
            sequences, requests = self._prefills, self._prefilling
        sequences.append(sequence)
        requests.append(request)
        for follower in followers:
            follower.num_in_flight = start + count - follower.num_computed
            follower.num_output_placeholders = 1
            requests.append(follower)
        self.budget -= count
        if growth.copied is not None:
            self.copy(growth)

    def add_decode(self, request: Request, start: int) -> None:
        """``add`` for a request that runs its last token, at ``start``, in a table that the workers
        have as it is: what a step mostly does."""
        unverified = request.num_unverified_drafts
        sequence = ScheduledSequence(request.request_id, start, 1, num_unverified_drafts=unverified)
        self._decodes.append(sequence)
        self._decoding.append(request)
        request.num_in_flight += 1
        request.num_output_placeholders += 1
        self.budget -= 1

    @property
    def decodes(self) -> Sequence[ScheduledSequence]:
        """The sequences that run one token and sample after it, so far."""
        return self._decodes

    def draft(self, index: int, request: Request, num_draft_tokens: int, growth: Growth) -> None:
        """Let one of the ``decodes`` draft tokens.

        Args:
            index: which.
            request: its own.
            num_draft_tokens: how many tokens at most.
            growth: blocks lent for them, behind those that the sequence has gained already.
        """
        sequence = self._decodes[index]
        at = sequence.new_blocks_at if sequence.new_block_ids else growth.at
        block_ids = sequence.new_block_ids + growth.block_ids
        self._decodes[index] = replace(
            sequence,
            new_block_ids=block_ids,
            new_blocks_at=at if block_ids else None,
            num_draft_tokens=num_draft_tokens,
        )
        request.num_unverified_drafts += num_draft_tokens
        self.budget -= num_draft_tokens

    def copy(self, growth: Growth) -> None:
        """Copy the block that a table no longer shares, if it is so."""
        if growth.copied is not None:
            self._copies.append(growth.copied)

    def swap_out(self, copies: BlockCopies) -> None:
        """Copy blocks to host memory before anything else."""
        assert not self._swap_ins, "what comes in may go out again in a later step only"
        self._swap_outs += copies

    def swap_in(self, copies: BlockCopies) -> None:
        """Copy blocks back from host memory."""
        assert not self._swap_outs, "host blocks that are read in a step are not written in it"
        self._swap_ins += copies

    @property
    def requests(self) -> list[Request]:
        """Who takes part, in the plan's order, siblings behind the one whose logits they share."""
        return self._decoding + self._prefilling

    @property
    def has_host_copies(self) -> bool:
        """Whether anything is swapped."""
        return bool(self._swap_outs or self._swap_ins)

    def build(
        self,
        step: int,
        removed: tuple[str, ...],
        received_blocks: tuple[int, ...] = (),
        *,
        drains_copies: bool = False,
    ) -> StepPlan:
        """The plan, decodes first."""
        return StepPlan(
            step,
            removed,
            tuple(self._new_requests),
            tuple(self._swap_outs),
            tuple(self._swap_ins),
            tuple(self._copies),
            (*self._decodes, *self._prefills),
            received_blocks,
            drains_copies,
        )
