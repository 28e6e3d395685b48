"""Every environment variable that the CUDA backend reads or sets; no other module of it does."""

from __future__ import annotations

import os
from contextlib import suppress

from mooncake_hal.errors import HalError, NativeUnavailable
from mooncake_hal.native import cache_directory


def hides_all_devices() -> bool:
    """Whether CUDA_VISIBLE_DEVICES is set to show none: empty, or beginning with ``-1``."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return value is not None and value.strip().split(",")[0] in ("", "-1")


def attention(names: tuple[str, ...]) -> str:
    """MOONCAKE_HAL_CUDA_ATTENTION: what attention runs on, the first of ``names`` by default.

    Raises:
        HalError: it is none of them.
    """
    return _one_of("MOONCAKE_HAL_CUDA_ATTENTION", names)


def memory_kind(names: tuple[str, ...]) -> str:
    """MOONCAKE_HAL_CUDA_MEMORY: the kind of KV memory, the first of ``names`` by default.

    Raises:
        HalError: it is none of them.
    """
    return _one_of("MOONCAKE_HAL_CUDA_MEMORY", names)


def all_reduce(names: tuple[str, ...]) -> str:
    """MOONCAKE_HAL_CUDA_ALL_REDUCE: how small all-reduces run, the first of ``names`` by default.

    Raises:
        HalError: it is none of them.
    """
    return _one_of("MOONCAKE_HAL_CUDA_ALL_REDUCE", names)


def keep_kernels_in_project_cache() -> None:
    """Set TRITON_CACHE_DIR, if it is not set, to a folder beside our compiled helpers.

    Triton would write to the home folder, whatever XDG_CACHE_HOME says (triton/knobs.py), and fail
    at the first kernel where there is none: in containers, pods and systemd units.
    """
    if "TRITON_CACHE_DIR" not in os.environ:
        with suppress(NativeUnavailable):  # Triton then finds its own folder, or says what is wrong
            os.environ["TRITON_CACHE_DIR"] = str(cache_directory() / "triton")


def _one_of(variable: str, names: tuple[str, ...]) -> str:
    value = os.environ.get(variable, names[0])
    if value not in names:
        raise HalError(f"{variable}={value!r} must be one of {list(names)}")
    return value
