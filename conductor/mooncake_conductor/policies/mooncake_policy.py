"""Mooncake's Algorithm 1, as published: arXiv 2407.00079 and FAST'25.

The two versions differ if ``best / own`` equals the threshold: arXiv's estimate includes a transfer
then, though it does not migrate; FAST's recomputes. The ratio for an own prefix of 0, which the
paper leaves open, is infinite if any instance has a prefix, else 1.
"""

from __future__ import annotations

from enum import Enum

import numpy as np

from mooncake_conductor.cost.link_calendar import Fetch
from mooncake_conductor.fleet import Values
from mooncake_conductor.index.chunk_index import Counts
from mooncake_conductor.policies.situation import Plan, PrefillChoice, Situation


class Boundary(Enum):
    """Which published version decides at equality."""

    ARXIV = "arxiv"
    FAST = "fast"


class MooncakePolicy:
    """Algorithm 1: the least queueing plus transfer plus prefill, with a threshold for transfers.

    Args:
        threshold: ``kvcache_balancing_threshold``; the paper gives no value.
        boundary: the published version to follow.
    """

    def __init__(self, threshold: float = 2.0, boundary: Boundary = Boundary.FAST) -> None:
        self._threshold = threshold
        self._boundary = boundary

    def choose(self, situation: Situation) -> PrefillChoice:
        own = situation.own
        best, source = self._best_match(situation, own)
        transfers = self.is_far_behind(best, own) & situation.fleet.fetches[situation.slots]
        reused = situation.tokens(np.where(transfers, best, own))
        moved = np.where(transfers, best - own, 0) * situation.fleet.chunk_bytes
        transfer = self._transfer_seconds(situation, source, moved)
        ttft = transfer + situation.queue + situation.compute(reused)
        index = situation.least(ttft)
        if not transfers[index]:
            return situation.with_local_prefix(index)
        return PrefillChoice(
            int(situation.slots[index]),
            Plan.FETCH,
            int(reused[index]),
            float(ttft[index]),
            float(situation.queue[index]),
            float(transfer[index]),
            float(situation.compute(reused)[index]),
            (Fetch(int(situation.slots[source]), int(own[index]), best - int(own[index])),),
            keeps_copy=True,
        )

    def is_far_behind(self, best: int, own: Counts) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Whether ``best / own`` calls for a transfer."""
        ratio = np.where(own > 0, best / np.maximum(own, 1), np.inf if best else 1.0)
        if self._boundary is Boundary.ARXIV:
            return (ratio >= self._threshold) & (best > own)
        return (ratio > self._threshold) & (best > own)

    def _best_match(self, situation: Situation, own: Counts) -> tuple[int, int]:
        """The longest prefix that can be sent, and its holder whose link is free to send first."""
        sends = situation.fleet.sends[situation.slots]
        if not sends.any():
            return 0, 0
        longest = int(own[sends].max())
        until = situation.fleet.links.sending_until[situation.slots]
        return longest, int(np.argmin(np.where(sends & (own == longest), until, np.inf)))

    def _transfer_seconds(self, situation: Situation, source: int, moved: Values) -> Values:
        """EstimateKVCacheTransferTime, including the congestion at the sender, as in the paper."""
        links = situation.fleet.links
        sender = situation.slots[source]
        wait = max(float(links.sending_until[sender]) - situation.now, 0.0)
        rate = np.minimum(links.bytes_per_s[situation.slots], links.bytes_per_s[sender])
        return np.where(moved > 0, wait + links.setup_s + moved / rate, 0.0)
