"""An endpoint's engine: the agent that serves its peers, and those that it drives."""

from __future__ import annotations

import secrets
import threading
import time

from mooncake_hal.errors import TransferError
from mooncake_hal.transport import MemoryRegion
from mooncake_hal.transports.adapter.agent import Engine
from mooncake_hal.transports.adapter.facts import (
    DESCRIBE,
    VERSION,
    ComparePlaces,
    Description,
    EngineFacts,
    anywhere,
    decode_facts,
    decode_told,
    why_apart,
)
from mooncake_hal.transports.adapter.link import TOKEN_KEY, Link
from mooncake_hal.transports.adapter.peer import AdapterPeer
from mooncake_hal.transports.control.session import Session
from mooncake_hal.transports.control.table import AttachedRegions
from mooncake_hal.transports.handshake import encode

TOKEN_BYTES = 32


class AdapterDriver:
    """See ``Driver``.

    Args:
        engine: what moves the bytes.
        local: the endpoint's own regions.
        compare_places: says whether two engines reach each other.

    Raises:
        TransportUnavailable: the engine does not start.
    """

    version = VERSION

    def __init__(
        self,
        engine: Engine,
        local: AttachedRegions,
        compare_places: ComparePlaces = anywhere,
    ) -> None:
        self.name = engine.name
        self._engine = engine
        self._local = local
        self._facts = EngineFacts(engine.protocol, engine.place)
        self._compare_places = compare_places
        self._regions: dict[int, MemoryRegion] = {}
        self._peers: list[AdapterPeer] = []
        self._lock = threading.Lock()
        self._agent = engine.open_agent(None)
        try:
            self._token = engine.scratch(TOKEN_BYTES)
            self._description = self._describe()
        except BaseException:
            self._agent.close()
            raise

    def facts(self) -> bytes:
        """See ``Driver``."""
        return encode(self._facts)

    def unreachable(self, facts: bytes) -> str | None:
        """See ``Driver``."""
        return why_apart(self._facts, decode_facts(facts), self._compare_places)

    def attach(self, key: int, region: MemoryRegion) -> bytes:
        """See ``Driver``."""
        with self._lock:
            attachment = self._agent.register(key, region)
            self._regions[key] = region
        return attachment

    def detach(self, key: int) -> None:
        """See ``Driver``: the agents let go of it, and know it no more."""
        with self._lock:
            del self._regions[key]
            peers = list(self._peers)
        for peer in peers:
            peer.withdraw(key)
        with self._lock:
            self._agent.deregister(key)

    def answer(self, session: Session, payload: bytes) -> bytes:
        """See ``Driver``: says how to reach the engine, and hands on what its agents ask for."""
        if payload == DESCRIBE:
            return self._description
        attendant = self._engine.attendant
        if attendant is None:
            raise TransferError(f"a peer may ask {DESCRIBE!r}, not {payload[:40]!r}")
        with self._lock:  # which a withdrawal waits for
            return attendant.answer(session, payload, self._local)

    def departed(self, session: Session) -> None:
        """See ``Driver``."""
        if self._engine.attendant is not None:
            with self._lock:
                self._engine.attendant.departed(session)

    def dial(self, session: Session, facts: bytes, timeout: float) -> AdapterPeer:
        """See ``Driver``: starts an agent, and proves that it reaches the peer's memory."""
        deadline = time.monotonic() + timeout
        description = decode_told(session.call(DESCRIBE, timeout), Description)
        link = Link(self._engine, description, self._regions.get, session)
        try:
            link.prove(deadline)
        except BaseException:
            link.close()
            raise
        peer = AdapterPeer(self._engine, session, link, self._local)
        with self._lock:
            self._peers = [known for known in self._peers if not known.closed] + [peer]
        return peer

    def close(self) -> None:
        """See ``Driver``."""
        self._agent.close()

    def _describe(self) -> bytes:
        token = secrets.token_bytes(TOKEN_BYTES)
        self._token.put(token)
        region = self._engine.scratch_region(self._token, TOKEN_BYTES)
        attachment = self._agent.register(TOKEN_KEY, region)
        return encode(Description(self._agent.description(), region.address, attachment, token))
