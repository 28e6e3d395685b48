"""A share in an endpoint's engine, as an adapter's agent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mooncake_hal.transport import MemoryRegion, Spans
from mooncake_hal.transports.adapter.agent import Slice
from mooncake_hal.transports.adapter.facts import decode_told
from mooncake_hal.transports.handshake import encode
from mooncake_hal_ascend.hccs.messages import RegionFacts
from mooncake_hal_ascend.hccs.shared import SharedEngine

if TYPE_CHECKING:
    from mooncake_hal_ascend.hccs.landing import Landing
    from mooncake_hal_ascend.hccs.pushing import Pusher
    from mooncake_hal_ascend.hccs.staging import Staging


@dataclass(frozen=True, slots=True)
class Buffers:
    """How many small pieces go by whole runs; what is None does not, and goes piece by piece.

    Args:
        staging: for our reads.
        pusher: for our writes to the peer.
        landing: for peers' writes to us.
    """

    staging: Staging | None = None
    pusher: Pusher | None = None
    landing: Landing | None = None


class HccsAgent:
    """See ``Agent``.

    A slice can't be stopped, and takes no longer than the engine's own deadline. One that failed
    has ended when the call returns: the engine drops its link with it.

    Args:
        engine: which it has a share in.
        buffers: for many small pieces.

    Raises:
        TransportUnavailable: the engine does not start.
    """

    def __init__(self, engine: SharedEngine, buffers: Buffers) -> None:
        self._engine = engine
        self._buffers = buffers
        self._vendor = engine.join()
        self._regions: dict[int, MemoryRegion] = {}
        self._learnt: dict[int, RegionFacts] = {}
        self._target = ""
        self._is_open = True

    def description(self) -> bytes:
        """See ``Agent``: the engine's session."""
        return self._vendor.session().encode()

    def register(self, key: int, region: MemoryRegion) -> bytes:
        """See ``Agent``."""
        self._engine.register(region)
        self._regions[key] = region
        landing = self._buffers.landing
        return encode(RegionFacts(region.address, landing is not None and landing.takes(region)))

    def deregister(self, key: int) -> None:
        """See ``Agent``."""
        self._engine.deregister(self._regions.pop(key))

    def meet(self, description: bytes) -> None:
        """See ``Agent``: links come up with the first transfer."""
        self._target = description.decode()

    def learn(self, key: int, attachment: bytes) -> None:
        """See ``Agent``; the engines tell each other what they need."""
        self._learnt[key] = decode_told(attachment, RegionFacts)

    def move(self, part: Slice, must_stop: Callable[[], bool]) -> None:
        """See ``Agent``."""

        def move(spans: Spans) -> None:
            self._engine.move(self._target, replace(part, spans=spans))

        if part.is_read:
            is_moved = self._read_runs(part, move)
        else:
            is_moved = self._write_runs(part, move, must_stop)
        if not is_moved:
            move(part.spans)

    def _read_runs(self, part: Slice, read: Callable[[Spans], None]) -> bool:
        """Read many small pieces as whole runs; False, and nothing done, where that is no gain."""
        keys, staging = set(part.local_keys.tolist()), self._buffers.staging
        if staging is None or len(keys) > 1:
            return False
        return staging.read(self._regions[keys.pop()], part.spans, read)

    def _write_runs(
        self, part: Slice, write: Callable[[Spans], None], must_stop: Callable[[], bool]
    ) -> bool:
        """Write many small pieces as whole runs; False, and nothing done, where that is no gain."""
        keys, pusher = set(part.remote_keys.tolist()), self._buffers.pusher
        if pusher is None or len(keys) > 1:
            return False
        region = self._learnt[keys.pop()]
        return region.takes_runs and pusher.write(part.spans, region.address, write, must_stop)

    def close(self) -> None:
        """See ``Agent``: gives its share back."""
        if self._is_open:
            self._is_open = False
            for key in list(self._regions):
                self.deregister(key)
            self._engine.leave()
