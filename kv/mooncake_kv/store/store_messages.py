"""The messages between ``StoreClient`` and ``StoreService``: versioned and typed.

A message is one msgpack map, the payload of a session's request or reply. ``mooncake_hal.session``
authenticates both ends with the deployment's secret first. Handles belong to the user of the
session, and end with it.
"""

from __future__ import annotations

import msgspec

from mooncake_hal.session.authentication import Credentials
from mooncake_hal.session.processes import ProcessName
from mooncake_kv.errors import BadFrame
from mooncake_kv.store.chunk_store import (
    ArenaInfo,
    Chunk,
    CopyTerms,
    PutRefusal,
    ReadHandle,
    Residence,
    StoreStats,
    Tier,
    WriteHandle,
)

STORE_PROTOCOL_VERSION = 4

MAX_KEYS = 65_536
"""Upper bound of the chunks in one message."""

MAX_WRITERS = 1024
"""Upper bound of the processes in one message."""

MAX_TRANSFER_TIMEOUT_S = 3600.0
"""Upper bound in seconds of a user's transfer timeout, for which its memory may be quarantined."""

PAGE_CHUNKS = 4096
"""Chunks per page of ``ListChunks``."""


class StoreMessage(msgspec.Struct, frozen=True, tag_field="kind", tag=str.lower):
    """Base of all messages."""


class OpenSession(StoreMessage, frozen=True):
    """The first message of a session: identifies the user.

    Args:
        name: name for logs.
        client: random id, the same on all sessions of one user, which has one session at a time.
        transfer_timeout_s: upper bound of this user's transfers in seconds.
        writers: see ``RegisterWriters``.
        writing: write handles of a former session whose transfers are still in flight. The store
            aborts all others of that session.
    """

    name: str
    client: bytes
    transfer_timeout_s: float
    writers: tuple[ProcessName, ...]
    writing: tuple[int, ...] = ()


class ArenaReply(StoreMessage, frozen=True):
    """Answers OpenSession: where the arena is."""

    arena: ArenaInfo


class RegisterWriters(StoreMessage, frozen=True):
    """Declares the processes that write to the store's memory for this user. If the session is
    lost, the memory of unfinished writes is not reused before they have exited."""

    writers: tuple[ProcessName, ...]


class ProbeKeys(StoreMessage, frozen=True):
    """Requests ``ChunkStore.probe``."""

    keys: tuple[bytes, ...]


class Probed(StoreMessage, frozen=True):
    """Answers ProbeKeys."""

    found: tuple[Residence, ...]


class PinKeys(StoreMessage, frozen=True):
    """Requests ``ChunkStore.pin``."""

    keys: tuple[bytes, ...]
    lease_s: float
    first_bytes: int | None = None


class Pinned(StoreMessage, frozen=True):
    """Answers PinKeys, at once or by ticket."""

    handles: tuple[ReadHandle | None, ...]


class Pending(StoreMessage, frozen=True):
    """The reply is not ready: poll for it with ``Poll``."""

    ticket: int


class Poll(StoreMessage, frozen=True):
    """Polls for a pending reply. Returns Pending again, or the reply, once."""

    ticket: int


class AwaitBytes(StoreMessage, frozen=True):
    """Requests ``ChunkStore.await_bytes``."""

    handles: tuple[ReadHandle, ...]
    beyond: int


class Arrived(StoreMessage, frozen=True):
    """Answers AwaitBytes, at once or by ticket."""

    num_bytes: int


class ReleaseHandles(StoreMessage, frozen=True):
    """Requests ``ChunkStore.release``; handles are identified by ``ReadHandle.handle_id``."""

    handles: tuple[ReadHandle, ...]


class ReserveChunks(StoreMessage, frozen=True):
    """Requests ``ChunkStore.reserve``."""

    chunks: tuple[Chunk, ...]
    lease_s: float
    copy: CopyTerms | None = None
    is_use: bool = True


class Reserved(StoreMessage, frozen=True):
    """Answers ReserveChunks."""

    grants: tuple[WriteHandle | PutRefusal, ...]


class EndWrites(StoreMessage, frozen=True):
    """Requests ``ChunkStore.commit`` if ``are_complete``, else ``abort``."""

    handles: tuple[WriteHandle, ...]
    are_complete: bool
    may_still_arrive: bool = False


class Ended(StoreMessage, frozen=True):
    """Answers ReleaseHandles and EndWrites."""

    valid: tuple[bool, ...]


class TouchKeys(StoreMessage, frozen=True):
    """Requests ``ChunkStore.touch``."""

    keys: tuple[bytes, ...]


class DropKeys(StoreMessage, frozen=True):
    """Requests ``ChunkStore.drop``. ``keys`` None drops all chunks, or all of ``tenant``."""

    keys: tuple[bytes, ...] | None = None
    tenant: str | None = None


class CountReply(StoreMessage, frozen=True):
    """Answers RegisterWriters, TouchKeys, DropKeys and CloseSession with a count."""

    num_chunks: int


class GetStats(StoreMessage, frozen=True):
    """Requests ``ChunkStore.stats``."""


class StatsReply(StoreMessage, frozen=True):
    """Answers GetStats."""

    stats: StoreStats


class ListChunks(StoreMessage, frozen=True):
    """Requests one page of a tier's chunks: those whose keys follow ``after``, in key order. All
    pages show the chunks of the moment at which the first one, whose ``after`` is empty, was
    requested in this session."""

    tier: Tier
    after: bytes = b""


class ChunkPage(StoreMessage, frozen=True):
    """Answers ListChunks, without the chunks' ``content``; a page that is not full is the last."""

    chunks: tuple[Chunk, ...]


class VerifyRecords(StoreMessage, frozen=True):
    """Requests a check of all SSD records, which takes long."""


class Verified(StoreMessage, frozen=True):
    """Answers VerifyRecords: the number of intact records, and of damaged ones, which were
    removed."""

    num_intact: int
    num_damaged: int


class CloseSession(StoreMessage, frozen=True):
    """The last message of a session: none of this user's transfers is in flight any more."""


StoreRequest = (
    OpenSession
    | RegisterWriters
    | ProbeKeys
    | PinKeys
    | Poll
    | AwaitBytes
    | ReleaseHandles
    | ReserveChunks
    | EndWrites
    | TouchKeys
    | DropKeys
    | GetStats
    | ListChunks
    | VerifyRecords
    | CloseSession
)
StoreReply = (
    ArenaReply
    | Probed
    | Pinned
    | Pending
    | Arrived
    | Reserved
    | Ended
    | CountReply
    | StatsReply
    | ChunkPage
    | Verified
)

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[StoreRequest] = msgspec.msgpack.Decoder(StoreRequest)
_replies: msgspec.msgpack.Decoder[StoreReply] = msgspec.msgpack.Decoder(StoreReply)
_LISTS = ("keys", "chunks", "handles", "writing")
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def store_credentials(secret: bytes) -> Credentials:
    """The credentials with which a store and its users authenticate each other."""
    return Credentials(secret, "node store", STORE_PROTOCOL_VERSION)


def encode_message(message: StoreRequest | StoreReply) -> bytes:
    """Encode a message."""
    return _encoder.encode(message)


def decode_request(payload: bytes) -> StoreRequest:
    """Decode a user's message.

    Raises:
        BadFrame: the payload is not a valid request; says why.
    """
    try:
        request = _requests.decode(payload)
    except _UNREADABLE as exc:
        raise BadFrame(f"not a valid request to a store: {exc}") from exc
    named = [getattr(request, field, None) or () for field in _LISTS]
    if max(map(len, named)) > MAX_KEYS:
        raise BadFrame(f"more than {MAX_KEYS} chunks in one message")
    if isinstance(request, OpenSession | RegisterWriters) and len(request.writers) > MAX_WRITERS:
        raise BadFrame(f"more than {MAX_WRITERS} processes in one message")
    if isinstance(request, OpenSession):
        _check_user(request)
    return request


def _check_user(message: OpenSession) -> None:
    if not message.client:
        raise BadFrame("the client id of a user is empty")
    if not 0 < message.transfer_timeout_s <= MAX_TRANSFER_TIMEOUT_S:
        raise BadFrame(
            f"a user's transfer timeout is {message.transfer_timeout_s:g} s, a store accepts more "
            f"than 0 and at most {MAX_TRANSFER_TIMEOUT_S:g} s: change --transfer-timeout-seconds"
        )


def decode_reply(payload: bytes) -> StoreReply:
    """Decode a store's message.

    Raises:
        BadFrame: the payload is not a valid reply; says why.
    """
    try:
        return _replies.decode(payload)
    except _UNREADABLE as exc:
        raise BadFrame(f"not a valid reply of a store: {exc}") from exc
