"""NIXL as an adapter's engine. Written against 1.5.

The bindings are used, not the classes on top of them: those give the progress thread no pause, so
that each agent keeps a core busy for as long as it lives.
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
from mooncake_hal.transport import EndpointOptions, MemoryRegion
from mooncake_hal.transports.adapter.agent import Engine, Slice
from mooncake_hal.transports.adapter.facts import decode_told
from mooncake_hal.transports.adapter.transport import AdapterTransport, chosen_settings
from mooncake_hal.transports.control.session import Session
from mooncake_hal.transports.handshake import encode
from mooncake_hal.transports.nixl.plugin import NAME

SETTINGS = {"backend": "UCX"}
"""``backend``: the NIXL plugin that moves the bytes."""

MAX_PIECES = 4096

PROGRESS_PAUSE_US = 1000
"""How long the serving thread sleeps without an event; an event wakes it at once."""

POLL_SECONDS = 20e-6

GRACE_SECONDS = 0.5
"""How long a slice that nobody wants any more may take to end by itself."""


class RegionFacts(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What another agent has to know of a region.

    Args:
        is_host: whether it is host memory.
        device: number of the device otherwise.
        metadata: NIXL's.
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

    NIXL loads both; where its own comes first, the process dies of a segmentation fault when it
    ends, all work done (nixl-cu12 1.5.1).
    """
    with suppress(OSError):  # a host without it has only one, and no such trouble
        ctypes.CDLL("libnl-route-3.so.200")


def configure(bindings: ModuleType, options: EndpointOptions) -> Engine:
    """Make the engine for an endpoint.

    Raises:
        ValueError: a setting is unknown.
    """
    backend = chosen_settings(NAME, options.extra, SETTINGS)["backend"]

    def open_agent(session: Session | None) -> NixlAgent:
        return NixlAgent(bindings, backend, serves=session is None)

    return Engine(NAME, backend, open_agent, MAX_PIECES)


class NixlAgent:
    """See ``Agent``: one NIXL agent with one backend.

    Args:
        bindings: nixl._bindings.
        backend: see SETTINGS.
        serves: whether peers move bytes to and from it; then it has a thread of its own.

    Raises:
        TransportUnavailable: it does not start.
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
        self._regions: dict[int, tuple[RegionFacts, Any]] = {}
        self._known: dict[int, RegionFacts] = {}
        config = bindings.nixlAgentConfig()
        config.useProgThread, config.pthrDelay = serves, PROGRESS_PAUSE_US
        config.syncMode = bindings.NIXL_THREAD_SYNC_STRICT
        with self._mapped(f"starting {backend}", TransportUnavailable):
            self._agent: Any = bindings.nixlAgent(uuid.uuid4().hex, config)
            self._backends = [self._agent.createBackend(backend, {})]

    def description(self) -> bytes:
        """See ``Agent``: NIXL's metadata of the agent, without regions."""
        nothing = self._bindings.nixlRegDList(self._bindings.DRAM_SEG)
        described: bytes = self._agent.getLocalPartialMD(nothing, True, self._backends)
        return described

    def register(self, key: int, region: MemoryRegion) -> bytes:
        """See ``Agent``."""
        facts = _place(region.device)
        memory = [(region.address, region.nbytes, facts.device, "")]
        with self._mapped(f"registering {region.device} memory", TransportUnavailable):
            listed = self._bindings.nixlRegDList(self._segment(facts), memory)
            self._agent.registerMem(listed, self._backends)
            metadata = self._agent.getLocalPartialMD(listed, False, self._backends)
        self._regions[key] = (facts, listed)
        return encode(RegionFacts(facts.is_host, facts.device, metadata))

    def deregister(self, key: int) -> None:
        """See ``Agent``."""
        _, listed = self._regions.pop(key)
        with self._mapped("withdrawing memory"):
            self._agent.deregisterMem(listed, self._backends)

    def meet(self, description: bytes) -> None:
        """See ``Agent``."""
        with self._mapped("loading the peer's metadata"):
            self._target = self._agent.loadRemoteMD(description)

    def learn(self, key: int, attachment: bytes) -> None:
        """See ``Agent``."""
        facts = decode_told(attachment, RegionFacts)
        with self._mapped("loading a region's metadata"):
            self._agent.loadRemoteMD(facts.metadata)
        self._known[key] = facts

    def move(self, part: Slice, must_stop: Callable[[], bool]) -> None:
        """See ``Agent``."""
        ours = {key: facts for key, (facts, _) in self._regions.items()}
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
        """See ``Agent``: its connections end with its last reference."""
        self._regions.clear()
        self._agent = None

    def _finish(self, handle: int, must_stop: Callable[[], bool]) -> None:
        """Start a transfer and drive it to its end."""
        state = self._agent.postXferReq(handle, b"")
        give_up_at = float("inf")
        while state == self._bindings.NIXL_IN_PROG:
            now = time.monotonic()
            if now >= give_up_at:
                raise TransferError("nixl: nobody waits for the transfer, and it does not end")
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
        regions: dict[int, RegionFacts],
    ) -> Any:
        """Return pieces as NIXL wants them."""
        touched = {key: regions[key] for key in np.unique(keys).tolist()}
        kinds = {self._segment(facts) for facts in touched.values()}
        if len(kinds) > 1:
            raise TransferError("nixl: one transfer can't touch host and device memory on one side")
        devices = np.zeros(len(keys), np.uint64)
        for key, facts in touched.items():
            devices[keys == key] = facts.device
        return self._bindings.nixlXferDList(
            kinds.pop(), np.stack([addresses, nbytes, devices], axis=1)
        )

    def _segment(self, facts: RegionFacts) -> Any:
        return self._bindings.DRAM_SEG if facts.is_host else self._bindings.VRAM_SEG

    @contextmanager
    def _mapped(self, what: str, kind: type[TransferError] = TransferError) -> Iterator[None]:
        """Turn NIXL's errors into ours."""
        try:
            yield
        except self._errors as exc:
            reason = f"{what}: {exc}"
            if kind is TransportUnavailable:
                raise TransportUnavailable(NAME, reason) from exc
            raise TransferError(f"nixl: {reason}") from exc


def _place(device: str) -> RegionFacts:
    """Say where memory of a device lies, in NIXL's terms."""
    name, _, number = device.partition(":")
    if name == "cpu":
        return RegionFacts(True, 0, b"")
    if name == "cuda":
        return RegionFacts(False, int(number or 0), b"")
    raise TransportUnavailable(NAME, f"NIXL knows no memory of {device}")
