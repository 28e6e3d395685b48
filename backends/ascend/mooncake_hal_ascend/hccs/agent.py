"""A share in an endpoint's engine, as an adapter's agent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from mooncake_hal.transport import MemoryRegion, Spans
from mooncake_hal.transports.adapter.agent import Slice
from mooncake_hal_ascend.hccs.shared import SharedEngine

if TYPE_CHECKING:
    from mooncake_hal_ascend.hccs.staging import Staging


class HccsAgent:
    """See ``Agent``.

    A slice can't be stopped, and takes no longer than the engine's own deadline. One that failed
    has ended when the call returns: the engine drops its link with it.

    Args:
        engine: which it has a share in.
        staging: for reads of many small pieces; None: piece by piece.

    Raises:
        TransportUnavailable: the engine does not start.
    """

    def __init__(self, engine: SharedEngine, staging: Staging | None) -> None:
        self._engine = engine
        self._staging = staging
        self._vendor = engine.join()
        self._regions: dict[int, MemoryRegion] = {}
        self._target = ""
        self._is_open = True

    def description(self) -> bytes:
        """See ``Agent``: the engine's session."""
        return self._vendor.session().encode()

    def register(self, key: int, region: MemoryRegion) -> bytes:
        """See ``Agent``."""
        self._engine.register(region)
        self._regions[key] = region
        return region.device.encode()

    def deregister(self, key: int) -> None:
        """See ``Agent``."""
        self._engine.deregister(self._regions.pop(key))

    def meet(self, description: bytes) -> None:
        """See ``Agent``: links come up with the first transfer."""
        self._target = description.decode()

    def learn(self, key: int, attachment: bytes) -> None:
        """See ``Agent``: the engines tell each other."""

    def move(self, part: Slice, must_stop: Callable[[], bool]) -> None:
        """See ``Agent``."""
        if not (part.is_read and self._read_runs(part)):
            self._engine.move(self._target, part)

    def _read_runs(self, part: Slice) -> bool:
        """Read many small pieces as whole runs; False, and nothing done, where that is no gain."""
        keys = set(part.local_keys.tolist())
        if self._staging is None or len(keys) > 1:
            return False

        def read(spans: Spans) -> None:
            self._engine.move(self._target, replace(part, spans=spans))

        return self._staging.read(self._regions[keys.pop()], part.spans, read)

    def close(self) -> None:
        """See ``Agent``: gives its share back."""
        if self._is_open:
            self._is_open = False
            for key in list(self._regions):
                self.deregister(key)
            self._engine.leave()
