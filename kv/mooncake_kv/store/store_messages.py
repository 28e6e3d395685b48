"""What a store and its users in other processes say: versioned and typed, as on the side channel.

A message is one msgpack map, the payload of a session's request or reply; ``mooncake_hal.session``
has both ends prove the deployment's secret first. Handles are the user's whose session it is, and
end with it.
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

STORE_PROTOCOL_VERSION = 3

MAX_KEYS = 65_536
"""Chunks that one message may name."""

MAX_WRITERS = 1024
"""Processes that one message may name."""

MAX_TRANSFER_TIMEOUT_S = 3600.0

PAGE_CHUNKS = 4096
"""Chunks in one page of a list."""


class StoreMessage(msgspec.Struct, frozen=True, tag_field="kind", tag=str.lower):
    """Base of all messages."""


class Introduce(StoreMessage, frozen=True):
    """The first: who asks.

    Args:
        name: for logs.
        client: random; the same on all sessions of one user, of which there is one at a time.
        transfer_timeout_s: no transfer of this user takes longer.
        writers: see ``NameWriters``.
        writing: handles of a session before this one whose memory the user still writes to: of all
            others nothing moves any more.
    """

    name: str
    client: bytes
    transfer_timeout_s: float
    writers: tuple[ProcessName, ...]
    writing: tuple[int, ...] = ()


class ArenaReply(StoreMessage, frozen=True):
    """The answer: where the memory is."""

    arena: ArenaInfo


class NameWriters(StoreMessage, frozen=True):
    """Which processes write to the store's memory for this user: those that have to end before it
    is used again, if the session is lost."""

    writers: tuple[ProcessName, ...]


class ProbeKeys(StoreMessage, frozen=True):
    """Asks for ``ChunkStore.probe``."""

    keys: tuple[bytes, ...]


class Probed(StoreMessage, frozen=True):
    """The answer."""

    found: tuple[Residence, ...]


class PinKeys(StoreMessage, frozen=True):
    """Asks for ``ChunkStore.pin``."""

    keys: tuple[bytes, ...]
    lease_s: float
    first_bytes: int | None = None


class Pinned(StoreMessage, frozen=True):
    """The answer, at once or by ticket."""

    handles: tuple[ReadHandle | None, ...]


class NotYet(StoreMessage, frozen=True):
    """The answer takes a while: ask again with the ticket."""

    ticket: int


class Collect(StoreMessage, frozen=True):
    """What has become of it? NotYet again, or the answer, once."""

    ticket: int


class AwaitBytes(StoreMessage, frozen=True):
    """Asks for ``ChunkStore.await_bytes``."""

    handles: tuple[ReadHandle, ...]
    beyond: int


class Arrived(StoreMessage, frozen=True):
    """The answer, at once or by ticket."""

    num_bytes: int


class ReleaseHandles(StoreMessage, frozen=True):
    """Asks for ``ChunkStore.release``; by ``ReadHandle.handle_id``."""

    handles: tuple[ReadHandle, ...]


class ReserveChunks(StoreMessage, frozen=True):
    """Asks for ``ChunkStore.reserve``."""

    chunks: tuple[Chunk, ...]
    lease_s: float
    copy: CopyTerms | None = None
    is_use: bool = True


class Reserved(StoreMessage, frozen=True):
    """The answer."""

    grants: tuple[WriteHandle | PutRefusal, ...]


class EndWrites(StoreMessage, frozen=True):
    """Asks for ``ChunkStore.commit`` and ``abort``."""

    handles: tuple[WriteHandle, ...]
    are_complete: bool


class Ended(StoreMessage, frozen=True):
    """The answer to ReleaseHandles and EndWrites."""

    valid: tuple[bool, ...]


class TouchKeys(StoreMessage, frozen=True):
    """Asks for ``ChunkStore.touch``."""

    keys: tuple[bytes, ...]


class DropKeys(StoreMessage, frozen=True):
    """Asks for ``ChunkStore.drop``; None is all there are, of one tenant if it is named."""

    keys: tuple[bytes, ...] | None = None
    tenant: str | None = None


class Counted(StoreMessage, frozen=True):
    """The answer to NameWriters, TouchKeys, DropKeys and Leave: of how many."""

    num_chunks: int


class AskStats(StoreMessage, frozen=True):
    """Asks for ``ChunkStore.stats``."""


class StatsReply(StoreMessage, frozen=True):
    """The answer."""

    stats: StoreStats


class ListChunks(StoreMessage, frozen=True):
    """What is in a tier, page by page: what follows the key ``after``, in the order of keys."""

    tier: Tier
    after: bytes = b""


class ChunkPage(StoreMessage, frozen=True):
    """The answer, without the chunks' contents; a page that is not full is the last."""

    chunks: tuple[Chunk, ...]


class VerifyRecords(StoreMessage, frozen=True):
    """Read all that SSDs have. The answer takes long."""


class Verified(StoreMessage, frozen=True):
    """The answer: records that were right, and not, which are forgotten."""

    num_right: int
    num_wrong: int


class Leave(StoreMessage, frozen=True):
    """The last: nothing of this user moves any more."""


StoreQuestion = (
    Introduce
    | NameWriters
    | ProbeKeys
    | PinKeys
    | Collect
    | AwaitBytes
    | ReleaseHandles
    | ReserveChunks
    | EndWrites
    | TouchKeys
    | DropKeys
    | AskStats
    | ListChunks
    | VerifyRecords
    | Leave
)
StoreAnswer = (
    ArenaReply
    | Probed
    | Pinned
    | NotYet
    | Arrived
    | Reserved
    | Ended
    | Counted
    | StatsReply
    | ChunkPage
    | Verified
)

_encoder = msgspec.msgpack.Encoder()
_questions: msgspec.msgpack.Decoder[StoreQuestion] = msgspec.msgpack.Decoder(StoreQuestion)
_answers: msgspec.msgpack.Decoder[StoreAnswer] = msgspec.msgpack.Decoder(StoreAnswer)
_LISTS = ("keys", "chunks", "handles", "writing")
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def store_credentials(secret: bytes) -> Credentials:
    """What a store and its users prove to each other."""
    return Credentials(secret, "node store", STORE_PROTOCOL_VERSION)


def encode_message(message: StoreQuestion | StoreAnswer) -> bytes:
    """A message's bytes."""
    return _encoder.encode(message)


def decode_question(payload: bytes) -> StoreQuestion:
    """Read a user's message.

    Raises:
        BadFrame: says why it is none.
    """
    try:
        question = _questions.decode(payload)
    except _UNREADABLE as exc:
        raise BadFrame(f"not a question to a store: {exc}") from exc
    named = [getattr(question, field, None) or () for field in _LISTS]
    if max(map(len, named)) > MAX_KEYS:
        raise BadFrame(f"more than {MAX_KEYS} chunks in one message")
    if isinstance(question, Introduce | NameWriters) and len(question.writers) > MAX_WRITERS:
        raise BadFrame(f"more than {MAX_WRITERS} processes in one message")
    if isinstance(question, Introduce):
        _check_introduction(question)
    return question


def _check_introduction(message: Introduce) -> None:
    if not message.client:
        raise BadFrame("a user has no name for its sessions")
    if not 0 < message.transfer_timeout_s <= MAX_TRANSFER_TIMEOUT_S:
        raise BadFrame(
            f"a user's transfers take {message.transfer_timeout_s:g} s, a store waits for "
            f"{MAX_TRANSFER_TIMEOUT_S:g} at most: lower --transfer-timeout-seconds"
        )


def decode_answer(payload: bytes) -> StoreAnswer:
    """Read a store's message.

    Raises:
        BadFrame: says why it is none.
    """
    try:
        return _answers.decode(payload)
    except _UNREADABLE as exc:
        raise BadFrame(f"not a store's answer: {exc}") from exc
