"""The messages of a session, and their frames and seals. Pure.

A frame is a 4-byte big-endian length and a body. During the handshake, the body is the message;
afterwards, it is a 16-byte seal and the message. A seal is a truncated HMAC-SHA256 over the frame's
number and the message, with the key of its direction: the seal of a frame that is injected,
modified, replayed, dropped, reordered or reflected does not match, which ends the session.

An endpoint sends every registration and revocation to every connected peer, in order and on the
same connection as pings. So once a ping is confirmed, the peer has processed everything that was
sent before it.
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
    """A new region that may be read and written from now on; ``attachment`` is what the transport
    needs to do so."""

    key: int
    address: int
    nbytes: int
    device: str
    attachment: bytes


class Revoked(msgspec.Struct, frozen=True, tag="revoked", forbid_unknown_fields=True):
    """A region that is revoked."""

    key: int


class Ping(msgspec.Struct, frozen=True, tag="ping", forbid_unknown_fields=True):
    """Asks for a SessionResponse once all earlier messages have been processed."""

    number: int


class SessionRequest(msgspec.Struct, frozen=True, tag="request", forbid_unknown_fields=True):
    """A request in the encoding of the session's user."""

    number: int
    payload: bytes


class SessionResponse(msgspec.Struct, frozen=True, tag="response", forbid_unknown_fields=True):
    """The response to a SessionRequest or a Ping; ``error`` is why the request was rejected."""

    number: int
    payload: bytes = b""
    error: str = ""


def respond(request: SessionRequest, handle: Callable[[bytes], bytes]) -> SessionResponse:
    """Call the handler and return its reply; if it raises a HalError, only this request is
    rejected."""
    try:
        return SessionResponse(request.number, handle(request.payload))
    except HalError as exc:
        return SessionResponse(request.number, error=str(exc) or type(exc).__name__)


AnyMessage = Registered | Revoked | Ping | SessionRequest | SessionResponse

_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def decode_any(data: bytes) -> AnyMessage:
    """Decode a message of an established session.

    Raises:
        PeerLost: the bytes are no such message.
    """
    try:
        return _decoder.decode(data)
    except (*UNREADABLE, RecursionError) as exc:
        raise PeerLost(f"the peer broke the session's protocol: {exc}") from exc


def frame(body: bytes) -> bytes:
    """Return the frame of a body: its length and the body."""
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def check_length(head: bytes, limit: int) -> int:
    """Decode the length in the first bytes of a frame.

    Raises:
        PeerLost: the frame is longer than ``limit``.
    """
    size = int.from_bytes(head, "big")
    if size > limit:
        raise PeerLost(
            f"the peer broke the session's protocol: a frame of {size} bytes exceeds {limit}"
        )
    return size


class FrameReader:
    """Assembles frames from received bytes; buffers at most one incomplete frame.

    Args:
        limit: longest body in bytes; the owner may raise it once the peer has proved itself.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Append received bytes."""
        self._buffer += data

    def take(self) -> bytes | None:
        """Return the next frame's body, or None if the frame is incomplete.

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
    """Seals or opens the frames of one direction, in order.

    Args:
        key: the session key of that direction.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def seal(self, message: msgspec.Struct) -> bytes:
        """Return the next message's complete frame."""
        data = encode(message)
        return frame(self._mac(data) + data)

    def open(self, body: bytes) -> AnyMessage:
        """Check the seal and decode the next message.

        Raises:
            PeerLost: the seal does not match, or the bytes are no message.
        """
        mac, data = body[:SEAL_BYTES], body[SEAL_BYTES:]
        if not hmac.compare_digest(mac, self._mac(data)):
            raise PeerLost("the peer broke the session's protocol: a frame's seal does not match")
        return decode_any(data)

    def _mac(self, data: bytes) -> bytes:
        text = self._number.to_bytes(8, "big") + data
        self._number += 1
        return hmac.digest(self._key, text, hashlib.sha256)[:SEAL_BYTES]


@dataclass(slots=True)
class Seals:
    """One end's seals for the two directions of a session."""

    outgoing: Seal
    incoming: Seal

    @classmethod
    def of_client(cls, proven: Proven) -> Seals:
        """Return the seals of the connecting end."""
        return cls(Seal(proven.keys.client), Seal(proven.keys.server))

    @classmethod
    def of_server(cls, proven: Proven) -> Seals:
        """Return the seals of the accepting end."""
        return cls(Seal(proven.keys.server), Seal(proven.keys.client))
