"""The engine of the mooncake adapter: mooncake-transfer-engine. Written against 0.3.13."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from mooncake_hal.errors import TransferError, TransportUnavailable
from mooncake_hal.session.session import Session
from mooncake_hal.transport import EndpointOptions, MemoryRegion
from mooncake_hal.transports.adapters.adapter_transport import AdapterTransport, chosen_settings
from mooncake_hal.transports.adapters.engine_agent import AdaptedEngine, Slice
from mooncake_hal.transports.adapters.mooncake_plugin import NAME

SETTINGS = {"protocol": "tcp", "devices": ""}
"""Settings with their defaults. ``protocol``: tcp or rdma. ``devices``: comma-separated NICs for
rdma; empty: all."""

PROTOCOLS = ("tcp", "rdma")

MAX_PIECES = 1024
"""The engine's queue per peer rejects 4,096 pieces at once, and sometimes 2,048."""

ENVIRONMENT = {
    # Without it, every piece opens a connection of its own, and thousands at once fail.
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",
    # A slice can't be cancelled; these limit how long an unresponsive peer blocks it.
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "2",
    "MC_TCP_STATUS_TIMEOUT_SEC": "2",
    "MC_LOG_LEVEL": "WARNING",
}
"""Defaults for environment variables, since these settings have no other interface; values that the
operator has set are kept."""


def load() -> AdapterTransport:
    """Import the engine and construct the transport.

    Raises:
        TransportUnavailable: its libraries do not load.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        from mooncake import engine
    except ImportError as exc:
        raise TransportUnavailable(NAME, f"mooncake.engine does not load: {exc}") from exc
    return AdapterTransport(NAME, partial(configure, engine))


def configure(module: ModuleType, options: EndpointOptions) -> AdaptedEngine:
    """Make the engine for an endpoint.

    Raises:
        ValueError: a setting is unknown or out of range.
    """
    settings = chosen_settings(NAME, options.extra, SETTINGS)
    protocol, devices = settings["protocol"], settings["devices"]
    if protocol not in PROTOCOLS:
        raise ValueError(f"mooncake setting protocol must be one of {PROTOCOLS}, not {protocol!r}")
    if protocol == "tcp":
        os.environ.setdefault("MC_FORCE_TCP", "1")  # otherwise it uses a NIC regardless of settings
    host = options.advertise_host or options.host

    def open_agent(session: Session | None) -> MooncakeAgent:
        return MooncakeAgent(module, host, protocol, devices)

    return AdaptedEngine(NAME, protocol, open_agent, MAX_PIECES)


class MooncakeAgent:
    """One TransferEngine, which peers address by host and port, without a metadata server.

    Args:
        module: the module mooncake.engine.
        host: address that peers connect to; the engine listens on every interface regardless of it.
        protocol, devices: see SETTINGS.

    Raises:
        TransportUnavailable: the engine does not start.
    """

    def __init__(self, module: ModuleType, host: str, protocol: str, devices: str) -> None:
        self._takes_devices = bool(module.SUPPORT_CUDA)
        self._engine: Any = module.TransferEngine()
        self._host = host
        self._target = ""
        self._addresses: dict[int, int] = {}
        if self._engine.initialize(host, "P2PHANDSHAKE", protocol, devices):
            raise TransportUnavailable(NAME, f"the engine does not start on {host} with {protocol}")

    def description(self) -> bytes:
        """Host and port."""
        return f"{self._host}:{self._engine.get_rpc_port()}".encode()

    def register(self, key: int, region: MemoryRegion) -> bytes:
        if region.device != "cpu" and not self._takes_devices:
            raise TransportUnavailable(
                NAME, f"this build supports host memory only, not {region.device}"
            )
        if self._engine.register_memory(region.address, region.nbytes):
            raise TransportUnavailable(
                NAME, f"the engine can't register {region.nbytes} bytes of {region.device} memory"
            )
        self._addresses[key] = region.address
        return region.device.encode()

    def deregister(self, key: int) -> None:
        """The engine rejects peers' requests for the region from now on."""
        self._engine.unregister_memory(self._addresses.pop(key))

    def meet(self, description: bytes) -> None:
        self._target = description.decode()

    def learn(self, key: int, attachment: bytes) -> None:
        """Nothing to do: the engine queries the other one itself."""

    def move(self, part: Slice, must_stop: Callable[[], bool]) -> None:
        """``must_stop`` is ignored: the engine can't be stopped, and its own timeouts bound the
        call."""
        if self._transfer(part):
            raise TransferError(
                f"mooncake-transfer-engine did not {_verb(part)} {len(part.spans)} pieces; "
                "its log says why"
            )

    def close(self) -> None:
        """The engine shuts down with its last reference, which takes up to a second."""
        self._engine = None

    def _transfer(self, part: Slice) -> int:
        """Return 0 if the slice was moved. A function of its own, so that no traceback keeps the
        engine alive."""
        call = getattr(self._engine, f"batch_transfer_sync_{_verb(part)}")
        arrays = (part.spans.local, part.spans.remote, part.spans.nbytes)
        return int(call(self._target, *(array.tolist() for array in arrays)))


def _verb(part: Slice) -> str:
    return "read" if part.is_read else "write"
