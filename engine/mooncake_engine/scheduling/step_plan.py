"""The plan of one step, which the scheduler sends to the workers, and the result they return.

Workers keep each request's tokens and sampling state from ``new_requests`` until ``removed``, so
the size of a plan grows with the batch and not with the requests' histories. Every rank gets the
same plan, and every rank samples the same tokens.
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
    """A request that starts to run, or runs again after preemption, which replaces the workers'
    state of it.

    Args:
        request_id: key in later messages.
        token_ids: all tokens known so far: the prompt, then any output. Choices of one prompt share
            the tuple while they have no output, and also ``block_ids``, see ``PackedPlan``.
        num_prompt_tokens: length of the prompt, without output of other instances.
        sampling: the sampling parameters.
        seed: resolved seed; together with the output position it determines each random choice.
        block_ids: its block table so far.
        sends_kv: whether a peer gets its KV while it is being computed.
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
    """One sequence's share of a step. A Struct, because each step makes one per running request.

    Args:
        request_id: the request.
        start: position of the first token to run; the KV of all tokens before it is computed. While
            earlier steps with draft tokens are in flight, it moves up by the accepted ones.
        count: number of tokens to run.
        new_block_ids: blocks to add to its block table before the step.
        is_sampling: whether a token is sampled after the last one.
        new_blocks_at: index in its block table where ``new_block_ids`` begin; None appends them.
            The table's blocks from that index on are replaced: a block that was copied on write,
            blocks that were lent for draft tokens, or a duplicate of another block.
        siblings: requests that sample from the same logits; all their tokens so far are equal.
        num_draft_tokens: maximum number of tokens to draft after the last one and run with it; the
            block table has slots for them.
        num_unverified_drafts: maximum number of draft tokens in earlier steps that are in flight.
            The sequence runs its newest token at ``start``, or up to that many positions later; the
            worker knows the position by then, and the block table has slots for all of them.
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
    """One concurrent step of all data-parallel ranks, whose experts serve each other's tokens. A
    rank without tokens of its own only serves the others.

    Args:
        token_counts: tokens that each data-parallel rank runs; an upper bound with draft tokens.
        is_dispatched: whether each token is sent only to the ranks that hold its chosen experts.
            Otherwise all tokens go to every rank, which takes fewer messages, and
            ``token_counts`` is exact.
    """

    token_counts: tuple[int, ...]
    is_dispatched: bool

    @classmethod
    def of(cls, plans: Sequence[StepPlan], least: int) -> ExpertRound | None:
        """Returns the round of these plans; None if none of them runs a token.

        Args:
            plans: one per data-parallel rank, in rank order.
            least: number of tokens on any rank from which on tokens are dispatched.
        """
        counts = tuple(plan.num_tokens for plan in plans)
        if not any(counts):
            return None
        return cls(counts, max(counts) >= least or any(plan.has_drafts for plan in plans))


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The plan of one step. Decodes (sequences with ``count == 1`` that sample) come first.

    Args:
        step: step number, counting up from 0.
        removed: requests to forget, before anything else.
        new_requests: requests that the workers don't know yet.
        swap_outs: ``(block, host block)`` pairs to copy to host memory, before any other copy.
        swap_ins: ``(host block, block)`` pairs to copy back from host memory, after ``swap_outs``.
        block_copies: ``(source, target)`` blocks to copy on write, all at once: no source is
            the target of another one. After ``swap_ins`` and before the sequences run.
        sequences: sequences to run; may be empty.
        drains_copies: whether the step waits for all copies to and from the host, including those
            of earlier plans. Otherwise such copies continue in parallel with steps.
        received_blocks: blocks that peers have written since the last plan that listed any; the
            workers convert them to their own KV layout, before any copy.
        expert_round: round that the step is part of, if experts are divided over data-parallel
            ranks.
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
        """Whether any sequence may draft tokens."""
        return any(sequence.num_draft_tokens for sequence in self.sequences)

    @property
    def num_tokens(self) -> int:
        """Maximum number of tokens that the step runs."""
        return sum([sequence.count + sequence.num_draft_tokens for sequence in self.sequences])

    @property
    def is_empty(self) -> bool:
        """Whether workers have nothing to do: nothing to run, to copy or to forget."""
        has_copies = self.has_host_copies or self.block_copies or self.drains_copies
        return not (self.sequences or has_copies or self.removed or self.expert_round)

    @property
    def has_host_copies(self) -> bool:
        """Whether blocks are copied to or from host memory."""
        return bool(self.swap_outs or self.swap_ins)

    def touched_blocks(self) -> set[int]:
        """Blocks that change their owner in this plan, or are copied or converted. A sequence reads
        or writes a block only from the plan on that adds the block to its table."""
        touched = set(self.received_blocks)
        touched.update(block_id for pair in self.block_copies for block_id in pair)
        for new_request in self.new_requests:
            touched.update(new_request.block_ids)
        for sequence in self.sequences:
            touched.update(sequence.new_block_ids)
        return touched

    @property
    def reads_freed_blocks(self) -> bool:
        """Whether it copies from blocks that may have been freed since it was planned."""
        return bool(self.swap_outs or self.block_copies)


class SampledToken(msgspec.Struct, frozen=True, gc=False):
    """A sampled token and, if the request asked for them, its log probabilities."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a plan; its dicts are keyed by request id.

    Args:
        step: step number of the plan.
        tokens: new tokens of sequences that sampled: the accepted draft tokens, and one more.
            Those in ``plain_tokens`` are left out.
        prompt_logprobs: log probabilities of the prompt tokens that follow those that ran, for
            requests that asked for them.
        failed: requests that can't continue, and why; their tokens are meaningless.
        grammar_failed: requests that can't continue because of their own grammar, and why.
        num_drafted: number of tokens drafted, for sequences that drafted any.
        is_copying: whether copies to or from the host were in progress on the reporting rank when
            the step was launched.
        plain_tokens: the new token of sequences that sampled a single one, without log
            probabilities, as most do.
    """

    step: int
    tokens: dict[str, tuple[SampledToken, ...]]
    prompt_logprobs: dict[str, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    grammar_failed: dict[str, str] = field(default_factory=dict)
    num_drafted: dict[str, int] = field(default_factory=dict)
    is_copying: bool = False
    plain_tokens: dict[str, int] = field(default_factory=dict)

    def tokens_of(self, request_id: str) -> tuple[SampledToken, ...]:
        """The new tokens of a request that sampled."""
        plain = self.plain_tokens.get(request_id)
        return self.tokens[request_id] if plain is None else (SampledToken(plain),)

    @property
    def num_tokens(self) -> int:
        """Number of new tokens of all requests."""
        return len(self.plain_tokens) + sum(map(len, self.tokens.values()))


class StepBuilder:
    """Collects the sequences and copies of one step. The scheduler creates one per step.

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
        self._sources: dict[int, int] = {}  # of the copies on write, by target

    def add_new_request(self, request: Request) -> None:
        """Introduce a request to the workers, with its current block table."""
        request.changed_at = None
        token_ids, block_ids = request.spec.prompt_token_ids, tuple(request.block_ids)
        if len(request.token_ids) > len(token_ids):
            token_ids = tuple(request.token_ids)
        if self._new_requests and self._new_requests[-1].block_ids == block_ids:
            block_ids = self._new_requests[-1].block_ids  # a follower's, as its sibling's
        self._new_requests.append(
            NewRequest(
                request.request_id,
                token_ids,
                request.num_prompt_tokens - request.spec.num_generated,
                request.sampling,
                request.seed,
                block_ids,
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
        """Add the request's next ``count`` tokens to the step; they are in flight from now on.

        Args:
            request: the request.
            count: number of tokens, at most those that are pending.
            growth: blocks that its table has gained since the workers last got it.
            followers: siblings that sample their first token from its prompt's logits.
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
        """Fast path of ``add`` for the common case: a request that runs its newest token, at
        ``start``, with a block table that the workers have already."""
        unverified = request.num_unverified_drafts
        sequence = ScheduledSequence(request.request_id, start, 1, num_unverified_drafts=unverified)
        self._decodes.append(sequence)
        self._decoding.append(request)
        request.num_in_flight += 1
        request.num_output_placeholders += 1
        self.budget -= 1

    @property
    def decodes(self) -> Sequence[ScheduledSequence]:
        """The sequences added so far that run one token and sample after it."""
        return self._decodes

    def draft(self, index: int, request: Request, num_draft_tokens: int, growth: Growth) -> None:
        """Allow draft tokens for one of the ``decodes``.

        Args:
            index: index in ``decodes``.
            request: the request of that sequence.
            num_draft_tokens: maximum number of tokens to draft.
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
        """Add the copy on write of a grown table, if it has one. A block that is itself copied in
        this step does not have its content yet, since all copies run at once: it is copied from
        where that comes from."""
        if growth.copied is not None:
            source, target = growth.copied
            self._sources[target] = self._sources.get(source, source)

    def swap_out(self, copies: BlockCopies) -> None:
        """Add copies to host memory, which run before all others."""
        assert not self._swap_ins, "a swapped-in block may be swapped out in a later step only"
        self._swap_outs += copies

    def swap_in(self, copies: BlockCopies) -> None:
        """Add copies back from host memory."""
        assert not self._swap_outs, "host blocks that a step reads must not be written in it"
        self._swap_ins += copies

    @property
    def requests(self) -> list[Request]:
        """The requests in the step, in the plan's order; siblings follow the request whose logits
        they share."""
        return self._decoding + self._prefilling

    @property
    def has_host_copies(self) -> bool:
        """Whether any block is swapped in or out."""
        return bool(self._swap_outs or self._swap_ins)

    def build(
        self,
        step: int,
        removed: tuple[str, ...],
        received_blocks: tuple[int, ...] = (),
        *,
        drains_copies: bool = False,
    ) -> StepPlan:
        """Returns the plan, with the decodes first."""
        return StepPlan(
            step,
            removed,
            tuple(self._new_requests),
            tuple(self._swap_outs),
            tuple(self._swap_ins),
            tuple((source, target) for target, source in self._sources.items()),
            (*self._decodes, *self._prefills),
            received_blocks,
            drains_copies,
        )
