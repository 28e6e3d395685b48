"""Chooses the decode instance with the least KV transfer and decode time within the objective."""

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
"""TBT of an instance without a free batch slot or KV capacity."""


class DecodeView(Enum):
    """Which load of the decode instances decides."""

    NOW = auto()
    """The current load."""
    PREDICTED = auto()
    """The expected load at the end of the prefill."""


@dataclass(frozen=True, slots=True)
class DecodeChoice:
    """Where a request decodes.

    Args:
        slot: slot of the decode instance.
        tbt: expected seconds per token there; ``FULL`` if it has no capacity.
        tail: seconds of KV transfer that remain after the end of the prefill.
        num_sequences: sequences that share the instance.
        num_held: tokens of the prompt that the instance holds already.
    """

    slot: int
    tbt: float
    tail: float
    num_sequences: float
    num_held: int


class DecodeChooser:
    """Chooses the decode instance of least cost, in seconds, among those that meet the objective.

    Args:
        fleet: the instances.
        ledger: the requests bound to decode instances.
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
        """Choose a decode instance; the least bad one if none meets the objective.

        Args:
            request: the request to place.
            match: which instances hold the prompt's chunks; None: no decode instance holds any.
            eta: time at which decoding starts.
            tbt_slo: TBT objective in seconds.
            only: slots that can receive the KV; None: all can.
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
        """The load of the decode instances that decides, for decoding that starts at `eta`."""
        return self._ledger.now() if self._view is DecodeView.NOW else self._ledger.at(eta)

    def tbt(self, load: DecodeLoad, num_tokens: float) -> Values:
        """TBT on each instance with one more request of `num_tokens`; ``FULL`` without capacity."""
        fleet, slots = self._fleet, self._fleet.decode_slots
        context = load.num_context + num_tokens
        tbt = fleet.step_seconds(slots, load.num_sequences + 1, context)
        has_slot = load.num_sequences < fleet.max_batch[slots]
        has_memory = context <= fleet.kv_tokens[slots]
        return np.where(has_slot & has_memory, tbt, FULL)

    def _tail_seconds(self, moved: Values) -> Values:
        """Seconds to transfer the last layer's KV, which is sent after the prefill has ended."""
        fleet = self._fleet
        moved_bytes = moved * fleet.kv_bytes_per_token / fleet.num_layers
        return fleet.links.setup_s + moved_bytes / fleet.links.bytes_per_s[fleet.decode_slots]


def _allowed(slots: Slots, avoid: frozenset[int], only: frozenset[int] | None) -> IsAllowed:
    """Which slots may be chosen: those in `only` but not `avoid`, else those in `only` or all."""
    allowed = np.ones(len(slots), np.bool_)
    if only is not None:
        allowed = np.isin(slots, list(only))
    untried = allowed & np.isin(slots, list(avoid), invert=True)
    if untried.any():
        return untried
    return allowed if allowed.any() else np.ones(len(slots), np.bool_)
