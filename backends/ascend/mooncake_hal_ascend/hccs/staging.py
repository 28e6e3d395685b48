"""Reads by whole runs into NPU memory, from where a kernel spreads them: see ``runs``.

There are two buffers: while one is spread, the engine fills the other. The spreading has a stream
of its own, so neither side waits for what the model computes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from mooncake_hal.transport import MemoryRegion, Spans
from mooncake_hal_ascend.hccs.runs import Batch, Runs, find_runs
from mooncake_hal_ascend.runtime import npu

_ELEMENT = torch.int32

TensorAt = Callable[[int], "Tensor | None"]
"""The tensor, flat uint8, of the backend's allocation that begins at an address."""


class Staging:
    """The two buffers of an endpoint.

    Args:
        memory: both of them, flat uint8; registered with the engine.
        tensor_at: finds the memory that is read into.
    """

    def __init__(self, memory: Tensor, tensor_at: TensorAt) -> None:
        half = memory.numel() // 2
        self._buffers = memory[:half], memory[half : 2 * half]
        self._tensor_at = tensor_at
        self._lock = threading.Lock()

    def read(self, region: MemoryRegion, spans: Spans, read: Callable[[Spans], None]) -> bool:
        """Read, if that is better done so; all has arrived when this returns.

        Args:
            region: ours, that all pieces lie in.
            spans: the pieces.
            read: reads by the engine; returns when all has arrived.

        Returns:
            Whether it was done so.
        """
        runs = find_runs(spans, region.address, self._buffers[0].numel())
        target = None if runs is None else self._tensor_at(region.address)
        if runs is None or target is None:
            return False
        rows = _rows(target, runs.row_bytes)
        npu.set_device(target.device)
        with self._lock, npu.stream(npu.Stream(target.device)):
            try:
                self._read_batches(runs, rows, read)
            finally:  # whoever gives up, too, leaves no memory that still changes
                npu.current_stream().synchronize()
        return True

    def _read_batches(self, runs: Runs, rows: Tensor, read: Callable[[Spans], None]) -> None:
        most_bytes = self._buffers[0].numel()
        is_spread = npu.Event(), npu.Event()
        for number, batch in enumerate(runs.batches(most_bytes)):
            buffer, event = self._buffers[number % 2], is_spread[number % 2]
            event.synchronize()
            read(batch.spans_into(buffer.data_ptr()))
            _spread(buffer, batch, rows)
            event.record()


def _rows(memory: Tensor, row_bytes: int) -> Tensor:
    """Flat uint8 as rows: [n, row_bytes / 4] int32."""
    whole = memory.numel() // row_bytes * row_bytes
    return memory[:whole].view(_ELEMENT).view(-1, row_bytes // _ELEMENT.itemsize)


def _spread(buffer: Tensor, batch: Batch, rows: Tensor) -> None:
    """Copy the buffer's rows to their places."""
    places = torch.from_numpy(batch.rows).to(rows.device)
    width = rows.shape[1]
    rows.index_copy_(0, places, buffer.view(_ELEMENT)[: len(batch.rows) * width].view(-1, width))
