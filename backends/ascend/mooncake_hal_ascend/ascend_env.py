"""The environment variables that the Ascend backend reads; no other module of it reads any.

============================  ===================================================================
ASCEND_HOME_PATH              where CANN is, as its own set_env.sh says
TORCH_DEVICE_BACKEND_AUTOLOAD ``0`` keeps ``import torch`` from importing torch-npu
MOONCAKE_HAL_ASCEND_ROOT      where the probe looks for /dev, /etc and /usr/local; default ``/``
MOONCAKE_HAL_HCCS             settings of ``hccs`` for every endpoint: ``name=value ...``
HCCL_*, ASCEND_*, MC_*, MF_*  what HCCL, CANN and the transfer engines read: they take their
                              settings from here only. What the operator has set stays.
============================  ===================================================================
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

PREFIXES = ("HCCL_", "ASCEND_", "MC_", "MF_", "MEMFABRIC_")


def cann_home() -> str | None:
    """Where CANN's own set_env.sh says that it is (ASCEND_HOME_PATH), or None."""
    return os.environ.get("ASCEND_HOME_PATH") or None


def loads_torch_plugins() -> bool:
    """Whether ``import torch`` imports torch-npu by itself (TORCH_DEVICE_BACKEND_AUTOLOAD)."""
    return os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "0"


def root() -> Path:
    """Where the machine's file system begins (MOONCAKE_HAL_ASCEND_ROOT): a container may have the
    host's mounted elsewhere, and tests describe a machine in a folder."""
    return Path(os.environ.get("MOONCAKE_HAL_ASCEND_ROOT") or "/")


def engine_settings() -> dict[str, str]:
    """The variables that HCCL, CANN and the engines read, those that are set and not empty."""
    return {
        name: value for name, value in os.environ.items() if value and name.startswith(PREFIXES)
    }


def transport_settings() -> str:
    """Settings of the transport hccs for every endpoint: ``name=value`` with spaces between."""
    return os.environ.get("MOONCAKE_HAL_HCCS", "")


def export_settings(settings: Mapping[str, str]) -> None:
    """Set variables that are not set; the engines read them when they start."""
    for name, value in settings.items():
        os.environ.setdefault(name, value)
