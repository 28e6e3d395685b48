"""Messages between two adapter endpoints. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from mooncake_hal.errors import PeerLost, TransferError
from mooncake_hal.session.authentication import UNREADABLE

VERSION = 5

DESCRIBE = b"describe"
"""The only request of the protocol itself; the reply is an AgentDescription."""


class AdapterInfo(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The info that an endpoint publishes; it gives no access to the engine.

    Args:
        protocol: the engine's protocol.
        location: the engine's location in the transport's own encoding; empty if it is irrelevant
            to reachability.
    """

    protocol: str
    location: bytes = b""


CompareLocations = Callable[[bytes, bytes], "str | None"]
"""Returns why engines at two locations, ours and the peer's, can't reach each other, or None if
they can."""


def anywhere(ours: bytes, theirs: bytes) -> str | None:
    """Compare the locations of engines that can always reach each other."""
    return None


class AgentDescription(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to reach an endpoint's engine; sent only to peers that have proved themselves.

    Args:
        agent: the agent's description, in the engine's own encoding.
        token_address: address of the token in the endpoint's process.
        token_attachment: attachment of that memory, in the engine's own encoding.
        token: random bytes; a peer that reads them at that address has reached the right engine.
    """

    agent: bytes
    token_address: int
    token_attachment: bytes
    token: bytes


Struct = TypeVar("Struct", bound=msgspec.Struct)


def decode_info(data: bytes) -> AdapterInfo:
    """Decode an endpoint's published info; raises TransferError if it is invalid."""
    try:
        return msgspec.msgpack.decode(data, type=AdapterInfo)
    except UNREADABLE as exc:
        raise TransferError(f"this is not the info of an adapter's endpoint: {exc}") from exc


def decode_message(data: bytes, kind: type[Struct]) -> Struct:
    """Decode a peer's message of the given type; raises PeerLost if it is invalid."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except UNREADABLE as exc:
        raise PeerLost(f"the peer broke the protocol: wanted {kind.__name__}: {exc}") from exc


def unreachable_reason(
    ours: AdapterInfo, theirs: AdapterInfo, compare_locations: CompareLocations = anywhere
) -> str | None:
    """Return why two engines can't communicate, or None if they may be able to."""
    if ours.protocol != theirs.protocol:
        return f"our engine speaks {ours.protocol}, the peer's {theirs.protocol}"
    return compare_locations(ours.location, theirs.location)
