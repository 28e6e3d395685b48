"""Model checking of the one-shot all-reduce protocol, over every interleaving of small groups.

A step of the model is one access to shared memory: a word of a chunk, or a counter. Steps of a rank
are in program order, because release and acquire preserve the relevant ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

WORDS = 2
"""Words of a chunk: two, so that a rank may see half of a chunk written."""


@dataclass(frozen=True)
class State:
    """The shared memory, and the progress of the ranks.

    Args:
        at: by rank, the number of steps taken.
        halves: by rank and half, the call that wrote each word.
        arrivals: by rank, the arrivals counted.
    """

    at: tuple[int, ...]
    halves: tuple[tuple[tuple[int, ...], ...], ...]
    arrivals: tuple[int, ...]


@dataclass(frozen=True)
class Protocol:
    """The program of the ranks.

    Args:
        ranks: the number of ranks.
        calls: the number of all-reduces of each rank.
        halves: the number of data buffers used in turn.
        early: by how many arrivals a rank stops waiting too early.
    """

    ranks: int
    calls: int
    halves: int = 2
    early: int = 0

    @property
    def steps_per_call(self) -> int:
        """Words written, arrivals signalled, one wait, words read."""
        return WORDS + self.ranks + 1 + WORDS * self.ranks

    def start(self) -> State:
        """Return the initial state, with zeroed memory."""
        chunk = (0,) * WORDS
        return State((0,) * self.ranks, (((chunk,) * self.halves),) * self.ranks, (0,) * self.ranks)

    def advance(self, state: State, rank: int) -> State | None:
        """Return the state after a rank's next step; None if the rank waits or has finished.

        Raises:
            AssertionError: The rank reads a word of another call.
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
            arrivals = _with(state.arrivals, step, state.arrivals[step] + 1)
            return replace(moved, arrivals=arrivals)
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
    """Yield every reachable state once."""
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
def test_every_rank_reads_its_calls_words_and_none_deadlocks(ranks: int, calls: int) -> None:
    protocol = Protocol(ranks, calls)
    last = protocol.steps_per_call * calls
    ends = [
        state
        for state in reachable(protocol)
        if all(protocol.advance(state, rank) is None for rank in range(ranks))
    ]
    assert [state.at for state in ends] == [(last,) * ranks]


@pytest.mark.parametrize("broken", [{"halves": 1}, {"early": 1}], ids=["one half", "early wait"])
def test_weaker_protocols_read_words_of_another_call(broken: dict[str, int]) -> None:
    with pytest.raises(AssertionError, match="a word of another call is read"):
        list(reachable(Protocol(2, 3, **broken)))
