"""Puts a step's plan together: who runs how many tokens."""

from __future__ import annotations

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

    def add(self, request: Request, count: int, fresh: tuple[int, ...] = ()) -> None:
        """Run the request's next ``count`` tokens."""
        is_sampling = count == request.num_pending
        sequence = ScheduledSequence(
            request.request_id, request.num_computed, count, fresh, is_sampling
        )
        is_decode = count == 1 and is_sampling
        (self._decodes if is_decode else self._prefills).append(sequence)
        self.budget -= count

    def build(self, step: int, retired: tuple[str, ...]) -> StepPlan:
        """The plan, decodes first."""
        return StepPlan(
            step,
            retired,
            tuple(self._admitted),
            sequences=(*self._decodes, *self._prefills),
        )
