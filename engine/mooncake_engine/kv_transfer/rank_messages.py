"""What the core's side and each rank's worker side say to each other, whichever way KV moves."""

from __future__ import annotations

import msgspec

from mooncake_engine.kv_transfer.facts import RankFacts


class ConnectPeer(msgspec.Struct, frozen=True, tag=True):
    """Core to rank: an instance to read from or write to, as it described itself."""

    engine_id: str
    ranks: tuple[RankFacts, ...]


class ForgetPeer(msgspec.Struct, frozen=True, tag=True):
    """Core to rank: that incarnation is gone; drop its connections."""

    engine_id: str


class RankReady(msgspec.Struct, frozen=True, tag=True):
    """Rank to core, once: what I hold, where, and how to reach me.

    Args:
        facts: all that.
        can_revoke: whether every transport that peers may use stops what is in flight.
    """

    facts: RankFacts
    can_revoke: bool
