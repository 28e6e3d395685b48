"""Drafts in a step: which sequences have one, and what the model makes of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from torch import Tensor

from mooncake_engine.execution.request_state import RequestState, SamplingState
from mooncake_engine.execution.sampler import Sampler
from mooncake_engine.execution.speculation.acceptance import Guess, count_accepted
from mooncake_engine.execution.speculation.continuation import Draft
from mooncake_engine.execution.speculation.proposer import Proposer, Wanted
from mooncake_engine.scheduling.plan import SampledToken, StepPlan


def draft_tokens(
    proposer: Proposer, plan: StepPlan, states: Sequence[RequestState]
) -> dict[str, Draft]:
    """Guesses for the plan's sequences that may have some, by request id."""
    wanted = [
        Wanted(state, sequence.num_guesses)
        for sequence, state in zip(plan.sequences, states, strict=True)
        if sequence.num_guesses
    ]
    return proposer.propose(wanted) if wanted else {}


def check_drafts(
    sampler: Sampler,
    logits: Tensor,
    states: Sequence[RequestState],
    drafts: Mapping[str, Draft],
) -> dict[str, tuple[SampledToken, ...]]:
    """The tokens of each request: the guesses that hold, and the one behind them.

    Args:
        sampler: chooses.
        logits: [rows, vocab] float32: of each request one row, or with a draft one before each
            guess and one behind the last.
        states: the requests.
        drafts: by request id.
    """
    rows: list[SamplingState] = []
    guesses: dict[int, Guess] = {}
    for state in states:
        draft = drafts.get(state.request_id)
        if draft is not None:
            known = enumerate(draft.guesses, start=len(rows))
            guesses.update((row, guess) for row, guess in known if guess.distribution is not None)
        rows += [state] if draft is None else draft.states
    sampled = iter(sampler.sample(logits, rows, guesses))
    return {state.request_id: _accepted(sampled, drafts.get(state.request_id)) for state in states}


def _accepted(sampled: Iterator[SampledToken], draft: Draft | None) -> tuple[SampledToken, ...]:
    """What a request keeps of its rows' tokens, all of which are taken from ``sampled``."""
    if draft is None:
        return (next(sampled),)
    tokens = tuple(islice(sampled, len(draft.states)))
    num_accepted = count_accepted(draft.guesses, [token.token_id for token in tokens])
    return tokens[: num_accepted + 1]
