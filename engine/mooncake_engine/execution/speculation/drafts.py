"""The draft tokens of a step: the proposer's interface, and their verification by the model."""

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
from mooncake_engine.execution.speculation.rejection_sampling import SampledDrafts, count_accepted
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.scheduling.step_plan import SampledToken, ScheduledSequence
from mooncake_engine.text.bad_words import BadWordState
from mooncake_hal.backend_parts import index_tensor

if TYPE_CHECKING:
    from mooncake_engine.execution.sampler import ChosenTokens, Sampler


@dataclass(frozen=True, slots=True, eq=False)
class DraftState:
    """The SamplingState of a request after some of its draft tokens."""

    row: int
    sampling: SamplingParams
    seed: int
    num_output_tokens: int
    counts: TokenCounts | None
    grammar: GrammarState | None
    bias: BiasedTokens | None
    allowed: bytes | None
    bad_words: BadWordState | None


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """The draft tokens of one request.

    Args:
        states: the request's state before each draft token, and after the last.
        token_ids: at least one; NO_TOKEN for tokens that only the device knows.
        distributions: by token, the distribution that it was sampled from if rejection sampling
            applies to it, else None; empty if it applies to no token.
    """

    states: Sequence[SamplingState]
    token_ids: list[int]
    distributions: Sequence[Tensor | None] = ()


@dataclass(frozen=True, slots=True, eq=False)
class StepDrafts:
    """All draft tokens of a step.

    Args:
        by_request: drafts by request id, in the order of the step's sequences.
        on_device: [tokens] int64, the tokens of all requests in that order, if the device made
            them; NO_TOKEN for a row without a finite logit.
    """

    by_request: Mapping[str, Draft]
    on_device: Tensor | None = None

    @property
    def num_drafted(self) -> dict[str, int]:
        """The number of draft tokens, by request id."""
        return {name: len(draft.token_ids) for name, draft in self.by_request.items()}

    def copy_to_host(self) -> None:
        """Copy tokens that only the device knows to the drafts; waits for the device."""
        if self.on_device is not None:
            known = iter(self.on_device.tolist())
            for draft in self.by_request.values():
                draft.token_ids[:] = islice(known, len(draft.token_ids))


NO_DRAFTS = StepDrafts({})


def depends_on_tokens(state: SamplingState) -> bool:
    """Whether a choice depends on the values of the tokens before it, other than by the logits."""
    has_growing_words = state.bad_words is not None and state.bad_words.depends_on_tokens
    return state.grammar is not None or state.counts is not None or has_growing_words


def advance(state: SamplingState, token_id: int) -> DraftState | None:
    """The state of a request one token later; None if its grammar does not allow the token.

    Args:
        state: the state before the token.
        token_id: the token; NO_TOKEN if only the device knows it and nothing depends on it.
    """
    grammar = state.grammar
    if grammar is not None:
        grammar = grammar.after(token_id)
        if grammar is None:
            return None
    counts = None if state.counts is None else state.counts.after(token_id)
    position = state.num_output_tokens + 1
    return DraftState(
        state.row,
        state.sampling,
        state.seed,
        position,
        counts,
        grammar,
        state.bias,
        state.allowed,
        None if state.bad_words is None else state.bad_words.after(token_id),
    )


def _depends_on_position(state: SamplingState) -> bool:
    """Whether a choice depends on the tokens before it, other than by the logits, or on their
    number, as random numbers and ``min_tokens`` do."""
    sampling = state.sampling
    return depends_on_tokens(state) or not sampling.is_greedy or sampling.min_tokens > 0


def make_draft(state: CachedRequest, token_ids: Sequence[int]) -> Draft | None:
    """A draft of the leading tokens that the request's grammar allows; None if it allows none."""
    if not token_ids:
        return None
    if not _depends_on_position(state):
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
    """A request to draft tokens for.

    Args:
        state: the request's state; its block table has blocks for the draft tokens.
        num_tokens: the most tokens to draft, at least one.
    """

    state: CachedRequest
    num_tokens: int


class Proposer(Protocol):
    """Proposes draft tokens. Every rank must make the same draft tokens from the same requests."""

    def propose(self, wanted: Sequence[DraftRequest]) -> StepDrafts:
        """Draft tokens for requests, in their order. A request may get none.

        It is called before the step's forward pass, so the last token of a request has no KV yet.
        """
        ...

    def forget(self, request_ids: Iterable[str]) -> None:
        """Forget requests that have ended or start anew. Unknown ids are ignored."""
        ...

    def close(self) -> None:
        """Free all resources. Idempotent."""
        ...


def propose_drafts(
    proposer: Proposer, sequences: Sequence[ScheduledSequence], states: Sequence[CachedRequest]
) -> StepDrafts:
    """Propose draft tokens for the sequences whose plan allows some."""
    wanted = [
        DraftRequest(state, sequence.num_draft_tokens)
        for sequence, state in zip(sequences, states, strict=True)
        if sequence.num_draft_tokens
    ]
    return proposer.propose(wanted) if wanted else NO_DRAFTS


@dataclass(frozen=True, slots=True, eq=False)
class VerifiedDrafts:
    """The tokens that the model chose in a step with draft tokens, on the device or on the host.

    Args:
        states: the requests, in the order of the step.
        drafts: the step's drafts.
        chosen: one token per request; for a request with a draft, one at the position of each draft
            token and one after the last.
    """

    states: Sequence[CachedRequest]
    drafts: StepDrafts
    chosen: ChosenTokens

    def moved(self, move: Callable[[Tensor], Tensor]) -> VerifiedDrafts:
        """A copy on another device: ``move`` copies each tensor."""
        drafts = self.drafts
        if drafts.on_device is not None:
            drafts = StepDrafts(drafts.by_request, move(drafts.on_device))
        return VerifiedDrafts(self.states, drafts, self.chosen.moved(move))

    def tokens(self) -> dict[str, tuple[SampledToken, ...]]:
        """The tokens of each request: the accepted draft tokens and the token after them. Waits for
        the device, and copies the draft tokens to the host (``StepDrafts.copy_to_host``)."""
        sampled = iter(self.chosen.tokens())
        self.drafts.copy_to_host()
        return {
            state.request_id: _accepted(sampled, self.drafts.by_request.get(state.request_id))
            for state in self.states
        }


def verify_drafts(
    sampler: Sampler, logits: Tensor, states: Sequence[CachedRequest], drafts: StepDrafts
) -> VerifiedDrafts:
    """Choose the tokens of a step with draft tokens.

    Args:
        sampler: chooses the tokens.
        logits: [rows, vocab]; for the rows see ``VerifiedDrafts.chosen``.
        states: the requests, in the order of the step.
        drafts: the step's drafts.
    """
    rows: list[SamplingState] = []
    tested: list[tuple[int, int, Tensor]] = []  # row, index among draft tokens, distribution
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
) -> SampledDrafts | None:
    if not tested:
        return None
    assert on_device is not None, "what has a distribution was drawn on the device"
    rows, indexes, distributions = zip(*tested, strict=True)
    if len(indexes) < len(on_device):
        on_device = on_device[index_tensor(on_device.device, indexes)]
    return SampledDrafts(rows, on_device, torch.stack(distributions))


def _accepted(sampled: Iterator[SampledToken], draft: Draft | None) -> tuple[SampledToken, ...]:
    """The tokens that a request keeps. Takes the tokens of all its rows from ``sampled``."""
    if draft is None:
        return (next(sampled),)
    tokens = tuple(islice(sampled, len(draft.states)))
    num_accepted = count_accepted(draft.token_ids, [token.token_id for token in tokens])
    return tokens[: num_accepted + 1]
