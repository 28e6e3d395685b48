"""Collectives over gloo."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import cast

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from mooncake_hal.backend import GroupSpec
from mooncake_hal.collectives import GroupCommunicator, ProcessGroup, is_of_one_host
from mooncake_hal_cpu.tape import play


class GlooCommunicator(GroupCommunicator):
    """One rank of a gloo group; see ``GroupCommunicator``."""

    def __init__(self, group: GroupSpec, generation: int) -> None:
        super().__init__(group, generation, _join)

    def _run(self, name: str, start: Callable[[ProcessGroup], dist.Work]) -> None:
        play(super()._run, name, start)


def _join(store: Store, group: GroupSpec) -> ProcessGroup:
    gloo = dist.ProcessGroupGloo
    options = gloo._Options()  # type: ignore[attr-defined]  # absent from torch's stubs
    options._timeout = timedelta(seconds=group.timeout_s)
    # else gloo takes the interface that it finds by host name
    is_local = is_of_one_host(group)
    options._devices = [
        gloo.create_device(hostname="127.0.0.1") if is_local else gloo.create_default_device()
    ]
    return cast(ProcessGroup, gloo(store, group.rank, group.world_size, options))
