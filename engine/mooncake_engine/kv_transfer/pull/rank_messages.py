"""What the pull connector's two halves say to each other: the core's side and each rank's."""

from __future__ import annotations

import msgspec

from mooncake_engine.kv_transfer.rank_messages import ConnectPeer, ForgetPeer, RankReady


class Load(msgspec.Struct, frozen=True, tag=True):
    """Core to rank: read the KV of prompt tokens ``[start, stop)``."""

    request_id: str
    engine_id: str
    local_blocks: tuple[int, ...]
    remote_blocks: tuple[int, ...]
    start: int
    stop: int
    spread: int


class CancelLoad(msgspec.Struct, frozen=True, tag=True):
    """Core to rank: end that load, drain it, and report as usual."""

    request_id: str


class LoadReport(msgspec.Struct, frozen=True, tag=True):
    """Rank to core: a load is over and drained.

    Args:
        request_id: which.
        error: None if every byte has arrived.
        nbytes, seconds: what was moved, and how long it took from command to report.
    """

    request_id: str
    error: str | None
    nbytes: int
    seconds: float


ToRank = ConnectPeer | ForgetPeer | Load | CancelLoad
FromRank = RankReady | LoadReport

encode = msgspec.msgpack.Encoder().encode
to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
