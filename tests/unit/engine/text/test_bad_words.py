"""Bad words: their tokens, and what they forbid after an output."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from mooncake_engine.errors import InvalidRequest
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.text.bad_words import BadWordState, with_bad_words

TOKENS = {
    **{"tea": (1,), " tea": (2,), "milk": (3, 4), " milk": (5, 4), "rice": (6,), " rice": (7, 6)},
    **{"sugar": (8, 9), " sugar": (8, 9), "x": (1,), " x": (7, 1), "": (), " ": (7,)},
}


class Encoder:
    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        assert not add_special_tokens
        return TOKENS[text]


def tokens_of(*words: str, **fields: Any) -> tuple[tuple[int, ...], ...]:
    encoder: Any = Encoder()
    return with_bad_words(SamplingParams(bad_words=words, **fields), encoder).bad_words_token_ids


def test_word_is_forbidden_after_a_space_if_that_is_as_many_tokens() -> None:
    """As in vLLM, also where the text begins with a space: of as many tokens, with another first
    one."""
    assert tokens_of("tea") == tokens_of(" tea") == tokens_of("tea", "tea") == ((1,), (2,))
    assert tokens_of("milk", "rice", "sugar") == ((3, 4), (5, 4), (6,), (8, 9))
    assert tokens_of() == ()


def test_words_that_cannot_be_forbidden_are_rejected() -> None:
    with pytest.raises(InvalidRequest, match="bad_words contains an empty string"):
        SamplingParams(bad_words=("tea", ""))
    with pytest.raises(InvalidRequest, match="bad_words contains ' ', which has no tokens"):
        tokens_of("tea", " ")
    with pytest.raises(InvalidRequest, match="bad_words forbid all of allowed_token_ids"):
        tokens_of("tea", "milk", allowed_token_ids=(2, 1))
    assert tokens_of("tea", "milk", allowed_token_ids=(2, 3)) == ((1,), (2,), (3, 4), (5, 4))


def test_number_of_sequences_and_of_tokens_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    many = {f"{space}{i}": (i + 100 * len(space),) for i in range(65) for space in ("", " ")}
    long = {"long": (1,) * 1025, " long": (2, 1)}
    for name, value in {**many, **long}.items():
        monkeypatch.setitem(TOKENS, name, value)
    words = [str(i) for i in range(65)]
    assert len(tokens_of(*words[:64])) == 128
    with pytest.raises(InvalidRequest, match="at most 128 sequences"):
        tokens_of(*words)
    with pytest.raises(InvalidRequest, match="1024 tokens together; got at least 1 with 1025"):
        tokens_of("long")


def completed(words: Sequence[tuple[int, ...]], output: list[int]) -> set[int]:
    """The tokens that would complete a word, by its definition."""
    return {
        word[-1]
        for word in words
        if len(output) >= len(word) - 1 and output[len(output) - len(word) + 1 :] == list(word[:-1])
    }


@pytest.mark.parametrize("seed", range(20))
def test_forbidden_tokens_are_those_that_complete_a_word(seed: int) -> None:
    """Whether the output is followed token by token, or taken over from another instance."""
    numbers = random.Random(f"bad words {seed}")
    words = [
        tuple(numbers.choices(range(3), k=numbers.randrange(1, 5)))
        for _ in range(numbers.randrange(1, 5))
    ]
    state = BadWordState.of(words, ())
    output: list[int] = []
    for _ in range(40):
        assert state is not None
        taken_over = BadWordState.of(words, output)
        assert taken_over is not None
        expected = completed(words, output)
        assert set(state.forbidden()) == set(taken_over.forbidden()) == expected
        assert state.depends_on_tokens is any(len(word) > 1 for word in words)
        output.append(numbers.randrange(3))
        state = state.after(output[-1])
