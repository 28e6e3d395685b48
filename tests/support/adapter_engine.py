"""An engine that adapters are tested with: copies within this process, and misbehaves on demand.

It checks every copy against the regions that the other agent registered. A test can make it fail or
stall; the suite's guard bytes show whether it touches memory after it was closed.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from mooncake_hal.errors import TransferError, TransportUnavailable
from mooncake_hal.transport import EndpointOptions, MemoryRegion
from mooncake_hal.transports.adapters.adapter_transport import AdapterTransport, chosen_settings
from mooncake_hal.transports.adapters.engine_agent import AdaptedEngine, Slice

NAME = "copying"


@dataclass
class World:
    """The agents of this process, and the faults to inject.

    The next ``num_failures`` slices fail. Slices stall until ``may_continue`` is set or they are
    cancelled. ``num_opened`` counts the agents that were started.
    """

    agents: dict[bytes, CopyingAgent] = field(default_factory=dict)
    num_failures: int = 0
    num_opened: int = 0
    may_continue: threading.Event = field(default_factory=threading.Event)
    stands_still: threading.Event = field(default_factory=threading.Event)
    is_misled: bool = False

    def __post_init__(self) -> None:
        self.may_continue.set()


class CopyingAgent:
    """See ``Agent``."""

    _numbers = itertools.count()

    def __init__(self, world: World) -> None:
        self._world = world
        self._name = b"agent %d" % next(self._numbers)
        self._target = b""
        self.regions: dict[int, MemoryRegion] = {}
        world.agents[self._name] = self
        world.num_opened += 1

    def description(self) -> bytes:
        return self._name

    def register(self, key: int, region: MemoryRegion) -> bytes:
        if region.device != "cpu":
            raise TransportUnavailable(NAME, f"copies host memory only, not {region.device}")
        self.regions[key] = region
        return b"registered"

    def deregister(self, key: int) -> None:
        del self.regions[key]

    def meet(self, description: bytes) -> None:
        self._target = description

    def learn(self, key: int, attachment: bytes) -> None:
        assert attachment == b"registered"

    def move(self, part: Slice, must_stop: Callable[[], bool]) -> None:
        while not self._world.may_continue.wait(0.001):
            self._world.stands_still.set()
            if must_stop():
                raise TransferError("the transfer stalled and was cancelled")
        if self._world.num_failures:
            self._world.num_failures -= 1
            raise TransferError("it was told to fail")
        other = self._world.agents.get(self._target)
        if other is None:
            raise TransferError("the peer's agent is gone")
        spans = part.spans
        shift = 1 if self._world.is_misled else 0
        for local, remote, nbytes, ours, theirs in zip(
            spans.local.tolist(),
            spans.remote.tolist(),
            spans.nbytes.tolist(),
            part.local_keys.tolist(),
            part.remote_keys.tolist(),
            strict=True,
        ):
            _require(self.regions, ours, local, nbytes)
            _require(other.regions, theirs, remote, nbytes)
            target, source = (local, remote - shift) if part.is_read else (remote, local)
            ctypes.memmove(target, source, nbytes)

    def close(self) -> None:
        self._world.agents.pop(self._name, None)


def _require(regions: dict[int, MemoryRegion], key: int, address: int, nbytes: int) -> None:
    region = regions.get(key)
    if region is None or not (
        region.address <= address and address + nbytes <= region.address + region.nbytes
    ):
        raise TransferError("the memory is not registered")


def transport_in(world: World) -> AdapterTransport:
    """The adapter's transport, with slices so small that every transfer has many of them."""

    def configure(options: EndpointOptions) -> AdaptedEngine:
        chosen_settings(NAME, options.extra, {})
        return AdaptedEngine(NAME, "memory", lambda serves: CopyingAgent(world), 512, 1 << 18)

    return AdapterTransport(NAME, configure)


def load() -> AdapterTransport:
    """Load the transport with a world of its own."""
    return transport_in(World())
