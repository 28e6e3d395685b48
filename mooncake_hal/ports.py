"""TCP ports of this host: whether they are free, checked by binding them, and which process listens
on one."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from mooncake_hal.port_range import PortRange

LISTEN = "0A"


@dataclass(frozen=True, slots=True)
class Port:
    """A port that an instance is going to bind.

    Args:
        what: its purpose, such as ``"HTTP"`` or ``"side channel of rank 1"``.
        host: address to bind.
        number: port number; 0 picks a free one.
    """

    what: str
    host: str
    number: int


def find_ports_in_use(ports: Sequence[Port]) -> list[str]:
    """Bind all ports at once and release them; returns a sentence for each that can't be bound.

    Ports on addresses of other machines are skipped.
    """
    problems = []
    with ExitStack() as held:
        for port in ports:
            problem = _try_bind(port, held)
            if problem is not None:
                problems.append(problem)
    return problems


def count_free(ports: PortRange, host: str, limit: int) -> int:
    """Count the free ports of a range, up to ``limit``."""
    free = 0
    with ExitStack() as held:
        for number in ports:
            if free >= limit:
                break
            free += _try_bind(Port("", host, number), held) is None
    return free


def find_port_owner(number: int) -> str | None:
    """The process that listens on a TCP port of this host, as ``"name (pid N)"``; None if it is not
    visible to this user."""
    inodes = _listening_inodes(number)
    for process in Path("/proc").glob("[0-9]*"):
        if inodes and _holds(process, inodes):
            return f"{_name(process)} (pid {process.name})"
    return None


def _try_bind(port: Port, held: ExitStack) -> str | None:
    family = socket.AF_INET6 if ":" in port.host else socket.AF_INET
    listener = held.enter_context(socket.socket(family))
    try:
        # connections in TIME_WAIT must not block a restarted instance from binding its port again
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((port.host, port.number))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)  # exclusive from now on
    except OSError as exc:
        if exc.errno == errno.EADDRNOTAVAIL:
            return None
        if exc.errno == errno.EADDRINUSE:
            holder = find_port_owner(port.number)
            by = f" by {holder}" if holder else ""
            return (
                f"port {port.number} on {port.host}, wanted for {port.what}, is taken{by}; "
                "stop that, or choose another port"
            )
        return f"port {port.number} on {port.host} can't be bound for {port.what}: {exc.strerror}"
    return None


def _listening_inodes(number: int) -> set[str]:
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if not os.path.exists(table):
            continue
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and int(fields[1].rsplit(":", 1)[1], 16) == number:
                found.add(f"socket:[{fields[9]}]")
    return found


def _holds(process: Path, inodes: set[str]) -> bool:
    with suppress(OSError):  # another user's process, or one that has just ended
        for descriptor in (process / "fd").iterdir():
            with suppress(OSError):  # closed since
                if os.readlink(descriptor) in inodes:
                    return True
    return False


def _name(process: Path) -> str:
    try:
        words = (process / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return "a process"
    return " ".join(word.decode(errors="replace") for word in words[:3] if word)
