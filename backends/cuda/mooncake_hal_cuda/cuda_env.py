"""Environment variables of the CUDA backend; its only module that reads or sets any."""

from __future__ import annotations

import os
from contextlib import suppress

from mooncake_hal.errors import HalError, NativeUnavailable
from mooncake_hal.native import cache_directory


def hides_all_devices() -> bool:
    """Whether CUDA_VISIBLE_DEVICES hides all devices: it is empty, or its first entry is ``-1``."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return value is not None and value.strip().split(",")[0] in ("", "-1")


def attention(names: tuple[str, ...]) -> str:
    """MOONCAKE_HAL_CUDA_ATTENTION: the attention implementation, by default the first of ``names``.

    Raises:
        HalError: the value is not in ``names``.
    """
    return _one_of("MOONCAKE_HAL_CUDA_ATTENTION", names)


def memory_kind(names: tuple[str, ...]) -> str:
    """MOONCAKE_HAL_CUDA_MEMORY: the kind of KV memory, by default the first of ``names``.

    Raises:
        HalError: the value is not in ``names``.
    """
    return _one_of("MOONCAKE_HAL_CUDA_MEMORY", names)


def all_reduce(names: tuple[str, ...]) -> str:
    """MOONCAKE_HAL_CUDA_ALL_REDUCE: the implementation of small all-reduces, by default the first
    of ``names``.

    Raises:
        HalError: the value is not in ``names``.
    """
    return _one_of("MOONCAKE_HAL_CUDA_ALL_REDUCE", names)


def keep_kernels_in_project_cache() -> None:
    """Set TRITON_CACHE_DIR, unless it is set, to a folder beside our compiled helpers.

    By default Triton writes to the home folder and ignores XDG_CACHE_HOME (triton/knobs.py). Where
    no home folder exists (containers, pods, systemd units), its first kernel fails.
    """
    if "TRITON_CACHE_DIR" not in os.environ:
        with suppress(NativeUnavailable):  # Triton then uses its default, or reports the error
            os.environ["TRITON_CACHE_DIR"] = str(cache_directory() / "triton")


def _one_of(variable: str, names: tuple[str, ...]) -> str:
    value = os.environ.get(variable, names[0])
    if value not in names:
        raise HalError(f"{variable}={value!r} must be one of {list(names)}")
    return value
