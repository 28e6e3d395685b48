"""The environment variables that the Ascend backend reads; nothing else of it reads any.

============================  ===================================================================
ASCEND_HOME_PATH              where CANN is, as its own set_env.sh says
TORCH_DEVICE_BACKEND_AUTOLOAD ``0`` keeps ``import torch`` from importing torch-npu
MOONCAKE_HAL_ASCEND_ROOT      where the probe looks for /dev, /etc and /usr/local; default ``/``
============================  ===================================================================
"""

from __future__ import annotations

import os
from pathlib import Path


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
