"""Stop strings: the automata against a plain search, however the text is split."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, strategies as st

from mooncake_engine.text.detokenizer import StopMatch, StopStringFinder

SMALL_ALPHABET = st.text(alphabet="ab", min_size=0, max_size=30)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4)


def first_match(text: str, stops: list[str]) -> tuple[int, str] | None:
    """The stop string that is complete first; the longest of those that end together."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return end, max(complete, key=len)
    return None


def held_back(text: str, stops: list[str]) -> int:
    """The longest suffix of the text that is a proper prefix of a stop string."""
    lengths = [n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])]
    return max(lengths)


def cut(text: str, positions: list[int]) -> list[str]:
    places = sorted({position % (len(text) + 1) for position in positions} | {0, len(text)})
    return [text[a:b] for a, b in pairwise(places)]


@given(SMALL_ALPHABET, STOPS, st.lists(st.integers(0, 100)))
def test_finds_the_same_as_a_plain_search(text: str, stops: list[str], cuts: list[int]) -> None:
    finder = StopStringFinder(stops)
    seen = 0
    for piece in cut(text, cuts):
        match = finder.feed(piece)
        if match is not None:
            assert (seen + match.end, match.stop) == first_match(text, stops)
            return
        seen += len(piece)
        assert finder.num_held == held_back(text[:seen], stops)
    assert first_match(text, stops) is None


def test_continues_after_an_ignored_match() -> None:
    finder = StopStringFinder(["aba"])
    assert finder.feed("xabab") == StopMatch("aba", 4)
    assert finder.num_held == 2  # the "ab" of the match may begin the next one
    assert finder.feed("a") == StopMatch("aba", 1)
