"""Draft tokens of a step: what proposes them, and what the model accepts of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from mooncake_engine.execution.penalties import TokenCounts
from mooncake_engine.execution.request_table import (
    BiasedTokens,
    CachedRequest,
    GrammarState,
    SamplingState,
)
from mooncake_engine.execution.speculation.rejection_sampling import DrawnTokens, count_accepted
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.scheduling.step_plan import SampledToken, ScheduledSequence
from mooncake_hal.backend_parts import index_tensor

if TYPE_CHECKING:
    from mooncake_engine.execution.sampler import ChosenTokens, Sampler


@dataclass(frozen=True, slots=True, eq=False)
class DraftState:
    """What the sampler looks at of a request, some draft tokens later."""

    row: int
    sampling: SamplingParams
    seed: int
    num_output_tokens: int
    counts: TokenCounts | None
    grammar: GrammarState | None
    bias: BiasedTokens | None


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """Draft tokens for one request.

    Args:
        states: the request before each draft token, and after the last.
        token_ids: at least one; NO_TOKEN for those that only the device knows.
        distributions: of each token that was drawn to be tested, what it was drawn from; None for
            the others, and of no token where none is tested.
    """

    states: Sequence[SamplingState]
    token_ids: list[int]
    distributions: Sequence[Tensor | None] = ()


@dataclass(frozen=True, slots=True, eq=False)
class StepDrafts:
    """All draft tokens of a step.

    Args:
        by_request: in the order of the step's sequences.
        on_device: [tokens] int64, those of all requests in that order, where a device made them;
            NO_TOKEN where there was none to be made.
    """

    by_request: Mapping[str, Draft]
    on_device: Tensor | None = None

    @property
    def num_drafted(self) -> dict[str, int]:
        """How many tokens, by request."""
        return {name: len(draft.token_ids) for name, draft in self.by_request.items()}

    def settle(self) -> None:
        """Let the host know the tokens that only the device does, which is waited for."""
        if self.on_device is not None:
            known = iter(self.on_device.tolist())
            for draft in self.by_request.values():
                draft.token_ids[:] = islice(known, len(draft.token_ids))


NO_DRAFTS = StepDrafts({})


def depends_on_tokens(state: SamplingState) -> bool:
    """Whether a choice needs the tokens before it, beyond the logits: else a place is enough."""
    return state.grammar is not None or state.counts is not None


def advance(state: SamplingState, token_id: int) -> DraftState | None:
    """The request one token later; None if its grammar does not allow the token.

    Args:
        state: before it.
        token_id: NO_TOKEN where only the device knows it, and nothing depends on it.
    """
    grammar = state.grammar
    if grammar is not None:
        grammar = grammar.after(token_id)
        if grammar is None:
            return None
    counts = None if state.counts is None else state.counts.after(token_id)
    position = state.num_output_tokens + 1
    return DraftState(state.row, state.sampling, state.seed, position, counts, grammar, state.bias)


def _depends_on_place(state: SamplingState) -> bool:
    """Whether a choice depends on what comes before it, beyond the logits, or on how much that
    is: a random number does, and an end that is masked at first."""
    sampling = state.sampling
    return depends_on_tokens(state) or not sampling.is_greedy or sampling.min_tokens > 0


def make_draft(state: CachedRequest, token_ids: Sequence[int]) -> Draft | None:
    """A draft of these tokens, as far as the request's grammar lets it; None if not at all."""
    if not token_ids:
        return None
    if not _depends_on_place(state):
        return Draft([state] * (len(token_ids) + 1), list(token_ids))
    states: list[SamplingState] = [state]
    drafted: list[int] = []
    for token_id in token_ids:
        following = advance(states[-1], token_id)
        if following is None:
            break
        states.append(following)
        drafted.append(token_id)
    return Draft(states, drafted) if drafted else None


class DraftRequest(NamedTuple):
    """A request that may have tokens drafted for it.

    Args:
        state: its tokens so far; its block table has room for the draft tokens.
        num_tokens: how many at most, at least one.
    """

    state: CachedRequest
    num_tokens: int


class Proposer(Protocol):
    """Proposes draft tokens. Every rank makes the same draft tokens from the same requests."""

    def propose(self, wanted: Sequence[DraftRequest]) -> StepDrafts:
        """Drafts, in that order; none for those about whom there is nothing to say.

        In the step that calls it the model has not run yet: a request's last token has no KV.
        """
        ...

    def forget(self, request_ids: Iterable[str]) -> None:
        """These requests have ended, or begin anew; unknown ids are normal."""
        ...

    def close(self) -> None:
        """Free what it holds. Idempotent."""
        ...


def propose_drafts(
    proposer: Proposer, sequences: Sequence[ScheduledSequence], states: Sequence[CachedRequest]
) -> StepDrafts:
    """Draft tokens for the sequences that may have some."""
    wanted = [
        DraftRequest(state, sequence.num_draft_tokens)
        for sequence, state in zip(sequences, states, strict=True)
        if sequence.num_draft_tokens
    ]
    return proposer.propose(wanted) if wanted else NO_DRAFTS


@dataclass(frozen=True, slots=True, eq=False)
class VerifiedDrafts:
    """What the model has chosen in a step with draft tokens, where it was chosen.

    Args:
        states: the requests, in the step's order.
        drafts: theirs.
        chosen: of each request one token, or with a draft one before each draft token and one
            behind the last.
    """

    states: Sequence[CachedRequest]
    drafts: StepDrafts
    chosen: ChosenTokens

    def moved(self, move: Callable[[Tensor], Tensor]) -> VerifiedDrafts:
        """The same elsewhere."""
        drafts = self.drafts
        if drafts.on_device is not None:
            drafts = StepDrafts(drafts.by_request, move(drafts.on_device))
        return VerifiedDrafts(self.states, drafts, self.chosen.moved(move))

    def tokens(self) -> dict[str, tuple[SampledToken, ...]]:
        """The tokens of each request: the draft tokens that hold, and the one behind them. Waits
        for the device; the host knows the drafts from now on."""
        sampled = iter(self.chosen.tokens())
        self.drafts.settle()
        return {
            state.request_id: _accepted(sampled, self.drafts.by_request.get(state.request_id))
            for state in self.states
        }


def verify_drafts(
    sampler: Sampler, logits: Tensor, states: Sequence[CachedRequest], drafts: StepDrafts
) -> VerifiedDrafts:
    """Choose what comes of draft tokens.

    Args:
        sampler: chooses.
        logits: [rows, vocab] float32, see ``VerifiedDrafts.chosen``.
        states: the requests, in the step's order.
        drafts: theirs.
    """
    rows: list[SamplingState] = []
    tested: list[tuple[int, int, Tensor]] = []  # row, place among the step's draft tokens
    num_drafted = 0
    for state in states:
        draft = drafts.by_request.get(state.request_id)
        if draft is None:
            rows.append(state)
            continue
        tested += [
            (len(rows) + index, num_drafted + index, distribution)
            for index, distribution in enumerate(draft.distributions)
            if distribution is not None
        ]
        rows += draft.states
        num_drafted += len(draft.token_ids)
    chosen = sampler.choose(logits, rows, _drawn(tested, drafts.on_device))
    return VerifiedDrafts(states, drafts, chosen)


def _drawn(
    tested: Sequence[tuple[int, int, Tensor]], on_device: Tensor | None
) -> DrawnTokens | None:
    if not tested:
        return None
    assert on_device is not None, "what has a distribution was drawn on the device"
    rows, places, distributions = zip(*tested, strict=True)
    if len(places) < len(on_device):
        on_device = on_device[index_tensor(on_device.device, places)]
    return DrawnTokens(rows, on_device, torch.stack(distributions))


def _accepted(sampled: Iterator[SampledToken], draft: Draft | None) -> tuple[SampledToken, ...]:
    """What a request keeps of its rows' tokens, all of which are taken from ``sampled``."""
    if draft is None:
        return (next(sampled),)
    tokens = tuple(islice(sampled, len(draft.states)))
    num_accepted = count_accepted(draft.token_ids, [token.token_id for token in tokens])
    return tokens[: num_accepted + 1]
