"""What the push connector's two halves say to each other: the core's side and each rank's."""

from __future__ import annotations

import msgspec

from mooncake_engine.kv_transfer.facts import RankFacts
from mooncake_engine.kv_transfer.rank_messages import ConnectPeer, ForgetPeer, RankReady


class MeetRanks(msgspec.Struct, frozen=True, tag=True):
    """Core to rank, once: all ranks of this instance, who share the writing."""

    ranks: tuple[RankFacts, ...]


class StartPush(msgspec.Struct, frozen=True, tag=True):
    """Core to rank: the peer has granted it; write the KV of tokens ``[start, stop)``.

    May come before, while or after the request runs.
    """

    request_id: str
    engine_id: str
    remote_blocks: tuple[int, ...]
    start: int
    stop: int
    spread: int


class StopPush(msgspec.Struct, frozen=True, tag=True):
    """Core to rank: write no more, drain, and report.

    Args:
        request_id: whose.
        reason: why.
        has_ended: whether its ``EndPush`` was sent; it follows otherwise.
    """

    request_id: str
    reason: str
    has_ended: bool


class EndPush(msgspec.Struct, frozen=True, tag=True):
    """Core to rank: the request runs no more. Write what is left, if it is complete, and report.

    Args:
        request_id: whose.
        is_complete: whether all of its prompt's KV has been computed.
        block_ids: its block table.
        num_tokens: length of the prompt.
    """

    request_id: str
    is_complete: bool
    block_ids: tuple[int, ...] = ()
    num_tokens: int = 0


class PushReport(msgspec.Struct, frozen=True, tag=True):
    """Rank to core, once per request: it is drained; nothing more will be sent.

    Args:
        request_id: whose.
        error: None if every byte of this rank's share was written.
        written: bytes by the peer's rank.
        seconds: spent in transfers.
        may_land: a write failed under way; what it had sent may arrive yet.
    """

    request_id: str
    error: str | None
    written: dict[int, int]
    seconds: float
    may_land: bool = False


ToRank = MeetRanks | ConnectPeer | ForgetPeer | StartPush | StopPush | EndPush
FromRank = RankReady | PushReport

encode = msgspec.msgpack.Encoder().encode
to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
