"""Collectives over NCCL.

A collective is enqueued on the current stream, and does not wait for it: it can be captured in a
graph. Only ``barrier`` waits.
"""

from __future__ import annotations

from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from mooncake_hal.backend import GroupSpec
from mooncake_hal.collectives import GroupCommunicator, ProcessGroup, is_of_one_host
from mooncake_hal.errors import CapabilityError


class NcclCommunicator(GroupCommunicator):
    """One rank of an NCCL group, on the device that is current when it is made.

    Args:
        group, generation: see ``GroupCommunicator``.

    Raises:
        CapabilityError: ranks of one host outnumber its devices, which NCCL refuses.
    """

    def __init__(self, group: GroupSpec, generation: int) -> None:
        count = torch.cuda.device_count()
        if is_of_one_host(group) and group.world_size > count:
            raise CapabilityError(
                f"nccl needs a device for each of {group.world_size} ranks, this host shows {count}"
            )
        super().__init__(group, generation, _join)

    def barrier(self) -> None:
        """See ``Communicator``."""
        self.all_reduce(torch.ones(1, device="cuda"))
        torch.cuda.current_stream().synchronize()


def _join(store: Store, group: GroupSpec) -> ProcessGroup:
    nccl = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timedelta(seconds=group.timeout_s)
    return cast(ProcessGroup, nccl(store, group.rank, group.world_size, options))
