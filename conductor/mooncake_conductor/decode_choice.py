"""Which instance decodes: seconds of decoding and of the KV's way there, within the objective."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from mooncake_conductor.decode_load import DecodeLedger, DecodeLoad
from mooncake_conductor.fleet import Fleet, Slots, Values
from mooncake_conductor.index.chunk_index import PrefixMatches
from mooncake_conductor.policies.situation import RoutingRequest

IsAllowed = NDArray[np.bool_]
_TIE_S = 1e-9
FULL = float("inf")
"""The TBT of an instance that has no room at all."""


class DecodeView(Enum):
    """Which load decides."""

    NOW = auto()
    """What decodes at the moment."""
    PREDICTED = auto()
    """What will decode when the prefill ends."""


@dataclass(frozen=True, slots=True)
class DecodeChoice:
    """Where a request decodes.

    Args:
        slot: of the decode instance.
        tbt: expected seconds per token there; ``FULL`` if there is no room.
        tail: seconds that its KV still needs once the prefill has ended.
        num_sequences: that it will share the instance with.
        num_held: tokens of its prompt that the instance has already.
    """

    slot: int
    tbt: float
    tail: float
    num_sequences: float
    num_held: int


class DecodeChooser:
    """Takes the decode instance with the fewest seconds among those that meet the objective.

    Args:
        fleet: the instances.
        ledger: who decodes where.
        view: which load decides.
        rng: breaks ties.
    """

    def __init__(
        self, fleet: Fleet, ledger: DecodeLedger, view: DecodeView, rng: random.Random
    ) -> None:
        self._fleet = fleet
        self._ledger = ledger
        self._view = view
        self._rng = rng

    def choose(
        self,
        request: RoutingRequest,
        match: PrefixMatches | None,
        eta: float,
        tbt_slo: float,
        only: frozenset[int] | None = None,
    ) -> DecodeChoice:
        """Where it decodes from ``eta`` on; the least bad instance if none meets the objective.

        ``only`` has the slots that can take the KV; None if all can.
        """
        fleet = self._fleet
        slots = fleet.decode_slots
        load = self.load(eta)
        held = np.zeros(len(slots)) if match is None else match.local[slots] * fleet.chunk_tokens
        held = np.minimum(held, request.num_tokens).astype(np.float64)
        tail = self._tail_seconds(request.num_tokens - held)
        tbt = self.tbt(load, request.num_tokens + request.num_output_tokens / 2)
        seconds = tail + request.num_output_tokens * tbt
        cost = np.where(tbt <= tbt_slo, seconds, FULL)
        drains = fleet.is_draining[slots]
        is_limited = only is not None or bool(request.avoid) or bool(drains.any())
        if is_limited:
            is_allowed = _allowed(slots, request.avoid, only) & ~drains
            cost = np.where(is_allowed, cost, FULL)
            tbt = np.where(is_allowed, tbt, FULL)
        if not np.isfinite(cost).any():
            cost = tbt if np.isfinite(tbt).any() else load.num_sequences
            if is_limited:
                cost = np.where(is_allowed, cost, FULL)
        ties = np.flatnonzero(cost <= cost.min() + _TIE_S)
        index = int(ties[self._rng.randrange(len(ties))])
        return DecodeChoice(
            int(slots[index]),
            float(tbt[index]),
            float(tail[index]),
            float(load.num_sequences[index]),
            int(held[index]),
        )

    def load(self, eta: float) -> DecodeLoad:
        """What the view shows."""
        return self._ledger.now() if self._view is DecodeView.NOW else self._ledger.at(eta)

    def tbt(self, load: DecodeLoad, num_tokens: float) -> Values:
        """Seconds per token on each instance with one more request of that many tokens."""
        fleet, slots = self._fleet, self._fleet.decode_slots
        context = load.num_context + num_tokens
        tbt = fleet.step_seconds(slots, load.num_sequences + 1, context)
        has_slot = load.num_sequences < fleet.max_batch[slots]
        has_memory = context <= fleet.kv_tokens[slots]
        return np.where(has_slot & has_memory, tbt, FULL)

    def _tail_seconds(self, moved: Values) -> Values:
        """The last layer's KV, sent when all others are across."""
        fleet = self._fleet
        moved_bytes = moved * fleet.kv_bytes_per_token / fleet.num_layers
        return fleet.links.setup_s + moved_bytes / fleet.links.bytes_per_s[fleet.decode_slots]


def _allowed(slots: Slots, avoid: frozenset[int], only: frozenset[int] | None) -> IsAllowed:
    """Which of these slots may be taken; all of them if none may."""
    allowed = np.ones(len(slots), np.bool_)
    if only is not None:
        allowed = np.isin(slots, list(only))
    untried = allowed & np.isin(slots, list(avoid), invert=True)
    if untried.any():
        return untried
    return allowed if allowed.any() else np.ones(len(slots), np.bool_)
