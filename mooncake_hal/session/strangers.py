"""Limits on the resources of peers, and the table of strangers: connections whose peers have not
proved themselves yet.

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
        stranger_frame_bytes: longest frame of a peer that has not proved itself.
        frame_bytes: longest frame of a peer that has.
        strangers: maximum number of connections in their handshake; a further one evicts an old
            one.
        handshake_s: timeout of the whole handshake, in seconds.
        send_s: a peer that accepts no bytes for this many seconds is dropped.
        send_buffer_bytes: maximum amount of unsent data for one peer, beyond one longest frame.
        outstanding: maximum number of our requests to one peer without a reply.
        keepalive_s: interval in seconds at which an idle peer is pinged (asyncio only); a peer that
            is silent for three intervals is lost.
    """

    stranger_frame_bytes: int = 4096
    frame_bytes: int = 16 << 20
    strangers: int = 64
    handshake_s: float = 10.0
    send_s: float = 5.0
    send_buffer_bytes: int = 1 << 20
    outstanding: int = 1024
    keepalive_s: float = 20.0


LIMITS = Limits()


class _Stranger(NamedTuple):
    host: str
    expires: float


class Strangers(Generic[Connection]):
    """The connections that are in their handshake, oldest first, each with a deadline.

    Not thread-safe.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._strangers: dict[Connection, _Stranger] = {}

    def enter(self, connection: Connection, host: str, now: float) -> Connection | None:
        """Add a connection; if there are too many, returns an evicted one for the caller to close.

        The oldest connection of the host with the most connections is evicted, so that a host that
        floods us evicts its own first.
        """
        evicted = None
        if len(self._strangers) >= self._limits.strangers:
            hosts = Counter(stranger.host for stranger in self._strangers.values())
            worst = hosts.most_common(1)[0][0]
            evicted = next(key for key, known in self._strangers.items() if known.host == worst)
            del self._strangers[evicted]
        self._strangers[connection] = _Stranger(host, now + self._limits.handshake_s)
        return evicted

    def leave(self, connection: Connection) -> bool:
        """Remove a connection that was authenticated or lost; False if it was evicted before."""
        return self._strangers.pop(connection, None) is not None

    def expire(self, now: float) -> list[Connection]:
        """Remove and return the connections whose deadline has passed."""
        late = [key for key, known in self._strangers.items() if known.expires <= now]
        for key in late:
            del self._strangers[key]
        return late

    def next_deadline(self) -> float | None:
        """Return the earliest deadline, or None if there are no connections."""
        return min((known.expires for known in self._strangers.values()), default=None)

    def all(self) -> list[Connection]:
        """Return all connections."""
        return list(self._strangers)
