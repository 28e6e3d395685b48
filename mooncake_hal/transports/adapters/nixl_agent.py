"""The engine of the nixl adapter: NIXL. Written against 1.5.

It uses the bindings, not the classes on top of them: with those, the progress thread never pauses,
so that every agent keeps a core busy for as long as it exists.
"""

from __future__ import annotations

import ctypes
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from mooncake_hal.errors import TransferError, TransportUnavailable
from mooncake_hal.session.authentication import encode
from mooncake_hal.session.session import Session
from mooncake_hal.transport import EndpointOptions, MemoryRegion
from mooncake_hal.transports.adapters.adapter_messages import decode_message
from mooncake_hal.transports.adapters.adapter_transport import AdapterTransport, chosen_settings
from mooncake_hal.transports.adapters.engine_agent import AdaptedEngine, Slice
from mooncake_hal.transports.adapters.nixl_plugin import NAME

SETTINGS = {"backend": "UCX"}
"""Settings with their defaults. ``backend``: the NIXL plugin that moves the bytes."""

MAX_PIECES = 4096

PROGRESS_PAUSE_US = 1000
"""How long the serving agent's progress thread sleeps without an event; an event wakes it."""

POLL_SECONDS = 20e-6

GRACE_SECONDS = 0.5
"""How long to wait for a slice to end by itself once it is not wanted any more."""


class RegionInfo(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The attachment of a region.

    Args:
        is_host: whether it is host memory.
        device: index of the device if it is not.
        metadata: NIXL's metadata of the region.
    """

    is_host: bool
    device: int
    metadata: bytes


def load() -> AdapterTransport:
    """Import NIXL and construct the transport.

    Raises:
        TransportUnavailable: its libraries do not load.
    """
    _load_system_netlink()
    try:
        import nixl

        bindings = nixl._bindings
    except (ImportError, AttributeError) as exc:
        raise TransportUnavailable(NAME, f"nixl does not load: {exc}") from exc
    return AdapterTransport(NAME, partial(configure, bindings))


def _load_system_netlink() -> None:
    """Load the host's libnl before NIXL's wheel loads its own copy.

    NIXL loads both. If its own copy comes first, the process crashes with a segmentation fault at
    exit, after all work is done (nixl-cu12 1.5.1).
    """
    with suppress(OSError):  # a host without libnl has only one copy, which is no problem
        ctypes.CDLL("libnl-route-3.so.200")


def configure(bindings: ModuleType, options: EndpointOptions) -> AdaptedEngine:
    """Make the engine for an endpoint.

    Raises:
        ValueError: a setting is unknown.
    """
    backend = chosen_settings(NAME, options.extra, SETTINGS)["backend"]

    def open_agent(session: Session | None) -> NixlAgent:
        return NixlAgent(bindings, backend, serves=session is None)

    return AdaptedEngine(NAME, backend, open_agent, MAX_PIECES)


class NixlAgent:
    """One NIXL agent with one backend.

    Args:
        bindings: nixl._bindings.
        backend: see SETTINGS.
        serves: whether it serves peers; it then has a progress thread.

    Raises:
        TransportUnavailable: the agent does not start.
    """

    def __init__(self, bindings: ModuleType, backend: str, serves: bool) -> None:
        self._bindings = bindings
        self._errors = tuple(
            found
            for found in vars(bindings).values()
            if isinstance(found, type) and issubclass(found, Exception)
        )
        self._serves = serves
        self._target = ""
        self._regions: dict[int, tuple[RegionInfo, Any]] = {}
        self._known: dict[int, RegionInfo] = {}
        config = bindings.nixlAgentConfig()
        config.useProgThread, config.pthrDelay = serves, PROGRESS_PAUSE_US
        config.syncMode = bindings.NIXL_THREAD_SYNC_STRICT
        with self._mapped(f"starting {backend}", TransportUnavailable):
            self._agent: Any = bindings.nixlAgent(uuid.uuid4().hex, config)
            self._backends = [self._agent.createBackend(backend, {})]

    def description(self) -> bytes:
        """NIXL's metadata of the agent, without regions."""
        nothing = self._bindings.nixlRegDList(self._bindings.DRAM_SEG)
        described: bytes = self._agent.getLocalPartialMD(nothing, True, self._backends)
        return described

    def register(self, key: int, region: MemoryRegion) -> bytes:
        info = _region_info(region.device)
        memory = [(region.address, region.nbytes, info.device, "")]
        with self._mapped(f"registering {region.device} memory", TransportUnavailable):
            listed = self._bindings.nixlRegDList(self._segment(info), memory)
            self._agent.registerMem(listed, self._backends)
            metadata = self._agent.getLocalPartialMD(listed, False, self._backends)
        self._regions[key] = (info, listed)
        return encode(RegionInfo(info.is_host, info.device, metadata))

    def deregister(self, key: int) -> None:
        _, listed = self._regions.pop(key)
        with self._mapped("withdrawing memory"):
            self._agent.deregisterMem(listed, self._backends)

    def meet(self, description: bytes) -> None:
        with self._mapped("loading the peer's metadata"):
            self._target = self._agent.loadRemoteMD(description)

    def learn(self, key: int, attachment: bytes) -> None:
        info = decode_message(attachment, RegionInfo)
        with self._mapped("loading a region's metadata"):
            self._agent.loadRemoteMD(info.metadata)
        self._known[key] = info

    def move(self, part: Slice, must_stop: Callable[[], bool]) -> None:
        ours = {key: info for key, (info, _) in self._regions.items()}
        local = self._listed(part.spans.local, part.spans.nbytes, part.local_keys, ours)
        remote = self._listed(part.spans.remote, part.spans.nbytes, part.remote_keys, self._known)
        bindings = self._bindings
        operation = bindings.NIXL_READ if part.is_read else bindings.NIXL_WRITE
        with self._mapped("moving bytes"):
            handle = self._agent.createXferReq(
                operation, local, remote, self._target, b"", self._backends
            )
            try:
                self._finish(handle, must_stop)
            finally:
                self._agent.releaseXferReq(handle)

    def close(self) -> None:
        """The agent's connections are closed with its last reference."""
        self._regions.clear()
        self._agent = None

    def _finish(self, handle: int, must_stop: Callable[[], bool]) -> None:
        """Start a transfer and poll it until it ends."""
        state = self._agent.postXferReq(handle, b"")
        give_up_at = float("inf")
        while state == self._bindings.NIXL_IN_PROG:
            now = time.monotonic()
            if now >= give_up_at:
                raise TransferError(
                    f"nixl: the transfer did not end within {GRACE_SECONDS:g} s of being stopped"
                )
            if must_stop():
                give_up_at = min(give_up_at, now + GRACE_SECONDS)
            time.sleep(POLL_SECONDS)
            state = self._agent.getXferStatus(handle)
        if state != self._bindings.NIXL_SUCCESS:
            raise TransferError(f"nixl: the transfer ended as {state}")

    def _listed(
        self,
        addresses: NDArray[np.uint64],  # [n]
        nbytes: NDArray[np.uint64],  # [n]
        keys: NDArray[np.int64],  # [n]
        regions: dict[int, RegionInfo],
    ) -> Any:
        """Return pieces as a NIXL descriptor list."""
        touched = {key: regions[key] for key in np.unique(keys).tolist()}
        kinds = {self._segment(info) for info in touched.values()}
        if len(kinds) > 1:
            raise TransferError("nixl: one transfer can't touch host and device memory on one side")
        devices = np.zeros(len(keys), np.uint64)
        for key, info in touched.items():
            devices[keys == key] = info.device
        return self._bindings.nixlXferDList(
            kinds.pop(), np.stack([addresses, nbytes, devices], axis=1)
        )

    def _segment(self, info: RegionInfo) -> Any:
        return self._bindings.DRAM_SEG if info.is_host else self._bindings.VRAM_SEG

    @contextmanager
    def _mapped(self, what: str, kind: type[TransferError] = TransferError) -> Iterator[None]:
        """Convert NIXL's exceptions to ours."""
        try:
            yield
        except self._errors as exc:
            reason = f"{what}: {exc}"
            if kind is TransportUnavailable:
                raise TransportUnavailable(NAME, reason) from exc
            raise TransferError(f"nixl: {reason}") from exc


def _region_info(device: str) -> RegionInfo:
    """Describe a device's memory in NIXL's terms."""
    name, _, number = device.partition(":")
    if name == "cpu":
        return RegionInfo(True, 0, b"")
    if name == "cuda":
        return RegionInfo(False, int(number or 0), b"")
    raise TransportUnavailable(NAME, f"NIXL knows no memory of {device}")
