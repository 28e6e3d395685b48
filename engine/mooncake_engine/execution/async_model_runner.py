"""Model runner for async scheduling: enqueues a step before the previous step's tokens are known.

The host prepares the next step while the device runs the current one, so that the device never
waits for Python. The host does not know the tokens that the current step samples yet, so the next
step's inputs get placeholders, which are filled on the device from a buffer of sampled tokens. The
host reads the tokens later; until then its copy of a request ends in placeholders.

How many tokens a step with drafts yields is not known before it has run. So the step after it is
launched only when the device has finished it. The scheduler has planned that step by then, so the
device waits only for the ranks' own work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mooncake_engine.execution.input_batch import StepInputs
from mooncake_engine.execution.model_runner import (
    Batch,
    ModelRunner,
    PendingStep,
    RunnerParts,
    append_tokens,
    failed_requests,
)
from mooncake_engine.execution.request_table import (
    CachedRequest,
    add_placeholders,
    fill_placeholders,
)
from mooncake_engine.execution.sampler import NO_TOKEN, ChosenTokens, grammar_failures
from mooncake_engine.execution.speculation.drafts import (
    Proposer,
    VerifiedDrafts,
    verify_drafts,
)
from mooncake_engine.scheduling.step_plan import SampledToken, StepPlan, StepResult
from mooncake_hal.backend import Event
from mooncake_hal.backend_parts import index_tensor


class SampledTokenBuffer:
    """The newest sampled token of every request, on the device.

    Args:
        num_rows: initial capacity, in requests; the buffer grows as needed.
        device: device that holds the buffer.
        depth: the most steps in flight; the host knows the tokens of all earlier steps.
    """

    def __init__(self, num_rows: int, device: torch.device, depth: int) -> None:
        self.depth = depth
        self._device = device
        self._newest = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._last: Sequence[CachedRequest] = ()
        self._last_rows: list[int] = []
        self._last_tokens = self._newest[:0]

    def store(self, states: Sequence[CachedRequest], token_ids: Tensor) -> None:
        """Store a step's sampled tokens, [states] int64. The caller must not change the tensor."""
        if self._last != states:  # most steps have the same requests as the step before
            self._flush_last()
            self._last, self._last_rows = states, [state.row for state in states]
        self._last_tokens = token_ids

    def newest(self, states: Sequence[CachedRequest]) -> Tensor:
        """The newest tokens of some requests, [states] int64. The caller must not change the
        tensor."""
        if self._last == states:
            return self._last_tokens
        self._flush_last()
        return self._newest[index_tensor(self._device, [state.row for state in states])]

    def fill(self, token_ids: Tensor, at: Sequence[int], states: Sequence[CachedRequest]) -> None:
        """Write the newest tokens of some requests into a step's tokens, in place.

        Args:
            token_ids: [tokens] int64, the tokens of the step.
            at: the index in ``token_ids`` of each request's token, ascending.
            states: the requests.
        """
        newest = self.newest(states)
        if at[-1] == len(at) - 1:  # the first tokens of the step, all of them
            token_ids[: len(at)] = newest
        else:
            token_ids.index_copy_(0, index_tensor(self._device, at), newest)

    def _flush_last(self) -> None:
        """Write the tokens of the last batch to their rows, before another batch reads them."""
        if not self._last_rows:
            return
        missing = max(self._last_rows) + 1 - len(self._newest)
        if missing > 0:
            self._newest = torch.cat((self._newest, self._newest.new_zeros(missing)))
        rows = index_tensor(self._device, self._last_rows)
        self._newest.index_copy_(0, rows, self._last_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class StepEnd:
    """The end of a step in flight, and the parts of its result that are known already.

    Args:
        step: number of the step.
        event: event recorded after the copy of the sampled tokens to the host.
        is_copying, grammar_failed: see ``StepResult``.
    """

    step: int
    event: Event
    is_copying: bool
    grammar_failed: dict[str, str]

    def result(
        self,
        tokens: dict[str, tuple[SampledToken, ...]],
        failed: dict[str, str],
        *,
        plain_tokens: dict[str, int] | None = None,
        num_drafted: dict[str, int] | None = None,
    ) -> StepResult:
        """Build the step's result; for the arguments see ``StepResult``."""
        return StepResult(
            self.step,
            tokens,
            failed=failed,
            grammar_failed=self.grammar_failed,
            num_drafted=num_drafted or {},
            is_copying=self.is_copying,
            plain_tokens=plain_tokens or {},
        )


@dataclass(slots=True, eq=False)
class EnqueuedStep:
    """A step in flight on the device.

    Args:
        states: the requests that sample.
        chosen: their tokens, in host memory that is valid once the step has ended.
        end: the end of the step.
    """

    states: list[CachedRequest]
    chosen: ChosenTokens
    end: StepEnd
    _known: list[int] | None = None

    def result(self) -> StepResult:
        token_ids = self._wait()
        names = [state.request_id for state in self.states]
        plain_tokens = dict(zip(names, token_ids, strict=True))
        tokens: dict[str, tuple[SampledToken, ...]] = {}
        if NO_TOKEN in token_ids or self.chosen.logprobs is not None:
            pairs = zip(names, self.chosen.tokens(), strict=True)
            tokens, plain_tokens = {name: (token,) for name, token in pairs}, {}
        return self.end.result(tokens, failed_requests(tokens), plain_tokens=plain_tokens)

    def complete(self) -> None:
        """Fill the requests' placeholders. Called in the thread that launches steps."""
        token_ids = self._wait()
        if NO_TOKEN in token_ids:  # the request fails: any token will do
            token_ids = [max(token_id, 0) for token_id in token_ids]
        fill_placeholders(self.states, token_ids)

    def _wait(self) -> list[int]:
        """Wait for the step; returns the ids of its tokens. Called by two threads, in any order."""
        known = self._known
        if known is None:
            self.end.event.synchronize()
            self._known = known = self.chosen.token_ids.tolist()
        return known


@dataclass(slots=True, eq=False)
class EnqueuedDrafts:
    """A step with draft tokens in flight on the device. Its requests have no placeholders.

    Args:
        verified: the verified drafts, in host memory that is valid once the step has ended.
        end: the end of the step.
    """

    verified: VerifiedDrafts
    end: StepEnd
    _known: dict[str, tuple[SampledToken, ...]] | None = None

    def result(self) -> StepResult:
        tokens = self._wait()
        num_drafted = self.verified.drafts.num_drafted
        return self.end.result(tokens, failed_requests(tokens), num_drafted=num_drafted)

    def complete(self) -> None:
        """Append the requests' tokens. Called in the thread that launches steps."""
        append_tokens(self.verified.states, self._wait())

    def _wait(self) -> dict[str, tuple[SampledToken, ...]]:
        """Wait for the step; returns the tokens. Called by two threads, in any order."""
        known = self._known
        if known is None:
            self.end.event.synchronize()
            self._known = known = self.verified.tokens()
        return known


class AsyncModelRunner(ModelRunner):
    """A ModelRunner that enqueues a step and does not wait for it.

    A grammar has to know the previous token before the next one is sampled, and so have bad words
    of several tokens. The host then waits for that token after it has enqueued the forward pass
    that computes the next logits. If the host reads logits between two steps (``prompt_logprobs``),
    the whole batch waits for the host. Drafts are proposed when all tokens before them are known.

    Args:
        parts: the runner's collaborators.
        sampled: carries sampled tokens from step to step.
        proposer: proposes draft tokens; None without speculative decoding.
    """

    def __init__(
        self, parts: RunnerParts, sampled: SampledTokenBuffer, proposer: Proposer | None = None
    ) -> None:
        super().__init__(parts, proposer)
        self._sampled = sampled
        self._enqueued: deque[EnqueuedStep | EnqueuedDrafts] = deque()

    def _update_requests(self, plan: StepPlan) -> None:
        follows_drafts = bool(self._enqueued) and isinstance(self._enqueued[-1], EnqueuedDrafts)
        needs_tokens = follows_drafts or (self._proposer is not None and plan.has_drafts)
        # Without drafts, the core already has the tokens of all but the newest depth - 1 steps.
        # This comes first: once a request is removed, its row of counts may go to another request.
        self._complete(0 if needs_tokens else self._sampled.depth - 1)
        super()._update_requests(plan)

    def _make_inputs(self, batch: Batch) -> StepInputs:
        states = batch.states
        placeholders = [i for i, state in enumerate(states) if state.num_output_placeholders]
        if len(placeholders) == len(states):
            return self._inputs.build(*batch, self._sampled.newest(states))
        inputs = super()._make_inputs(batch)
        if placeholders:  # all decodes, which come first in a batch and have one token each
            waiting = [states[i] for i in placeholders]
            self._sampled.fill(inputs.token_ids, placeholders, waiting)
        return inputs

    def _finish_step(
        self, plan: StepPlan, batch: Batch, inputs: StepInputs, hidden: Tensor
    ) -> PendingStep:
        states = (*batch.states, *inputs.sampling) if self._requests.num_host_bound else ()
        if any(state.is_host_bound for state in states):
            self._complete(0)
            return super()._finish_step(plan, batch, inputs, hidden)
        if not inputs.sampling:
            return self._pending_unsampled(self._unsampled(plan))
        if batch.drafts.by_request:
            return self._enqueue_drafts(plan, batch, inputs, hidden)
        if self._requests.num_token_bound and any(s.is_token_bound for s in inputs.sampling):
            self._complete(0)
        chosen = self._sampler.choose(self._logits(hidden, inputs), inputs.sampling)
        token_ids = chosen.token_ids.clamp(min=0)
        self._sampled.store(inputs.sampling, token_ids)
        self._requests.count_sampled(inputs.sampling, token_ids)
        add_placeholders(inputs.sampling)
        on_host = chosen.moved(_to_host)
        step = EnqueuedStep(inputs.sampling, on_host, self._end(plan, inputs))
        self._enqueued.append(step)
        return step

    def _enqueue_drafts(
        self, plan: StepPlan, batch: Batch, inputs: StepInputs, hidden: Tensor
    ) -> PendingStep:
        logits = self._logits(hidden, inputs)
        verified = verify_drafts(self._sampler, logits, inputs.sampling, batch.drafts)
        on_host = verified.moved(_to_host)
        step = EnqueuedDrafts(on_host, self._end(plan, inputs))
        self._enqueued.append(step)
        return step

    def _end(self, plan: StepPlan, inputs: StepInputs) -> StepEnd:
        """Record the end of a step, all of whose work is enqueued."""
        event = self._make_event()
        event.record()
        failed = grammar_failures(inputs.sampling) if self._requests.num_grammars else {}
        return StepEnd(plan.step, event, self._copier.is_copying, failed)

    def _complete(self, num_left: int) -> None:
        """Complete all steps in flight except the newest ``num_left``."""
        while len(self._enqueued) > num_left:
            self._enqueued.popleft().complete()


def _to_host(token_ids: Tensor) -> Tensor:
    """Start a copy to the host, into page-locked memory. On the CPU, returns the tensor itself."""
    if token_ids.device.type == "cpu":
        return token_ids
    host = torch.empty(token_ids.shape, dtype=token_ids.dtype, pin_memory=True)
    return host.copy_(token_ids, non_blocking=True)
