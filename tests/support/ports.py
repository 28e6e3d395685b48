"""Finds consecutive free ports on this host."""

from __future__ import annotations

import random

from mooncake_hal.port_range import PortRange
from mooncake_hal.ports import count_free

BELOW_EPHEMERAL = (10_000, 32_000)
"""Below the range from which the kernel allocates ports."""


def free_range(count: int, host: str = "127.0.0.1") -> PortRange:
    """That many consecutive ports that are free now.

    Raises:
        AssertionError: none are found.
    """
    for _ in range(100):
        first = random.randrange(*BELOW_EPHEMERAL)
        found = PortRange(first, first + count - 1)
        if count_free(found, host, count) == count:
            return found
    raise AssertionError(f"no {count} free ports in a row on {host}")
