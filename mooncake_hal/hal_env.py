"""All environment variables that the hardware layer reads; no other module of it reads any.

========================  =======================================================================
MOONCAKE_HAL_BACKEND      backend that ``auto`` selects; unset: the best available one
MOONCAKE_HAL_BLOCK        comma-separated names of plugins (entry points) that are not loaded
MOONCAKE_HAL_CPU_NATIVE   ``0`` keeps the CPU backend from compiling its kernels; default ``1``
MOONCAKE_HAL_PACED        time that a layer of the ``paced`` backend takes for a step's decodes and
                          for each prompt token, as two numbers of microseconds; default ``300 1``
MOONCAKE_HAL_MOONCAKE     settings of the transport ``mooncake``, as those of ``tcp``
MOONCAKE_HAL_NIXL         settings of the transport ``nixl``
MOONCAKE_HAL_RDMA         settings of the transport ``rdma``
MOONCAKE_HAL_TCP          settings of the transport ``tcp``: ``name=value``, separated by spaces
========================  =======================================================================
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection

from mooncake_hal.errors import HalError

_NAME = re.compile(r"[a-z][a-z0-9_-]*")


def backend_name() -> str | None:
    """The name in MOONCAKE_HAL_BACKEND; None if it is unset, empty or ``auto``.

    Raises:
        HalError: the value is not a valid name.
    """
    name = os.environ.get("MOONCAKE_HAL_BACKEND", "").strip()
    if name in ("", "auto"):
        return None
    return _checked("MOONCAKE_HAL_BACKEND", name)


def blocked_plugins() -> frozenset[str]:
    """The names in MOONCAKE_HAL_BLOCK.

    Raises:
        HalError: one of them is not a valid name.
    """
    names = [name.strip() for name in os.environ.get("MOONCAKE_HAL_BLOCK", "").split(",")]
    return frozenset(_checked("MOONCAKE_HAL_BLOCK", name) for name in names if name)


def cpu_native() -> bool:
    """Whether the CPU backend may compile kernels (MOONCAKE_HAL_CPU_NATIVE).

    Raises:
        HalError: the value is neither ``0`` nor ``1``.
    """
    value = os.environ.get("MOONCAKE_HAL_CPU_NATIVE", "1")
    if value not in ("0", "1"):
        raise HalError(f"MOONCAKE_HAL_CPU_NATIVE={value!r} must be 0 or 1")
    return value == "1"


def gloo_interfaces() -> tuple[str, ...]:
    """The network interfaces in torch's GLOO_SOCKET_IFNAME; empty if it is unset.
    torch reads it only for groups without devices of their own."""
    names = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
    return tuple(name.strip() for name in names if name.strip())


def paced_settings() -> tuple[float, float]:
    """The times in MOONCAKE_HAL_PACED, in seconds: of a layer's decodes, and of a prompt token.

    Raises:
        HalError: the value is not two numbers.
    """
    value = os.environ.get("MOONCAKE_HAL_PACED", "300 1")
    try:
        decode_us, token_us = map(float, value.split())
    except ValueError:
        raise HalError(
            f"MOONCAKE_HAL_PACED={value!r} must be two numbers of microseconds, such as '300 1'"
        ) from None
    return decode_us * 1e-6, token_us * 1e-6


def transport_settings(transport: str, known: Collection[str]) -> dict[str, str]:
    """The settings in a transport's variable (MOONCAKE_HAL_TCP, ...) by name. They hold for every
    endpoint that does not override them: for instances, stores and vLLM alike.

    Args:
        transport: name of the transport.
        known: names of its settings.

    Raises:
        HalError: a word is not ``name=value``, or has an unknown name.
    """
    variable = f"MOONCAKE_HAL_{transport.upper()}"
    found = {}
    for word in os.environ.get(variable, "").split():
        name, sign, value = word.partition("=")
        if not (name and sign):
            raise HalError(f"{variable}: {word!r} is not name=value")
        found[name] = value
    if unknown := sorted(set(found) - set(known)):
        raise HalError(f"{variable}: {transport} has no setting {unknown}; it has {sorted(known)}")
    return found


def is_name(name: str) -> bool:
    """Whether ``name`` is valid for a plugin, backend or transport."""
    return _NAME.fullmatch(name) is not None


def _checked(variable: str, name: str) -> str:
    if not is_name(name):
        raise HalError(
            f"{variable}: {name!r} is not a valid name: use lower-case letters, digits, '-' and '_'"
        )
    return name
