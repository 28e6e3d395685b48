"""What two endpoints of one engine tell each other. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from mooncake_hal.errors import PeerLost, TransferError
from mooncake_hal.session.authentication import UNREADABLE

VERSION = 5

DESCRIBE = b"describe"
"""The one request: the reply is an AgentDescription."""


class AdapterInfo(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What an endpoint publishes: nothing that leads to its engine.

    Args:
        protocol: what the engine speaks.
        location: where it stands, in its transport's own encoding; empty if that decides nothing.
    """

    protocol: str
    location: bytes = b""


CompareLocations = Callable[[bytes, bytes], "str | None"]
"""Says why two engines, at our location and at theirs, can't reach each other, or None."""


def anywhere(ours: bytes, theirs: bytes) -> str | None:
    """Compare locations of engines that reach each other wherever they are."""
    return None


class AgentDescription(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to reach an endpoint's engine; sent to peers that have proved themselves.

    Args:
        agent: in the engine's own words.
        token_address: where in the endpoint's process the token lies.
        token_attachment: what the engine has to know of that memory.
        token: random bytes; who reads them there has reached the right engine.
    """

    agent: bytes
    token_address: int
    token_attachment: bytes
    token: bytes


Struct = TypeVar("Struct", bound=msgspec.Struct)


def decode_info(data: bytes) -> AdapterInfo:
    """Read what an endpoint published; raises TransferError if it is something else."""
    try:
        return msgspec.msgpack.decode(data, type=AdapterInfo)
    except UNREADABLE as exc:
        raise TransferError(f"these are no facts of an engine's endpoint: {exc}") from exc


def decode_message(data: bytes, kind: type[Struct]) -> Struct:
    """Read what a peer says over its session; raises PeerLost if that is not it."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except UNREADABLE as exc:
        raise PeerLost(f"the peer broke the protocol: wanted {kind.__name__}: {exc}") from exc


def unreachable_reason(
    ours: AdapterInfo, theirs: AdapterInfo, compare_locations: CompareLocations = anywhere
) -> str | None:
    """Say why two engines can't speak to each other, or None if they may."""
    if ours.protocol != theirs.protocol:
        return f"our engine speaks {ours.protocol}, the peer's {theirs.protocol}"
    return compare_locations(ours.location, theirs.location)
