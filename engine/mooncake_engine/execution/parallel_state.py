"""A rank's place in its instance: its number, its communication groups, its pipeline stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mooncake_engine.config import EngineConfig
from mooncake_engine.models.catalog import Model
from mooncake_engine.models.layers import ParallelContext
from mooncake_engine.models.parallel_context import ForwardContext
from mooncake_hal.backend import Communicator
from mooncake_hal.fused_experts import FusedExperts
from mooncake_hal.kv.geometry import KVGeometry, KVShard, shard_of


@dataclass(frozen=True, slots=True)
class RankInfo:
    """The number of a rank, and its place in the parallel layout.

    Ranks are numbered by data-parallel rank, then by stage, then by tensor-parallel rank.

    Args:
        rank: number within its data-parallel rank, below ``tp_size * pp_size``.
        tp_size: number of ranks per stage.
        pp_size: number of pipeline stages.
        dp_rank: its data-parallel rank, below ``dp_size``.
        dp_size: number of data-parallel ranks.
    """

    rank: int = 0
    tp_size: int = 1
    pp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1

    @classmethod
    def all_of(cls, config: EngineConfig) -> list[RankInfo]:
        """All ranks of an instance, in order."""
        return [
            cls(rank, config.tp_size, config.pp_size, dp_rank, config.dp_size)
            for dp_rank in range(config.dp_size)
            for rank in range(config.num_ranks)
        ]

    @property
    def number(self) -> int:
        """Its number among all ranks of the instance."""
        return self.dp_rank * self.tp_size * self.pp_size + self.rank

    @property
    def expert_rank(self) -> int:
        """Its number among the ranks that the experts of its stage are divided over."""
        return self.dp_rank * self.tp_size + self.tp_rank

    @property
    def stage_name(self) -> str:
        """Name of the group of its stage."""
        return f"dp-{self.dp_rank}-stage-{self.stage}"

    @property
    def pipeline_name(self) -> str:
        """Name of the group of all stages' ranks with its tensor-parallel rank."""
        return f"dp-{self.dp_rank}-pipeline-{self.tp_rank}"

    @property
    def experts_name(self) -> str:
        """Name of the group of its stage's ranks in all data-parallel ranks."""
        return f"experts-{self.stage}"

    @property
    def group_names(self) -> tuple[str, str, str]:
        """Names of all groups that it may belong to."""
        return self.stage_name, self.pipeline_name, self.experts_name

    @property
    def stage(self) -> int:
        """Its pipeline stage."""
        return self.rank // self.tp_size

    @property
    def tp_rank(self) -> int:
        """Its rank within the stage."""
        return self.rank % self.tp_size

    @property
    def is_last_stage(self) -> bool:
        """Whether it is in the last stage, which samples."""
        return self.stage == self.pp_size - 1

    @property
    def is_driver(self) -> bool:
        """Whether it is the driver rank: the rank of the last stage that reports step results."""
        return self.is_last_stage and self.tp_rank == 0

    def shard(self, geometry: KVGeometry) -> KVShard:
        """The part of a model's KV that it holds; raises PlanError if there are more stages than
        layers."""
        return shard_of(geometry, self.tp_size, self.tp_rank, self.pp_size, self.stage)


@dataclass(frozen=True, slots=True)
class ParallelGroups:
    """The communication groups that a rank belongs to.

    Args:
        info: the rank's number and place.
        stage: all ranks of its stage; None if it is the only one.
        pipeline: the ranks of all stages that have its tensor-parallel rank; None if there is one
            stage.
        experts: the ranks of its stage in all data-parallel ranks; None if these share no experts.
        fused_experts: the ranks that experts are divided over, as a group of the backend's fused
            ops; None if the backend has no fused ops for them.
    """

    info: RankInfo = RankInfo()
    stage: Communicator | None = None
    pipeline: Communicator | None = None
    experts: Communicator | None = None
    fused_experts: FusedExperts | None = None

    @property
    def all(self) -> tuple[Communicator, ...]:
        """The groups that are not None."""
        groups = (self.stage, self.pipeline, self.experts)
        return tuple(group for group in groups if group is not None)

    def least(self, count: int, device: torch.device) -> int:
        """The minimum of all ranks' counts. A collective: every rank must call it."""
        for group in self.all:
            mine = torch.tensor([count], dtype=torch.int64, device=device)
            count = int(group.all_gather(mine).min())
        return count

    def drain(self) -> None:
        """Wait until every other stage has received what this one sent. A collective: every rank
        must call it."""
        if self.pipeline is not None:
            self.pipeline.barrier()

    def close(self) -> None:
        """Leave all groups. Idempotent."""
        if self.fused_experts is not None:
            self.fused_experts.close()
        for group in self.all:
            group.close()


class StageRunner(Protocol):
    """Runs a rank's part of a model. Implemented by ``PipelineStage`` and by graph runners."""

    def forward(
        self, token_ids: Tensor, positions: Tensor, context: ForwardContext
    ) -> Tensor | None:
        """Run the tokens of a step.

        Args:
            token_ids: [tokens] int64; only the first stage uses the values.
            positions: [tokens] int64.
            context: the attention batch, the KV and hooks of the step.

        Returns:
            Hidden rows, [tokens, hidden], on the last stage; None on the others.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden rows, [rows, hidden], to logits, [rows, vocab]. Last stage only."""
        ...


class PipelineStage:
    """Runs one pipeline stage: receives the previous stage's activations, and sends its own on.

    Every rank of a stage has the complete hidden states of a step, and sends them to the rank with
    the same tensor-parallel rank in the next stage.

    Args:
        model: this rank's part of the model, loaded and packed.
        parallel: the parallel context of that part.
        hidden_size: hidden size of the model.
        pipeline: the ranks of all stages with this rank's tensor-parallel rank; None if there is
            one stage.
    """

    def __init__(
        self,
        model: Model,
        parallel: ParallelContext,
        hidden_size: int,
        pipeline: Communicator | None = None,
    ) -> None:
        self._model = model
        self._parallel = parallel
        self._hidden_size = hidden_size
        self._pipeline = pipeline
        self._stage, self._last = (pipeline.rank, pipeline.world_size - 1) if pipeline else (0, 0)

    def forward(
        self, token_ids: Tensor, positions: Tensor, context: ForwardContext
    ) -> Tensor | None:
        if self._pipeline is None:
            return self._model.forward(token_ids, positions, context)
        entry = token_ids
        if self._stage > 0:
            room = self._parallel.empty(2, len(token_ids), self._hidden_size)
            entry = self._pipeline.recv(room, self._stage - 1)
        leaving = self._model.forward(entry, positions, context)
        if self._stage == self._last:
            return leaving
        self._pipeline.send(leaving, self._stage + 1)
        return None

    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)
