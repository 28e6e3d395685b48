"""Experts placed anew while the instance runs: all ranks agree on it between two steps."""

from __future__ import annotations

import logging

import torch

from mooncake_engine.models.catalog import Model
from mooncake_engine.models.expert_placement import ExpertRanks, imbalance, place_experts, settle
from mooncake_engine.models.layers import ParallelContext
from mooncake_engine.scheduling.step_plan import StepPlan

logger = logging.getLogger(__name__)

LEAST_GAIN = 0.05
"""Of the imbalance of a layer, by which a new placement has to lower it: weights are large, and
loads of the next steps are not those of the last ones."""


class ExpertBalancer:
    """Counts a rank's steps, and places the experts of its layers by what these got in the last.

    Every rank that experts are divided over runs the same steps, or serves in them, and so comes to
    the same step. The first one's choice is the others'.

    Args:
        model: this rank's share.
        parallel: where it lives; ``ep_size`` is above 1.
        over: what the experts are divided over.
        interval: steps between two placements.
    """

    def __init__(
        self, model: Model, parallel: ParallelContext, over: ExpertRanks, interval: int
    ) -> None:
        group = parallel.expert_communicator or parallel.communicator
        assert group is not None, "experts are divided over several ranks"
        self._model = model
        self._group = group
        self._device = parallel.device
        self._over = over
        self._interval = interval
        self._num_steps = 0
        self.num_placements = 0

    def before(self, plan: StepPlan) -> None:
        """A step is about to run."""
        if not (plan.sequences or plan.expert_round):
            return
        self._num_steps += 1
        if self._num_steps > self._interval:
            self._num_steps = 1
            self.place()

    @torch.inference_mode()
    def place(self) -> None:
        """Place experts by their tokens since the last time, where it is worth moving them."""
        counts = self._model.expert_counts
        wanted = [self._choose(layer) for layer in counts]
        agreed = torch.tensor(wanted, dtype=torch.int64, device=self._device)
        chosen = dict(zip(counts, self._group.broadcast(agreed, 0).tolist(), strict=True))
        changed = {
            layer: tuple(slots)
            for layer, slots in chosen.items()
            if tuple(slots) != counts[layer].slots
        }
        self._model.move_experts(changed)
        self.num_placements += bool(changed)
        logger.debug("experts of %d of %d layers were placed anew", len(changed), len(chosen))

    def _choose(self, layer: int) -> tuple[int, ...]:
        """The expert in each slot of a layer."""
        counts, ranks = self._model.expert_counts[layer], self._over.ranks
        loads = counts.placed_tokens
        slots = settle(place_experts(loads, len(counts.slots), self._over), counts.slots, ranks)
        least = imbalance(loads, counts.slots, ranks) * (1 - LEAST_GAIN)
        return slots if imbalance(loads, slots, ranks) < least else counts.slots
