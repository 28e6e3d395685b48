"""Collectives over NCCL."""

from __future__ import annotations

from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from mooncake_hal.backend import GroupSpec
from mooncake_hal.collectives import DeviceCommunicator, ProcessGroup


class NcclCommunicator(DeviceCommunicator):
    """One rank of an NCCL group; see ``DeviceCommunicator``."""

    def __init__(self, group: GroupSpec, generation: int) -> None:
        super().__init__(group, generation, _join, name="nccl", accelerator=torch.cuda)


def _join(store: Store, group: GroupSpec) -> ProcessGroup:
    nccl = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timedelta(seconds=group.timeout_s)
    return cast(ProcessGroup, nccl(store, group.rank, group.world_size, options))
