"""The Ascend backend over the real torch-npu and the real transfer engines, on the CANN stub.

Importing this module sets the stub up, which must happen before torch-npu is imported.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from contextlib import redirect_stdout
from functools import lru_cache
from pathlib import Path
from sysconfig import get_paths
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray
from support import cann_stub
from support.fake_hccs import HostMemory, HostRuntime, host_scatterer

if TYPE_CHECKING:
    from mooncake_hal.backend import Backend, Memory, Runtime
    from mooncake_hal.transport import MemoryRegion
    from mooncake_hal.transports.adapters.adapter_transport import AdapterTransport

SITE = Path(get_paths()["purelib"])
STUB = Path(sys.prefix) / "cann-stub"
MACHINE = Path(__file__).parent / "npu_emulation/machine"
SETTINGS = {
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    "TASK_QUEUE_ENABLE": "0",  # otherwise torch-npu runs ops in a thread of its own
    "CANN_STUB_DEVICES": "2",
    "CANN_STUB_BYTES": str(1 << 30),
    "MC_LOG_LEVEL": "FATAL",
    "MOONCAKE_HAL_ASCEND_ROOT": str(MACHINE),
}


def _set_up() -> None:
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    if "CANN_STUB_FOLDER" not in os.environ:
        os.environ["CANN_STUB_FOLDER"] = tempfile.mkdtemp(prefix="mooncake-test-hixl-")
    torch = [path for path in (SITE / "torch/lib").glob("*.so*") if path.name.startswith("lib")]
    packages = [SITE / "torch_npu", SITE / "mooncake"]
    cann_stub.preload(cann_stub.built(packages, torch, STUB))


_set_up()


@lru_cache(maxsize=1)
def backend() -> Backend:
    """The backend over the real torch-npu, whose ops compute with the reference kernels."""
    from support.cann_stub import kernels

    from mooncake_hal.testing.backends import load_backend

    with redirect_stdout(sys.stderr):  # it reports there that ASCEND_HOME_PATH is missing
        kernels.take_over(STUB)
    kernels.use_references()
    return load_backend("ascend")


class NpuBuffer:
    """See ``transports_buffers.Buffer``: memory of the backend."""

    def __init__(self, nbytes: int) -> None:
        self._memory = backend().memory.allocate(nbytes, 0)

    @property
    def region(self) -> MemoryRegion:
        return self._memory.region

    def put(self, content: NDArray[np.uint8]) -> None:
        import torch

        self._memory.tensor.copy_(torch.from_numpy(content))

    def get(self) -> NDArray[np.uint8]:
        return cast("NDArray[np.uint8]", self._memory.tensor.cpu().numpy())

    def close(self) -> None:
        self._memory.free()


def load_mooncake() -> AdapterTransport:
    """The transport hccs over mooncake's engine."""
    backend()
    from mooncake_hal_ascend.hccs.hccs_transport import load

    return load()


class StubRuntime(HostRuntime):
    """One NPU of the stub without torch-npu, for suite processes that have to start fast."""

    def bind_thread(self, index: int) -> None:
        ctypes.CDLL("libascendcl.so").aclrtSetDevice(index)


def load_mooncake_alone() -> AdapterTransport:
    """The transport hccs over mooncake's engine and host memory."""
    from mooncake_hal_ascend.hccs.hccs_transport import HccsResources, transport_of

    runtime, memory = cast("Runtime", StubRuntime()), cast("Memory", HostMemory())
    return transport_of(HccsResources(runtime, memory, scatterer=host_scatterer()))
