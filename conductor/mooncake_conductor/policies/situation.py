"""The input of prefill policies (a request and the fleet's state) and their output."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import numpy as np

from mooncake_conductor.cost.link_calendar import Fetch
from mooncake_conductor.decode_load import DEFAULT_CLASS
from mooncake_conductor.fleet import Fleet, Slots, Values
from mooncake_conductor.index.chunk_index import Counts, PrefixMatches

_TIE_S = 1e-9


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """The properties of a request that routing uses.

    Args:
        request_id: unique among live requests.
        num_tokens: tokens of its prompt.
        keys: keys of its prompt's full chunks, in order.
        num_output_tokens: expected number of output tokens.
        request_class: class that determines its objectives and expected decode duration.
        owner: owner of its reservations: a proxy process.
        avoid: slots on which it has failed; avoided while there are others.
        receivers: maps a prefill slot to the slots that can receive its KV; None: all can.
        decode_slot: decode instance that has reserved blocks for it already; None: none has.
        deadline: time at which it is given up, so that its reservation expires.
    """

    request_id: str
    num_tokens: int
    keys: tuple[int, ...]
    num_output_tokens: float = 256.0
    request_class: str = DEFAULT_CLASS
    owner: str = ""
    avoid: frozenset[int] = frozenset()
    receivers: Callable[[int], frozenset[int]] | None = None
    decode_slot: int | None = None
    deadline: float = math.inf


class Plan(Enum):
    """Where the reused prefix comes from."""

    RECOMPUTE = "recompute"
    LOCAL = "local"
    FETCH = "fetch"
    JOIN = "join"


@dataclass(frozen=True, slots=True)
class PrefillChoice:
    """Where a request is prefilled, and from which reused prefix.

    Args:
        slot: slot of the prefill instance.
        plan: where the reused prefix comes from.
        num_reused: tokens that are not computed again.
        ttft: expected seconds to the first token, composed of the following parts.
        queue: seconds in the prefill queue.
        load: seconds to load the reused prefix.
        compute: seconds of computation.
        fetches: chunks that are read from other instances.
        keeps_copy: whether fetched chunks stay in the instance's cache.
    """

    slot: int
    plan: Plan
    num_reused: int
    ttft: float
    queue: float
    load: float
    compute: float
    fetches: tuple[Fetch, ...] = ()
    keeps_copy: bool = True


@dataclass(slots=True)
class Situation:
    """One request with the state of the fleet and the index. Vectors run over prefill instances.

    Args:
        fleet: the instances.
        request: the request to place.
        match: which instances hold its prefix.
        now: current time.
        rng: breaks ties.
        slots: slots of the prefill instances.
        queue: seconds that a new prefill waits on each.
        own: leading chunks that each holds itself.
        local_load: seconds that each needs to load those into device memory.
    """

    fleet: Fleet
    request: RoutingRequest
    match: PrefixMatches
    now: float
    rng: random.Random
    slots: Slots = field(init=False)
    queue: Values = field(init=False)
    own: Counts = field(init=False)
    local_load: Values = field(init=False)

    def __post_init__(self) -> None:
        self.slots = self.fleet.prefill_slots
        self.queue = self.fleet.queues.seconds(self.slots, self.now)
        self.own = self.match.local[self.slots]
        self.local_load = self._local_load()

    def tokens(self, num_chunks: Counts) -> Values:
        """Tokens that `num_chunks` cached chunks save; a prompt's last token is always computed."""
        held = num_chunks * self.fleet.chunk_tokens
        return np.minimum(held, self.request.num_tokens - 1).astype(np.float64)

    def compute(self, num_reused: Values) -> Values:
        """Seconds of computation; `num_reused` may have one row per plan."""
        return self.fleet.all_prefill_seconds(self.request.num_tokens, num_reused)

    def _local_load(self) -> Values:
        match, slots, fleet = self.match, self.slots, self.fleet
        if match.device is match.local:
            return np.zeros(len(slots))
        on_host = (match.host - match.device)[slots] * fleet.chunk_bytes
        on_disk = (match.local - match.host)[slots] * fleet.chunk_bytes
        return on_host / fleet.host_bytes_per_s[slots] + on_disk / fleet.disk_bytes_per_s[slots]

    def candidates(self) -> Slots:
        """Indices of the instances on which the request has not failed, else of all."""
        untried = np.isin(self.slots, list(self.request.avoid), invert=True)
        return np.flatnonzero(untried if untried.any() else np.ones(len(self.slots), np.bool_))

    def least(self, costs: Values) -> int:
        """Index of the least cost. Ties: the longest prefix, then random."""
        if self.request.avoid:
            left = self.candidates()
            ties = left[costs[left] <= costs[left].min() + _TIE_S]
        else:
            ties = np.flatnonzero(costs <= costs.min() + _TIE_S)
        if len(ties) > 1:
            hinted = self.match.hinted[self.slots][ties]
            ties = ties[hinted == hinted.max()]
        return int(ties[0] if len(ties) == 1 else ties[self.rng.randrange(len(ties))])

    def with_local_prefix(self, index: int) -> PrefillChoice:
        """The choice of an instance with its own cached prefix."""
        slot, num_tokens = int(self.slots[index]), self.request.num_tokens
        reused = min(int(self.own[index]) * self.fleet.chunk_tokens, num_tokens - 1)
        compute = self.fleet.prefill_seconds(slot, num_tokens, reused)
        load, queue = float(self.local_load[index]), float(self.queue[index])
        return PrefillChoice(
            slot,
            Plan.LOCAL if reused else Plan.RECOMPUTE,
            reused,
            behind_queue(queue, load, compute, self.fleet.num_layers),
            queue,
            load,
            compute,
        )


def behind_queue(queue: float, load: float, compute: float, num_layers: int) -> float:
    """Seconds to the first token. The load overlaps with the queue, then with the layers."""
    return max(queue + compute, load + compute / num_layers)


class PrefillPolicy(Protocol):
    """Chooses prefill instances. One object per conductor; it may be stateful."""

    def choose(self, situation: Situation) -> PrefillChoice:
        """Choose where to prefill. There is at least one prefill instance."""
        ...
