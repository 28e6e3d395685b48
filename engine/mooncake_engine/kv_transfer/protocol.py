"""What instances say to each other on the side channel: versioned, typed, sealed; never pickled.

A frame is ``mac || msgpack``, the mac being HMAC-SHA256 with the deployment's secret. Requests
carry a ticket that the answer repeats. All of them may be sent twice: identities are minted once
per prefill, so a repeated one changes nothing.
"""

from __future__ import annotations

import hmac
from enum import Enum
from hashlib import sha256

import msgspec

from mooncake_engine.errors import HandshakeRefused, KVTransferError
from mooncake_engine.kv_transfer.facts import InstanceFacts

PROTOCOL_VERSION = 2
MAX_FRAME_BYTES = 16 << 20
_MAC_BYTES = sha256().digest_size


class LeaseStatus(str, Enum):
    """What the holder answers about a lease."""

    HELD = "held"
    RELEASED = "released"
    """It was held until the reader said that it was done: what was read is valid."""
    EXPIRED = "expired"
    """It ended before: what was read since may be someone else's KV."""
    UNKNOWN = "unknown"


class Message(msgspec.Struct, frozen=True, tag_field="kind", tag=str.lower):
    """Base of all messages."""

    ticket: int


class Hello(Message, frozen=True):
    """Decode to prefill, once per pair and incarnation: who I am."""

    version: int
    facts: InstanceFacts


class Welcome(Message, frozen=True):
    """The answer: who I am, and where my KV lies."""

    facts: InstanceFacts


class Renew(Message, frozen=True):
    """I still want these, or write them; sent for all of a pair at once."""

    request_ids: tuple[str, ...]


class Renewed(Message, frozen=True):
    """The answer: these of them are not held for you (any more)."""

    lost: tuple[str, ...]


class Done(Message, frozen=True):
    """I have read it; was it valid all along?

    Args:
        reader: one attempt to read; a lease ends with the first, and is void for the others.
    """

    request_id: str
    reader: str


class Failed(Message, frozen=True):
    """I will not read it (any more)."""

    request_id: str
    reason: str


class Writer(msgspec.Struct, frozen=True):
    """Who writes a pushed prompt: one attempt of one incarnation of a prefill instance.

    Args:
        engine_id: the incarnation.
        request_id: its own name for the request.
        host, port: its side channel.
    """

    engine_id: str
    request_id: str
    host: str
    port: int


class PushedToken(msgspec.Struct, frozen=True):
    """The token that the prefill instance sampled.

    Args:
        token_id: which.
        logprobs: its log probability, and the most probable tokens with theirs; None if not asked.
        num_cached_tokens: prompt tokens that needed no computing.
    """

    token_id: int
    logprobs: tuple[float, tuple[tuple[int, float], ...]] | None
    num_cached_tokens: int


class PushOpen(Message, frozen=True):
    """Prefill to decode: may I write that request's KV into the blocks that you reserved?

    HELD means yes; from then on the blocks are not used otherwise until this writer says Pushed
    or PushFailed, or is dead. A request has one writer.
    """

    request_id: str
    writer: Writer


class Pushed(Message, frozen=True):
    """All is written, and drained: RELEASED means that it is complete and was taken.

    Args:
        written: bytes from each of the writer's ranks to each of the reader's:
            ``(writer rank, reader rank, bytes)``; what the reader finds missing is a failure.
        first_token: the answer's first.
    """

    request_id: str
    writer: Writer
    written: tuple[tuple[int, int, int], ...]
    first_token: PushedToken


class PushFailed(Message, frozen=True):
    """Nothing more will be sent, and it is not complete.

    Args:
        may_land: a write failed under way. All is drained on this side; where the transport can't
            revoke, what had been sent may change the peer's memory yet.
    """

    request_id: str
    writer: Writer
    reason: str
    may_land: bool = False


class Inquire(Message, frozen=True):
    """Decode to prefill: nothing is heard of these pushes; who are you, and how do they stand?

    Args:
        request_ids: the writer's own names.
    """

    request_ids: tuple[str, ...]


class Standing(Message, frozen=True):
    """The answer. What is named neither way is over: nothing is written there, nor will be.

    Args:
        engine_id: this incarnation.
        running: those under way, by the writer's own names.
        endings: how others ended, as it has been said or is about to be.
    """

    engine_id: str
    running: tuple[str, ...]
    endings: tuple[Pushed | PushFailed, ...]


class Status(Message, frozen=True):
    """The answer to Done, Failed, PushOpen, Pushed and PushFailed."""

    status: LeaseStatus


class Reject(Message, frozen=True):
    """A message that was not understood, or not allowed; it changed nothing."""

    reason: str


PushMessage = PushOpen | Pushed | PushFailed | Inquire
PullMessage = Done | Failed
Question = Hello | Renew | PullMessage | PushMessage
AnyMessage = Question | Welcome | Renewed | Standing | Status | Reject

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


class BadFrame(KVTransferError):
    """A frame that can't be honoured: too long, wrongly sealed, or not a message of ours."""


def seal(message: AnyMessage, secret: bytes) -> bytes:
    """Encode a message and seal it with the deployment's secret."""
    payload = _encoder.encode(message)
    return hmac.digest(secret, payload, "sha256") + payload


def unseal(frame: bytes, secret: bytes) -> AnyMessage:
    """Check a frame's seal, in constant time, and decode it.

    Raises:
        BadFrame: says which check failed.
    """
    if not _MAC_BYTES < len(frame) <= MAX_FRAME_BYTES:
        raise BadFrame(f"a frame of {len(frame)} bytes")
    mac, payload = frame[:_MAC_BYTES], frame[_MAC_BYTES:]
    if not hmac.compare_digest(mac, hmac.digest(secret, payload, "sha256")):
        raise BadFrame("the seal does not fit: the instances have different secrets")
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise BadFrame(f"not a message of protocol {PROTOCOL_VERSION}: {exc}") from exc


def check_version(theirs: int) -> None:
    """Refuse a peer of another protocol version.

    Raises:
        HandshakeRefused: names both.
    """
    if theirs != PROTOCOL_VERSION:
        raise HandshakeRefused(
            f"the peer speaks side-channel protocol {theirs}, this instance {PROTOCOL_VERSION}; "
            "run the same release on both"
        )
