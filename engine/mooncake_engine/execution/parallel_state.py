"""The groups of ranks that one rank belongs to."""

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
    """Ranks are counted stage after stage, and within a stage by tensor-parallel rank; all of them
    data-parallel rank after data-parallel rank.

    Args:
        rank: which one of its data-parallel rank's, of ``tp_size * pp_size``.
        tp_size: ranks of a stage.
        pp_size: stages.
        dp_rank: which data-parallel rank it is of, of ``dp_size``.
        dp_size: data-parallel ranks.
    """

    rank: int = 0
    tp_size: int = 1
    pp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1

    @classmethod
    def all_of(cls, config: EngineConfig) -> list[RankInfo]:
        """Those of an instance, in order."""
        return [
            cls(rank, config.tp_size, config.pp_size, dp_rank, config.dp_size)
            for dp_rank in range(config.dp_size)
            for rank in range(config.num_ranks)
        ]

    @property
    def number(self) -> int:
        """Which of all ranks of the instance it is."""
        return self.dp_rank * self.tp_size * self.pp_size + self.rank

    @property
    def expert_rank(self) -> int:
        """Which it is of those that a stage's experts are divided over."""
        return self.dp_rank * self.tp_size + self.tp_rank

    @property
    def stage_name(self) -> str:
        """Of the group of its stage."""
        return f"dp-{self.dp_rank}-stage-{self.stage}"

    @property
    def pipeline_name(self) -> str:
        """Of the group of the ranks of all stages with its tensor-parallel rank."""
        return f"dp-{self.dp_rank}-pipeline-{self.tp_rank}"

    @property
    def experts_name(self) -> str:
        """Of the group of its stage's ranks in all data-parallel ranks."""
        return f"experts-{self.stage}"

    @property
    def group_names(self) -> tuple[str, str, str]:
        """Of all groups that it may belong to."""
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
        """Whether it samples."""
        return self.stage == self.pp_size - 1

    @property
    def is_driver(self) -> bool:
        """Whether it is the one of those that sample together who tells what they did."""
        return self.is_last_stage and self.tp_rank == 0

    def shard(self, geometry: KVGeometry) -> KVShard:
        """The KV that it holds; raises PlanError if there are more stages than layers."""
        return shard_of(geometry, self.tp_size, self.tp_rank, self.pp_size, self.stage)


@dataclass(frozen=True, slots=True)
class ParallelGroups:
    """Which rank this is, and the groups that it belongs to.

    Args:
        info: which rank it is.
        stage: all ranks of its stage; None for a rank alone.
        pipeline: the ranks of all stages that have its tensor-parallel rank; None if there is one
            stage.
        experts: the ranks of its stage in all data-parallel ranks; None if these share no experts.
        fused_experts: those that experts are divided over again, in a group that the backend's ops
            have for themselves; None if it has none for them.
    """

    info: RankInfo = RankInfo()
    stage: Communicator | None = None
    pipeline: Communicator | None = None
    experts: Communicator | None = None
    fused_experts: FusedExperts | None = None

    @property
    def all(self) -> tuple[Communicator, ...]:
        """Those that there are."""
        groups = (self.stage, self.pipeline, self.experts)
        return tuple(group for group in groups if group is not None)

    def least(self, count: int, device: torch.device) -> int:
        """The smallest of all ranks' counts; every rank calls it."""
        for group in self.all:
            mine = torch.tensor([count], dtype=torch.int64, device=device)
            count = int(group.all_gather(mine).min())
        return count

    def drain(self) -> None:
        """Wait until every other stage has what this one gave it; every rank calls it."""
        if self.pipeline is not None:
            self.pipeline.barrier()

    def close(self) -> None:
        """Leave them. Idempotent."""
        if self.fused_experts is not None:
            self.fused_experts.close()
        for group in self.all:
            group.close()


class StageRunner(Protocol):
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


class PipelineStage:
    """Takes what the stage before computed, and hands on what this one does.

    Every rank of a stage has the whole of a step's hidden states; each gives them to the rank of
    the same tensor-parallel number in the next stage.

    Args:
        model: this rank's share, loaded and packed.
        parallel: where it is.
        hidden_size: of the model.
        pipeline: the ranks of all stages with this one's tensor-parallel number; None if there is
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
