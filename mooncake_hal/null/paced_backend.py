"""The paced backend: a null backend with a simulated device, which takes time and runs concurrently
with the host.

It measures the host's cost of serving a fast device, on any machine. Each layer's attention keeps
the simulated device busy for the time in MOONCAKE_HAL_PACED, in launch order, and events complete
when the device reaches them. The host's costs are real, and the device costs nothing: as on a
device with sampling ops, a step's greedy tokens cost the host one op, not a search of the logits.

Only code that waits for events is paced, such as steps with async scheduling. A captured graph
costs the host a replay, and keeps the device busy for the time that was launched under capture.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mooncake_hal.backend import AttentionBatch, Event, Graph, SamplingMetadata
from mooncake_hal.hal_env import paced_settings
from mooncake_hal.null.null_backend import NullBackend, NullOps, NullRuntime


@dataclass
class DeviceClock:
    """Tracks when the simulated device will have finished the launched work.

    Args:
        free_at: ``time.perf_counter`` value, in seconds, at which all launched work is done.
    """

    free_at: float = 0.0
    captured_s: float | None = None
    """Duration in seconds of the work captured so far; None if no graph is being captured."""

    def launch(self, seconds: float) -> None:
        """Launch work of a duration, which starts when all earlier work is done."""
        if self.captured_s is not None:
            self.captured_s += seconds
        else:
            self.free_at = max(time.perf_counter(), self.free_at) + seconds


@dataclass(frozen=True)
class PacedGraph:
    """Captured work, which a replay launches as one piece. Its results are zeros, which were
    computed at capture."""

    clock: DeviceClock
    seconds: float

    def replay(self, host_context_lens: Sequence[int] = ()) -> None:
        self.clock.launch(self.seconds)


class PacedEvent:
    """An event of the simulated device.

    Args:
        clock: the device's clock.
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
    """The runtime of the simulated device.

    Args:
        clock: the device's clock.
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
    """Null ops whose grouped-query attention keeps the simulated device busy.

    Args:
        clock: the device's clock.
        decode_s: duration of a layer's decodes in seconds, whatever their number.
        token_s: duration of a layer per prompt token, in seconds.
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
        """Zeros; keeps the device busy."""
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
        """Zeros; keeps the device busy."""
        self._clock.launch(self._token_s * query.shape[0])
        return super().prefill_attention(query, key_cache, value_cache, batch, scale)

    def sample(self, logits: Tensor, sampling_metadata: SamplingMetadata) -> Tensor:
        """The tokens of the largest logits, whatever the parameters and random numbers."""
        return logits.argmax(dim=-1)

    def argmax(self, logits: Tensor) -> Tensor:
        """Token 0 of each row, without a look at the logits: all of a model's are zero, and the
        first of equal ones counts. Float32 logits, which requests may have changed, are searched:
        grammars and biases hold."""
        if logits.dtype is not torch.float32:
            return logits.new_zeros(logits.shape[0], dtype=torch.int64)
        largest, token_ids = logits.max(dim=-1)
        return token_ids.masked_fill_(~largest.isfinite(), -1)


class PacedBackend(NullBackend):
    """The null backend on the simulated device."""

    name = "paced"

    def __init__(self) -> None:
        super().__init__()
        self.capabilities = replace(self.capabilities, graphs=True, sampling=True)
        clock = DeviceClock()
        decode_s, token_s = paced_settings()
        self.runtime = PacedRuntime(clock)
        self.ops = PacedOps(clock, decode_s, token_s)
