"""What instances say to each other on the side channel: versioned and typed; never pickled.

A message is one msgpack map, the payload of a session's request or reply. Requests carry a ticket
that the answer repeats. All of them may be sent twice: identities are minted once per prefill, so a
repeated one changes nothing.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from mooncake_kv.errors import BadFrame, HandshakeRefused
from mooncake_kv.handshake import CompatibilityCheck, IncompatiblePeers, InstanceMetadata
from mooncake_kv.params import FirstToken

PROTOCOL_VERSION = 5
MAX_MESSAGE_BYTES = (16 << 20) - 1024
"""What a frame of the session holds, less its own words."""


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
    """Decode to prefill, once per pair and epoch: who I am."""

    version: int
    instance: InstanceMetadata


class Welcome(Message, frozen=True):
    """The answer: who I am, and where my KV lies."""

    instance: InstanceMetadata


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
    """Who computes a prompt for blocks that were reserved: one attempt of one epoch of a prefill
    instance.

    Args:
        engine_id: the epoch.
        request_id: its own name for the request.
        host, port: its side channel.
    """

    engine_id: str
    request_id: str
    host: str
    port: int


class PrefillProgress(Message, frozen=True):
    """Prefill to decode: so much is computed of the KV that you have reserved blocks for; read it.

    Each one stands for all before it. HELD means that the reader waits for more; from the first one
    on it keeps the lease alive, and ends it as any other.

    Args:
        request_id: the reader's.
        holder: who computes it, under which name.
        attempt: another one whenever the holder has lost its blocks meanwhile (preemption): what
            was read in an earlier one counts for nothing.
        block_ids: the holder's table, as far as it has one.
        num_tokens: the first tokens of the prompt, whose KV is there.
        prompt_digest: of the prompt that the holder was given, which must be the request's.
        lease_s: how long the holder waits for a keepalive.
        first_token: the answer's first, once all is computed.
        error: it will not be computed; empty if it will.
    """

    request_id: str
    holder: Writer
    attempt: int
    block_ids: tuple[int, ...]
    num_tokens: int
    prompt_digest: str
    lease_s: float
    first_token: FirstToken | None = None
    error: str = ""


class PushOpen(Message, frozen=True):
    """Prefill to decode: may I write that request's KV into the blocks that you reserved?

    HELD means yes; from then on the blocks are not used otherwise until this writer says Pushed
    or PushFailed, or is dead. A request has one writer.

    Args:
        prompt_digest: of the prompt that the writer was given, which must be the request's.
    """

    request_id: str
    writer: Writer
    prompt_digest: str = ""


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
    first_token: FirstToken


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


class StatusRequest(Message, frozen=True):
    """Decode to prefill: nothing has come of these pushes; who are you, and how do they stand?

    Args:
        request_ids: the writer's own names.
    """

    request_ids: tuple[str, ...]


class StatusReply(Message, frozen=True):
    """The answer. What is named neither way is over: nothing is written there, nor will be.

    Args:
        engine_id: this epoch.
        running: those under way, by the writer's own names.
        endings: how others ended, as it has been said or is about to be.
    """

    engine_id: str
    running: tuple[str, ...]
    endings: tuple[Pushed | PushFailed, ...]


class LeaseReply(Message, frozen=True):
    """The answer to Done, Failed, PrefillProgress, PushOpen, Pushed and PushFailed."""

    status: LeaseStatus


class Reject(Message, frozen=True):
    """A message that was not understood, or not allowed; it changed nothing."""

    reason: str


PushMessage = PushOpen | Pushed | PushFailed | StatusRequest
PullMessage = Done | Failed | PrefillProgress
Question = Hello | Renew | PullMessage | PushMessage
AnyMessage = Question | Welcome | Renewed | StatusReply | LeaseReply | Reject

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: AnyMessage) -> bytes:
    """Return the message's bytes."""
    return _encoder.encode(message)


def decode(payload: bytes) -> AnyMessage:
    """Read a message.

    Raises:
        BadFrame: says why it is none.
    """
    if not 0 < len(payload) <= MAX_MESSAGE_BYTES:
        raise BadFrame(f"a frame of {len(payload)} bytes")
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


def welcome(
    hello: Hello, own: InstanceMetadata, check: CompatibilityCheck, incompatible: IncompatiblePeers
) -> Welcome:
    """Reply to a peer that introduces itself.

    Raises:
        HandshakeRefused: it does not fit, which is remembered.
    """
    try:
        check_version(hello.version)
        check(own, hello.instance)
    except HandshakeRefused as exc:
        incompatible.note(hello.instance.engine_id, str(exc))
        raise
    return Welcome(hello.ticket, own)
