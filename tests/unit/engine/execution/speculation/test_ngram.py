"""Prompt lookup, checked against a search of the whole sequence."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings, strategies as st

from mooncake_engine.execution.request_table import CachedRequest, RequestTable
from mooncake_engine.execution.speculation import ngram
from mooncake_engine.execution.speculation.drafts import DraftRequest
from mooncake_engine.execution.speculation.ngram import NGramIndex, NGramProposer
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.scheduling.step_plan import NewRequest

sequences = st.lists(st.integers(0, 3), min_size=1, max_size=200)


def search(tokens: list[int], shortest: int, longest: int, count: int) -> list[int]:
    """The definition: the newest of the longest matches, repeated if it is too close to the end."""
    best, best_length = 0, shortest - 1
    for end in range(len(tokens) - 1, 0, -1):
        length = 0
        while length < min(longest, end) and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        if length > best_length:
            best, best_length = end, length
    if not best:
        return []
    found = list(tokens)
    for index in range(count):
        found.append(found[best + index])
    return found[len(tokens) :]


@settings(max_examples=150)
@given(sequences, st.integers(1, 3), st.integers(0, 3), st.integers(1, 6), st.integers(0, 200))
@example([1, 2, 3, 1, 2], 2, 0, 4, 0)
@example([7] * 100, 1, 2, 5, 70)
def test_lookup_equals_a_full_search(
    tokens: list[int], shortest: int, more: int, count: int, known: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ngram, "_MAX_CANDIDATES", 1000)
        index = NGramIndex(shortest, shortest + more)
        index.extend(tokens[:known])
        index.extend(tokens)
        found = index.find(tokens, count)
    assert found == search(tokens, shortest, shortest + more, count)


@given(st.lists(st.integers(0, 2**31), max_size=300), st.integers(1, 3))
def test_prompt_indexed_at_once_equals_token_by_token(tokens: list[int], shortest: int) -> None:
    tokens = tokens + tokens[: len(tokens) // 2]
    at_once, by_token = NGramIndex(shortest, 5), NGramIndex(shortest, 5)
    at_once.extend(tokens)
    for count in range(len(tokens) + 1):
        by_token.extend(tokens[:count])
    assert at_once._earlier == by_token._earlier
    assert at_once._last == by_token._last


def running(name: str, tokens: tuple[int, ...]) -> CachedRequest:
    table = RequestTable(2, 4, 100, torch.device("cpu"))
    table.admit([NewRequest(name, tokens, len(tokens), SamplingParams(), 0, ())])
    return table[name]


def test_each_request_uses_its_own_tokens() -> None:
    proposer = NGramProposer(2, 4)
    one, other = running("a", (5, 6, 7, 5, 6)), running("b", (7, 8, 9, 1, 2))
    drafts = proposer.propose([DraftRequest(one, 3), DraftRequest(other, 3)]).by_request
    assert {name: draft.token_ids for name, draft in drafts.items()} == {"a": [7, 5, 6]}
    one.append(7)
    assert proposer.propose([DraftRequest(one, 1)]).by_request["a"].token_ids == [5]


def test_restarted_request_is_indexed_again() -> None:
    proposer = NGramProposer(1, 2)
    proposer.propose([DraftRequest(running("a", (1, 2, 3, 1)), 2)])
    proposer.forget(["a", "unknown"])
    drafts = proposer.propose([DraftRequest(running("a", (9, 8, 9)), 2)]).by_request
    assert drafts["a"].token_ids == [8, 9]
    proposer.close()
