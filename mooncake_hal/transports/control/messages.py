"""What the two ends of a control connection say to each other, and how it is framed.

A frame is a 4-byte big-endian length and a msgpack message. Everything that an endpoint registers
or revokes is sent to every connected peer in the order it happened, on the one connection that
pings use too: who has got the answer to a ping has seen everything that went before it.
"""

from __future__ import annotations

import socket

import msgspec

from mooncake_hal.errors import PeerLost
from mooncake_hal.transports.handshake import Message, decode, encode

MAX_FRAME_BYTES = 16 << 20
MAX_STRANGER_FRAME_BYTES = 4096
"""Largest frame that is read from a peer that has not proved itself."""

_LENGTH_BYTES = 4


class ControlAddress(
    msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True
):
    """What an endpoint publishes.

    Args:
        transport: name of the transport.
        version: version of its protocol.
        epoch: identity of this incarnation.
        host: where the control connection is accepted.
        port: its TCP port.
        facts: what the transport needs to judge reach, in its own encoding.
    """

    transport: str
    version: int
    epoch: bytes
    host: str
    port: int
    facts: bytes


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
    """Asks for a Pong once everything sent before has been taken in."""

    number: int


class Call(msgspec.Struct, frozen=True, tag="call", forbid_unknown_fields=True):
    """A question of the transport's own, in its own encoding."""

    number: int
    payload: bytes


class Answer(msgspec.Struct, frozen=True, tag="answer", forbid_unknown_fields=True):
    """The answer to a Call or a Ping; with ``error``, why there is none."""

    number: int
    payload: bytes = b""
    error: str = ""


AnyMessage = Registered | Revoked | Ping | Call | Answer

_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def decode_any(data: bytes) -> AnyMessage:
    """Read any message of an established connection.

    Raises:
        PeerLost: the bytes are none.
    """
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as exc:
        raise PeerLost(f"the peer broke the control protocol: {exc}") from exc


def send_frame(sock: socket.socket, message: msgspec.Struct) -> None:
    """Send one message whole.

    Raises:
        PeerLost: the connection is gone, or does not take the bytes within its timeout.
    """
    data = encode(message)
    try:
        sock.sendall(len(data).to_bytes(_LENGTH_BYTES, "big") + data)
    except OSError as exc:
        raise PeerLost(f"the control connection broke while sending: {exc}") from exc


def receive_frame(sock: socket.socket, limit: int = MAX_FRAME_BYTES) -> bytes:
    """Receive the bytes of one message.

    Raises:
        PeerLost: the connection ended or stalled, or the frame is longer than ``limit``.
    """
    size = int.from_bytes(_receive_exactly(sock, _LENGTH_BYTES), "big")
    if size > limit:
        raise PeerLost(f"the peer broke the control protocol: a frame of {size} bytes, not {limit}")
    return _receive_exactly(sock, size)


def receive(sock: socket.socket, kind: type[Message]) -> Message:
    """Receive one message of a known kind from a peer that may still be a stranger."""
    return decode(receive_frame(sock, MAX_STRANGER_FRAME_BYTES), kind)


def _receive_exactly(sock: socket.socket, size: int) -> bytes:
    parts, missing = [], size
    while missing:
        try:
            part = sock.recv(min(missing, 1 << 20))
        except OSError as exc:
            raise PeerLost(f"the control connection broke: {exc}") from exc
        if not part:
            raise PeerLost("the peer closed the control connection")
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)
