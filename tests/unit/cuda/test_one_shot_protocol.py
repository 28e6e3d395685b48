"""The protocol of small all-reduces, over every interleaving of small groups.

A step of the model is one access to memory that others see: a word of a chunk, a count. Steps of a
rank are in its program's order, as release and acquire keep those that matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

WORDS = 2
"""Of a chunk: ranks may meet half of one."""


@dataclass(frozen=True)
class State:
    """All memory, and where the ranks are.

    Args:
        at: by rank, steps behind it.
        halves: by rank and half, who wrote each word of it in which call.
        arrivals: by rank.
    """

    at: tuple[int, ...]
    halves: tuple[tuple[tuple[int, ...], ...], ...]
    arrivals: tuple[int, ...]


@dataclass(frozen=True)
class Protocol:
    """What ranks do.

    Args:
        ranks: how many.
        calls: after which they end.
        halves: for data.
        early: how many arrivals too few a rank is content with.
    """

    ranks: int
    calls: int
    halves: int = 2
    early: int = 0

    @property
    def steps_per_call(self) -> int:
        """Words written, arrivals told, one wait, words read."""
        return WORDS + self.ranks + 1 + WORDS * self.ranks

    def start(self) -> State:
        """Zeroed memory."""
        chunk = (0,) * WORDS
        return State((0,) * self.ranks, (((chunk,) * self.halves),) * self.ranks, (0,) * self.ranks)

    def advance(self, state: State, rank: int) -> State | None:
        """The state after a rank's next step; None if it waits or is through.

        Raises:
            AssertionError: it reads what is not the word of its call.
        """
        number, step = divmod(state.at[rank], self.steps_per_call)
        number, half = number + 1, (number + 1) % self.halves
        if number > self.calls:
            return None
        moved = replace(state, at=_with(state.at, rank, state.at[rank] + 1))
        if step < WORDS:
            chunk = _with(state.halves[rank][half], step, number)
            own = _with(state.halves[rank], half, chunk)
            return replace(moved, halves=_with(state.halves, rank, own))
        step -= WORDS
        if step < self.ranks:
            told = _with(state.arrivals, step, state.arrivals[step] + 1)
            return replace(moved, arrivals=told)
        step -= self.ranks
        if step == 0:
            passes = state.arrivals[rank] >= number * self.ranks - self.early
            return moved if passes else None
        other, word = divmod(step - 1, WORDS)
        assert state.halves[other][half][word] == number, "a word of another call is read"
        return moved


def _with(values: tuple, index: int, value: object) -> tuple:  # type: ignore[type-arg]  # any
    return (*values[:index], value, *values[index + 1 :])


def reachable(protocol: Protocol) -> Iterator[State]:
    """Every state, once."""
    start = protocol.start()
    seen, left = {start}, [start]
    while left:
        state = left.pop()
        yield state
        for rank in range(protocol.ranks):
            after = protocol.advance(state, rank)
            if after is not None and after not in seen:
                seen.add(after)
                left.append(after)


@pytest.mark.parametrize(("ranks", "calls"), [(2, 5), (3, 3), (4, 2)])
def test_every_rank_reads_what_its_call_wrote_and_none_is_stuck(ranks: int, calls: int) -> None:
    protocol = Protocol(ranks, calls)
    last = protocol.steps_per_call * calls
    ends = [
        state
        for state in reachable(protocol)
        if all(protocol.advance(state, rank) is None for rank in range(ranks))
    ]
    assert [state.at for state in ends] == [(last,) * ranks]


@pytest.mark.parametrize("broken", [{"halves": 1}, {"early": 1}], ids=["one half", "not all wait"])
def test_less_would_not_do(broken: dict[str, int]) -> None:
    with pytest.raises(AssertionError, match="a word of another call is read"):
        list(reachable(Protocol(2, 3, **broken)))
