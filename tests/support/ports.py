"""Ports on this host: consecutive free ones, and one that a server has left."""

from __future__ import annotations

import random
import socket

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


def left_port(*, reuse_port: bool) -> int:
    """A port that a server has left with a connection in TIME_WAIT."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(reuse_port))
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with socket.create_connection(listener.getsockname()) as client:
            accepted, _ = listener.accept()
            accepted.close()
            assert client.recv(1) == b""
        return int(listener.getsockname()[1])
