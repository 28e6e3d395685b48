"""The adaptive number of draft tokens, after accepted and rejected drafts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from mooncake_engine.execution.speculation.ngram import NGramIndex
from mooncake_engine.scheduling.draft_scheduling import MAX_PAUSE_TOKENS, DraftLength

LIMIT = 4


def lengths_after(outcomes: Sequence[tuple[int, int]]) -> list[int]:
    """Return the draft length after each (drafted, accepted) outcome, one token apart."""
    length = DraftLength(LIMIT)
    found = []
    for num_tokens, (num_drafted, accepted) in enumerate(outcomes):
        length.learn(num_drafted, accepted, num_tokens)
        found.append(length.at(num_tokens + MAX_PAUSE_TOKENS))  # beyond any pause
    return found


@pytest.mark.parametrize(
    ("outcomes", "lengths"),
    [
        ([(4, 4), (4, 4)], [4, 4]),
        ([(4, 2), (3, 3)], [3, 4]),
        ([(4, 0), (3, 1), (2, 0), (1, 1)], [3, 2, 1, 3]),
        ([(0, 0), (0, 0)], [4, 4]),
        ([(2, 2)], [4]),
    ],
    ids=["all accepted", "most accepted", "few accepted", "nothing drafted", "fewer fit"],
)
def test_draft_length_follows_acceptance(
    outcomes: list[tuple[int, int]], lengths: list[int]
) -> None:
    assert lengths_after(outcomes) == lengths


def test_pauses_grow_while_nothing_is_accepted() -> None:
    length = DraftLength(1)
    rests = []
    num_tokens = 0
    for _ in range(7):
        length.learn(1, 0, num_tokens)
        before = num_tokens
        while not length.at(num_tokens):
            num_tokens += 1
        rests.append(num_tokens - before)
    assert rests == [1, 2, 4, 8, 16, 16, 16]
    length.learn(1, 1, num_tokens)
    length.learn(1, 0, num_tokens)
    assert (length.at(num_tokens), length.at(num_tokens + 1)) == (0, 1)


@dataclass(frozen=True)
class Work:
    """The cost of an answer: steps, and tokens computed in them."""

    num_steps: int
    num_computed: int


def answer(prompt: list[int], tokens: list[int]) -> Work:
    """Decode a known answer with prompt lookup."""
    index, length = NGramIndex(2, 5), DraftLength(LIMIT)
    known, num_steps, num_drafted, at = [*prompt, tokens[0]], 0, 0, 1
    while at < len(tokens):
        index.extend(known)
        wanted = min(length.at(len(known)), len(tokens) - at - 1)
        drafted = index.find(known, wanted) if wanted else []
        accepted = 0
        while accepted < len(drafted) and drafted[accepted] == tokens[at + accepted]:
            accepted += 1
        known += tokens[at : at + accepted + 1]
        at += accepted + 1
        num_steps += 1
        num_drafted += len(drafted)
        length.learn(len(drafted), accepted, len(known))
    return Work(num_steps, num_steps + num_drafted)


def test_repetitive_text_wastes_no_tokens() -> None:
    work = answer([i % 24 for i in range(96)], [i % 24 for i in range(97)])
    assert work == Work(20, 96), "four drafted and one more token in each step but the last"


def test_random_text_wastes_at_most_15_percent() -> None:
    """The vocabulary is so small that the last tokens have nearly always occurred before."""
    numbers = random.Random(5)
    prompt, tokens = ([numbers.randrange(16) for _ in range(n)] for n in (500, 1000))
    work = answer(prompt, tokens)
    assert work.num_computed < 1.15 * len(tokens)


def test_drafting_resumes_soon_after_random_text() -> None:
    numbers = random.Random(7)
    prompt = [numbers.randrange(1000) for _ in range(400)]
    noise = [numbers.randrange(16) for _ in range(300)]
    alone, behind = answer(prompt, prompt), answer(prompt, noise + prompt)
    extra = behind.num_steps - alone.num_steps - len(noise)
    assert extra < MAX_PAUSE_TOKENS + LIMIT
