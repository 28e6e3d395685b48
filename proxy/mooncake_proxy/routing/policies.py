"""Which instance takes the next step: pure functions over loads, no clock, no sockets.

Load is what the proxy itself has in flight: outstanding prompt tokens (prefill work) and running
requests (decode work). Body bytes would mislead: an image is a million of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from types import MappingProxyType
from typing import NamedTuple, Protocol, TypeVar
from zlib import crc32


class Candidate(Protocol):
    """What policies see of an instance."""

    @property
    def name(self) -> str:
        """Stable identity."""

    @property
    def total_running(self) -> int:
        """Requests in flight there."""

    @property
    def total_prompt_tokens(self) -> int:
        """Their prompt tokens."""

    @property
    def relative_speed(self) -> float:
        """Of its devices, beside others."""


C = TypeVar("C", bound=Candidate)

# A running request counts as this many outstanding prompt tokens: about the cost of one request's
# decode step relative to prefill on a compute-bound device.
TOKENS_PER_RUNNING = 64
# Session affinity is overridden when its choice has this many times the mean load, plus a few.
SESSION_OVERLOAD = 2.0


NOTHING_CACHED: Mapping[str, int] = MappingProxyType({})


class RoutingHint(NamedTuple):
    """What policies see of the request. `cached_tokens`: instance name -> expected prefix hit."""

    prompt_tokens: int = 0
    turn: int = 0
    session: str | None = None
    cached_tokens: Mapping[str, int] = NOTHING_CACHED


Policy = Callable[[Sequence[C], RoutingHint, Random], C]


def load(candidate: Candidate) -> int:
    """Outstanding work in prompt tokens."""
    return candidate.total_prompt_tokens + TOKENS_PER_RUNNING * candidate.total_running


def _least(candidates: Sequence[C], cost: Callable[[C], float], rng: Random) -> C:
    """The cheapest one; equal ones take random turns."""
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
    """One after the other, by the caller's turn counter."""
    return candidates[hint.turn % len(candidates)]


def random_choice(candidates: Sequence[C], hint: RoutingHint, rng: Random) -> C:
    """A random one."""
    return candidates[int(rng.random() * len(candidates))]


def least_loaded(candidates: Sequence[C], hint: RoutingHint, rng: Random) -> C:
    """The first to be through with the request, too, on its devices: an idle CPU is no match for a
    busy GPU."""
    own = max(hint.prompt_tokens, TOKENS_PER_RUNNING)
    return _least(candidates, lambda c: (load(c) + own) / c.relative_speed, rng)


def power_of_two(candidates: Sequence[C], hint: RoutingHint, rng: Random) -> C:
    """The better of two random ones: nearly as good as least loaded, and no herd when several
    proxies use outdated loads (Mitzenmacher 2001)."""
    if len(candidates) <= 2:
        return least_loaded(candidates, hint, rng)
    first = int(rng.random() * len(candidates))
    second = int(rng.random() * (len(candidates) - 1))
    if second >= first:
        second += 1
    return least_loaded((candidates[first], candidates[second]), hint, rng)


def prefix_affinity(candidates: Sequence[C], hint: RoutingHint, rng: Random) -> C:
    """As ``least_loaded``, if the cached prefix needs no prefill: load + prompt - hit.

    A hit is worth exactly the tokens it saves, so a hot prefix spreads by itself as soon as its
    holder has that much more to do than another instance.
    """
    own = max(hint.prompt_tokens, TOKENS_PER_RUNNING)

    def time(candidate: C) -> float:
        hit = min(hint.cached_tokens.get(candidate.name, 0), hint.prompt_tokens)
        return (load(candidate) + own - hit) / candidate.relative_speed

    return _least(candidates, time, rng)


def session_affinity(candidates: Sequence[C], hint: RoutingHint, rng: Random) -> C:
    """The same instance for the same session, by rendezvous hashing: adding or removing one
    instance moves only its own sessions. Overload or no session: least loaded."""
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

# Of those the ones that name one of an instance's data-parallel ranks, too.
RANK_POLICIES: dict[str, Policy] = {  # type: ignore[type-arg]  # as above
    name: POLICIES[name] for name in ("prefix", "session")
}
