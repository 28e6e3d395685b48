"""ctypes bindings of NVIDIA's driver library, for what torch does not offer.

These are memory that other processes can map, and copies between addresses of any process. Status
codes become exceptions here: a call that fails raises DeviceError. Calls act on the context that
``bind`` has made current in the calling thread: the device's primary context, which torch uses too.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Mapping
from ctypes import (
    POINTER,
    byref,
    c_char,
    c_char_p,
    c_int,
    c_size_t,
    c_ubyte,
    c_uint,
    c_uint64,
    c_void_p as handle,
)
from threading import Lock

from mooncake_hal.errors import DeviceError, OutOfMemory

LIBRARY = "libcuda.so.1"
HANDLE_BYTES = 64
UUID_BYTES = 16
_OUT_OF_MEMORY = 2
ALREADY_ENABLED = 704  # CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
_LAZY_PEER_ACCESS = 1
_NON_BLOCKING = 1
_WITHOUT_TIME = 2
_FOR_EVERY_DEVICE = 3  # portable, and mapped
NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED


class _IpcHandle(ctypes.Structure):
    """CUipcMemHandle; it is passed by value."""

    _fields_ = [("reserved", c_char * HANDLE_BYTES)]


_SIGNATURES: dict[str, tuple[type, ...]] = {
    "cuInit": (c_uint,),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGetUuid_v2": (c_ubyte * UUID_BYTES, c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDeviceCanAccessPeer": (POINTER(c_int), c_int, c_int),
    "cuDeviceGetP2PAttribute": (POINTER(c_int), c_int, c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(handle), c_int),
    "cuCtxSetCurrent": (handle,),
    "cuCtxEnablePeerAccess": (handle, c_uint),
    "cuCtxSynchronize": (),
    "cuMemGetInfo_v2": (POINTER(c_size_t), POINTER(c_size_t)),
    "cuMemAlloc_v2": (POINTER(c_uint64), c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemHostAlloc": (POINTER(handle), c_size_t, c_uint),
    "cuMemFreeHost": (handle,),
    "cuMemsetD8_v2": (c_uint64, c_ubyte, c_size_t),
    "cuMemGetAddressRange_v2": (POINTER(c_uint64), POINTER(c_size_t), c_uint64),
    "cuIpcGetMemHandle": (POINTER(_IpcHandle), c_uint64),
    "cuIpcOpenMemHandle_v2": (POINTER(c_uint64), _IpcHandle, c_uint),
    "cuIpcCloseMemHandle": (c_uint64,),
    "cuMemcpyAsync": (c_uint64, c_uint64, c_size_t, handle),
    "cuStreamCreate": (POINTER(handle), c_uint),
    "cuStreamSynchronize": (handle,),
    "cuEventCreate": (POINTER(handle), c_uint),
    "cuEventRecord": (handle, handle),
    "cuEventSynchronize": (handle,),
    "cuEventDestroy_v2": (handle,),
}


class CudaDriver:
    """The driver's functions with Python types.

    Args:
        library: name or path of the driver's library; replaced only in tests.

    Raises:
        DeviceError: the library can't be loaded, or does not initialise.
    """

    def __init__(self, library: str = LIBRARY) -> None:
        try:
            self._library = ctypes.CDLL(library)
        except OSError as exc:
            raise DeviceError(f"{library} can't be loaded: {exc}") from exc
        self.declare(_SIGNATURES)
        self._library.cuGetErrorString.argtypes = (c_int, POINTER(c_char_p))
        self._contexts: dict[int, handle] = {}
        self._streams: defaultdict[int, list[handle]] = defaultdict(list)
        self._lock = Lock()
        self.call("cuInit", 0)

    def declare(self, signatures: Mapping[str, tuple[type, ...]]) -> None:
        """Declare the argument types of functions, by name.

        Raises:
            AttributeError: the library lacks one of them.
        """
        for name, arguments in signatures.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = arguments, c_int

    def bind(self, index: int) -> None:
        """Make a device current in the calling thread."""
        self.call("cuCtxSetCurrent", self._context(index))

    def enable_access(self, index: int, other: int) -> None:
        """Let a device access all that another device allocates with ``cuMemAlloc`` in this
        process."""
        self.bind(index)
        self.call("cuCtxEnablePeerAccess", self._context(other), 0, accepted=ALREADY_ENABLED)

    def count(self) -> int:
        """The number of devices that are visible to this process."""
        found = c_int()
        self.call("cuDeviceGetCount", byref(found))
        return found.value

    def uuid(self, index: int) -> bytes:
        """The device's UUID, which does not depend on CUDA_VISIBLE_DEVICES."""
        found = (c_ubyte * UUID_BYTES)()
        self.call("cuDeviceGetUuid_v2", found, self.ordinal(index))
        return bytes(found)

    def can_access(self, index: int, other: int) -> bool:
        """Whether a device can access another device's memory (peer access)."""
        answer = c_int()
        devices = self.ordinal(index), self.ordinal(other)
        self.call("cuDeviceCanAccessPeer", byref(answer), *devices)
        return bool(answer.value)

    def has_atomics(self, index: int, other: int) -> bool:
        """Whether a device supports atomic operations on another device's memory: over NVLink, but
        not over PCIe."""
        answer = c_int()
        devices = self.ordinal(index), self.ordinal(other)
        self.call("cuDeviceGetP2PAttribute", byref(answer), NATIVE_ATOMICS, *devices)
        return bool(answer.value)

    def memory_bytes(self) -> tuple[int, int]:
        """(free, total) memory of the current device, in bytes."""
        free, total = c_size_t(), c_size_t()
        self.call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value, total.value

    def allocate(self, nbytes: int) -> int:
        """Allocate zeroed memory on the current device; raises OutOfMemory."""
        address = c_uint64()
        self.call("cuMemAlloc_v2", byref(address), nbytes)
        self.zero(address.value, nbytes)
        return address.value

    def zero(self, address: int, nbytes: int) -> None:
        """Fill memory with zeros."""
        self.call("cuMemsetD8_v2", address, 0, nbytes)
        self.synchronize()  # other streams may use the memory as soon as this returns

    def synchronize(self) -> None:
        """Block until the current device has completed all work that this process enqueued."""
        self.call("cuCtxSynchronize")

    def free(self, address: int) -> None:
        """Free memory; waits for the device."""
        self.call("cuMemFree_v2", address)

    def allocate_host(self, nbytes: int) -> int:
        """Allocate pinned host memory that has the same address for every device; raises
        OutOfMemory."""
        address = handle()
        self.call("cuMemHostAlloc", byref(address), nbytes, _FOR_EVERY_DEVICE)
        return address.value or 0

    def free_host(self, address: int) -> None:
        """Free pinned host memory."""
        self.call("cuMemFreeHost", address)

    def allocation_of(self, address: int) -> tuple[int, int]:
        """(address, bytes) of the allocation that contains an address."""
        base, nbytes = c_uint64(), c_size_t()
        self.call("cuMemGetAddressRange_v2", byref(base), byref(nbytes), address)
        return base.value, nbytes.value

    def export(self, address: int) -> bytes:
        """Export an IPC handle of an allocation, given by its first address, for other processes of
        this host."""
        exported = _IpcHandle()
        self.call("cuIpcGetMemHandle", byref(exported), address)
        return bytes(exported)

    def open(self, exported: bytes) -> int:
        """Map another process's allocation by its IPC handle; returns its address here."""
        address = c_uint64()
        named = _IpcHandle.from_buffer_copy(exported)
        self.call("cuIpcOpenMemHandle_v2", byref(address), named, _LAZY_PEER_ACCESS)
        return address.value

    def close(self, address: int) -> None:
        """Unmap an allocation that ``open`` mapped."""
        self.call("cuIpcCloseMemHandle", address)

    def take_stream(self, index: int) -> handle:
        """A stream of the current device, ``index``, that does not wait for the default stream; the
        caller gives it back.

        Streams are kept and reused: torch's allocator keeps what was allocated on a stream for that
        stream only, even after it was destroyed, so every new one takes more of the device's
        memory.
        """
        with self._lock:
            if self._streams[index]:
                return self._streams[index].pop()
        stream = handle()
        self.call("cuStreamCreate", byref(stream), _NON_BLOCKING)
        return stream

    def give_stream(self, index: int, stream: handle) -> None:
        """Give back a stream of ``take_stream``; work that is still enqueued on it is completed
        first by whatever is enqueued next."""
        with self._lock:
            self._streams[index].append(stream)

    def copy(self, target: int, source: int, nbytes: int, stream: handle) -> None:
        """Enqueue a copy between any two addresses."""
        self.call("cuMemcpyAsync", target, source, nbytes, stream)

    def drain(self, stream: handle) -> None:
        """Block until all work that was enqueued on the stream has completed."""
        self.call("cuStreamSynchronize", stream)

    def mark(self, stream: handle) -> handle:
        """Record an event behind all work enqueued on the stream so far; the caller passes it to
        ``reach`` once."""
        event = handle()
        self.call("cuEventCreate", byref(event), _WITHOUT_TIME)
        self.call("cuEventRecord", event, stream)
        return event

    def reach(self, event: handle) -> None:
        """Block until the stream has reached an event, and destroy the event."""
        try:
            self.call("cuEventSynchronize", event)
        finally:
            self.call("cuEventDestroy_v2", event)

    def attribute(self, index: int, number: int) -> int:
        """An attribute of a device, by its number in CUdevice_attribute.

        Raises:
            DeviceError: the driver is older than the attribute.
        """
        value = c_int()
        self.call("cuDeviceGetAttribute", byref(value), number, self.ordinal(index))
        return value.value

    def ordinal(self, index: int) -> int:
        """The driver's handle of a device."""
        device = c_int()
        self.call("cuDeviceGet", byref(device), index)
        return device.value

    def call(self, name: str, *arguments: object, accepted: int = 0) -> None:
        """Call a declared function, and raise OutOfMemory or DeviceError if it fails with another
        status than ``accepted``."""
        status = getattr(self._library, name)(*arguments)
        if status == _OUT_OF_MEMORY:
            raise OutOfMemory(f"{name}: the device is out of memory")
        if status not in (0, accepted):
            raise DeviceError(f"{name} failed: {self._describe(status)}")

    def _context(self, index: int) -> handle:
        """A device's primary context."""
        with self._lock:
            if index not in self._contexts:
                context = handle()
                self.call("cuDevicePrimaryCtxRetain", byref(context), self.ordinal(index))
                self._contexts[index] = context
            return self._contexts[index]

    def _describe(self, status: int) -> str:
        text = c_char_p()
        self._library.cuGetErrorString(status, byref(text))
        return f"{(text.value or b'unknown error').decode()} (CUDA error {status})"
