"""Collectives over gloo, in process groups of their own: nothing global is initialised."""

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
from mooncake_hal.errors import DeviceError

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class _Gloo(Protocol):
    """What torch's gloo group has and its type stubs leave out."""

    def allreduce(self, tensors: list[Tensor]) -> dist.Work: ...

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> dist.Work: ...

    def broadcast(self, tensor: Tensor, root: int) -> dist.Work: ...

    def barrier(self) -> dist.Work: ...


class GlooCommunicator:
    """One rank of a gloo group.

    Args:
        group: where this process stands.
        generation: how many groups this process has joined at the same rendezvous before; keeps
            their keys apart in the shared store. Ranks must join in the same order.
    """

    def __init__(self, group: GroupSpec, generation: int) -> None:
        self._group = group
        try:
            self._joined = [_join(group, generation)]
        except (RuntimeError, ValueError, OSError) as exc:
            raise DeviceError(
                f"rank {group.rank} of {group.world_size} could not join {group.init_method} "
                f"within {group.timeout_s:g} s: {exc}"
            ) from exc
        # a group that outlives the interpreter has threads that nobody joins, and aborts it
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
        self._wait("all_reduce", lambda gloo: gloo.allreduce([dense]))
        return x if dense is x else x.copy_(dense)

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """See ``Communicator``."""
        dense = x.contiguous()
        parts = [torch.empty_like(dense) for _ in range(self.world_size)]
        self._wait("all_gather", lambda gloo: gloo.allgather([parts], [dense]))
        return torch.cat(parts, dim=dim)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """See ``Communicator``."""
        dense = x.contiguous()
        self._wait("broadcast", lambda gloo: gloo.broadcast(dense, source))
        return x if dense is x else x.copy_(dense)

    def barrier(self) -> None:
        """See ``Communicator``."""
        self._wait("barrier", lambda gloo: gloo.barrier())

    def close(self) -> None:
        """See ``Communicator``."""
        self._leave()

    def _wait(self, name: str, start: Callable[[_Gloo], dist.Work]) -> None:
        if not self._joined:
            raise DeviceError(f"{name}: rank {self.rank} has left the group")
        try:
            start(self._joined[0]).wait()
        except RuntimeError as exc:
            raise DeviceError(
                f"{name}: rank {self.rank} of {self.world_size} lost the group, or a rank took "
                f"longer than {self._group.timeout_s:g} s: {exc}"
            ) from exc


def _join(group: GroupSpec, generation: int) -> _Gloo:
    timeout = timedelta(seconds=group.timeout_s)
    shared, _, _ = next(
        rendezvous(group.init_method, group.rank, group.world_size, timeout=timeout)
    )
    shared.set_timeout(timeout)
    store = torch._C._distributed_c10d.PrefixStore(f"mooncake-hal/{generation}", shared)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # absent from stubs
    options._timeout = timeout
    options._devices = [_device(group.init_method)]
    return cast(_Gloo, dist.ProcessGroupGloo(store, group.rank, group.world_size, options))


def _device(init_method: str) -> object:
    """Interface to talk over: loopback if the rendezvous is, else what gloo finds by host name."""
    if urlparse(init_method).hostname in _LOOPBACK:
        return dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
    return dist.ProcessGroupGloo.create_default_device()
