"""The engine that drives one peer: opened when it is needed, closed when it fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np

from mooncake_hal.errors import RegionRevoked, TransferError, TransportUnavailable
from mooncake_hal.transport import MemoryRegion, Spans
from mooncake_hal.transports.adapter.agent import Agent, Engine, Slice
from mooncake_hal.transports.adapter.facts import Description
from mooncake_hal.transports.control.session import Session

TOKEN_KEY = 0
"""The peer's token; keys of regions begin with 1."""

LANDING_KEY = -1
"""Where the token is read to."""


class Link:
    """An agent of our own for one peer, so that closing it disturbs nobody else.

    Args:
        engine: starts it.
        description: the peer's.
        region: our region of a key; None if it is revoked.
        session: to the peer.
    """

    def __init__(
        self,
        engine: Engine,
        description: Description,
        region: Callable[[int], MemoryRegion | None],
        session: Session,
    ) -> None:
        self._engine = engine
        self._description = description
        self._region = region
        self._session = session
        self._agent: Agent | None = None
        self._registered: set[int] = set()
        self._learnt: set[int] = set()
        self._lock = threading.Lock()

    def prove(self, deadline: float) -> None:
        """Read the peer's token.

        Raises:
            TransportUnavailable: its engine is out of reach, or it is another one.
        """
        token = self._description.token
        landing = self._engine.scratch(len(token))
        ours, theirs = landing.address, self._description.token_address
        spans = Spans(*(np.array([value], np.uint64) for value in (ours, theirs, len(token))))
        keys = (np.array([key]) for key in (LANDING_KEY, TOKEN_KEY))
        name = self._engine.name
        with self._lock:
            agent = self._opened()
            agent.register(LANDING_KEY, self._engine.scratch_region(landing, len(token)))
            try:
                agent.learn(TOKEN_KEY, self._description.token_attachment)
                agent.move(Slice(True, spans, *keys), lambda: time.monotonic() >= deadline)
            except TransferError as exc:
                raise TransportUnavailable(
                    name, f"the peer's engine is unreachable: {exc}"
                ) from exc
            agent.deregister(LANDING_KEY)
        if landing.get() != token:
            raise TransportUnavailable(name, "another engine answers at the peer's address")

    def move(self, part: Slice, must_stop: Callable[[], bool]) -> None:
        """See ``Agent``. When this raises, the agent is closed: nothing moves any more."""
        with self._lock:
            try:
                agent = self._opened()
                self._prepare(agent, part)
                agent.move(part, must_stop)
            except BaseException:
                self._discard()
                raise

    def forget(self, key: int) -> None:
        """Withdraw our region from the agent; waits for the slice that is being moved."""
        with self._lock:
            if self._agent is not None and key in self._registered:
                self._registered.discard(key)
                self._agent.deregister(key)

    def close(self) -> None:
        """Close the agent. Idempotent."""
        with self._lock:
            self._discard()

    def _opened(self) -> Agent:
        if self._agent is None:
            self._agent = self._engine.open_agent(self._session)
            self._agent.meet(self._description.agent)
        return self._agent

    def _prepare(self, agent: Agent, part: Slice) -> None:
        """Tell the agent of the regions that it has not seen yet."""
        for key in np.unique(part.local_keys).tolist():
            if key not in self._registered:
                region = self._region(key)
                if region is None:
                    raise RegionRevoked(f"region {key} of this side has been revoked")
                agent.register(key, region)
                self._registered.add(key)
        fresh = [key for key in np.unique(part.remote_keys).tolist() if key not in self._learnt]
        attachments = self._session.regions.attachments(fresh)
        for key, attachment in zip(fresh, attachments, strict=True):
            if not attachment:
                raise RegionRevoked(f"region {key} of the peer has been revoked")
            agent.learn(key, attachment)
            self._learnt.add(key)

    def _discard(self) -> None:
        agent, self._agent = self._agent, None
        self._registered.clear()
        self._learnt.clear()
        if agent is not None:
            agent.close()
