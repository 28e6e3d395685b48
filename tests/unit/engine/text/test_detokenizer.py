"""The incremental detokenizer loses nothing and shows nothing early, whatever the grouping."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, strategies as st
from support.byte_tokenizer import EOS

from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.text.detokenizer import IncrementalDetokenizer, text_offsets
from mooncake_engine.text.tokenizer import Tokenizer

BYTE_LEVEL_IDS = st.lists(st.integers(0, 257), max_size=40)
TEXT_IDS = st.text(alphabet="abé→🍵", max_size=20).map(lambda text: list(text.encode()))


def stream(
    tokenizer: Tokenizer, sampling: SamplingParams, groups: list[list[int]]
) -> tuple[list[str], IncrementalDetokenizer]:
    detokenizer = IncrementalDetokenizer(tokenizer, sampling)
    return [*map(detokenizer.push, groups), detokenizer.finish()], detokenizer


def grouped(ids: list[int], cuts: list[int]) -> list[list[int]]:
    places = sorted({position % (len(ids) + 1) for position in cuts} | {0, len(ids)})
    return [ids[a:b] for a, b in pairwise(places)]


@given(ids=BYTE_LEVEL_IDS, cuts=st.lists(st.integers(0, 100)), skips=st.booleans())
def test_deltas_add_up_to_the_full_decode(
    byte_tokenizer: Tokenizer, ids: list[int], cuts: list[int], skips: bool
) -> None:
    sampling = SamplingParams(skip_special_tokens=skips)
    deltas, _ = stream(byte_tokenizer, sampling, grouped(ids, cuts))
    assert "".join(deltas) == byte_tokenizer.decode(ids, skip_special_tokens=skips)


@given(text=st.text(alphabet="abc é→🍵", max_size=20))
def test_deltas_of_fallback_bytes_add_up_to_the_text(
    fallback_tokenizer: Tokenizer, text: str
) -> None:
    ids = fallback_tokenizer.encode(text)
    deltas, _ = stream(fallback_tokenizer, SamplingParams(), [[i] for i in ids])
    assert "".join(deltas) == fallback_tokenizer.decode(ids) == text


@given(
    ids=TEXT_IDS,
    cuts=st.lists(st.integers(0, 100)),
    stops=st.lists(st.text(alphabet="abé→🍵", min_size=1, max_size=3), max_size=3),
    keeps_stop=st.booleans(),
    min_tokens=st.integers(0, 8),
)
def test_grouping_changes_nothing(
    byte_tokenizer: Tokenizer,
    ids: list[int],
    cuts: list[int],
    stops: list[str],
    keeps_stop: bool,
    min_tokens: int,
) -> None:
    sampling = SamplingParams(
        stop=tuple(stops),
        include_stop_str_in_output=keeps_stop,
        min_tokens=min_tokens,
        max_tokens=None,
    )
    single, one = stream(byte_tokenizer, sampling, [[i] for i in ids])
    several, other = stream(byte_tokenizer, sampling, grouped(ids, cuts))
    assert "".join(single) == "".join(several)
    assert (one.stop_string, one.num_tokens) == (other.stop_string, other.num_tokens)
    whole = bytes(ids).decode()
    assert whole.startswith("".join(single))
    if one.stop_string is None:
        assert "".join(single) == whole


@given(
    ids=TEXT_IDS,
    at=st.integers(0, 20),
    stops=st.lists(st.text(alphabet="abé→🍵", min_size=1, max_size=3), max_size=3),
    min_tokens=st.integers(0, 30),
)
def test_continues_after_replayed_tokens(
    byte_tokenizer: Tokenizer, ids: list[int], at: int, stops: list[str], min_tokens: int
) -> None:
    sampling = SamplingParams(stop=tuple(stops), min_tokens=min_tokens, max_tokens=None)
    singles = [[i] for i in ids]
    whole, one = stream(byte_tokenizer, sampling, singles)
    known = min(at, one.num_tokens - (one.stop_string is not None))
    continued = IncrementalDetokenizer(byte_tokenizer, sampling)
    assert continued.replay(ids[:known]) == "".join(whole[:known])
    assert [*map(continued.push, singles[known:]), continued.finish()] == whole[known:]
    assert continued.stop_string == one.stop_string


def test_holds_back_an_incomplete_character(byte_tokenizer: Tokenizer) -> None:
    deltas, _ = stream(byte_tokenizer, SamplingParams(), [[i] for i in "é🍵!".encode()])
    assert deltas == ["", "é", "", "", "", "🍵", "!", ""]


def test_shows_an_incomplete_character_at_the_end(byte_tokenizer: Tokenizer) -> None:
    deltas, _ = stream(byte_tokenizer, SamplingParams(), [list("🍵".encode()[:2])])
    assert deltas == ["", "\ufffd"]


def test_holds_back_what_may_become_a_stop_string(byte_tokenizer: Tokenizer) -> None:
    sampling = SamplingParams(stop=("END",))
    deltas, detokenizer = stream(byte_tokenizer, sampling, [[i] for i in b"xENxE"])
    assert deltas == ["x", "", "", "ENx", "", "E"]
    assert detokenizer.stop_string is None


@pytest.mark.parametrize(("keeps", "expected"), [(False, "tea "), (True, "tea END")])
def test_ends_at_a_stop_string(byte_tokenizer: Tokenizer, keeps: bool, expected: str) -> None:
    sampling = SamplingParams(stop=("END",), include_stop_str_in_output=keeps)
    deltas, detokenizer = stream(byte_tokenizer, sampling, [list(b"tea END and more")])
    assert "".join(deltas) == expected
    assert detokenizer.stop_string == "END"
    assert detokenizer.num_tokens == len("tea END")


def test_a_stop_string_within_min_tokens_is_ignored(byte_tokenizer: Tokenizer) -> None:
    sampling = SamplingParams(stop=("b",), min_tokens=2)
    deltas, detokenizer = stream(byte_tokenizer, sampling, [[i] for i in b"abab"])
    assert "".join(deltas) == "aba"
    assert detokenizer.num_tokens == 4


def test_special_tokens_are_shown_if_requested(byte_tokenizer: Tokenizer) -> None:
    ids = [*b"a", EOS, *b"b"]
    assert stream(byte_tokenizer, SamplingParams(), [ids])[0][0] == "ab"
    shown = SamplingParams(skip_special_tokens=False)
    assert stream(byte_tokenizer, shown, [ids])[0][0] == "a<|eos|>b"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("é<|eos|>a", (0, 0, 1, 8)),  # é has two tokens
        ("éa", (0, 0, 1, 1)),  # not shown
        ("", (0, 0, 0, 0)),
    ],
)
def test_offsets_are_those_in_the_text_with_and_without_special_tokens(
    byte_tokenizer: Tokenizer, text: str, expected: tuple[int, ...]
) -> None:
    ids = (*"é".encode(), EOS, ord("a"))
    assert text_offsets(byte_tokenizer, ids, text) == expected


@pytest.mark.parametrize("text", ["hi a", " hi a"])
def test_offsets_do_not_count_a_space_that_is_not_in_the_text(
    fallback_tokenizer: Tokenizer, text: str
) -> None:
    """SentencePiece prepends it, after a BOS that is not in the text either."""
    ids = (1, *fallback_tokenizer.encode(" hi a"))
    surplus = 5 - len(text)
    expected = (0, 0, *(place - surplus for place in (1, 2, 3, 4)))
    assert text_offsets(fallback_tokenizer, ids, text) == expected
