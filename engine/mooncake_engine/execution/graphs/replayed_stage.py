"""A stage some of whose steps are replayed: captured once per size, then taken by all that fit."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from mooncake_engine.errors import ConfigError
from mooncake_engine.execution.graphs.inputs import TokenInputs
from mooncake_engine.execution.kv_pool import KVPool
from mooncake_engine.execution.model_stage import Stage
from mooncake_engine.models.context import ForwardContext
from mooncake_hal.backend import AttentionBatch, Runtime
from mooncake_hal.errors import CapabilityError

logger = logging.getLogger(__name__)

Captured = TypeVar("Captured")


class ReplayedStage(ABC, Generic[Captured]):
    """A Stage in front of another one, which runs what is not replayed.

    Args:
        stage: the other one.
        pool: KV, which ends with a scratch slot for each token that a step may be short of.
        runtime: captures.
        sizes: tokens per step, rising.
    """

    name: ClassVar[str]
    """What is replayed, for messages."""

    remedy: ClassVar[str]
    """The option that leaves such steps as they are."""

    def __init__(self, stage: Stage, pool: KVPool, runtime: Runtime, sizes: Sequence[int]) -> None:
        self._stage = stage
        self._runtime = runtime
        self._kv = pool.layers
        self._inputs = TokenInputs.of(sizes[-1], pool)
        self._sizes = sizes
        self._captured: dict[int, Captured] = {}

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture all sizes now, the largest first: the others fit into its memory. Without this a
        size is captured when it is first wanted.

        Raises:
            ConfigError: a step can't be captured, for a reason that the backend did not foresee.
        """
        for size in reversed(self._sizes):
            self._of(size)
        if self._captured:
            logger.info("captured %s in sizes %s", self.name, list(self._sizes))

    def forward(
        self, token_ids: Tensor, positions: Tensor, context: ForwardContext
    ) -> Tensor | None:
        """See ``Stage``. What a replay returns is good until the next one."""
        count = len(token_ids)
        size = self._fitting(count) if self._takes(count, context) else None
        if size is not None:
            self._fill(token_ids, positions, context.batch, size)
            captured = self._of(size)
            if captured is not None:
                return self._replay(captured, size, count, context)
        return self._stage.forward(token_ids, positions, context)

    def logits(self, hidden: Tensor) -> Tensor:
        """See ``Stage``."""
        return self._stage.logits(hidden)

    @abstractmethod
    def _takes(self, count: int, context: ForwardContext) -> bool:
        """Whether a step of that many tokens is of the kind that is replayed."""

    def _fill(self, token_ids: Tensor, positions: Tensor, batch: AttentionBatch, size: int) -> None:
        """Bring a step to where the graphs of a size read it."""
        self._inputs.fill(token_ids, positions, batch.slot_mapping, size)

    @abstractmethod
    def _capture(self, size: int) -> Captured:
        """The graphs of a size; raises what ``Runtime.capture`` does."""

    @abstractmethod
    def _replay(self, captured: Captured, size: int, count: int, context: ForwardContext) -> Tensor:
        """Run a step that was filled in; its hidden rows, [count, hidden]."""

    def _fitting(self, count: int) -> int | None:
        return next((size for size in self._sizes if size >= count), None)

    def _of(self, size: int) -> Captured | None:
        """The graphs of a size; None if this model's steps can't be captured here."""
        if size in self._captured or not self._sizes:
            return self._captured.get(size)
        try:
            self._captured[size] = self._capture(size)
        except CapabilityError as exc:
            logger.warning("%s run without graphs: %s", self.name, exc)
            self._sizes = ()
            return None
        except RuntimeError as exc:
            raise ConfigError(
                f"{self.name} can't be captured in size {size}: {exc}; run them without graphs: "
                f"{self.remedy}"
            ) from exc
        return self._captured[size]
