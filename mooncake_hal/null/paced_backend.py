"""The paced backend: a null backend whose device takes time, and computes while the host goes on.

What a serving host costs beside a fast device shows on any machine: each layer's attention keeps
the pretended device busy for as long as MOONCAKE_HAL_PACED says, in the order in which it was
launched, and events pass when it gets there. The host pays what it really pays, the device nothing.

Only who waits for an event is paced: steps with async scheduling do. A captured graph costs the
host what a replay costs, and the device what was launched while it was captured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from mooncake_hal.backend import AttentionBatch, Event, Graph
from mooncake_hal.hal_env import paced_settings
from mooncake_hal.null.null_backend import NullBackend, NullOps, NullRuntime


@dataclass
class DeviceClock:
    """When the pretended device has done what was launched on it.

    Args:
        free_at: seconds, as ``time.perf_counter`` counts them.
    """

    free_at: float = 0.0
    captured_s: float | None = None
    """Seconds of the work in the graph that is being captured; None while none is."""

    def launch(self, seconds: float) -> None:
        """Work that begins when all earlier work is done."""
        if self.captured_s is not None:
            self.captured_s += seconds
        else:
            self.free_at = max(time.perf_counter(), self.free_at) + seconds


@dataclass(frozen=True)
class PacedGraph:
    """Work that is launched at once. What it computes is there since it was captured: zeros."""

    clock: DeviceClock
    seconds: float

    def replay(self, host_context_lens: Sequence[int] = ()) -> None:
        self.clock.launch(self.seconds)


class PacedEvent:
    """A point in the device's work.

    Args:
        clock: of the device.
    """

    def __init__(self, clock: DeviceClock) -> None:
        self._clock = clock
        self._passes_at = 0.0

    def record(self) -> None:
        self._passes_at = self._clock.free_at

    def query(self) -> bool:
        return time.perf_counter() >= self._passes_at

    def synchronize(self) -> None:
        left = self._passes_at - time.perf_counter()
        if left > 0:
            time.sleep(left)


class PacedRuntime(NullRuntime):
    """One device whose events take their time.

    Args:
        clock: of the device.
    """

    def __init__(self, clock: DeviceClock) -> None:
        super().__init__()
        self._clock = clock

    def event(self, index: int) -> Event:
        self.require_device(index)
        return PacedEvent(self._clock)

    def capture(self, run: Callable[[], None]) -> Graph:
        self._clock.captured_s = 0.0
        try:
            run()
            return PacedGraph(self._clock, self._clock.captured_s)
        finally:
            self._clock.captured_s = None


class PacedOps(NullOps):
    """Grouped attention that keeps the device busy.

    Args:
        clock: of the device.
        decode_s: seconds that a layer's decodes take, however many they are.
        token_s: seconds that a layer takes per token of a prompt.
    """

    def __init__(self, clock: DeviceClock, decode_s: float, token_s: float) -> None:
        self._clock = clock
        self._decode_s = decode_s
        self._token_s = token_s

    def decode_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
    ) -> Tensor:
        """Zeros, in time."""
        self._clock.launch(self._decode_s)
        return super().decode_attention(query, key_cache, value_cache, batch, scale)

    def prefill_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
    ) -> Tensor:
        """Zeros, in time."""
        self._clock.launch(self._token_s * query.shape[0])
        return super().prefill_attention(query, key_cache, value_cache, batch, scale)


class PacedBackend(NullBackend):
    """A null backend over a device that has a clock."""

    name = "paced"

    def __init__(self) -> None:
        super().__init__()
        self.capabilities = replace(self.capabilities, graphs=True)
        clock = DeviceClock()
        decode_s, token_s = paced_settings()
        self.runtime = PacedRuntime(clock)
        self.ops = PacedOps(clock, decode_s, token_s)
