"""NVLink domains, within which hosts can map each other's GPU memory; read from NVML and device
files.

Names and layouts are those of ``nvml.h``: nvmlGpuFabricInfo_v2_t, whose version field is its size
with a 2 in the top byte. State 3 is NVML_GPU_FABRIC_STATE_COMPLETED.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_ubyte, c_uint, c_void_p, sizeof
from pathlib import Path
from uuid import UUID

import msgspec

from mooncake_hal.errors import DeviceError

LIBRARY = "libnvidia-ml.so.1"
CHANNELS = Path("/dev/nvidia-caps-imex-channels")
"""Folder of the IMEX device files. Processes that can read the same file can share memory."""

_COMPLETED = 3


class FabricInfo(Structure):
    """nvmlGpuFabricInfo_v2_t."""

    _fields_ = [
        ("version", c_uint),
        ("clusterUuid", c_ubyte * 16),
        ("status", c_int),
        ("cliqueId", c_uint),
        ("state", c_ubyte),
        ("healthMask", c_uint),
    ]


FABRIC_INFO_VERSION = sizeof(FabricInfo) | 2 << 24

_SIGNATURES: dict[str, tuple[type, ...]] = {
    "nvmlInit_v2": (),
    "nvmlShutdown": (),
    "nvmlDeviceGetHandleByUUID": (c_char_p, POINTER(c_void_p)),
    "nvmlDeviceGetGpuFabricInfoV": (c_void_p, POINTER(FabricInfo)),
}


class NvlinkDomain(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A set of GPUs that are connected by NVLink, on one host or several.

    Args:
        cluster: UUID that the fabric manager assigned to the cluster.
        clique: number of the group of GPUs within the cluster that can reach each other.
    """

    cluster: bytes
    clique: int

    def __str__(self) -> str:
        return f"{self.cluster.hex()}/{self.clique}"


class NvlinkFabric:
    """Finds the NVLink domains of this host's GPUs.

    Args:
        library: name or path of NVML; replaced only in tests.
        channels: folder of the IMEX device files.
    """

    def __init__(self, library: str = LIBRARY, channels: Path = CHANNELS) -> None:
        self._name = library
        self._channels = channels

    def has_channel(self) -> bool:
        """Whether this process may share memory through IMEX."""
        return any(os.access(path, os.R_OK) for path in self._channels.glob("channel*"))

    def domain(self, uuid: bytes) -> NvlinkDomain:
        """The domain of the device with this UUID.

        Raises:
            DeviceError: the device is in no domain that extends beyond its host; the message says
                why.
        """
        library = self._load()
        _call(library, "nvmlInit_v2")
        try:
            device, info = c_void_p(), FabricInfo(version=FABRIC_INFO_VERSION)
            name = f"GPU-{UUID(bytes=uuid)}".encode()
            _call(library, "nvmlDeviceGetHandleByUUID", name, byref(device))
            _call(library, "nvmlDeviceGetGpuFabricInfoV", device, byref(info))
        finally:
            _call(library, "nvmlShutdown")
        if info.state != _COMPLETED or info.status:
            raise DeviceError(
                f"the GPU has not joined its NVLink fabric (state {info.state}, status "
                f"{info.status}); look at nvidia-fabricmanager and nvidia-imex"
            )
        if not any(info.clusterUuid):
            raise DeviceError("the NVLink fabric spans this host only")
        return NvlinkDomain(bytes(info.clusterUuid), info.cliqueId)

    def _load(self) -> ctypes.CDLL:
        try:
            library = ctypes.CDLL(self._name)
            for name, arguments in _SIGNATURES.items():
                function = getattr(library, name)
                function.argtypes, function.restype = arguments, c_int
        except (OSError, AttributeError) as exc:
            raise DeviceError(f"NVML can't report the NVLink domain: {exc}") from exc
        return library


def _call(library: ctypes.CDLL, name: str, *arguments: object) -> None:
    status = getattr(library, name)(*arguments)
    if status:
        raise DeviceError(f"{name} failed: NVML error {status}")
