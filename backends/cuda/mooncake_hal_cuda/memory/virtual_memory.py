"""Memory from the driver's virtual memory management API, which other processes can map.

An allocation has a handle, which is mapped to a reserved range of addresses. A process that
receives the handle maps it to addresses of its own. The memory is freed when all processes have
unmapped and released it. Layouts and numbers are those of CUDA's ``cuda.h`` (13.1), with which the
tests compare them. They have not changed since 11.0; fabric handles were added in 12.3.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_int,
    c_size_t,
    c_ubyte,
    c_uint64,
    c_ulonglong,
    c_ushort,
    c_void_p,
    cast,
)
from dataclasses import dataclass
from enum import IntEnum, IntFlag

from mooncake_hal.errors import DeviceError
from mooncake_hal_cuda.libcuda import HANDLE_BYTES, CudaDriver

_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_RECOMMENDED = 1  # CU_MEM_ALLOC_GRANULARITY_RECOMMENDED


class Attribute(IntEnum):
    """CUdevice_attribute: what a device can do."""

    VIRTUAL_MEMORY = 102
    POSIX_FILE_DESCRIPTOR = 103
    GPU_DIRECT_RDMA = 110
    FABRIC = 128


class HandleType(IntFlag):
    """CUmemAllocationHandleType: how memory can be exported to other processes."""

    NONE = 0
    POSIX_FILE_DESCRIPTOR = 1
    FABRIC = 8


class Location(Structure):
    """CUmemLocation: a device, by its ordinal."""

    _fields_ = [("type", c_int), ("id", c_int)]


class AccessDesc(Structure):
    """CUmemAccessDesc: the access of a device to a mapping."""

    _fields_ = [("location", Location), ("flags", c_int)]


class AllocationFlags(Structure):
    """``CUmemAllocationProp.allocFlags``."""

    _fields_ = [
        ("compressionType", c_ubyte),
        ("gpuDirectRDMACapable", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    ]


class AllocationProp(Structure):
    """CUmemAllocationProp: properties of an allocation."""

    _fields_ = [
        ("type", c_int),
        ("requestedHandleTypes", c_int),
        ("location", Location),
        ("win32HandleMetaData", c_void_p),
        ("allocFlags", AllocationFlags),
    ]


class FabricHandle(Structure):
    """CUmemFabricHandle."""

    _fields_ = [("data", c_ubyte * HANDLE_BYTES)]


_SIGNATURES: dict[str, tuple[type, ...]] = {
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(AllocationProp), c_int),
    "cuMemCreate": (POINTER(c_uint64), c_size_t, POINTER(AllocationProp), c_ulonglong),
    "cuMemRelease": (c_uint64,),
    "cuMemAddressReserve": (POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_ulonglong),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_ulonglong),
    "cuMemUnmap": (c_uint64, c_size_t),
    "cuMemSetAccess": (c_uint64, c_size_t, POINTER(AccessDesc), c_size_t),
    "cuMemRetainAllocationHandle": (POINTER(c_uint64), c_void_p),
    "cuMemGetAllocationPropertiesFromHandle": (POINTER(AllocationProp), c_uint64),
    "cuMemExportToShareableHandle": (c_void_p, c_uint64, c_int, c_ulonglong),
    "cuMemImportFromShareableHandle": (POINTER(c_uint64), c_void_p, c_int),
}


@dataclass(frozen=True, slots=True)
class Mapped:
    """Memory that is mapped in this process.

    Args:
        address: address of its first byte.
        close: unmaps and releases the memory, in the device's context; must be called once.
    """

    address: int
    close: Callable[[], None]


class VirtualMemory:
    """The API's functions with Python types. They act on the current device.

    Args:
        driver: the driver.
    """

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        driver.declare(_SIGNATURES)

    def has(self, index: int, attribute: Attribute) -> bool:
        """Whether a device has an attribute; False if the driver does not know the attribute."""
        try:
            return bool(self._driver.attribute(index, attribute))
        except DeviceError:
            return False

    def allocate(self, nbytes: int, index: int, types: HandleType, *, is_rdma: bool) -> Mapped:
        """Allocate zeroed memory; raises OutOfMemory or DeviceError.

        Args:
            nbytes: minimum size; rounded up to the device's allocation granularity.
            index: index of the device.
            types: how the memory can be exported; can't be changed later.
            is_rdma: whether NICs can register the memory (needs Attribute.GPU_DIRECT_RDMA).
        """
        prop = AllocationProp(_PINNED, types, Location(_ON_DEVICE, self._driver.ordinal(index)))
        prop.allocFlags.gpuDirectRDMACapable = is_rdma
        granule, handle = c_size_t(), c_uint64()
        self._driver.call(
            "cuMemGetAllocationGranularity", byref(granule), byref(prop), _RECOMMENDED
        )
        whole = -(-nbytes // granule.value) * granule.value
        self._driver.call("cuMemCreate", byref(handle), whole, byref(prop), 0)
        mapped = self._map(handle.value, whole, index)
        try:
            self._driver.zero(mapped.address, whole)
        except DeviceError:
            mapped.close()
            raise
        return mapped

    def handle_types(self, address: int) -> HandleType | None:
        """How the memory at an address can be exported; None if it is not from ``allocate``."""
        try:
            handle = self._retain(address)
        except DeviceError:
            return None
        prop = AllocationProp()
        try:
            self._driver.call("cuMemGetAllocationPropertiesFromHandle", byref(prop), handle)
        finally:
            self._driver.call("cuMemRelease", handle)
        return HandleType(prop.requestedHandleTypes)

    def export_descriptor(self, address: int) -> int:
        """Export a descriptor of the memory at an address; the caller closes it."""
        descriptor = c_int(-1)
        self._export(address, HandleType.POSIX_FILE_DESCRIPTOR, descriptor)
        return descriptor.value

    def export_fabric(self, address: int) -> bytes:
        """Export a fabric handle of the memory at an address, valid in the NVLink domain."""
        handle = FabricHandle()
        self._export(address, HandleType.FABRIC, handle)
        return bytes(handle)

    def open_descriptor(self, descriptor: int, nbytes: int, index: int) -> Mapped:
        """Map all ``nbytes`` of another process's memory; the descriptor may be closed
        afterwards."""
        # the driver takes the descriptor itself where the signature has a pointer
        return self._open(c_void_p(descriptor), HandleType.POSIX_FILE_DESCRIPTOR, nbytes, index)

    def open_fabric(self, name: bytes, nbytes: int, index: int) -> Mapped:
        """Map all ``nbytes`` of another process's memory by its fabric handle."""
        handle = FabricHandle.from_buffer_copy(name)
        return self._open(cast(byref(handle), c_void_p), HandleType.FABRIC, nbytes, index)

    def grant(self, address: int, nbytes: int, index: int) -> None:
        """Give a device read and write access to a whole mapped range."""
        access = AccessDesc(Location(_ON_DEVICE, self._driver.ordinal(index)), _READ_WRITE)
        self._driver.call("cuMemSetAccess", address, nbytes, byref(access), 1)

    def _retain(self, address: int) -> int:
        handle = c_uint64()
        self._driver.call("cuMemRetainAllocationHandle", byref(handle), address)
        return handle.value

    def _export(self, address: int, kind: HandleType, out: Structure | c_int) -> None:
        handle = self._retain(address)
        try:
            self._driver.call("cuMemExportToShareableHandle", byref(out), handle, kind, 0)
        finally:
            self._driver.call("cuMemRelease", handle)

    def _open(self, source: c_void_p, kind: HandleType, nbytes: int, index: int) -> Mapped:
        handle = c_uint64()
        self._driver.call("cuMemImportFromShareableHandle", byref(handle), source, kind)
        return self._map(handle.value, nbytes, index)

    def _map(self, handle: int, nbytes: int, index: int) -> Mapped:
        """Map memory for one device; takes ownership of the handle."""
        call, address = self._driver.call, c_uint64()
        with ExitStack() as undo:
            undo.callback(call, "cuMemRelease", handle)
            call("cuMemAddressReserve", byref(address), nbytes, 0, 0, 0)
            undo.callback(call, "cuMemAddressFree", address.value, nbytes)
            call("cuMemMap", address, nbytes, 0, handle, 0)
            undo.callback(call, "cuMemUnmap", address.value, nbytes)
            self.grant(address.value, nbytes, index)
            undo.callback(self._driver.bind, index)
            return Mapped(address.value, undo.pop_all().close)
