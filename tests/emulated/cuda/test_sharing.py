"""Memory shared by processes, over the emulated driver: layouts, rejections, and selected kinds."""

from __future__ import annotations

import ctypes
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from support.cuda_emulation import (
    InterpretedCopier,
    emulated_driver,
    emulated_library,
    emulated_memory,
    emulated_sharing,
)

from mooncake_hal.errors import CapabilityError, DeviceError, PeerLost, TransferTimeout
from mooncake_hal.negotiation import OpenedTransport, Transports
from mooncake_hal.transport import EndpointOptions
from mooncake_hal.transports.staged.staged_peer import StagingBuffer
from mooncake_hal.transports.tcp.tcp_transport import load as load_tcp
from mooncake_hal_cuda.cuda_machine import read_driver_library
from mooncake_hal_cuda.libcuda import ALREADY_ENABLED, NATIVE_ATOMICS
from mooncake_hal_cuda.memory import virtual_memory
from mooncake_hal_cuda.memory.memory_kinds import MemoryKind
from mooncake_hal_cuda.memory.virtual_memory import Attribute, HandleType, VirtualMemory
from mooncake_hal_cuda.transports.cuda_host_copies import CudaHostCopies
from mooncake_hal_cuda.transports.ipc_peer import (
    MAX_SILENT,
    DescriptorMailbox,
    send_descriptor,
)

MIB = 1 << 20
DESCRIPTOR = HandleType.POSIX_FILE_DESCRIPTOR


def header_fact(name: str) -> int:
    """A size, offset or constant from NVIDIA's header."""
    return int(emulated_library().header_fact(name.encode()))


@pytest.fixture
def memory() -> VirtualMemory:
    emulated_driver().bind(0)
    return VirtualMemory(emulated_driver())


@pytest.fixture
def channels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "channel0").touch()
    monkeypatch.setenv("EMULATED_IMEX_CHANNELS", str(tmp_path))


@pytest.mark.parametrize("name", ["Location", "AccessDesc", "AllocationProp", "FabricHandle"])
def test_struct_sizes_equal_the_headers(name: str) -> None:
    assert ctypes.sizeof(getattr(virtual_memory, name)) == header_fact(f"{name}.size")


@pytest.mark.parametrize(
    "field",
    [
        "AccessDesc.flags",
        "AllocationProp.requestedHandleTypes",
        "AllocationProp.location",
        "AllocationProp.win32HandleMetaData",
        "AllocationProp.allocFlags",
        "AllocationFlags.gpuDirectRDMACapable",
        "AllocationFlags.usage",
    ],
)
def test_field_offsets_equal_the_headers(field: str) -> None:
    structure, _, name = field.partition(".")
    assert getattr(getattr(virtual_memory, structure), name).offset == header_fact(field)


def test_the_driver_reports_its_cuda_version() -> None:
    version = header_fact("CUDA_VERSION")
    found = read_driver_library(emulated_library()._name)
    assert found == (True, (version // 1000, version % 1000 // 10))
    assert read_driver_library("libabsent.so.1") == (False, None)


def test_constants_equal_the_headers() -> None:
    assert all(attribute == header_fact(attribute.name) for attribute in Attribute)
    for kind in (HandleType.POSIX_FILE_DESCRIPTOR, HandleType.FABRIC):
        assert kind == header_fact(f"HandleType.{kind.name}")
    assert header_fact("NATIVE_ATOMICS") == NATIVE_ATOMICS
    assert header_fact("ALREADY_ENABLED") == ALREADY_ENABLED


@pytest.mark.parametrize("nbytes", [1, 2 * MIB, 3 * MIB])
def test_memory_is_zeroed_and_freed(memory: VirtualMemory, nbytes: int) -> None:
    free, _ = emulated_driver().memory_bytes()
    mapped = memory.allocate(nbytes, 0, DESCRIPTOR, is_rdma=True)
    assert ctypes.string_at(mapped.address, nbytes) == bytes(nbytes)
    assert emulated_driver().memory_bytes()[0] <= free - nbytes
    mapped.close()
    assert emulated_driver().memory_bytes()[0] == free
    assert emulated_library().emulated_leftovers() == 0


def test_memory_lives_until_its_last_mapping_is_gone(memory: VirtualMemory) -> None:
    owned = memory.allocate(2 * MIB, 0, DESCRIPTOR, is_rdma=False)
    descriptor = memory.export_descriptor(owned.address)
    seen = memory.open_descriptor(descriptor, 2 * MIB, 0)
    os.close(descriptor)
    ctypes.memmove(owned.address, b"kv", 2)
    owned.close()
    assert ctypes.string_at(seen.address, 2) == b"kv"
    seen.close()
    assert emulated_library().emulated_leftovers() == 0


def test_a_handle_type_that_was_not_requested_is_rejected(memory: VirtualMemory) -> None:
    mapped = memory.allocate(1, 0, DESCRIPTOR, is_rdma=False)
    with pytest.raises(DeviceError, match="cuMemExportToShareableHandle failed"):
        memory.export_fabric(mapped.address)
    mapped.close()
    assert emulated_library().emulated_leftovers() == 0


def test_failed_mapping_is_undone(memory: VirtualMemory) -> None:
    owned = memory.allocate(2 * MIB, 0, DESCRIPTOR, is_rdma=False)
    descriptor = memory.export_descriptor(owned.address)
    with pytest.raises(DeviceError, match="cuMemMap failed"):
        memory.open_descriptor(descriptor, 4 * MIB, 0)  # more than its size
    os.close(descriptor)
    owned.close()
    assert emulated_library().emulated_leftovers() == 0


def test_other_memory_has_no_handle(memory: VirtualMemory) -> None:
    address = emulated_driver().allocate(2 * MIB)
    assert memory.handle_types(address) is None
    emulated_driver().free(address)


@pytest.mark.parametrize(
    ("lacks", "nvlink", "kind", "reason"),
    [
        ("", "9", MemoryKind.FABRIC, "other hosts reach it"),
        ("imex", "9", MemoryKind.DESCRIPTOR, "no fabric: cuMemCreate failed: operation not perm"),
        (
            "daemon",
            "9",
            MemoryKind.DESCRIPTOR,
            "no fabric: cuMemExportToShareableHandle failed: operation not permitted",
        ),
        ("import", "9", MemoryKind.DESCRIPTOR, "no fabric: cuMemImportFromShareableHandle failed"),
        ("gpudirect", "9", MemoryKind.DESCRIPTOR, "no fabric: cuMemCreate failed: operation not s"),
        ("fabric", "9", MemoryKind.DESCRIPTOR, "no fabric: the device has no fabric handles"),
        ("", "0", MemoryKind.DESCRIPTOR, "no fabric: the NVLink fabric spans this host only"),
        ("", "none", MemoryKind.DESCRIPTOR, "no fabric: the GPU has not joined its NVLink fabric"),
        ("fd", "9", MemoryKind.IPC, "no fd: the device exports no descriptors"),
        ("vmm", "9", MemoryKind.IPC, "no fd: the device has no virtual memory management"),
        (
            "export",
            "0",
            MemoryKind.IPC,
            "no fd: cuMemExportToShareableHandle failed",
        ),
    ],
)
@pytest.mark.usefixtures("channels")
def test_the_memory_kind_with_the_longest_reach_is_selected(
    monkeypatch: pytest.MonkeyPatch, lacks: str, nvlink: str, kind: MemoryKind, reason: str
) -> None:
    monkeypatch.setenv("EMULATED_CUDA_LACKS", lacks)
    monkeypatch.setenv("EMULATED_NVLINK", nvlink)
    found = emulated_sharing().of(0)
    assert found.kind is kind
    assert reason in found.reason
    assert (found.domain is not None) == (kind is MemoryKind.FABRIC)
    assert emulated_library().emulated_leftovers() == 0


def test_memory_that_can_not_be_pinned_for_nics_is_still_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in sandboxes whose driver reports the attribute but rejects such memory."""
    monkeypatch.setenv("EMULATED_CUDA_LACKS", "pinning")
    found = emulated_sharing().of(0)
    assert (found.kind, found.is_rdma) == (MemoryKind.DESCRIPTOR, False)
    allocation = emulated_memory().allocate(1, 0)
    allocation.free()
    assert emulated_library().emulated_leftovers() == 0


def test_driver_calls_fail_in_a_thread_without_a_device() -> None:
    """As in the driver: code that frees memory binds the device first."""
    driver = emulated_driver()
    driver.bind(0)
    address = driver.allocate_host(4096)
    refused = pytest.raises(DeviceError, match="cuMemFreeHost failed: invalid device context")
    with ThreadPoolExecutor(1) as thread, refused:
        thread.submit(driver.free_host, address).result()
    driver.free_host(address)


def test_staging_buffers_can_be_freed_by_any_thread() -> None:
    """For example a connection's reader thread, which never bound a device."""
    copies = CudaHostCopies(emulated_driver(), 0, InterpretedCopier)
    tcp = load_tcp()
    endpoint = tcp.open(EndpointOptions(host="127.0.0.1", secret=b"secret"))
    inner = Transports([OpenedTransport(tcp, endpoint, 10)])
    buffer, copier = StagingBuffer.allocate(copies, inner), copies.copier()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(copier.drain).result()
        thread.submit(copier.close).result()
        thread.submit(buffer.close).result()
    inner.close()


@pytest.mark.parametrize(
    ("lacks", "reason"),
    [
        ("peer", "cuda:0 has no peer access to cuda:1; see nvidia-smi topo"),
        ("atomics", "no NVLink connects cuda:0 and cuda:1; see nvidia-smi topo"),
    ],
)
def test_devices_without_atomics(monkeypatch: pytest.MonkeyPatch, lacks: str, reason: str) -> None:
    monkeypatch.setenv("EMULATED_CUDA_LACKS", lacks)
    sharing = emulated_sharing()
    first, second = (sharing.driver.uuid(index) for index in (0, 1))
    assert sharing.no_atomics_reason(first, second) == reason
    assert sharing.no_atomics_reason(first, first) is None


def test_without_a_channel_there_is_no_fabric() -> None:
    assert "no IMEX channel can be read" in emulated_sharing().of(0).reason


def test_unavailable_memory_kind_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_HAL_CUDA_MEMORY", "fabric")
    with pytest.raises(CapabilityError, match=r"MEMORY=fabric requests .*, but no IMEX channel"):
        emulated_memory().allocate(1, 0)


def test_a_descriptor_is_sent_to_the_holder_of_the_token() -> None:
    with closing(DescriptorMailbox()) as mailbox, open(os.devnull) as file:
        send_descriptor(mailbox.name, bytes(32), file.fileno())
        send_descriptor(mailbox.name, mailbox.token, file.fileno())
        received = mailbox.receive(5.0)
    assert os.path.samestat(os.fstat(received), os.stat(os.devnull))
    os.close(received)


def test_a_descriptor_arrives_behind_a_silent_connection() -> None:
    with ExitStack() as stack:
        mailbox = stack.enter_context(closing(DescriptorMailbox()))
        stranger = silent_connection(mailbox, stack)
        file = stack.enter_context(open(os.devnull))
        send_descriptor(mailbox.name, mailbox.token, file.fileno())
        os.close(mailbox.receive(10.0))
        assert stranger.recv(1) == b"", "the connection is closed"


def test_a_mailbox_keeps_a_bounded_number_of_silent_connections() -> None:
    with ExitStack() as stack:
        mailbox = stack.enter_context(closing(DescriptorMailbox()))
        found = stack.enter_context(ThreadPoolExecutor()).submit(mailbox.receive, 10.0)
        strangers = [silent_connection(mailbox, stack) for _ in range(MAX_SILENT + 1)]
        assert strangers[0].recv(1) == b"", "the oldest connection is closed"
        file = stack.enter_context(open(os.devnull))
        send_descriptor(mailbox.name, mailbox.token, file.fileno())
        os.close(found.result())


def silent_connection(mailbox: DescriptorMailbox, stack: ExitStack) -> socket.socket:
    """A connection to the mailbox that sends nothing; the stack closes it."""
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stack.enter_context(closing(stranger))
    stranger.settimeout(10.0)
    stranger.connect(f"\0{mailbox.name}")
    return stranger


def test_a_descriptor_that_never_arrives_times_out() -> None:
    mailbox = DescriptorMailbox()
    with pytest.raises(TransferTimeout, match="received no descriptor of the peer's memory within"):
        mailbox.receive(0.01)
    mailbox.close()
    with pytest.raises(PeerLost, match="did not accept a descriptor of our memory"):
        send_descriptor(mailbox.name, mailbox.token, 0)
