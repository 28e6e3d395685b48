"""What the two ends of a session say to each other, and how it is framed and sealed. Pure.

A frame is a 4-byte big-endian length and a body. During the handshake the body is the message;
after it, a seal of 16 bytes and the message. A seal is the beginning of an HMAC-SHA256 over the
frame's number and the message, with the key of its direction: a frame that is injected, changed,
repeated, left out, moved or sent back to its sender does not fit, and ends the session.

Everything that an endpoint registers or revokes is sent to every connected peer in the order it
happened, on the one connection that pings use too: once a ping is confirmed, the peer has taken in
everything that went before it.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from mooncake_hal.errors import HalError, PeerLost
from mooncake_hal.session.authentication import UNREADABLE, Proven, encode

LENGTH_BYTES = 4
SEAL_BYTES = 16


class Registered(msgspec.Struct, frozen=True, tag="registered", forbid_unknown_fields=True):
    """A region that may be read and written from now on; ``attachment`` says how."""

    key: int
    address: int
    nbytes: int
    device: str
    attachment: bytes


class Revoked(msgspec.Struct, frozen=True, tag="revoked", forbid_unknown_fields=True):
    """A region that is withdrawn."""

    key: int


class Ping(msgspec.Struct, frozen=True, tag="ping", forbid_unknown_fields=True):
    """Asks for a SessionResponse once everything sent before has been taken in."""

    number: int


class SessionRequest(msgspec.Struct, frozen=True, tag="request", forbid_unknown_fields=True):
    """A request in the encoding of the session's user."""

    number: int
    payload: bytes


class SessionResponse(msgspec.Struct, frozen=True, tag="response", forbid_unknown_fields=True):
    """The response to a SessionRequest or a Ping; with ``error``, why the request was refused."""

    number: int
    payload: bytes = b""
    error: str = ""


def respond(request: SessionRequest, handle: Callable[[bytes], bytes]) -> SessionResponse:
    """Let the session's user answer; a HalError of it refuses this request, and nothing else."""
    try:
        return SessionResponse(request.number, handle(request.payload))
    except HalError as exc:
        return SessionResponse(request.number, error=str(exc) or type(exc).__name__)


AnyMessage = Registered | Revoked | Ping | SessionRequest | SessionResponse

_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def decode_any(data: bytes) -> AnyMessage:
    """Read any message of an established session.

    Raises:
        PeerLost: the bytes are none.
    """
    try:
        return _decoder.decode(data)
    except (*UNREADABLE, RecursionError) as exc:
        raise PeerLost(f"the peer broke the session's protocol: {exc}") from exc


def frame(body: bytes) -> bytes:
    """Return a body with its length before it."""
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def check_length(head: bytes, limit: int) -> int:
    """Return the length that the first bytes of a frame announce.

    Raises:
        PeerLost: it is longer than ``limit``.
    """
    size = int.from_bytes(head, "big")
    if size > limit:
        raise PeerLost(
            f"the peer broke the session's protocol: a frame of {size} bytes, not {limit}"
        )
    return size


class FrameReader:
    """Puts frames together from bytes as they come; holds at most one frame that is not whole.

    Args:
        limit: longest body; may be raised once the peer has proved itself.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Take in what was received."""
        self._buffer += data

    def take(self) -> bytes | None:
        """Return the next body, or None if it is not whole yet.

        Raises:
            PeerLost: a frame is longer than the limit.
        """
        if len(self._buffer) < LENGTH_BYTES:
            return None
        end = LENGTH_BYTES + check_length(bytes(self._buffer[:LENGTH_BYTES]), self.limit)
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[LENGTH_BYTES:end])
        del self._buffer[:end]
        return body


class Seal:
    """Seals or opens the frames of one direction, which must come in order.

    Args:
        key: of that direction.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def seal(self, message: msgspec.Struct) -> bytes:
        """Return the whole frame of the next message."""
        data = encode(message)
        return frame(self._mac(data) + data)

    def open(self, body: bytes) -> AnyMessage:
        """Check and read the next message.

        Raises:
            PeerLost: the seal does not fit, or the bytes are no message.
        """
        mac, data = body[:SEAL_BYTES], body[SEAL_BYTES:]
        if not hmac.compare_digest(mac, self._mac(data)):
            raise PeerLost("the peer broke the session's protocol: a frame whose seal does not fit")
        return decode_any(data)

    def _mac(self, data: bytes) -> bytes:
        text = self._number.to_bytes(8, "big") + data
        self._number += 1
        return hmac.digest(self._key, text, hashlib.sha256)[:SEAL_BYTES]


@dataclass(slots=True)
class Seals:
    """Both directions of a session, as one end uses them."""

    outgoing: Seal
    incoming: Seal

    @classmethod
    def of_client(cls, proven: Proven) -> Seals:
        """Return those of the end that connected."""
        return cls(Seal(proven.keys.client), Seal(proven.keys.server))

    @classmethod
    def of_server(cls, proven: Proven) -> Seals:
        """Return those of the end that accepted."""
        return cls(Seal(proven.keys.server), Seal(proven.keys.client))
