"""Collectives over HCCL."""

from __future__ import annotations

from datetime import timedelta
from typing import cast

import torch_npu
from torch._C._distributed_c10d import Store

from mooncake_hal.backend import GroupSpec
from mooncake_hal.collectives import DeviceCommunicator, ProcessGroup
from mooncake_hal_ascend.runtime import npu


class HcclCommunicator(DeviceCommunicator):
    """One rank of an HCCL group; see ``DeviceCommunicator``."""

    def __init__(self, group: GroupSpec, generation: int) -> None:
        super().__init__(group, generation, _join, name="hccl", accelerator=npu)


def _join(store: Store, group: GroupSpec) -> ProcessGroup:
    hccl = torch_npu._C._distributed_c10d.ProcessGroupHCCL
    options = hccl.Options()
    options._timeout = timedelta(seconds=group.timeout_s)
    return cast(ProcessGroup, hccl(store, group.rank, group.world_size, options))
