"""Loads the vendors' engines and puts the transport together."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, cast

from mooncake_hal.backend import Memory, Runtime
from mooncake_hal.errors import BackendUnavailable, HalError, TransportUnavailable
from mooncake_hal.port_range import PortRange, why_reserved
from mooncake_hal.transport import EndpointOptions
from mooncake_hal.transports.adapter.agent import Agent, Engine
from mooncake_hal.transports.adapter.transport import AdapterTransport
from mooncake_hal.transports.control.session import Session
from mooncake_hal_ascend.hccs import env
from mooncake_hal_ascend.hccs.agent import Buffers, HccsAgent
from mooncake_hal_ascend.hccs.arena import ARENA_BYTES, Arena
from mooncake_hal_ascend.hccs.landing import LENT_BYTES, MAX_BORROWERS, Landing
from mooncake_hal_ascend.hccs.locating import locate, physical_device
from mooncake_hal_ascend.hccs.place import Place, why_apart
from mooncake_hal_ascend.hccs.ports import DEFAULTS, engine_ports
from mooncake_hal_ascend.hccs.pushing import Pusher
from mooncake_hal_ascend.hccs.runs import BUFFER_BYTES
from mooncake_hal_ascend.hccs.settings import (
    NAME,
    HccsSettings,
    deadlines,
    settings_of_endpoint,
)
from mooncake_hal_ascend.hccs.shared import SharedEngine
from mooncake_hal_ascend.hccs.spreading import Spreader
from mooncake_hal_ascend.hccs.staging import Staging
from mooncake_hal_ascend.hccs.vendor import MemfabricVendor, MooncakeVendor, VendorEngine

if TYPE_CHECKING:
    from mooncake_hal_ascend.memory import AscendMemory

logger = logging.getLogger(__name__)

MODULES = {"mooncake": "mooncake.engine", "memfabric": "memfabric_hybrid"}

MAX_PIECES = 4096
MAX_BYTES = 256 << 20
"""A few milliseconds over HCCS; a cancelled transfer waits for as much to end."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What an endpoint is opened with.

    Args:
        runtime: of the backend whose memory is moved.
        memory: that memory.
        import_engine: imports an engine's module. Only that which is used: both bring copies of
            the same libraries.
        spreader: for many small pieces, which then go by whole runs; None where no kernel can
            spread them.
    """

    runtime: Runtime
    memory: Memory
    import_engine: Callable[[str], ModuleType] = importlib.import_module
    spreader: Spreader | None = None


def load() -> AdapterTransport:
    """Load the backend; which engine it takes, and whether that loads, is seen when it is opened.

    Raises:
        TransportUnavailable: the backend does not load.
    """
    from mooncake_hal_ascend.plugin import load as load_backend

    try:
        backend = load_backend()
    except BackendUnavailable as exc:
        raise TransportUnavailable(NAME, exc.reason) from exc
    from mooncake_hal_ascend.hccs.streams import NpuSideStream

    memory = cast("AscendMemory", backend.memory)
    spreader = Spreader(memory.tensor_at, NpuSideStream())
    return transport_of(Loaded(backend.runtime, memory, spreader=spreader))


def transport_of(loaded: Loaded) -> AdapterTransport:
    """Construct the transport."""
    return AdapterTransport(NAME, partial(configure, loaded), why_apart)


def configure(loaded: Loaded, options: EndpointOptions) -> Engine:
    """Make the engine for an endpoint.

    Raises:
        ValueError: a setting is unknown or out of range.
        TransportUnavailable: the engine that is asked for does not load, a port is the engine's,
            or the NPU does not say where it stands.
    """
    settings = settings_of_endpoint(options.extra, env.transport_settings())
    engine, module = _import_engine(loaded, settings)
    device = _device_index(loaded.runtime, options.device)
    generation = loaded.runtime.devices()[device].generation
    vendor = env.vendor_settings()
    try:
        _prepare(engine, settings, vendor, device, options)
    except HalError as exc:
        raise TransportUnavailable(NAME, str(exc)) from exc
    place = locate(generation, device, _reach(engine, settings), vendor)
    return _assemble(loaded, (engine, module), place, device, options)


def _import_engine(loaded: Loaded, settings: HccsSettings) -> tuple[str, ModuleType]:
    """Import the engine that is asked for, or the first that loads; returns its name too."""
    refusals = []
    for name in MODULES if settings.engine == "auto" else (settings.engine,):
        try:
            return name, loaded.import_engine(MODULES[name])
        except ImportError as exc:
            refusals.append(f"{MODULES[name]} does not load: {exc}")
    raise TransportUnavailable(NAME, f"engine={settings.engine}: {'; '.join(refusals)}")


def _reach(engine: str, settings: HccsSettings) -> str:
    """memfabric takes one way for all peers; its ``auto`` is HCCS."""
    if engine == "memfabric" and settings.protocol == "auto":
        return "hccs"
    return settings.protocol


def _device_index(runtime: Runtime, device: str) -> int:
    """Return the number in ``"npu:1"``; a deployment that moves host memory has none."""
    name, _, number = device.partition(":")
    if name == "cpu":
        raise TransportUnavailable(NAME, "it moves NPU memory only, not the host's; use tcp")
    index = int(number or 0)
    runtime.device(index)  # refuses what is not there
    return index


def _prepare(
    engine: str,
    settings: HccsSettings,
    vendor: Mapping[str, str],
    device: int,
    options: EndpointOptions,
) -> None:
    """Derive what the engine has to be told, check our ports against its own, and tell it.

    Raises:
        HalError: a variable makes no sense, or a port of ours is one of the engine's.
    """
    limits = deadlines(vendor, settings.protocol)
    ranges = engine_ports(engine, vendor, [physical_device(device, vendor)])
    ours = PortRange(options.port, options.port) if options.port else options.port_range
    problem = ours and why_reserved("the transport", ours, ranges)
    if problem:
        raise HalError(problem)
    told = {
        "ASCEND_CONNECT_TIMEOUT": str(limits.connect_ms),
        "ASCEND_TRANSFER_TIMEOUT": str(limits.transfer_ms),
        **DEFAULTS[engine],
    }
    if settings.protocol == "roce":
        told["HCCL_INTRA_ROCE_ENABLE"] = "1"
    env.tell_engines(told)
    logger.info(
        "hccs: engine %s, protocol %s; deadlines of %d ms to connect, %d ms to transfer (%s); "
        "its ports: %s",
        engine,
        settings.protocol,
        limits.connect_ms,
        limits.transfer_ms,
        limits.why,
        ", ".join(str(each.ports) for each in ranges),
    )


def _assemble(
    loaded: Loaded,
    chosen: tuple[str, ModuleType],  # the engine's name, and its module
    place: Place,
    device: int,
    options: EndpointOptions,
) -> Engine:
    engine, module = chosen
    arena, staging, landing = _memory(loaded, device)
    name = arena.region.device
    host = options.advertise_host or options.host
    over_roce = place.protocol == "roce"

    def bind_thread() -> None:
        loaded.runtime.bind_thread(device)

    def shared(serves: bool) -> SharedEngine:
        def start() -> VendorEngine:
            if engine == "mooncake":
                return MooncakeVendor(module, host)
            return MemfabricVendor(module, host, device, serves=serves, over_roce=over_roce)

        return SharedEngine(
            start,
            arena.region,
            name,
            bind_thread,
            needs_pages=not over_roce,
            ended=arena.close if serves else None,
        )

    serving = shared(True)
    driving = serving if engine == "mooncake" else shared(False)

    def open_agent(session: Session | None) -> Agent:
        if session is None:
            return HccsAgent(serving, Buffers(landing=landing))
        return HccsAgent(driving, Buffers(staging, Pusher(session)))

    return Engine(
        NAME,
        engine,
        open_agent,
        MAX_PIECES,
        MAX_BYTES,
        place.encode(),
        arena.scratch,
        name,
        landing,
    )


def _memory(loaded: Loaded, device: int) -> tuple[Arena, Staging | None, Landing | None]:
    """Allocate what an endpoint has for tokens, for its reads and for its peers' writes."""
    if loaded.spreader is None:
        return Arena(loaded.memory.allocate(ARENA_BYTES, device), ARENA_BYTES), None, None
    lent = ARENA_BYTES + 2 * BUFFER_BYTES
    allocation = loaded.memory.allocate(lent + MAX_BORROWERS * LENT_BYTES, device)
    staging = Staging(allocation.tensor[ARENA_BYTES:lent], loaded.spreader)
    landing = Landing(allocation.tensor[lent:], loaded.spreader)
    return Arena(allocation, ARENA_BYTES), staging, landing
