"""Collectives over NCCL, in process groups of their own: nothing global is initialised.

A collective is enqueued on the current stream, and does not wait for it: it can be captured in a
graph. Only ``barrier`` waits.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol, cast
from urllib.parse import urlparse

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from mooncake_hal.backend import GroupSpec
from mooncake_hal.errors import CapabilityError, DeviceError

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class _Nccl(Protocol):
    """What torch's NCCL group has."""

    def allreduce(self, tensors: list[Tensor]) -> dist.Work: ...

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> dist.Work: ...

    def broadcast(self, tensor: Tensor, root: int) -> dist.Work: ...


class NcclCommunicator:
    """One rank of an NCCL group, on the device that is current when it is made.

    Args:
        group: where this process stands.
        generation: how many groups this process has joined at the same rendezvous before; keeps
            their keys apart in the shared store. Ranks must join in the same order.

    Raises:
        CapabilityError: ranks of one host outnumber its devices, which NCCL refuses.
        DeviceError: the group does not form in time.
    """

    def __init__(self, group: GroupSpec, generation: int) -> None:
        count = torch.cuda.device_count()
        if urlparse(group.init_method).hostname in _LOOPBACK and group.world_size > count:
            raise CapabilityError(
                f"nccl needs a device for each of {group.world_size} ranks, this host shows {count}"
            )
        self._group = group
        try:
            self._joined = [_join(group, generation)]
        except (RuntimeError, ValueError, OSError) as exc:
            raise DeviceError(
                f"rank {group.rank} of {group.world_size} could not join {group.init_method} "
                f"within {group.timeout_s:g} s: {exc}"
            ) from exc
        self._leave = weakref.finalize(self, self._joined.clear)

    @property
    def rank(self) -> int:
        """See ``Communicator``."""
        return self._group.rank

    @property
    def world_size(self) -> int:
        """See ``Communicator``."""
        return self._group.world_size

    def all_reduce(self, x: Tensor) -> Tensor:
        """See ``Communicator``."""
        dense = x.contiguous()
        self._enqueue("all_reduce", lambda nccl: nccl.allreduce([dense]))
        return x if dense is x else x.copy_(dense)

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """See ``Communicator``."""
        dense = x.contiguous()
        parts = [torch.empty_like(dense) for _ in range(self.world_size)]
        self._enqueue("all_gather", lambda nccl: nccl.allgather([parts], [dense]))
        return torch.cat(parts, dim=dim)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """See ``Communicator``."""
        dense = x.contiguous()
        self._enqueue("broadcast", lambda nccl: nccl.broadcast(dense, source))
        return x if dense is x else x.copy_(dense)

    def barrier(self) -> None:
        """See ``Communicator``."""
        self.all_reduce(torch.ones(1, device="cuda"))
        torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        """See ``Communicator``."""
        self._leave()

    def _enqueue(self, name: str, start: Callable[[_Nccl], dist.Work]) -> None:
        if not self._joined:
            raise DeviceError(f"{name}: rank {self.rank} has left the group")
        try:
            start(self._joined[0]).wait()  # makes the current stream wait, not this thread
        except RuntimeError as exc:
            raise DeviceError(
                f"{name}: rank {self.rank} of {self.world_size} lost the group: {exc}"
            ) from exc


def _join(group: GroupSpec, generation: int) -> _Nccl:
    timeout = timedelta(seconds=group.timeout_s)
    shared, _, _ = next(
        rendezvous(group.init_method, group.rank, group.world_size, timeout=timeout)
    )
    shared.set_timeout(timeout)
    store = torch._C._distributed_c10d.PrefixStore(f"mooncake-hal/{generation}", shared)
    nccl = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout
    return cast(_Nccl, nccl(store, group.rank, group.world_size, options))
