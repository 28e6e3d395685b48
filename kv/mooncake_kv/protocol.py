"""The messages of the side channel: versioned and typed; never pickled.

A message is one msgpack map, the payload of a session's request or reply. A request carries a
ticket, which the answer repeats. Every request may be sent twice: request ids are unique per
prefill, so a repeated message changes nothing.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from mooncake_kv.errors import BadFrame, HandshakeRefused
from mooncake_kv.handshake import CompatibilityCheck, IncompatiblePeers, InstanceMetadata
from mooncake_kv.params import FirstToken

PROTOCOL_VERSION = 5
MAX_MESSAGE_BYTES = (16 << 20) - 1024
"""Size of a session's frame, less its header."""


class LeaseStatus(str, Enum):
    """The holder's answer about a lease or reservation."""

    HELD = "held"
    RELEASED = "released"
    """The lease was held until the reader reported that it was done: what was read is valid."""
    EXPIRED = "expired"
    """The lease ended earlier: what was read may be another request's KV."""
    UNKNOWN = "unknown"
    """The holder has no record of the request."""


class Message(msgspec.Struct, frozen=True, tag_field="kind", tag=str.lower):
    """Base of all messages."""

    ticket: int


class Hello(Message, frozen=True):
    """From the instance that connects, once per pair of epochs: its metadata."""

    version: int
    instance: InstanceMetadata


class Welcome(Message, frozen=True):
    """The answer to Hello: the metadata of the instance that was connected to."""

    instance: InstanceMetadata


class Renew(Message, frozen=True):
    """A keepalive for all KV that the sender still wants to read, or is writing, at this peer."""

    request_ids: tuple[str, ...]


class Renewed(Message, frozen=True):
    """The answer to Renew: the requests for which nothing is held (any more)."""

    lost: tuple[str, ...]


class Done(Message, frozen=True):
    """Decode to prefill: the prompt is read; was its lease held the whole time?

    Args:
        reader: name of the reader. The first one ends the lease, which is void for all others.
    """

    request_id: str
    reader: str


class Failed(Message, frozen=True):
    """Decode to prefill: the prompt will not be read (any more)."""

    request_id: str
    reason: str


class Writer(msgspec.Struct, frozen=True):
    """The prefill instance that computes a prompt for reserved blocks: one attempt of one epoch.

    Args:
        engine_id: name of the epoch.
        request_id: its own name for the request.
        host, port: address of its side channel.
    """

    engine_id: str
    request_id: str
    host: str
    port: int


class PrefillProgress(Message, frozen=True):
    """Prefill to decode: how much of a prompt is computed and may be read into the reserved blocks.

    Each message supersedes all earlier ones. HELD means that the reader waits for more. From the
    first message on, the reader renews the lease, and ends it like any other.

    Args:
        request_id: the reader's name for the request.
        holder: the instance that computes the prompt, and its name for the request.
        attempt: changes whenever the holder has lost its blocks (preemption); what was read in an
            earlier attempt is invalid.
        block_ids: the holder's block table, as far as it is allocated.
        num_tokens: number of leading tokens of the prompt whose KV is computed.
        prompt_digest: digest of the prompt that the holder was given; must match the request's.
        lease_s: how long the holder waits for a keepalive, in seconds.
        first_token: the sampled token, once the whole prompt is computed.
        error: reason for which the prefill will not complete; empty if it will.
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
    """Prefill to decode: asks for the permission to write a request's KV into its reserved blocks.

    HELD grants it. From then on the blocks are reserved until this writer sends Pushed or
    PushFailed, or is dead. A request has one writer.

    Args:
        prompt_digest: digest of the prompt that the writer was given; must match the request's.
    """

    request_id: str
    writer: Writer
    prompt_digest: str = ""


class Pushed(Message, frozen=True):
    """Prefill to decode: all KV is written, and drained. RELEASED means that the reader found it
    complete and uses it.

    Args:
        written: bytes from each of the writer's ranks to each of the reader's:
            ``(writer rank, reader rank, bytes)``. The push fails if a count is not what the reader
            expects.
        first_token: the sampled token.
    """

    request_id: str
    writer: Writer
    written: tuple[tuple[int, int, int], ...]
    first_token: FirstToken


class PushFailed(Message, frozen=True):
    """Prefill to decode: the push has failed; nothing more will be sent.

    Args:
        may_still_arrive: whether a write failed in flight. The writer's side is drained; if the
            transport can't revoke access, data already sent may still change the peer's memory.
    """

    request_id: str
    writer: Writer
    reason: str
    may_still_arrive: bool = msgspec.field(default=False, name="may_land")  # its wire name


class StatusRequest(Message, frozen=True):
    """Decode to prefill: asks for the status of silent pushes, and for the epoch that answers.

    Args:
        request_ids: the writer's own names of the requests.
    """

    request_ids: tuple[str, ...]


class StatusReply(Message, frozen=True):
    """The answer to StatusRequest. A push in neither list is over: nothing is being or will be
    written.

    Args:
        engine_id: the epoch that answers.
        running: pushes in flight, by the writer's own names.
        endings: how other pushes ended, as was or will be reported.
    """

    engine_id: str
    running: tuple[str, ...]
    endings: tuple[Pushed | PushFailed, ...]


class LeaseReply(Message, frozen=True):
    """The answer to Done, Failed, PrefillProgress, PushOpen, Pushed and PushFailed."""

    status: LeaseStatus


class Reject(Message, frozen=True):
    """The answer to a message that was not understood, or not allowed; it had no effect."""

    reason: str


PushMessage = PushOpen | Pushed | PushFailed | StatusRequest
PullMessage = Done | Failed | PrefillProgress
Question = Hello | Renew | PullMessage | PushMessage
AnyMessage = Question | Welcome | Renewed | StatusReply | LeaseReply | Reject

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: AnyMessage) -> bytes:
    """Encode a message."""
    return _encoder.encode(message)


def decode(payload: bytes) -> AnyMessage:
    """Decode a message.

    Raises:
        BadFrame: the payload is not a message; has the reason.
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
        HandshakeRefused: the versions differ; names both.
    """
    if theirs != PROTOCOL_VERSION:
        raise HandshakeRefused(
            f"the peer speaks side-channel protocol {theirs}, this instance {PROTOCOL_VERSION}; "
            "run the same release on both"
        )


def welcome(
    hello: Hello, own: InstanceMetadata, check: CompatibilityCheck, incompatible: IncompatiblePeers
) -> Welcome:
    """Check a peer that sends Hello, and return the reply.

    Raises:
        HandshakeRefused: the peer is incompatible, which is recorded.
    """
    try:
        check_version(hello.version)
        check(own, hello.instance)
    except HandshakeRefused as exc:
        incompatible.note(hello.instance.engine_id, str(exc))
        raise
    return Welcome(hello.ticket, own)
