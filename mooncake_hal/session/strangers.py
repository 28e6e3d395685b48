"""Limits on connections that have not proved themselves yet.

Pure: no sockets, time is an argument.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

Connection = TypeVar("Connection", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a peer may cost us, in bytes, connections and seconds.

    Args:
        stranger_frame_bytes: longest frame of a peer that has not proved itself.
        frame_bytes: longest frame of one that has.
        strangers: connections in their handshake at once; the oldest is closed for a new one.
        handshake_s: for the whole handshake, however the peer spreads its bytes over it.
        send_s: how long a peer may take no bytes before it is dropped.
        send_buffer_bytes: what may wait to be sent to one peer, beyond one longest frame.
        outstanding: requests of ours to one peer that it has not replied to.
        keepalive_s: how often an idle peer is pinged (asyncio); after three without a word it is
            lost.
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
    """The connections that are in their handshake, oldest first; one deadline each.

    Not safe for threads.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._strangers: dict[Connection, _Stranger] = {}

    def enter(self, connection: Connection, host: str, now: float) -> Connection | None:
        """Take a connection in; returns the one to close for it, if there are too many.

        That is the oldest one of the host that has most: who floods us pushes out its own first.
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
        """Take a connection out, proved or gone; False if it was evicted before."""
        return self._strangers.pop(connection, None) is not None

    def expire(self, now: float) -> list[Connection]:
        """Take out and return those whose time is over."""
        late = [key for key, known in self._strangers.items() if known.expires <= now]
        for key in late:
            del self._strangers[key]
        return late

    def next_deadline(self) -> float | None:
        """Return when the next one's time is over."""
        return min((known.expires for known in self._strangers.values()), default=None)

    def all(self) -> list[Connection]:
        """Return all of them."""
        return list(self._strangers)
