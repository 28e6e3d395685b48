"""Puts a step's plan together: who runs how many tokens."""

from __future__ import annotations

from collections.abc import Sequence

from mooncake_engine.scheduling.block_manager import NO_GROWTH, BlockCopies, Growth
from mooncake_engine.scheduling.plan import AdmittedRequest, ScheduledSequence, StepPlan
from mooncake_engine.scheduling.request import Request


class StepBuilder:
    """Collects a step's sequences within its token budget.

    Args:
        budget: tokens that may still be added.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._admitted: list[AdmittedRequest] = []
        self._decodes: list[ScheduledSequence] = []
        self._prefills: list[ScheduledSequence] = []
        self._decoding: list[Request] = []
        self._prefilling: list[Request] = []
        self._swap_outs: list[tuple[int, int]] = []
        self._swap_ins: list[tuple[int, int]] = []
        self._copies: list[tuple[int, int]] = []

    def admit(self, request: Request) -> None:
        """Tell the workers about a request, with the block table that it has now."""
        self._admitted.append(
            AdmittedRequest(
                request.request_id,
                tuple(request.token_ids),
                request.num_prompt_tokens,
                request.sampling,
                request.seed,
                tuple(request.block_ids),
                request.sends_kv,
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
        is_sampling = count == len(request.token_ids) + request.num_promised - start
        sequence = ScheduledSequence(
            request.spec.request_id,
            start,
            count,
            growth.block_ids,
            is_sampling,
            growth.at if growth.block_ids else None,
            tuple([follower.request_id for follower in followers]) if followers else (),
        )
        request.num_in_flight += count
        request.num_promised += is_sampling
        if count == 1 and is_sampling:
            sequences, requests = self._decodes, self._decoding
        else:
            sequences, requests = self._prefills, self._prefilling
        sequences.append(sequence)
        requests.append(request)
        for follower in followers:
            follower.num_in_flight = start + count - follower.num_computed
            follower.num_promised = 1
            requests.append(follower)
        self.budget -= count
        if growth.copied is not None:
            self.copy(growth)

    @property
    def decodes(self) -> Sequence[ScheduledSequence]:
        """The sequences that run one token and sample after it, so far."""
        return self._decodes

    def draft(self, index: int, num_guesses: int, growth: Growth) -> None:
        """Let one of the ``decodes`` guess tokens ahead.

        Args:
            index: which.
            num_guesses: how many tokens at most.
            growth: blocks lent for them, behind those that the sequence has gained already.
        """
        sequence = self._decodes[index]
        at = sequence.new_blocks_at if sequence.new_block_ids else growth.at
        block_ids = sequence.new_block_ids + growth.block_ids
        self._decodes[index] = ScheduledSequence(
            sequence.request_id,
            sequence.start,
            sequence.count,
            block_ids,
            new_blocks_at=at if block_ids else None,
            num_guesses=num_guesses,
        )
        self.budget -= num_guesses

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

    def build(
        self, step: int, retired: tuple[str, ...], arrived_blocks: tuple[int, ...] = ()
    ) -> StepPlan:
        """The plan, decodes first."""
        return StepPlan(
            step,
            retired,
            tuple(self._admitted),
            tuple(self._swap_outs),
            tuple(self._swap_ins),
            tuple(self._copies),
            (*self._decodes, *self._prefills),
            arrived_blocks,
        )
