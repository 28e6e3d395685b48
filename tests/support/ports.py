"""Ports of this host that are free, in a row."""

from __future__ import annotations

import random

from mooncake_hal.port_range import PortRange
from mooncake_hal.ports import count_free

BELOW_EPHEMERAL = (10_000, 32_000)
"""Where the kernel takes none from by itself."""


def free_range(count: int, host: str = "127.0.0.1") -> PortRange:
    """So many ports that nobody holds now.

    Raises:
        AssertionError: none are found.
    """
    for _ in range(100):
        first = random.randrange(*BELOW_EPHEMERAL)
        found = PortRange(first, first + count - 1)
        if count_free(found, host, count) == count:
            return found
    raise AssertionError(f"no {count} free ports in a row on {host}")
