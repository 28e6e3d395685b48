"""Stands in for torch-npu on machines without an NPU: importable under its name if this folder's
parent is on PYTHONPATH.

The device is a PrivateUse1 device of torch over host memory (``csrc``). Ops of ``torch.ops.npu``
have torch-npu's own schemas (``schemas.json``, read from the live package) and kernels in plain
torch (``kernels``) that reject what Ascend's documentation says they reject.
"""

from __future__ import annotations

import os
import sys
from typing import Any

_wanted = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD")
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # torch would come back here, half done

import torch  # noqa: E402

from torch_npu._build import library  # noqa: E402

if _wanted is None:
    del os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"]
else:
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = _wanted

__version__ = "2.13.0"

torch.utils.rename_privateuse1_backend("npu")
torch.ops.load_library(str(library()))
torch.ops.npu_emulation.register_fallbacks()

from torch_npu import npu  # noqa: E402  # the device comes first

torch._register_device_module("npu", npu)
sys.modules["torch.npu"] = npu
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)

from torch_npu import _C, kernels  # noqa: E402, F401  # they register themselves


def _autoload() -> None:
    """The entry point that ``import torch`` calls; importing this module is enough."""


def __getattr__(name: str) -> Any:
    """Ops are the module's attributes, as in torch-npu."""
    for namespace in (torch.ops.npu, torch.ops.atb):
        if not name.startswith("__") and hasattr(namespace, name):
            return getattr(namespace, name)
    raise AttributeError(f"module 'torch_npu' has no attribute {name!r}")
