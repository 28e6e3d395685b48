"""Finding stop strings in text that arrives in pieces, without looking at any character twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string found: it ends after ``end`` characters of the text fed last."""

    stop: str
    end: int


class StopStringFinder:
    """Feeds text to one automaton per stop string (Knuth, Morris and Pratt 1977).

    The first stop string to be complete wins, and of several that end together the longest, so
    the answer does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._automata = [_Automaton(stop) for stop in stops]

    @property
    def num_held(self) -> int:
        """Characters at the text's end that may yet turn out to begin a stop string."""
        return max((automaton.num_matched for automaton in self._automata), default=0)

    def feed(self, text: str) -> StopMatch | None:
        """Read on; the first complete stop string, or None. Not to be fed after a match unless
        the match is to be passed over: every automaton has read all of ``text``."""
        matches = [
            StopMatch(automaton.pattern, end)
            for automaton in self._automata
            if (end := automaton.feed(text)) is not None
        ]
        return min(matches, key=lambda match: (match.end, -len(match.stop)), default=None)


class _Automaton:
    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.num_matched = 0
        self._fallback = _fallback_table(pattern)

    def feed(self, text: str) -> int | None:
        """Number of characters after which the pattern is first complete, or None."""
        first_end = None
        pattern, fallback, matched = self.pattern, self._fallback, self.num_matched
        for position, character in enumerate(text, start=1):
            while matched and pattern[matched] != character:
                matched = fallback[matched - 1]
            if pattern[matched] == character:
                matched += 1
            if matched == len(pattern):
                first_end = position if first_end is None else first_end
                matched = fallback[matched - 1]
        self.num_matched = matched
        return first_end


def _fallback_table(pattern: str) -> list[int]:
    """Per prefix of the pattern, the length of its longest proper suffix that is a prefix too."""
    table = [0] * len(pattern)
    matched = 0
    for position in range(1, len(pattern)):
        while matched and pattern[matched] != pattern[position]:
            matched = table[matched - 1]
        if pattern[matched] == pattern[position]:
            matched += 1
        table[position] = matched
    return table
