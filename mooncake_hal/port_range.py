"""Port ranges as operators write them, for configurations and deployment plans; pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MAX_PORT = 65_535


@dataclass(frozen=True, slots=True)
class PortRange:
    """A contiguous range of ports, such as those that a firewall lets through. Iterable.

    Args:
        first, last: first and last port, both included.

    Raises:
        ValueError: these are not valid ports, or ``last`` is below ``first``.
    """

    first: int
    last: int

    def __post_init__(self) -> None:
        if not 1 <= self.first <= self.last <= MAX_PORT:
            raise ValueError(
                f"wanted a range of ports such as 14000-14099, within 1-{MAX_PORT}, got {self}"
            )

    @classmethod
    def parse(cls, text: str) -> PortRange:
        """Parse ``"14000-14099"`` or a single port; raises ValueError."""
        first, dash, last = text.partition("-")
        try:
            return cls(int(first), int(last if dash else first))
        except ValueError as exc:
            raise ValueError(
                f"wanted a range of ports such as 14000-14099, within 1-{MAX_PORT}, got {text!r}"
            ) from exc

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"

    def __len__(self) -> int:
        return self.last - self.first + 1

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.last + 1))


@dataclass(frozen=True, slots=True)
class ReservedPorts:
    """Ports that a library or driver below a transport may bind at any time, and that must not be
    used for anything else.

    Args:
        what: the library or driver that binds them.
        ports: the range from which it may bind any port.
        setting: how to move the range, for messages.
    """

    what: str
    ports: PortRange
    setting: str


def reservation_conflict(
    what: str, wanted: PortRange, reserved: Sequence[ReservedPorts]
) -> str | None:
    """Return how wanted ports overlap reserved ones and what to do about it; None if they do not.

    Args:
        what: what the ports are wanted for, for messages.
        wanted: the wanted range, or a range of a single port.
        reserved: all reserved ports of this host.
    """
    for each in reserved:
        if wanted.first <= each.ports.last and each.ports.first <= wanted.last:
            name = f"ports {wanted}" if len(wanted) > 1 else f"port {wanted.first}"
            return (
                f"{name}, wanted for {what}, lies in {each.ports}, from which {each.what} may take "
                f"any port at any time; choose one outside, or move that range ({each.setting})"
            )
    return None
