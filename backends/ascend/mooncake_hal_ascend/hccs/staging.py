"""Reads by whole runs into NPU memory, from where it spreads them: see ``runs``.

There are two buffers: while one is spread, the engine fills the other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch import Tensor

from mooncake_hal.transport import MemoryRegion, Spans
from mooncake_hal_ascend.hccs.runs import Batch, Runs, find_runs
from mooncake_hal_ascend.hccs.spreading import Spreader, Wait


class Staging:
    """The two buffers of an endpoint.

    Args:
        memory: both of them, flat uint8; registered with the engine.
        spreader: empties them.
    """

    def __init__(self, memory: Tensor, spreader: Spreader) -> None:
        half = memory.numel() // 2
        self._buffers = memory[:half], memory[half : 2 * half]
        self._spreader = spreader
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
        most_bytes = self._buffers[0].numel()
        runs = find_runs(spans.remote, spans.local, spans.nbytes, region.address, most_bytes)
        if runs is None or not self._spreader.takes(region.address):
            return False
        with self._lock:
            self._read_runs(runs, region.address, read)
        return True

    def _read_runs(self, runs: Runs, base: int, read: Callable[[Spans], None]) -> None:
        is_free: list[Wait] = [_at_once, _at_once]
        try:
            for number, batch in enumerate(runs.batches(self._buffers[0].numel())):
                slot = number % 2
                is_free[slot]()
                buffer = self._buffers[slot]
                read(_into(buffer, batch))
                is_free[slot] = self._spreader.spread(buffer, batch.places, batch.sizes, base)
        finally:  # whoever gives up, too, leaves no memory that still changes
            for wait in is_free:
                wait()


def _into(buffer: Tensor, batch: Batch) -> Spans:
    return Spans(batch.in_buffer(buffer.data_ptr()), batch.starts, batch.run_bytes)


def _at_once() -> None:
    """Wait for nothing."""
