"""Collectives over HCCL.

A collective is enqueued on the current stream, and does not wait for it: it can be captured in a
graph. Only ``barrier`` waits.
"""

from __future__ import annotations

from datetime import timedelta
from typing import cast

import torch
import torch_npu
from torch._C._distributed_c10d import Store

from mooncake_hal.backend import GroupSpec
from mooncake_hal.collectives import GroupCommunicator, ProcessGroup, is_of_one_host
from mooncake_hal.errors import CapabilityError
from mooncake_hal_ascend.runtime import npu


class HcclCommunicator(GroupCommunicator):
    """One rank of an HCCL group, on the device that is current when it is made.

    Args:
        group, generation: see ``GroupCommunicator``.

    Raises:
        CapabilityError: ranks of one host outnumber its devices, which HCCL refuses.
    """

    def __init__(self, group: GroupSpec, generation: int) -> None:
        count = npu.device_count()
        if is_of_one_host(group) and group.world_size > count:
            raise CapabilityError(
                f"hccl needs a device for each of {group.world_size} ranks, this host shows {count}"
            )
        super().__init__(group, generation, _join)

    def barrier(self) -> None:
        """See ``Communicator``."""
        self.all_reduce(torch.ones(1, device="npu"))
        npu.current_stream().synchronize()


def _join(store: Store, group: GroupSpec) -> ProcessGroup:
    hccl = torch_npu._C._distributed_c10d.ProcessGroupHCCL
    options = hccl.Options()
    options._timeout = timedelta(seconds=group.timeout_s)
    return cast(ProcessGroup, hccl(store, group.rank, group.world_size, options))
