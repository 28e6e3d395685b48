"""The hccs transport over the vendors' engines: limits, sharing, errors, and its plugin."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from unittest.mock import patch

import pytest
from support import fake_hccs
from support.fake_hccs import DEVICE, HostMemory, HostRuntime, NpuBuffer

from mooncake_hal.errors import (
    HalError,
    PeerLost,
    TransferError,
    TransferTimeout,
    TransportUnavailable,
)
from mooncake_hal.port_range import PortRange
from mooncake_hal.specs import Availability
from mooncake_hal.testing.transports import one_span
from mooncake_hal.transport import EndpointOptions, MemoryRegion
from mooncake_hal.transports.adapters.adapter_transport import AdapterTransport
from mooncake_hal_ascend.hccs import hccs_plugin
from mooncake_hal_ascend.hccs.hccs_engine import (
    ALIGNMENT,
    MAX_REGIONS,
    WORKSPACE_BYTES,
    SharedEngine,
    WorkspacePool,
)
from mooncake_hal_ascend.hccs.vendor_engines import (
    MemfabricVendor,
    MooncakeVendor,
    VendorEngine,
    failure,
)

OPTIONS = EndpointOptions(device=DEVICE)
ENGINES = {"mooncake": fake_hccs.mooncake_module, "memfabric": fake_hccs.memfabric_module}


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Restore the environment variables that the transport sets for the engines."""
    with patch.dict(os.environ):
        yield


@pytest.fixture(params=sorted(ENGINES))
def transport(request: pytest.FixtureRequest) -> AdapterTransport:
    """The transport over each engine."""
    return fake_hccs.load_with({request.param: ENGINES[request.param]()})


def vendor_engine(engine: str, *, serves: bool = False) -> VendorEngine:
    """Return our wrapper over a fake engine; the one of mooncake both serves and connects."""
    module = ENGINES[engine]()
    if engine == "mooncake":
        return MooncakeVendor(module, "127.0.0.1")
    return MemfabricVendor(module, "127.0.0.1", 0, serves=serves, over_roce=False)


def with_options(**extra: str) -> EndpointOptions:
    return EndpointOptions(device=DEVICE, extra=extra)


def test_unaligned_region_is_rejected(transport: AdapterTransport) -> None:
    buffer = NpuBuffer(1 << 20)
    region = buffer.region
    off = MemoryRegion(region.address + 512, 4096, DEVICE)
    endpoint = transport.open(OPTIONS)
    try:
        with pytest.raises(TransportUnavailable, match=r"HCCS needs a multiple of 2 MiB"):
            endpoint.register(off)
        endpoint.register(region)
    finally:
        endpoint.close()


def test_memory_of_the_host_or_another_npu_is_rejected(transport: AdapterTransport) -> None:
    with pytest.raises(TransportUnavailable, match="moves NPU memory only, not the host's"):
        transport.open(EndpointOptions())
    endpoint = transport.open(OPTIONS)
    try:
        with pytest.raises(TransportUnavailable, match=r"memory of npu:0, not of npu:1"):
            endpoint.register(MemoryRegion(WORKSPACE_BYTES, 4096, "npu:1"))
    finally:
        endpoint.close()


def test_region_257_is_rejected_before_it_reaches_the_engine(transport: AdapterTransport) -> None:
    memory = HostMemory().allocate(MAX_REGIONS * ALIGNMENT, 0)
    pages = memory.region.address
    endpoint = transport.open(OPTIONS)
    try:
        for number in range(MAX_REGIONS - 1):  # the workspaces are one
            endpoint.register(MemoryRegion(pages + number * ALIGNMENT, 64, DEVICE))
        last = MemoryRegion(pages + (MAX_REGIONS - 1) * ALIGNMENT, 64, DEVICE)
        with pytest.raises(TransportUnavailable, match="takes 256 regions at most"):
            endpoint.register(last)
    finally:
        endpoint.close()


@pytest.mark.parametrize(("engine", "port"), [("mooncake", 15100), ("memfabric", 17500)])
def test_port_in_the_engines_range_is_rejected(engine: str, port: int) -> None:
    transport = fake_hccs.load_with({engine: ENGINES[engine]()})
    with pytest.raises(TransportUnavailable, match=f"port {port}, wanted for the transport, lies"):
        transport.open(EndpointOptions(device=DEVICE, port=port))
    around = PortRange(port - 5000, port)
    with pytest.raises(TransportUnavailable, match=f"ports {around}, wanted for the transport"):
        transport.open(EndpointOptions(device=DEVICE, port_range=around))


def test_engine_receives_its_deadlines_and_ports() -> None:
    os.environ["HCCL_RDMA_TIMEOUT"] = "14"
    os.environ["ASCEND_CONNECT_TIMEOUT"] = "123"
    fake_hccs.load_mooncake().open(with_options(protocol="roce")).close()
    assert os.environ["ASCEND_CONNECT_TIMEOUT"] == "123"
    assert os.environ["ASCEND_TRANSFER_TIMEOUT"] == "3469"
    assert os.environ["ASCEND_BASE_PORT"] == "20000"
    assert os.environ["HCCL_INTRA_ROCE_ENABLE"] == "1"


def test_invalid_variable_makes_the_transport_unavailable() -> None:
    os.environ["HCCL_RDMA_RETRY_CNT"] = "many"
    with pytest.raises(TransportUnavailable, match="HCCL_RDMA_RETRY_CNT='many' must be"):
        fake_hccs.load_mooncake().open(OPTIONS)


def test_missing_requested_engine_is_named() -> None:
    with pytest.raises(TransportUnavailable, match="engine=memfabric: memfabric_hybrid does not"):
        fake_hccs.load_mooncake().open(with_options(engine="memfabric"))


def test_engines_of_two_kinds_are_unreachable() -> None:
    ours, theirs = fake_hccs.load_mooncake(), fake_hccs.load_memfabric()
    here, there = ours.open(OPTIONS), theirs.open(OPTIONS)
    try:
        assert ours.reaches(here.address, there.address) == (
            "our engine speaks mooncake, the peer's memfabric"
        )
    finally:
        here.close()
        there.close()


def test_generations_are_compared_before_connecting() -> None:
    os.environ["HCCL_LOGIC_SUPERPOD_ID"] = "7"
    modules = {"mooncake": fake_hccs.mooncake_module()}
    older = fake_hccs.load_with(modules).open(OPTIONS)
    newer = fake_hccs.load_with(modules, "A3").open(OPTIONS)
    try:
        with pytest.raises(TransportUnavailable, match="this end is an A3, the peer an A2"):
            newer.connect(older.address, timeout=10)
    finally:
        older.close()
        newer.close()


def test_memfabric_server_cannot_read_from_its_client() -> None:
    """This is why an endpoint has two memfabric engines."""
    HostRuntime().bind_thread(0)
    server, client = (vendor_engine("memfabric", serves=serves) for serves in (True, False))
    ours, theirs = NpuBuffer(4096), NpuBuffer(4096)
    for end, buffer in ((server, theirs), (client, ours)):
        end.register(buffer.region.address, 4096)
    spans = one_span(ours.region.address, theirs.region.address, 4096)
    client.read(server.session(), spans)
    message = "memfabric did not read 1 pieces: -2000, parameters .*session .* not found"
    with pytest.raises(TransferError, match=message):
        server.read(client.session(), spans)


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ("mooncake", "mooncake did not start on 127.0.0.1: -6, the NPU is not found; is it set"),
        ("memfabric", "memfabric did not start on 127.0.0.1: -1, .*: device 0 is not this thread"),
    ],
)
def test_engine_without_an_npu_bound_to_its_thread_does_not_start(
    engine: str, message: str
) -> None:
    fake_hccs.unbind_thread()
    with pytest.raises(TransportUnavailable, match=message):
        vendor_engine(engine)


RULES = [
    ("mooncake", "off a page", "register memory: -1, refused; the engine's log says why"),
    ("mooncake", "257th region", "register memory: -1, refused; the engine's log says why"),
    ("mooncake", "overlap", "register memory: -7, memory overlaps what is registered"),
    ("mooncake", "withdrawn twice", "withdraw memory: -1, refused"),
    ("memfabric", "off a page", "register memory: -1, refused; .*: 0x[0-9a-f]+ is off a page"),
    ("memfabric", "257th region", "register memory: -1, .*: 256 regions are registered"),
    ("memfabric", "overlap", "register memory: -1, .*: 0x[0-9a-f]+ is registered"),
    ("memfabric", "withdrawn twice", "withdraw memory: -1, .*: 0x[0-9a-f]+ is not registered"),
]


@pytest.mark.parametrize(("engine", "broken", "message"), RULES)
def test_memory_errors_of_engines_are_typed(engine: str, broken: str, message: str) -> None:
    """As the wrapper raises them for callers that bypass the checks of ``SharedEngine``."""
    HostRuntime().bind_thread(0)
    running = vendor_engine(engine)
    memory = HostMemory().allocate((MAX_REGIONS + 1) * ALIGNMENT, 0)
    pages = memory.region.address
    running.register(pages, ALIGNMENT)
    if broken == "257th region":
        for number in range(1, MAX_REGIONS):
            running.register(pages + number * ALIGNMENT, 64)
    breaks = {
        "off a page": lambda: running.register(pages + 512, 64),
        "257th region": lambda: running.register(pages + MAX_REGIONS * ALIGNMENT, 64),
        "overlap": lambda: running.register(pages, 64),
        "withdrawn twice": lambda: [running.unregister(pages) for _ in range(2)],
    }
    with pytest.raises(TransferError, match=f"{engine} did not {message}"):
        breaks[broken]()


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ("mooncake", "mooncake did not write 1 pieces: -1, refused"),
        (
            "memfabric",
            "memfabric did not write 1 pieces: -2000, parameters .*an address is invalid",
        ),
    ],
)
def test_unregistered_memory_is_not_moved(engine: str, message: str) -> None:
    HostRuntime().bind_thread(0)
    near, far = vendor_engine(engine), vendor_engine(engine, serves=True)
    ours, theirs = NpuBuffer(4096), NpuBuffer(4096)
    near.register(ours.region.address, 4096)
    spans = one_span(ours.region.address, theirs.region.address, 4096)
    with pytest.raises(TransferError, match=message):
        near.write(far.session(), spans)
    far.register(theirs.region.address, 4096)
    near.write(far.session(), spans)


def test_endpoints_share_an_engine_and_its_regions() -> None:
    started = []
    workspaces = WorkspacePool(HostMemory().allocate(WORKSPACE_BYTES, 0), WORKSPACE_BYTES)
    freed = []

    def start() -> MooncakeVendor:
        started.append(MooncakeVendor(fake_hccs.mooncake_module(), "127.0.0.1"))
        return started[-1]

    shared = SharedEngine(
        start,
        workspaces.region,
        DEVICE,
        lambda: HostRuntime().bind_thread(0),
        needs_pages=True,
        on_closed=lambda: freed.append(True),
    )
    first, second = shared.join(), shared.join()
    assert first is second
    buffer = NpuBuffer(4096)
    for _ in range(2):
        shared.register(buffer.region)
    shared.deregister(buffer.region)
    with pytest.raises(TransferError, match="-7, memory overlaps"):
        first.register(buffer.region.address, 64)  # still registered once
    shared.deregister(buffer.region)
    first.register(buffer.region.address, 64)
    shared.leave()
    assert not freed
    shared.leave()
    assert (len(started), freed) == (1, [True])
    with pytest.raises(TransferError, match="the engine has been closed"):
        shared.register(buffer.region)


def test_endpoint_closes_despite_engine_errors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = fake_hccs.load_mooncake().open(OPTIONS)
    buffer = NpuBuffer(4096)
    endpoint.register(buffer.region)
    monkeypatch.setattr(fake_hccs.HixlEngine, "unregister_memory", lambda self, address: 103900)
    endpoint.close()
    assert "the engine did not unregister memory: mooncake did not" in caplog.text


def test_workspace_slots_are_reused() -> None:
    workspaces = WorkspacePool(HostMemory().allocate(1024, 0), 1024)
    held = [workspaces.workspace(32), workspaces.workspace(32)]
    held[0].put(b"a" * 32)
    assert held[0].get() == b"a" * 32
    with pytest.raises(TransportUnavailable, match="no NPU memory is left for tokens"):
        workspaces.workspace(32)
    held.pop()
    assert workspaces.workspace(32).address % 512 == workspaces.region.address % 512


def test_return_codes_become_errors() -> None:
    assert type(failure("mooncake", "read", 103901)) is TransferTimeout
    assert type(failure("mooncake", "read", 103902)) is PeerLost
    assert type(failure("memfabric", "read", -2004)) is TransferTimeout
    assert type(failure("memfabric", "read", -2014)) is PeerLost
    assert str(failure("memfabric", "start", 17, "no driver")) == (
        "memfabric did not start: 17, a code that is not documented: no driver"
    )


def test_probe_reports_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = hccs_plugin.mooncake_hal_transport()
    assert (spec.name, spec.priority) == ("hccs", 60)
    absent = hccs_plugin.probe()
    assert not absent.ok
    assert "no Ascend driver" in absent.reason
    ready = Availability(True, "8 Ascend devices")
    monkeypatch.setattr(hccs_plugin.ascend_plugin, "probe", lambda: ready)
    assert "no transfer engine is installed: pip install" in hccs_plugin.probe().reason
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: ModuleSpec(name, None) if name != "x" else None
    )
    monkeypatch.setattr(
        hccs_plugin,
        "installed",
        lambda names: f"{names[0]} 9.9" if "memfabric" in names[0] else None,
    )
    assert hccs_plugin.probe() == Availability(True, "memfabric-hybrid 9.9; 8 Ascend devices")


def test_plugin_reports_the_reserved_ports_of_its_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the installed engines or the configured one, for all NPUs of the host."""
    monkeypatch.setattr(
        hccs_plugin, "_installed", lambda: {"memfabric_hybrid": "memfabric-hybrid 9.9"}
    )
    monkeypatch.setattr(hccs_plugin, "_devices", lambda: [0, 1])
    os.environ["MF_CONFIG_STORE_PORT_START"] = "18000"
    [store] = hccs_plugin.mooncake_hal_transport().reserved_ports()
    assert store.ports == PortRange(18000, 19000)
    os.environ["MOONCAKE_HAL_HCCS"] = "engine=mooncake"
    links, handshakes = hccs_plugin.mooncake_hal_transport().reserved_ports()
    assert (links.ports, handshakes.ports) == (PortRange(20000, 22000), PortRange(15000, 17000))
    os.environ["MC_MAX_RPC_PORT"] = "many"
    with pytest.raises(HalError, match="MC_MAX_RPC_PORT='many' must be a port"):
        hccs_plugin.mooncake_hal_transport().reserved_ports()
