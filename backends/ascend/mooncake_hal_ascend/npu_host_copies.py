"""Copies between NPU memory and pinned host memory, concurrently with the model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mooncake_hal.errors import DeviceError
from mooncake_hal.host_copies import Addresses
from mooncake_hal_ascend.hccs.contiguous_runs import is_row, row_bytes, rows_of
from mooncake_hal_ascend.hccs.hccs_staging import SideStream, Wait, as_rows

LARGE_BYTES = 256 << 10
"""Mean size, in bytes, from which on each piece is one copy: packing them would cost more."""

AllocationAround = Callable[[int], "Tensor | None"]
"""Returns the backend's allocation that contains an address, as a flat uint8 tensor."""


class NpuPinnedMemory:
    """Pinned host memory.

    Args:
        tensor: flat uint8; must be pinned by torch-npu.
        forget: called with the memory's address when it is closed.
    """

    def __init__(self, tensor: Tensor, forget: Callable[[int], None]) -> None:
        self.address = tensor.data_ptr()
        self.nbytes = tensor.numel()
        self._forget = forget

    def close(self) -> None:
        self._forget(self.address)


class NpuHostCopies:
    """``HostCopies`` of one NPU.

    Args:
        allocation_around: finds the backend's memory.
        device: the NPU.
        stream: runs the copies.
        pin: whether to pin host memory; False only if there is no driver that can.
    """

    def __init__(
        self,
        allocation_around: AllocationAround,
        device: torch.device,
        stream: SideStream,
        *,
        pin: bool = True,
    ) -> None:
        self._allocation_around = allocation_around
        self._device = device
        self._stream = stream
        self._pin = pin
        self._pinned: dict[int, Tensor] = {}
        self._lock = threading.Lock()

    def allocate_pinned(self, nbytes: int) -> NpuPinnedMemory:
        tensor = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pin)
        with self._lock:
            self._pinned[tensor.data_ptr()] = tensor
        return NpuPinnedMemory(tensor, self._forget)

    def copier(self) -> NpuHostCopier:
        return NpuHostCopier(self, self._device, self._stream)

    def pinned(self, host: int, nbytes: int) -> Tensor:
        """``nbytes`` of pinned memory at an address, as a flat uint8 tensor."""
        with self._lock:
            for address, tensor in self._pinned.items():
                if address <= host and host + nbytes <= address + tensor.numel():
                    return tensor[host - address : host - address + nbytes]
        raise DeviceError(f"{nbytes} bytes at {host:#x} are not in pinned memory of this device")

    def allocations(
        self, addresses: Addresses, nbytes: Addresses
    ) -> Iterator[tuple[Tensor, slice]]:
        """Group consecutive pieces by allocation: (allocation as flat uint8, range of pieces)."""
        begin, ends = 0, addresses + nbytes
        while begin < len(addresses):
            found = self._allocation_around(int(addresses[begin]))
            if found is None:
                raise DeviceError(f"{addresses[begin]:#x} is in no allocation of {self._device}")
            first, last = found.data_ptr(), found.data_ptr() + found.numel()
            is_out = (addresses[begin:] < first) | (ends[begin:] > last)
            count = int(is_out.argmax()) if is_out.any() else len(is_out)
            if not count:
                raise DeviceError(f"a piece at {addresses[begin]:#x} leaves its allocation")
            yield found, slice(begin, begin + count)
            begin += count

    def _forget(self, address: int) -> None:
        with self._lock:
            self._pinned.pop(address, None)


class _Move(Protocol):
    def __call__(self, device: Tensor, host: Tensor, rows: Tensor | None) -> None: ...


class NpuHostCopier:
    """Packs small pieces on the NPU and transfers them in one copy; copies large pieces one by one.

    Args:
        copies: finds the memory of both sides.
        device: the NPU.
        stream: runs the copies.
    """

    def __init__(self, copies: NpuHostCopies, device: torch.device, stream: SideStream) -> None:
        self._copies = copies
        self._device = device
        self._stream = stream
        self._in_flight: list[Wait] = []

    def gather(self, addresses: Addresses, nbytes: Addresses, host: int) -> None:
        self._move(addresses, nbytes, host, _to_host)

    def scatter(self, host: int, addresses: Addresses, nbytes: Addresses) -> None:
        self._move(addresses, nbytes, host, _to_device)

    def drain(self) -> None:
        in_flight, self._in_flight = self._in_flight, []
        for wait in in_flight:
            wait()

    def close(self) -> None:
        self.drain()

    def _move(self, addresses: Addresses, nbytes: Addresses, host: int, move: _Move) -> None:
        for memory, pieces in self._copies.allocations(addresses, nbytes):
            self._move_within(memory, addresses[pieces], nbytes[pieces], host, move)
            host += int(nbytes[pieces].sum())

    def _move_within(
        self, memory: Tensor, addresses: Addresses, nbytes: Addresses, host: int, move: _Move
    ) -> None:
        total = int(nbytes.sum())
        packed = self._copies.pinned(host, total)
        base = memory.data_ptr()
        row = row_bytes(addresses, nbytes, base)
        if total >= LARGE_BYTES * len(nbytes) or not is_row(row) or host % row:
            pieces = _slices(addresses - np.uint64(base), nbytes)

            def work() -> None:
                for source_slice, packed_slice in pieces:
                    move(memory[source_slice], packed[packed_slice], None)
        else:
            rows = torch.from_numpy(rows_of(addresses, nbytes, base, row))

            def work() -> None:
                move(as_rows(memory, row), as_rows(packed, row), rows.to(memory.device))

        self._in_flight.append(self._stream.run(work, self._device))


def _to_host(device: Tensor, host: Tensor, rows: Tensor | None) -> None:
    host.copy_(device if rows is None else device.index_select(0, rows), non_blocking=True)


def _to_device(device: Tensor, host: Tensor, rows: Tensor | None) -> None:
    if rows is None:
        device.copy_(host, non_blocking=True)
    else:
        device.index_copy_(0, rows, host.to(device.device, non_blocking=True))


def _slices(offsets: Addresses, nbytes: Addresses) -> list[tuple[slice, slice]]:
    """The slices of pieces in their allocation and in the packed buffer: [pieces]."""
    ends = np.cumsum(nbytes).tolist()
    sources = zip(offsets.tolist(), nbytes.tolist(), strict=True)
    return [
        (slice(begin, begin + size), slice(end - size, end))
        for (begin, size), end in zip(sources, ends, strict=True)
    ]
