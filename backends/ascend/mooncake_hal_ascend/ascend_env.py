"""Environment variables of the Ascend backend, and of the vendor's libraries that it configures.

============================  ===================================================================
ASCEND_HOME_PATH              folder of CANN, set by CANN's set_env.sh
TORCH_DEVICE_BACKEND_AUTOLOAD ``0`` keeps ``import torch`` from importing torch-npu
MOONCAKE_HAL_ASCEND_ROOT      root under which the probe looks for /dev, /etc and /usr/local;
                              default ``/``
MOONCAKE_HAL_HCCS             settings of ``hccs`` for every endpoint: ``name=value ...``
HCCL_*, ASCEND_*, MC_*, MF_*  settings of HCCL, CANN and the transfer engines, which have no
                              other configuration. Values that the operator set are kept.
============================  ===================================================================
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from mooncake_hal.errors import HalError

_DEFAULT_BUFFER_MIB = 200
PREFIXES = ("HCCL_", "ASCEND_", "MC_", "MF_", "MEMFABRIC_")


def cann_home() -> str | None:
    """The folder of CANN that its set_env.sh has exported (ASCEND_HOME_PATH), or None."""
    return os.environ.get("ASCEND_HOME_PATH") or None


def loads_torch_plugins() -> bool:
    """Whether ``import torch`` also imports torch-npu (TORCH_DEVICE_BACKEND_AUTOLOAD)."""
    return os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "0"


def root() -> Path:
    """Root of the machine's file system (MOONCAKE_HAL_ASCEND_ROOT).

    A container may have the host's file system mounted elsewhere, and tests describe a machine in a
    folder.
    """
    return Path(os.environ.get("MOONCAKE_HAL_ASCEND_ROOT") or "/")


def engine_settings() -> dict[str, str]:
    """The variables of HCCL, CANN and the transfer engines that are set and not empty."""
    return {
        name: value for name, value in os.environ.items() if value and name.startswith(PREFIXES)
    }


def group_buffer_bytes() -> int:
    """Size of the buffer that HCCL allocates per group, through which ops exchange rows
    (HCCL_BUFFSIZE, in MiB; 200 unless it is set).

    Raises:
        HalError: the value is not a whole number above 0.
    """
    value = os.environ.get("HCCL_BUFFSIZE") or str(_DEFAULT_BUFFER_MIB)
    if not value.isdecimal() or int(value) == 0:
        raise HalError(f"HCCL_BUFFSIZE={value!r} must be a whole number of MiB above 0")
    return int(value) << 20


def transport_settings() -> str:
    """Settings of the ``hccs`` transport for every endpoint: ``name=value`` separated by spaces."""
    return os.environ.get("MOONCAKE_HAL_HCCS", "")


def export_settings(settings: Mapping[str, str]) -> None:
    """Set those variables that are not set yet; the engines read them when they start."""
    for name, value in settings.items():
        os.environ.setdefault(name, value)
