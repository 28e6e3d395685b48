"""The environment variables of CANN that the Ascend backend reads; nothing else here does."""

from __future__ import annotations

import os


def cann_home() -> str | None:
    """Where CANN's own set_env.sh says that it is (ASCEND_HOME_PATH), or None."""
    return os.environ.get("ASCEND_HOME_PATH") or None


def loads_torch_plugins() -> bool:
    """Whether ``import torch`` imports torch-npu by itself (TORCH_DEVICE_BACKEND_AUTOLOAD)."""
    return os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "0"
