"""One rank of the communicator suite: ``python -m mooncake_hal.testing.backends_rank``.

Arguments: backend, scenario, rank, world size, rendezvous. Exits with status 0 if all checks
passed, or with SKIPPED and a reason on stdout if this machine can't form the group.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from mooncake_hal.backend import Communicator, GroupSpec
from mooncake_hal.errors import CapabilityError, DeviceError
from mooncake_hal.registry import Registry

Join = Callable[[], Communicator]
SKIPPED = 77
"""Exit status if the group can't be formed, for example without a device for each rank."""

_DEVICE_HAS_FAILED = getattr(torch, "AcceleratorError", DeviceError)
"""Torch's own error, which is raised if the result of work that failed on the device is read."""


def collectives(join: Join) -> None:
    """All collectives and messages, with contiguous and strided tensors, in two concurrent
    groups."""
    first, second = join(), join()
    for group in (first, second):
        _check_reduce(group)
        _check_gather(group)
        _check_broadcast(group)
        _check_exchange(group)
        _check_line(group)
        _check_ahead(group)
        group.barrier()
        _check_waited(group)
    first.close()
    first.close()
    _check_reduce(second)
    second.close()
    try:
        second.barrier()
    except DeviceError:
        return
    raise AssertionError("a closed communicator still works")


def _check_waited(group: Communicator) -> None:
    """The time spent in a collective is added to ``waited_s``, which stays empty on a device."""
    waited = dict(group.waited_s)
    _require(all(seconds > 0 for seconds in waited.values()), f"waited_s: {waited}")
    group.all_reduce(torch.ones(4))
    grown = {name for name, seconds in group.waited_s.items() if seconds > waited.get(name, 0)}
    _require(grown == ({"all_reduce"} if waited else set()), f"waited_s grew by {grown}")


def lost_rank(join: Join) -> None:
    """The last rank leaves; the others get an error, or are terminated, and do not hang."""
    group = join()
    group.barrier()
    if group.rank == group.world_size - 1:
        group.close()
        return
    try:
        group.all_reduce(torch.ones(4)).tolist()  # reading the result waits for the device
    except (DeviceError, _DEVICE_HAS_FAILED):
        return
    raise AssertionError("all_reduce succeeded without a rank")


def lost_in_exchange(join: Join) -> None:
    """The last rank leaves while the others exchange rows with it."""
    group = join()
    group.barrier()
    if group.rank == group.world_size - 1:
        group.close()
        return
    rows = [1] * group.world_size
    try:
        group.start_all_to_all(torch.ones(group.world_size, 4), rows, rows).wait().tolist()
    except DeviceError:
        return
    raise AssertionError("an all-to-all succeeded without a rank")


def lost_sender(join: Join) -> None:
    """The last rank leaves while the first waits for its message."""
    group = join()
    group.barrier()
    if group.rank == group.world_size - 1:
        group.close()
    elif group.rank == 0:
        try:
            group.recv(torch.ones(4), group.world_size - 1).tolist()
        except DeviceError:
            return
        raise AssertionError("recv succeeded without a sender")


def _check_reduce(group: Communicator) -> None:
    total = sum(range(1, group.world_size + 1))
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        x = torch.full((3, 4), group.rank + 1).to(dtype)
        for view in (x, x.clone().t(), x.clone()[:, ::2]):
            found = group.all_reduce(view)
            _require(found.data_ptr() == view.data_ptr(), "all_reduce works in place")
            _require(bool((found == total).all()), f"all_reduce of {dtype}: {found}")


def _check_gather(group: Communicator) -> None:
    x = torch.arange(6.0).view(2, 3).t() + 100 * group.rank  # strided on purpose
    for dim in (0, 1, -1):
        parts = [torch.arange(6.0).view(2, 3).t() + 100 * i for i in range(group.world_size)]
        found = group.all_gather(x, dim)
        _require(torch.equal(found, torch.cat(parts, dim)), f"all_gather along {dim}: {found}")


def _check_broadcast(group: Communicator) -> None:
    for source in range(group.world_size):
        x = torch.full((4, 2), group.rank).t()
        _require(bool((group.broadcast(x, source) == source).all()), f"broadcast: {x}")


def _check_exchange(group: Communicator) -> None:
    """Uneven numbers of rows, including 0, of several dtypes; two exchanges in flight; an exchange
    without any rows."""
    ranks, rank = range(group.world_size), group.rank
    send = [(rank + 2 * other) % 3 for other in ranks]
    recv = [(other + 2 * rank) % 3 for other in ranks]
    wanted = [10 * other + rank for other in ranks for _ in range(recv[other])]
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
        rows = torch.tensor([10 * rank + other for other in ranks for _ in range(send[other])])
        x = rows.to(dtype).expand(4, -1).t()  # strided on purpose
        first, second = (group.start_all_to_all(x, send, recv) for _ in range(2))
        for exchange in (first, second):
            found = exchange.wait()
            _require(found.shape == (sum(recv), 4), f"all_to_all: {found.shape}")
            _require(found.dtype == dtype, f"all_to_all: {found.dtype}")
            _require(bool((found[:, 3].cpu() == torch.tensor(wanted, device="cpu")).all()), f"{x}")
    none = group.start_all_to_all(torch.ones(0, 4), [0] * len(send), [0] * len(send)).wait()
    _require(none.shape == (0, 4), f"all_to_all of nothing: {none.shape}")


def _check_line(group: Communicator) -> None:
    """Several messages of several dtypes from rank to rank, in order; every rank adds one."""
    kinds = [
        torch.full((3, 4), float(index)).to(dtype)
        for index, dtype in enumerate((torch.float32, torch.bfloat16, torch.int64))
    ]
    for x in (*kinds, torch.arange(6.0).view(2, 3).t()):  # strided on purpose
        found = x.clone().t().clone().t() if group.rank == 0 else torch.empty_like(x).zero_()
        if group.rank > 0:
            taken = group.recv(found, group.rank - 1)
            _require(taken.data_ptr() == found.data_ptr(), "recv works in place")
        _require(bool((found == x + group.rank).all()), f"rank {group.rank} received {found}")
        if group.rank < group.world_size - 1:
            group.send(found + 1, group.rank + 1)


def _check_ahead(group: Communicator) -> None:
    """Between ranks that have communicated before, a message of a megabyte can be sent before its
    receiver calls ``recv``."""
    if group.rank == 0:
        group.send(torch.full((1 << 18,), 7.0), 1)
    group.barrier()
    if group.rank == 1:
        found = group.recv(torch.zeros(1 << 18), 0)
        _require(bool((found == 7).all()), f"sent ahead: {found}")


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(what)


SCENARIOS = {
    "collectives": collectives,
    "lost_rank": lost_rank,
    "lost_in_exchange": lost_in_exchange,
    "lost_sender": lost_sender,
}


def main(backend_name: str, scenario: str, rank: str, world_size: str, init_method: str) -> None:
    """Run one scenario as one rank, on a device of its own if there are enough."""
    torch.set_num_threads(1)
    backend = Registry.discover().select_backend(backend_name)
    index = int(rank) % len(backend.runtime.devices())
    backend.runtime.bind_thread(index)
    torch.set_default_device(backend.runtime.device(index))
    group = GroupSpec(int(rank), int(world_size), init_method, timeout_s=20)
    try:
        SCENARIOS[scenario](lambda: backend.communicator(group))
    except CapabilityError as exc:
        print(exc)  # noqa: T201  the suite reads it
        sys.exit(SKIPPED)


if __name__ == "__main__":
    main(*sys.argv[1:])
