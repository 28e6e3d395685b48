"""The proxy's own routing policies: pure functions that choose an instance by load.

Load is what this proxy has in flight on the instance: outstanding prompt tokens (prefill work) and
running requests (decode work). Body bytes would be misleading: an image has a million of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from types import MappingProxyType
from typing import NamedTuple, Protocol, TypeVar
from zlib import crc32


class Candidate(Protocol):
    """The properties of an instance that policies use."""

    @property
    def name(self) -> str:
        """Unique and stable name."""

    @property
    def total_running(self) -> int:
        """Requests in flight there."""

    @property
    def total_prompt_tokens(self) -> int:
        """Prompt tokens of the requests in flight there."""

    @property
    def relative_speed(self) -> float:
        """Speed of its devices relative to those of other instances."""


C = TypeVar("C", bound=Candidate)

# A running request counts as this many outstanding prompt tokens: about what its decode step costs
# relative to prefill on a compute-bound device.
TOKENS_PER_RUNNING = 64
# Session affinity is overridden if its choice has more than this multiple of the mean load, plus
# the load of 8 running requests.
SESSION_OVERLOAD = 2.0


NOTHING_CACHED: Mapping[str, int] = MappingProxyType({})


class RoutingHint(NamedTuple):
    """The properties of a request that policies use.

    `cached_tokens` maps instance names to the expected prefix hit; `turn` is the round-robin
    counter.
    """

    prompt_tokens: int = 0
    turn: int = 0
    session: str | None = None
    cached_tokens: Mapping[str, int] = NOTHING_CACHED


Policy = Callable[[Sequence[C], RoutingHint, Random], C]


def load(candidate: Candidate) -> int:
    """Outstanding work in prompt tokens."""
    return candidate.total_prompt_tokens + TOKENS_PER_RUNNING * candidate.total_running


def _least(candidates: Sequence[C], cost: Callable[[C], float], rng: Random) -> C:
    """The candidate of least cost; ties are broken randomly."""
    if len(candidates) == 1:
        return candidates[0]
    best: list[C] = []
    lowest = None
    for candidate in candidates:
        value = cost(candidate)
        if lowest is None or value < lowest:
            lowest, best = value, [candidate]
        elif value == lowest:
            best.append(candidate)
    return best[0] if len(best) == 1 else best[int(rng.random() * len(best))]


def round_robin(candidates: Sequence[C], hint: RoutingHint, rng: Random) -> C:
    """Choose the candidates in turn, by the caller's counter."""
    return candidates[hint.turn % len(candidates)]


def random_choice(candidates: Sequence[C], hint: RoutingHint, rng: Random) -> C:
    """Choose a random candidate."""
    return candidates[int(rng.random() * len(candidates))]


def least_loaded(candidates: Sequence[C], hint: RoutingHint, rng: Random) -> C:
    """Choose the candidate that would finish its load and this request first.

    Load is divided by device speed: an idle CPU is slower than a busy GPU.
    """
    own = max(hint.prompt_tokens, TOKENS_PER_RUNNING)
    return _least(candidates, lambda c: (load(c) + own) / c.relative_speed, rng)


def power_of_two(candidates: Sequence[C], hint: RoutingHint, rng: Random) -> C:
    """Choose the less loaded of two random candidates.

    Nearly as good as least loaded, and several proxies with stale loads don't all choose the same
    instance (Mitzenmacher 2001).
    """
    if len(candidates) <= 2:
        return least_loaded(candidates, hint, rng)
    first = int(rng.random() * len(candidates))
    second = int(rng.random() * (len(candidates) - 1))
    if second >= first:
        second += 1
    return least_loaded((candidates[first], candidates[second]), hint, rng)


def prefix_affinity(candidates: Sequence[C], hint: RoutingHint, rng: Random) -> C:
    """As `least_loaded`, without the prefill of the cached prefix: load + prompt - hit.

    A hit is worth exactly the tokens that it saves, so a hot prefix spreads to another instance as
    soon as its holder has that much more load.
    """
    own = max(hint.prompt_tokens, TOKENS_PER_RUNNING)

    def time(candidate: C) -> float:
        hit = min(hint.cached_tokens.get(candidate.name, 0), hint.prompt_tokens)
        return (load(candidate) + own - hit) / candidate.relative_speed

    return _least(candidates, time, rng)


def session_affinity(candidates: Sequence[C], hint: RoutingHint, rng: Random) -> C:
    """Choose the same instance for the same session, by rendezvous hashing.

    Adding or removing an instance moves only its own sessions. Falls back to `least_loaded` if the
    instance is overloaded or the request has no session.
    """
    if hint.session is None:
        return least_loaded(candidates, hint, rng)
    key = hint.session.encode("utf-8", "replace")
    chosen = max(candidates, key=lambda c: (crc32(key, crc32(c.name.encode())), c.name))
    mean = sum(load(c) for c in candidates) / len(candidates)
    if load(chosen) > SESSION_OVERLOAD * mean + 8 * TOKENS_PER_RUNNING:
        return least_loaded(candidates, hint, rng)
    return chosen


POLICIES: dict[str, Policy] = {  # type: ignore[type-arg]  # each is generic in its candidates
    "round-robin": round_robin,
    "random": random_choice,
    "least-loaded": least_loaded,
    "power-of-two": power_of_two,
    "prefix": prefix_affinity,
    "session": session_affinity,
}

# Policies that also choose one of an instance's data-parallel ranks.
RANK_POLICIES: dict[str, Policy] = {  # type: ignore[type-arg]  # as above
    name: POLICIES[name] for name in ("prefix", "session")
}
