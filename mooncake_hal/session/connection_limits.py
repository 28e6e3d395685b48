"""Limits on the resources of peers, and the table of pending handshakes: connections whose
peers have not authenticated themselves yet.

Pure: no sockets, and the time is an argument.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

Connection = TypeVar("Connection", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on the resources that a peer may use.

    Args:
        handshake_frame_bytes: longest frame of a peer that has not proved itself.
        frame_bytes: longest frame of a peer that has.
        handshakes: maximum number of connections in their handshake; a further one evicts an old
            one.
        handshake_s: timeout of the whole handshake, in seconds.
        send_s: a peer that accepts no bytes for this many seconds is dropped.
        send_buffer_bytes: maximum amount of unsent data for one peer, beyond one longest frame.
        outstanding: maximum number of our requests to one peer without a reply.
        keepalive_s: interval in seconds at which an idle peer is pinged (asyncio only); a peer that
            is silent for three intervals is lost.
    """

    handshake_frame_bytes: int = 4096
    frame_bytes: int = 16 << 20
    handshakes: int = 64
    handshake_s: float = 10.0
    send_s: float = 5.0
    send_buffer_bytes: int = 1 << 20
    outstanding: int = 1024
    keepalive_s: float = 20.0


LIMITS = Limits()


class _Pending(NamedTuple):
    host: str
    expires: float


class PendingHandshakes(Generic[Connection]):
    """The connections that are in their handshake, oldest first, each with a deadline.

    Not thread-safe.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._handshakes: dict[Connection, _Pending] = {}

    def enter(self, connection: Connection, host: str, now: float) -> Connection | None:
        """Add a connection; if there are too many, returns an evicted one for the caller to close.

        The oldest connection of the host with the most connections is evicted, so that a host that
        floods us evicts its own first.
        """
        evicted = None
        if len(self._handshakes) >= self._limits.handshakes:
            hosts = Counter(pending.host for pending in self._handshakes.values())
            worst = hosts.most_common(1)[0][0]
            evicted = next(key for key, known in self._handshakes.items() if known.host == worst)
            del self._handshakes[evicted]
        self._handshakes[connection] = _Pending(host, now + self._limits.handshake_s)
        return evicted

    def leave(self, connection: Connection) -> bool:
        """Remove a connection that was authenticated or lost; False if it was evicted before."""
        return self._handshakes.pop(connection, None) is not None

    def expire(self, now: float) -> list[Connection]:
        """Remove and return the connections whose deadline has passed."""
        late = [key for key, known in self._handshakes.items() if known.expires <= now]
        for key in late:
            del self._handshakes[key]
        return late

    def next_deadline(self) -> float | None:
        """Return the earliest deadline, or None if there are no connections."""
        return min((known.expires for known in self._handshakes.values()), default=None)

    def all(self) -> list[Connection]:
        """Return all connections."""
        return list(self._handshakes)
