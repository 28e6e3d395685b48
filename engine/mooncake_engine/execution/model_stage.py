"""A model's share on one rank, between the pipeline stages before and after it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from mooncake_engine.models.catalog import Model
from mooncake_engine.models.context import ForwardContext
from mooncake_engine.models.layers import Placement
from mooncake_hal.backend import Communicator


class Stage(Protocol):
    """What runs a rank's share of a model."""

    def forward(
        self, token_ids: Tensor, positions: Tensor, context: ForwardContext
    ) -> Tensor | None:
        """Run a step's tokens; hidden rows [tokens, hidden] on the last stage, else None.

        Args:
            token_ids: [tokens] int64; only the first stage looks at their values.
            positions: [tokens] int64.
            context: where their KV is.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] to [rows, vocab] float32; on the last stage."""
        ...


class ModelStage:
    """Takes what the stage before computed, and hands on what this one does.

    Every rank of a stage has the whole of a step's hidden states; each gives them to the rank in
    its place of the next stage.

    Args:
        model: this rank's share, loaded and packed.
        placement: where it is.
        hidden_size: of the model.
        pipeline: the ranks of all stages in this one's place; None for a model of one stage.
    """

    def __init__(
        self,
        model: Model,
        placement: Placement,
        hidden_size: int,
        pipeline: Communicator | None = None,
    ) -> None:
        self._model = model
        self._placement = placement
        self._hidden_size = hidden_size
        self._pipeline = pipeline
        self._stage, self._last = (pipeline.rank, pipeline.world_size - 1) if pipeline else (0, 0)

    def forward(
        self, token_ids: Tensor, positions: Tensor, context: ForwardContext
    ) -> Tensor | None:
        """See ``Stage``."""
        if self._pipeline is None:
            return self._model.forward(token_ids, positions, context)
        entry = token_ids
        if self._stage > 0:
            room = self._placement.empty(2, len(token_ids), self._hidden_size)
            entry = self._pipeline.recv(room, self._stage - 1)
        leaving = self._model.forward(entry, positions, context)
        if self._stage == self._last:
            return leaving
        self._pipeline.send(leaving, self._stage + 1)
        return None

    def logits(self, hidden: Tensor) -> Tensor:
        """See ``Stage``."""
        return self._model.logits(hidden)
