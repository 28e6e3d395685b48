"""Where a rank stands among those of its instance: a pipeline of tensor-parallel groups."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mooncake_hal.backend import Communicator
from mooncake_hal.kv.geometry import KVGeometry, KVShard, shard_of


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Ranks are counted stage after stage, and within a stage by tensor-parallel rank.

    Args:
        rank: which one, of ``tp_size * pp_size``.
        tp_size: ranks of a stage.
        pp_size: stages.
    """

    rank: int = 0
    tp_size: int = 1
    pp_size: int = 1

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
    def is_speaker(self) -> bool:
        """Whether it is the one of those that sample who tells what they did."""
        return self.is_last_stage and self.tp_rank == 0

    def shard(self, geometry: KVGeometry) -> KVShard:
        """The KV that it holds; raises PlanError if there are more stages than layers."""
        return shard_of(geometry, self.tp_size, self.tp_rank, self.pp_size, self.stage)


@dataclass(frozen=True, slots=True)
class RankGroups:
    """A rank's place, and the groups that it belongs to.

    Args:
        place: where it stands.
        stage: all ranks of its stage; None for a rank alone.
        pipeline: the ranks of all stages that have its tensor-parallel rank; None if there is one
            stage.
    """

    place: RankPlace = RankPlace()
    stage: Communicator | None = None
    pipeline: Communicator | None = None

    def least(self, count: int, device: torch.device) -> int:
        """The smallest of all ranks' counts; every rank calls it."""
        for group in (self.stage, self.pipeline):
            if group is not None:
                mine = torch.tensor([count], dtype=torch.int64, device=device)
                count = int(group.all_gather(mine).min())
        return count

    def drain(self) -> None:
        """Wait until every other stage has what this one gave it; every rank calls it."""
        if self.pipeline is not None:
            self.pipeline.barrier()

    def close(self) -> None:
        """Leave them. Idempotent."""
        for group in (self.stage, self.pipeline):
            if group is not None:
                group.close()
