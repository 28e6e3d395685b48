"""Ranges of ports, as operators write them; pure, for configs and plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MAX_PORT = 65_535


@dataclass(frozen=True, slots=True)
class PortRange:
    """Ports that a firewall lets through, say. Iterates over them.

    Args:
        first, last: both are in it.

    Raises:
        ValueError: they are no ports, or in the wrong order.
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
        """Read ``"14000-14099"``, or one port; raises ValueError."""
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
    """Ports that something below us takes by itself, at any time, and that we keep out of.

    Args:
        what: takes them.
        ports: any of them.
        setting: what moves them.
    """

    what: str
    ports: PortRange
    setting: str


def why_reserved(what: str, wanted: PortRange, reserved: Sequence[ReservedPorts]) -> str | None:
    """Say which reserved ports are among those that we want, and what to do; None if none are.

    Args:
        what: they are wanted for.
        wanted: a range, or one port.
        reserved: all of this host.
    """
    for each in reserved:
        if wanted.first <= each.ports.last and each.ports.first <= wanted.last:
            name = f"ports {wanted}" if len(wanted) > 1 else f"port {wanted.first}"
            return (
                f"{name}, wanted for {what}, lies in {each.ports}, of which {each.what} may take "
                f"any at any time; choose one outside, or move those ({each.setting})"
            )
    return None
