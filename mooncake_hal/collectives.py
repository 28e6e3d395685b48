"""Communicators on top of torch's process groups, created directly: torch's global default group is
neither initialised nor used.

A backend passes a function that creates its kind of group (gloo, NCCL, HCCL).
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Protocol
from urllib.parse import urlparse

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from mooncake_hal.backend import Communicator, Exchange, GroupSpec
from mooncake_hal.backend_parts import SingleRankCommunicator
from mooncake_hal.errors import CapabilityError, DeviceError

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class ProcessGroup(Protocol):
    """Methods of torch's process groups that its type stubs leave out."""

    def allreduce(self, tensors: list[Tensor]) -> dist.Work:
        """Sum over all ranks, in place."""
        ...

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> dist.Work:
        """Collect every rank's tensor on every rank."""
        ...

    def broadcast(self, tensor: Tensor, root: int) -> dist.Work:
        """Overwrite the tensor with the root's."""
        ...

    def alltoall_base(
        self,
        output: Tensor,
        given: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: dist.AllToAllOptions,
    ) -> dist.Work:
        """Send rows of ``given`` to every rank and receive rows of ``output`` from every rank."""
        ...

    def send(self, tensors: list[Tensor], target: int, tag: int) -> dist.Work:
        """Send to one rank; the tensors must not change until the work is done."""
        ...

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work:
        """Receive from one rank."""
        ...

    def barrier(self) -> dist.Work:
        """Wait for every rank."""
        ...


MakeGroup = Callable[[Store, GroupSpec], ProcessGroup]
"""Joins a group whose ranks rendezvous through the store, which no other group uses."""


class GroupCommunicator:
    """One rank of a process group.

    Args:
        group: the group, and this process's rank in it.
        generation: how many groups this process has joined at the same rendezvous before; it keeps
            the groups' keys in the shared store apart. All ranks must join in the same order.
        make: creates this rank's process group.

    Raises:
        DeviceError: the group does not form in time.
    """

    def __init__(self, group: GroupSpec, generation: int, make: MakeGroup) -> None:
        self._group = group
        try:
            self._joined = [make(_open_store(group, generation), group)]
        except (RuntimeError, ValueError, OSError) as exc:
            raise DeviceError(
                f"rank {group.rank} of {group.world_size} could not join {group.init_method} "
                f"within {group.timeout_s:g} s: {exc}"
            ) from exc
        self._sending: dict[int, tuple[dist.Work, Tensor]] = {}
        self._waited_s: dict[str, float] = {}
        # a group that outlives the interpreter has threads that are never joined, which aborts the
        # process
        self._leave = weakref.finalize(self, self._joined.clear)

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def world_size(self) -> int:
        return self._group.world_size

    @property
    def waited_s(self) -> Mapping[str, float]:
        return self._waited_s

    def all_reduce(self, x: Tensor) -> Tensor:
        dense = x.contiguous()
        self._run("all_reduce", lambda joined: joined.allreduce([dense]))
        return x if dense is x else x.copy_(dense)

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        dense = x.contiguous()
        parts = [torch.empty_like(dense) for _ in range(self.world_size)]
        self._run("all_gather", lambda joined: joined.allgather([parts], [dense]))
        return torch.cat(parts, dim=dim)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        dense = x.contiguous()
        self._run("broadcast", lambda joined: joined.broadcast(dense, source))
        return x if dense is x else x.copy_(dense)

    def start_all_to_all(
        self, x: Tensor, send_rows: Sequence[int], recv_rows: Sequence[int]
    ) -> Exchange:
        dense = x.contiguous()
        arriving = x.new_empty(sum(recv_rows), *x.shape[1:])
        counts = list(recv_rows), list(send_rows)
        started = self._start(
            "all_to_all",
            lambda joined: joined.alltoall_base(arriving, dense, *counts, dist.AllToAllOptions()),
        )
        return _StartedExchange(lambda: self._finish("all_to_all", started), dense, arriving)

    def send(self, x: Tensor, target: int) -> None:
        before = self._sending.pop(target, None)
        if before is not None:
            self._finish("send", before[0])
        dense = x.contiguous()
        started = self._start("send", lambda joined: joined.send([dense], target, 0))
        self._sending[target] = started, dense

    def recv(self, x: Tensor, source: int) -> Tensor:
        dense = x.contiguous()
        self._run("recv", lambda joined: joined.recv([dense], source, 0))
        return x if dense is x else x.copy_(dense)

    def barrier(self) -> None:
        self._run("barrier", lambda joined: joined.barrier())

    def close(self) -> None:
        self._sending.clear()
        self._leave()

    def _run(self, name: str, start: Callable[[ProcessGroup], dist.Work]) -> None:
        self._finish(name, self._start(name, start))

    def _start(self, name: str, start: Callable[[ProcessGroup], dist.Work]) -> dist.Work:
        if not self._joined:
            raise DeviceError(f"{name}: rank {self.rank} has left the group")
        try:
            return start(self._joined[0])
        except RuntimeError as exc:
            raise self._group_error(name, exc) from exc

    def _finish(self, name: str, work: dist.Work) -> None:
        started = time.perf_counter()
        try:
            work.wait()
        except RuntimeError as exc:
            raise self._group_error(name, exc) from exc
        self._waited_s[name] = self._waited_s.get(name, 0.0) + time.perf_counter() - started

    def _group_error(self, name: str, cause: RuntimeError) -> DeviceError:
        return DeviceError(
            f"{name}: rank {self.rank} of {self.world_size} lost the group, or a rank took "
            f"longer than {self._group.timeout_s:g} s: {cause}"
        )


class _StartedExchange:
    """An all-to-all in flight, and the tensors that it uses."""

    def __init__(self, finish: Callable[[], None], leaving: Tensor, arriving: Tensor) -> None:
        self._finish = finish
        self._tensors = leaving, arriving

    def wait(self) -> Tensor:
        self._finish()
        return self._tensors[1]


class Accelerator(Protocol):
    """The functions that torch's module for a device type has, whichever the type is."""

    def device_count(self) -> int:
        """Number of devices that are visible to this process."""
        ...

    def current_stream(self) -> torch.Stream:
        """The calling thread's current stream."""
        ...


class DeviceCommunicator(GroupCommunicator):
    """One rank of a group of devices; uses the device that is current at construction.

    Collectives are enqueued on the current stream without waiting for it, so they can be captured
    in a graph. Only ``barrier`` blocks. If a rank is lost, enqueued collectives can't be cancelled
    and never complete: the library terminates this process once the group's timeout has passed.

    Args:
        group, generation, make: see ``GroupCommunicator``.
        name: name of the collective library, for messages.
        accelerator: torch's module for the device type.

    Raises:
        CapabilityError: one host has more ranks than devices, which such libraries reject.
    """

    def __init__(
        self,
        group: GroupSpec,
        generation: int,
        make: MakeGroup,
        *,
        name: str,
        accelerator: Accelerator,
    ) -> None:
        count = accelerator.device_count()
        if is_of_one_host(group) and group.world_size > count:
            raise CapabilityError(
                f"{name} needs a device for each of {group.world_size} ranks, "
                f"this host shows {count}"
            )
        self._accelerator = accelerator
        super().__init__(group, generation, make)

    @property
    def waited_s(self) -> Mapping[str, float]:
        return {}  # the current stream waits, not this thread

    def barrier(self) -> None:
        stream = self._accelerator.current_stream()
        self.all_reduce(torch.ones(1, device=stream.device))
        stream.synchronize()


class GroupFactory:
    """Creates a process's communicators.

    Args:
        join: creates the communicator of ``(group, generation)`` for a group of several ranks.
    """

    def __init__(self, join: Callable[[GroupSpec, int], Communicator]) -> None:
        self._join = join
        self._joined: Counter[str] = Counter()

    def join(self, group: GroupSpec) -> Communicator:
        """Join a group; raises DeviceError if it does not form in time."""
        if group.world_size == 1:
            return SingleRankCommunicator()
        generation = self._joined[group.init_method]
        self._joined[group.init_method] += 1
        return self._join(group, generation)


def is_of_one_host(group: GroupSpec) -> bool:
    """Whether the ranks rendezvous on the loopback interface, and so are on one host."""
    return urlparse(group.init_method).hostname in _LOOPBACK


def _open_store(group: GroupSpec, generation: int) -> Store:
    timeout = timedelta(seconds=group.timeout_s)
    shared, _, _ = next(
        rendezvous(group.init_method, group.rank, group.world_size, timeout=timeout)
    )
    shared.set_timeout(timeout)
    return PrefixStore(f"mooncake-hal/{generation}", shared)
