"""Expert balancer: moves experts between ranks by load, between two steps, on all ranks alike."""

from __future__ import annotations

import logging

import torch

from mooncake_engine.models.catalog import Model
from mooncake_engine.models.expert_placement import (
    ExpertRanks,
    imbalance,
    place_experts,
    reduce_moves,
)
from mooncake_engine.models.layers import ParallelContext
from mooncake_engine.scheduling.step_plan import StepPlan

logger = logging.getLogger(__name__)

MIN_GAIN = 0.05
"""The fraction of a layer's imbalance that a new placement must save. A smaller gain is not worth
it: weights are large to move, and the load of the next steps will differ from that of the last."""


class ExpertBalancer:
    """Counts a rank's steps, and every ``interval`` steps places the experts of its layers by the
    load of the last ones.

    All ranks that share experts take part in the same steps, and so place experts at the same step.
    The first of these ranks broadcasts its choice to the others.

    Args:
        model: this rank's part of the model.
        parallel: the model's parallel context, with an ``ep_size`` above 1.
        over: the ranks and groups that the experts are divided over.
        interval: number of steps between two placements.
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
        """Count a step that is about to run, and place experts if that is due."""
        if not (plan.sequences or plan.expert_round):
            return
        self._num_steps += 1
        if self._num_steps > self._interval:
            self._num_steps = 1
            self.place()

    @torch.inference_mode()
    def place(self) -> None:
        """Place experts by their tokens since the last call, in the layers in which that gains
        enough."""
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
        """Choose the expert in each slot of a layer."""
        counts, ranks = self._model.expert_counts[layer], self._over.ranks
        loads = counts.placed_tokens
        slots = reduce_moves(
            place_experts(loads, len(counts.slots), self._over), counts.slots, ranks
        )
        least = imbalance(loads, counts.slots, ranks) * (1 - MIN_GAIN)
        return slots if imbalance(loads, slots, ranks) < least else counts.slots
