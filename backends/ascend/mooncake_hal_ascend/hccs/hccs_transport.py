"""Loads a vendor's engine and assembles the ``hccs`` transport."""

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
from mooncake_hal.port_range import PortRange, reservation_conflict
from mooncake_hal.session.session import Session
from mooncake_hal.transport import EndpointOptions
from mooncake_hal.transports.adapters.adapter_transport import AdapterTransport
from mooncake_hal.transports.adapters.engine_agent import AdaptedEngine, Agent
from mooncake_hal_ascend import ascend_env
from mooncake_hal_ascend.hccs.hccs_engine import (
    WORKSPACE_BYTES,
    AgentStaging,
    HccsAgent,
    SharedEngine,
    WorkspacePool,
)
from mooncake_hal_ascend.hccs.hccs_settings import (
    DEFAULTS,
    NAME,
    HccsSettings,
    deadlines,
    engine_ports,
    settings_of_endpoint,
)
from mooncake_hal_ascend.hccs.hccs_staging import (
    LENT_BYTES,
    MAX_BORROWERS,
    MAX_READS,
    READ_BYTES,
    Scatterer,
    StagedReader,
    StagedWriter,
    StagingBufferPool,
)
from mooncake_hal_ascend.hccs.npu_location import (
    NpuLocation,
    locate,
    physical_device,
    unreachable_reason,
)
from mooncake_hal_ascend.hccs.vendor_engines import MemfabricVendor, MooncakeVendor, VendorEngine

if TYPE_CHECKING:
    from mooncake_hal_ascend.ascend_backend import AscendMemory

logger = logging.getLogger(__name__)

MODULES = {"mooncake": "mooncake.engine", "memfabric": "memfabric_hybrid"}

MAX_PIECES = 4096
MAX_BYTES = 256 << 20
"""Largest slice, in bytes: a few milliseconds over HCCS. A cancelled transfer still waits for the
slice in flight."""


@dataclass(frozen=True, slots=True)
class HccsResources:
    """What an endpoint is opened with.

    Args:
        runtime: runtime of the backend whose memory is moved.
        memory: allocator of that backend.
        import_engine: imports an engine's module. It is called only for the engine that is used,
            since both contain copies of the same libraries.
        scatterer: scatters many small pieces, which then move as contiguous runs; None if no kernel
            can scatter them.
    """

    runtime: Runtime
    memory: Memory
    import_engine: Callable[[str], ModuleType] = importlib.import_module
    scatterer: Scatterer | None = None


def load() -> AdapterTransport:
    """Load the backend and construct the transport; an engine is only loaded when an endpoint is
    opened.

    Raises:
        TransportUnavailable: the backend does not load.
    """
    from mooncake_hal_ascend.ascend_plugin import load as load_backend

    try:
        backend = load_backend()
    except BackendUnavailable as exc:
        raise TransportUnavailable(NAME, exc.reason) from exc
    from mooncake_hal_ascend.ascend_runtime import NpuSideStream

    memory = cast("AscendMemory", backend.memory)
    scatterer = Scatterer(memory.tensor_at, NpuSideStream())
    return transport_of(HccsResources(backend.runtime, memory, scatterer=scatterer))


def transport_of(resources: HccsResources) -> AdapterTransport:
    """Construct the transport."""
    return AdapterTransport(NAME, partial(configure, resources), unreachable_reason)


def configure(resources: HccsResources, options: EndpointOptions) -> AdaptedEngine:
    """Make the engine for an endpoint.

    Raises:
        ValueError: a setting is unknown or out of range.
        TransportUnavailable: the requested engine does not load, a port of ours is reserved for the
            engine, or the NPU's location is unknown.
    """
    settings = settings_of_endpoint(options.extra, ascend_env.transport_settings())
    engine = _import_engine(resources, settings)
    device = _device_index(resources.runtime, options.device)
    generation = resources.runtime.devices()[device].generation
    vendor = ascend_env.engine_settings()
    try:
        _prepare(engine.name, settings, vendor, device, options)
    except HalError as exc:
        raise TransportUnavailable(NAME, str(exc)) from exc
    protocol = settings.protocol
    if engine.name == "memfabric" and protocol == "auto":
        protocol = "hccs"  # memfabric uses one protocol for all its peers
    location = locate(generation, device, protocol, vendor)
    return _assemble(resources, engine, location, device, options)


@dataclass(frozen=True, slots=True)
class ImportedEngine:
    """A vendor's engine: its name in the settings, and its module."""

    name: str
    module: ModuleType


def _import_engine(resources: HccsResources, settings: HccsSettings) -> ImportedEngine:
    """Import the requested engine, or with ``auto`` the first one that loads."""
    refusals = []
    for name in MODULES if settings.engine == "auto" else (settings.engine,):
        try:
            return ImportedEngine(name, resources.import_engine(MODULES[name]))
        except ImportError as exc:
            refusals.append(f"{MODULES[name]} does not load: {exc}")
    raise TransportUnavailable(NAME, f"engine={settings.engine}: {'; '.join(refusals)}")


def _device_index(runtime: Runtime, device: str) -> int:
    """The device index in a name such as ``"npu:1"``; refuses ``"cpu"``."""
    name, _, number = device.partition(":")
    if name == "cpu":
        raise TransportUnavailable(NAME, "it moves NPU memory only, not the host's; use tcp")
    index = int(number or 0)
    runtime.device(index)  # raises if there is no such device
    return index


def _prepare(
    engine: str,
    settings: HccsSettings,
    vendor: Mapping[str, str],
    device: int,
    options: EndpointOptions,
) -> None:
    """Derive the engine's variables, check our ports against the engine's, and set the variables.

    Raises:
        HalError: a variable is invalid, or a port of ours is reserved for the engine.
    """
    limits = deadlines(vendor, settings.protocol)
    ranges = engine_ports(engine, vendor, [physical_device(device, vendor)])
    ours = PortRange(options.port, options.port) if options.port else options.port_range
    problem = ours and reservation_conflict("the transport", ours, ranges)
    if problem:
        raise HalError(problem)
    variables = {
        "ASCEND_CONNECT_TIMEOUT": str(limits.connect_ms),
        "ASCEND_TRANSFER_TIMEOUT": str(limits.transfer_ms),
        **DEFAULTS[engine],
    }
    if settings.protocol == "roce":
        variables["HCCL_INTRA_ROCE_ENABLE"] = "1"
    ascend_env.export_settings(variables)
    logger.info(
        "hccs: engine %s, protocol %s; deadlines of %d ms to connect, %d ms to transfer (%s); "
        "its ports: %s",
        engine,
        settings.protocol,
        limits.connect_ms,
        limits.transfer_ms,
        limits.reason,
        ", ".join(str(each.ports) for each in ranges),
    )


def _assemble(
    resources: HccsResources,
    engine: ImportedEngine,
    location: NpuLocation,
    device: int,
    options: EndpointOptions,
) -> AdaptedEngine:
    buffers = _allocate_buffers(resources, device)
    workspaces = buffers.workspaces
    name = workspaces.region.device
    host = options.advertise_host or options.host
    over_roce = location.protocol == "roce"

    def bind_thread() -> None:
        resources.runtime.bind_thread(device)

    def share(serves: bool) -> SharedEngine:
        def start() -> VendorEngine:
            if engine.name == "mooncake":
                return MooncakeVendor(engine.module, host)
            return MemfabricVendor(engine.module, host, device, serves=serves, over_roce=over_roce)

        return SharedEngine(
            start,
            workspaces.region,
            name,
            bind_thread,
            needs_pages=not over_roce,
            on_closed=buffers.close if serves else None,
        )

    serving = share(serves=True)
    # a memfabric engine either accepts or opens connections; a mooncake engine does both
    driving = serving if engine.name == "mooncake" else share(serves=False)

    def open_agent(session: Session | None) -> Agent:
        if session is None:
            return HccsAgent(serving, AgentStaging(lent=buffers.lent))
        return HccsAgent(driving, AgentStaging(buffers.reader, StagedWriter(session)))

    return AdaptedEngine(
        NAME,
        engine.name,
        open_agent,
        MAX_PIECES,
        MAX_BYTES,
        location.encode(),
        workspaces.workspace,
        name,
        buffers.lent,
    )


@dataclass(frozen=True, slots=True)
class _EndpointBuffers:
    """NPU memory of an endpoint: for tokens, for its own reads, and for writes of its peers."""

    workspaces: WorkspacePool
    reader: StagedReader | None = None
    lent: StagingBufferPool | None = None

    def close(self) -> None:
        """Free all memory now: the endpoint may be part of a reference cycle that has not been
        collected yet."""
        for part in (self.reader, self.lent, self.workspaces):
            if part is not None:
                part.close()


def _allocate_buffers(resources: HccsResources, device: int) -> _EndpointBuffers:
    memory, scatterer = resources.memory, resources.scatterer
    if scatterer is None:
        return _EndpointBuffers(
            WorkspacePool(memory.allocate(WORKSPACE_BYTES, device), WORKSPACE_BYTES)
        )
    # one allocation, since an engine can register few regions
    lent_from = WORKSPACE_BYTES + MAX_READS * READ_BYTES
    allocation = memory.allocate(lent_from + MAX_BORROWERS * LENT_BYTES, device)
    return _EndpointBuffers(
        WorkspacePool(allocation, WORKSPACE_BYTES),
        StagedReader(allocation.tensor[WORKSPACE_BYTES:lent_from], scatterer, MAX_READS),
        StagingBufferPool(allocation.tensor[lent_from:], scatterer),
    )
