"""Requests as they would stand if some guessed tokens were theirs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mooncake_engine.execution.grammar_state import GrammarState
from mooncake_engine.execution.request_state import RequestState, SamplingState, TokenCounts
from mooncake_engine.execution.speculation.acceptance import Guess
from mooncake_engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class Continuation:
    """What the sampler looks at of a request, some guesses later."""

    sampling: SamplingParams
    seed: int
    num_output_tokens: int
    counts: TokenCounts | None
    grammar: GrammarState | None


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """Guesses for one request.

    Args:
        states: the request before each guess, and after the last.
        guesses: at least one.
    """

    states: Sequence[SamplingState]
    guesses: Sequence[Guess]

    @property
    def token_ids(self) -> list[int]:
        """The guessed tokens."""
        return [guess.token_id for guess in self.guesses]


def continue_with(state: SamplingState, token_id: int) -> Continuation | None:
    """The request one token later; None if its grammar does not let it go on so."""
    grammar = state.grammar
    if grammar is not None:
        grammar = grammar.after(token_id)
        if grammar is None:
            return None
    counts = None if state.counts is None else state.counts.after(token_id)
    return Continuation(state.sampling, state.seed, state.num_output_tokens + 1, counts, grammar)


def follow(state: RequestState, token_ids: Iterable[int]) -> Draft | None:
    """A draft of these tokens, as far as the request's grammar lets it; None if not at all."""
    states: list[SamplingState] = [state]
    guesses: list[Guess] = []
    for token_id in token_ids:
        following = continue_with(states[-1], token_id)
        if following is None:
            break
        states.append(following)
        guesses.append(Guess(token_id))
    return Draft(states, guesses) if guesses else None
