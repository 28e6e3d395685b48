"""The environment of Ascend's transfer engines: read by us, and set for them.

They take their settings from here and nowhere else. What the operator has set stays.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

PREFIXES = ("HCCL_", "ASCEND_", "MC_", "MF_", "MEMFABRIC_")


def vendor_settings() -> dict[str, str]:
    """The variables that HCCL, CANN and the engines read, those that are set and not empty."""
    return {
        name: value for name, value in os.environ.items() if value and name.startswith(PREFIXES)
    }


def transport_settings() -> str:
    """Settings of the transport hccs for every endpoint: ``name=value`` with spaces between."""
    return os.environ.get("MOONCAKE_HAL_HCCS", "")


def tell_engines(settings: Mapping[str, str]) -> None:
    """Set variables that are not set; the engines read them when they start."""
    for name, value in settings.items():
        os.environ.setdefault(name, value)
