"""Ascend's transfer engines without an NPU: their Python API and the rules that they enforce.

They move host memory of this process in place of an NPU's. They reject what the real engines
reject: memory that is not page-aligned, the 257th region, a thread without an NPU, pieces outside
the regions that were registered when the link came up, and, with memfabric, a transfer initiated by
the end that was dialled. tests/contract/ascend compares the signatures with those of the published
wheels.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
import torch
from numpy.typing import NDArray

from mooncake_hal.backend import DeviceInfo, Memory, Runtime
from mooncake_hal.backend_parts import TensorAllocation
from mooncake_hal.errors import DeviceError
from mooncake_hal.transport import MemoryRegion
from mooncake_hal.transports.adapters.adapter_transport import AdapterTransport
from mooncake_hal_ascend.hccs.hccs_staging import Scatterer, Wait
from mooncake_hal_ascend.hccs.hccs_transport import MODULES, HccsResources, transport_of

DEVICE = "npu:0"
PAGE = 2 << 20
MAX_REGIONS = 256

Sizes = dict[int, int]
"""Sizes of regions by first address."""

_current = threading.local()
_errors = threading.local()
_engines: weakref.WeakValueDictionary[str, FakeEngine] = weakref.WeakValueDictionary()
_allocations: weakref.WeakValueDictionary[int, TensorAllocation] = weakref.WeakValueDictionary()
_backings: list[weakref.ref[NDArray[np.uint8]]] = []
_ports = itertools.count(15000)


class HostRuntime:
    """The part of a runtime that hccs uses: one A2 NPU, current in threads that bound it."""

    def __init__(self, generation: str = "A2") -> None:
        self._generation = generation

    def devices(self) -> Sequence[DeviceInfo]:
        return [DeviceInfo(0, "host memory", self._generation, 1 << 30)]

    def device(self, index: int) -> torch.device:
        if index:
            raise DeviceError(f"there is one NPU, not number {index}")
        return torch.device("cpu")

    def bind_thread(self, index: int) -> None:
        _current.device = index


class HostMemory:
    """Pages of host memory in place of an NPU's."""

    def allocate(self, nbytes: int, index: int) -> TensorAllocation:
        backing = np.zeros(nbytes + PAGE, np.uint8)
        _backings.append(weakref.ref(backing))
        whole = torch.from_numpy(backing)
        start = -whole.data_ptr() % PAGE
        tensor = whole[start : start + nbytes]
        made = TensorAllocation(MemoryRegion(tensor.data_ptr(), nbytes, DEVICE), tensor)
        _allocations[made.region.address] = made
        return made


def bytes_in_use() -> int:
    """Bytes of this memory that have not been freed."""
    return sum(len(found) for each in _backings if (found := each()) is not None)


def tensor_at(address: int) -> torch.Tensor | None:
    """The whole allocation that begins at an address; see ``TensorAt``."""
    found = _allocations.get(address)
    return None if found is None or found.is_freed else found.tensor


class HostStream:
    """See ``SideStream``: runs enqueued work at once."""

    def run(self, work: Callable[[], None], device: torch.device) -> Wait:
        work()
        return lambda: None


def host_scatterer() -> Scatterer:
    """A scatterer over this memory."""
    return Scatterer(tensor_at, HostStream())


class NpuBuffer:
    """See ``transports_buffers.Buffer``."""

    def __init__(self, nbytes: int) -> None:
        self._memory = HostMemory().allocate(nbytes, 0)
        self._bytes = self._memory.tensor.numpy()

    @property
    def region(self) -> MemoryRegion:
        return self._memory.region

    def put(self, content: NDArray[np.uint8]) -> None:
        self._bytes[:] = content

    def get(self) -> NDArray[np.uint8]:
        return cast("NDArray[np.uint8]", self._bytes.copy())

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Codes:
    """The error codes that an engine returns."""

    refused: int = -1
    no_device: int = -1
    overlaps: int = -1
    unknown: int = -1


class FakeEngine:
    """The common part of both engines: a port, and a limited number of page-aligned regions."""

    codes: ClassVar[Codes]

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}  # by first address
        self._lock = threading.Lock()
        self._port = 0

    def get_rpc_port(self) -> int:
        return self._port

    def register_memory(self, buffer_addr: int, capacity: int) -> int:
        with self._lock:
            if capacity <= 0 or buffer_addr % PAGE:
                return self._refuse(self.codes.refused, f"{buffer_addr:#x} is off a page")
            if len(self._sizes) == MAX_REGIONS:
                return self._refuse(self.codes.refused, f"{MAX_REGIONS} regions are registered")
            for start, size in self._sizes.items():
                if buffer_addr < start + size and start < buffer_addr + capacity:
                    return self._refuse(self.codes.overlaps, f"{buffer_addr:#x} is registered")
            self._sizes[buffer_addr] = capacity
            return 0

    def unregister_memory(self, buffer_addr: int) -> int:
        with self._lock:
            if self._sizes.pop(buffer_addr, None) is None:
                return self._refuse(self.codes.refused, f"{buffer_addr:#x} is not registered")
            return 0

    def _start(self, host: str) -> None:
        self._port = next(_ports)
        _engines[f"{host}:{self._port}"] = self

    def _regions(self) -> Sizes:
        with self._lock:
            return dict(self._sizes)

    def _refuse(self, code: int, words: str) -> int:
        _errors.words = words
        return code


class HixlEngine(FakeEngine):
    """``mooncake.engine.TransferEngine`` with its Ascend protocol."""

    codes = Codes(no_device=-6, overlaps=-7)

    def __init__(self) -> None:
        super().__init__()
        self._links: dict[str, tuple[Sizes, Sizes]] = {}

    def initialize(
        self, local_hostname: str, metadata_server: str, protocol: str, device_name: str
    ) -> int:
        if getattr(_current, "device", None) is None:
            return self.codes.no_device
        if metadata_server != "P2PHANDSHAKE" or protocol != "ascend":
            return self.codes.refused
        self._start(local_hostname)
        return 0

    def batch_transfer_sync_read(
        self,
        target_hostname: str,
        buffers: list[int],
        peer_buffer_addresses: list[int],
        lengths: list[int],
    ) -> int:
        return self._move(target_hostname, buffers, peer_buffer_addresses, lengths, True)

    def batch_transfer_sync_write(
        self,
        target_hostname: str,
        buffers: list[int],
        peer_buffer_addresses: list[int],
        lengths: list[int],
    ) -> int:
        return self._move(target_hostname, buffers, peer_buffer_addresses, lengths, False)

    def _move(
        self, session: str, ours: list[int], theirs: list[int], sizes: list[int], is_read: bool
    ) -> int:
        other = _engines.get(session)
        if not isinstance(other, HixlEngine) or not len(ours) == len(theirs) == len(sizes):
            return self.codes.refused
        # a link knows the memory that was registered on both ends when it came up, and goes down
        # with the first failure
        link = self._links.setdefault(session, (self._regions(), other._regions()))
        if _copy(link, other._regions(), ours, theirs, sizes, is_read):
            return 0
        self._links.pop(session, None)
        return self.codes.unknown


class MemfabricEngine(FakeEngine):
    """``memfabric_hybrid.TransferEngine``."""

    codes = Codes(unknown=-2000)

    def __init__(self) -> None:
        super().__init__()
        self._serves = False

    def initialize(
        self,
        store_url: str,
        session_id: str,
        role: str,
        device_id: int,
        data_op_type: int = 1,
        store_server_role: str = "Decode",
        nic: str = "",
    ) -> int:
        if role not in ("Prefill", "Decode") or not store_url.startswith("tcp://"):
            return self._refuse(self.codes.refused, f"role {role} and store {store_url}")
        if getattr(_current, "device", None) != device_id:
            return self._refuse(self.codes.no_device, f"device {device_id} is not this thread's")
        self._serves = role == store_server_role
        self._start(session_id)
        return 0

    def batch_transfer_sync_read(
        self,
        dest_session: str,
        buffers: list[int],
        peer_buffers: list[int],
        lengths: list[int],
        flags: int = 0,
    ) -> int:
        return self._move(dest_session, buffers, peer_buffers, lengths, True)

    def batch_transfer_sync_write(
        self,
        dest_session: str,
        buffers: list[int],
        peer_buffers: list[int],
        lengths: list[int],
        flags: int = 0,
    ) -> int:
        return self._move(dest_session, buffers, peer_buffers, lengths, False)

    def destroy(self) -> None:
        for session, engine in list(_engines.items()):
            if engine is self:
                del _engines[session]

    def _move(
        self, session: str, ours: list[int], theirs: list[int], sizes: list[int], is_read: bool
    ) -> int:
        other = _engines.get(session)
        if self._serves or not isinstance(other, MemfabricEngine) or not other._serves:
            return self._refuse(self.codes.unknown, f"session {session} not found")
        now = self._regions(), other._regions()
        if _copy(now, now[1], ours, theirs, sizes, is_read):
            return 0
        return self._refuse(self.codes.unknown, "an address is invalid")


def _copy(
    link: tuple[Sizes, Sizes],
    still: Sizes,
    ours: list[int],
    theirs: list[int],
    sizes: list[int],
    is_read: bool,
) -> bool:
    """Copy piece by piece up to the first one that is not registered at both ends."""
    local, remote = link
    for here, there, nbytes in zip(ours, theirs, sizes, strict=True):
        if not (
            _holds(local, here, nbytes)
            and _holds(remote, there, nbytes)
            and _holds(still, there, nbytes)
        ):
            return False
        target, source = (here, there) if is_read else (there, here)
        ctypes.memmove(target, source, nbytes)
    return True


def _holds(sizes: Sizes, address: int, nbytes: int) -> bool:
    return any(
        start <= address and address + nbytes <= start + size for start, size in sizes.items()
    )


def _last_error() -> str:
    """memfabric's last message in this thread; clears it."""
    words, _errors.words = getattr(_errors, "words", ""), ""
    return words


def mooncake_module() -> ModuleType:
    """A stand-in for ``mooncake.engine``."""
    module = ModuleType("mooncake.engine")
    module.TransferEngine = HixlEngine  # type: ignore[attr-defined]  # made here
    return module


def memfabric_module() -> ModuleType:
    """A stand-in for ``memfabric_hybrid``."""
    module: Any = ModuleType("memfabric_hybrid")
    module.TransferEngine = MemfabricEngine
    module.TransDataOpType = SimpleNamespace(SDMA=1, DEVICE_RDMA=2)
    module.get_and_clear_last_err_msg = _last_error
    return cast("ModuleType", module)


def load_with(modules: dict[str, ModuleType], generation: str = "A2") -> AdapterTransport:
    """The transport over host memory and these engines."""
    runtime, memory = cast("Runtime", HostRuntime(generation)), cast("Memory", HostMemory())

    def import_engine(name: str) -> ModuleType:
        if name not in found:
            raise ImportError(f"no fake of {name} is installed")
        return found[name]

    found = {MODULES[engine]: module for engine, module in modules.items()}
    return transport_of(HccsResources(runtime, memory, import_engine, host_scatterer()))


def load_mooncake() -> AdapterTransport:
    """The transport over mooncake's engine."""
    return load_with({"mooncake": mooncake_module()})


def load_memfabric() -> AdapterTransport:
    """The transport over memfabric's engine."""
    return load_with({"memfabric": memfabric_module()})


def unbind_thread() -> None:
    """Leave the calling thread without a bound NPU."""
    _current.device = None
