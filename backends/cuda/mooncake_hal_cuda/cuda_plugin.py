"""Plugin entry point of the CUDA backend; imports the standard library only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mooncake_hal.errors import BackendUnavailable
from mooncake_hal.hookspecs import hookimpl
from mooncake_hal.known_hardware import CUDA
from mooncake_hal.specs import API_VERSION, Availability, BackendSpec, TransportSpec
from mooncake_hal_cuda.cuda_env import keep_kernels_in_project_cache
from mooncake_hal_cuda.cuda_machine import check_availability, detect_machine

if TYPE_CHECKING:
    from mooncake_hal.backend import Backend
    from mooncake_hal.host_copies import HostCopies
    from mooncake_hal.transport import Transport

IPC_PRIORITY = 60
"""Above the transports that go through a NIC or host memory."""


@hookimpl
def mooncake_hal_backend() -> BackendSpec:
    """Register the backend for NVIDIA GPUs."""
    return BackendSpec(
        name="cuda",
        api_version=API_VERSION,
        priority=100,
        probe=probe,
        load=load,
        device_type="cuda",
        host_copies=load_host_copies,
        hardware=CUDA,
    )


@hookimpl
def mooncake_hal_transport() -> TransportSpec:
    """Register the transport that moves KV between GPUs of one host."""
    return TransportSpec("cuda_ipc", API_VERSION, IPC_PRIORITY, probe, load_ipc)


def probe() -> Availability:
    """Look for the driver, the devices and a torch that can use them, and initialise none."""
    return check_availability(detect_machine())


def load() -> Backend:
    """Import torch and the kernels, and construct the backend.

    Raises:
        BackendUnavailable: something is missing that the probe can't detect; the reason names it.
    """
    keep_kernels_in_project_cache()
    try:
        from mooncake_hal_cuda.cuda_backend import CudaBackend
    except (ImportError, OSError, RuntimeError) as exc:
        raise BackendUnavailable("cuda", f"torch or triton can't be imported: {exc}") from exc
    return CudaBackend()


def load_host_copies(index: int) -> HostCopies:
    """Load the driver, and copy between device ``index`` and host memory.

    Raises:
        DeviceError: the driver does not load, or has no such device.
    """
    keep_kernels_in_project_cache()
    from mooncake_hal_cuda.libcuda import CudaDriver
    from mooncake_hal_cuda.transports.cuda_host_copies import CudaHostCopies

    return CudaHostCopies(CudaDriver(), index)


def load_ipc() -> Transport:
    """Load the driver and construct the ``cuda_ipc`` transport.

    Raises:
        TransportUnavailable: the driver does not load.
    """
    keep_kernels_in_project_cache()
    from mooncake_hal_cuda.transports.cuda_ipc import load as load_transport

    return load_transport()
