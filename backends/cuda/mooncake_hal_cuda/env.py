"""Every environment variable that the CUDA backend reads; nothing else reads the environment."""

from __future__ import annotations

import os


def hides_all_devices() -> bool:
    """Whether CUDA_VISIBLE_DEVICES is set to show none: empty, or beginning with ``-1``."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return value is not None and value.strip().split(",")[0] in ("", "-1")
