"""The transport that adapts a third-party transfer engine."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from functools import partial

from mooncake_hal.errors import TransferError
from mooncake_hal.hal_env import transport_settings
from mooncake_hal.session.authentication import encode
from mooncake_hal.session.regions import AttachedRegions
from mooncake_hal.session.session import Session
from mooncake_hal.transport import Endpoint, EndpointOptions, MemoryRegion
from mooncake_hal.transports.adapters.adapter_messages import (
    DESCRIBE,
    VERSION,
    AdapterInfo,
    AgentDescription,
    CompareLocations,
    anywhere,
    decode_info,
    decode_message,
    unreachable_reason,
)
from mooncake_hal.transports.adapters.adapter_peer import TOKEN_KEY, AdapterPeer, AgentLink
from mooncake_hal.transports.adapters.engine_agent import AdaptedEngine
from mooncake_hal.transports.session_endpoint import compare_addresses, open_endpoint

TOKEN_BYTES = 32


class AdapterDataPath:
    """Data path whose bytes a third-party transfer engine moves.

    Args:
        engine: the engine.
        local: the endpoint's own regions.
        compare_locations: decides whether two engines can reach each other.

    Raises:
        TransportUnavailable: the engine does not start.
    """

    version = VERSION

    def __init__(
        self,
        engine: AdaptedEngine,
        local: AttachedRegions,
        compare_locations: CompareLocations = anywhere,
    ) -> None:
        self.name = engine.name
        self._engine = engine
        self._local = local
        self._info = AdapterInfo(engine.protocol, engine.location)
        self._compare_locations = compare_locations
        self._regions: dict[int, MemoryRegion] = {}
        self._peers: list[AdapterPeer] = []
        self._lock = threading.Lock()
        self._agent = engine.open_agent(None)
        try:
            self._token = engine.workspace(TOKEN_BYTES)
            self._description = self._describe()
        except BaseException:
            self._agent.close()
            raise

    def info(self) -> bytes:
        return encode(self._info)

    def unreachable_reason(self, info: bytes) -> str | None:
        return unreachable_reason(self._info, decode_info(info), self._compare_locations)

    def attach(self, key: int, region: MemoryRegion) -> bytes:
        with self._lock:
            attachment = self._agent.register(key, region)
            self._regions[key] = region
        return attachment

    def detach(self, key: int) -> None:
        """All agents deregister the region."""
        with self._lock:
            del self._regions[key]
            peers = list(self._peers)
        for peer in peers:
            peer.withdraw(key)
        with self._lock:
            self._agent.deregister(key)

    def handle_request(self, session: Session, payload: bytes) -> bytes:
        """Returns the agent's description, and forwards the engine's own requests."""
        if payload == DESCRIBE:
            return self._description
        request_handler = self._engine.request_handler
        if request_handler is None:
            raise TransferError(f"a peer may ask {DESCRIBE!r}, not {payload[:40]!r}")
        with self._lock:  # so that detach() waits for it
            return request_handler.handle_request(session, payload, self._local)

    def session_ended(self, session: Session) -> None:
        if self._engine.request_handler is not None:
            with self._lock:
                self._engine.request_handler.session_ended(session)

    def connect(self, session: Session, info: bytes, timeout: float) -> AdapterPeer:
        """Opens an agent for the peer, and checks that it can read the peer's memory."""
        deadline = time.monotonic() + timeout
        description = decode_message(session.request(DESCRIBE, timeout), AgentDescription)
        link = AgentLink(self._engine, description, self._regions.get, session)
        try:
            link.prove(deadline)
            peer = AdapterPeer(self._engine, session, link, self._local)
        except BaseException:
            link.close()
            raise
        with self._lock:
            self._peers = [known for known in self._peers if not known.closed] + [peer]
        return peer

    def close(self) -> None:
        self._agent.close()

    def _describe(self) -> bytes:
        token = secrets.token_bytes(TOKEN_BYTES)
        self._token.put(token)
        region = self._engine.workspace_region(self._token, TOKEN_BYTES)
        attachment = self._agent.register(TOKEN_KEY, region)
        return encode(
            AgentDescription(self._agent.description(), region.address, attachment, token)
        )


class AdapterTransport:
    """A transport that adapts a third-party transfer engine.

    Args:
        name: name of the transport.
        configure: creates the engine for an endpoint. Raises ValueError for unknown settings, and
            TransportUnavailable if the host lacks what they require.
        compare_locations: decides whether two of its engines can reach each other.
    """

    can_revoke = False  # this side can't stop what a peer's engine has started
    stops_writes_on_failure = False

    def __init__(
        self,
        name: str,
        configure: Callable[[EndpointOptions], AdaptedEngine],
        compare_locations: CompareLocations = anywhere,
    ) -> None:
        self.name = name
        self._configure = configure
        self._compare_locations = compare_locations

    def open(self, options: EndpointOptions) -> Endpoint:
        local = AttachedRegions("this side")
        engine = self._configure(options)
        data_path = AdapterDataPath(engine, local, self._compare_locations)
        variants = [f"{VERSION} {engine.protocol}"]
        return open_endpoint(data_path, local, options, variants=variants)

    def reaches(self, local: bytes, remote: bytes) -> str | None:
        """Compares the engines' protocols and locations."""
        compare = partial(unreachable_reason, compare_locations=self._compare_locations)
        return compare_addresses((local, remote), self.name, VERSION, decode_info, compare)


def chosen_settings(name: str, extra: dict[str, str], known: dict[str, str]) -> dict[str, str]:
    """Return all settings: the given ones, else those of the environment, else their defaults.

    Raises:
        ValueError: a given setting is unknown.
        HalError: one of the environment is: see ``transport_settings``.
    """
    unknown = sorted(set(extra) - set(known))
    if unknown:
        raise ValueError(f"{name} has no settings {unknown}; it has {sorted(known)}")
    return {**known, **transport_settings(name, known), **extra}
