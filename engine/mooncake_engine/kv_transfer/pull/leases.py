"""Which finished prompts are held for a peer, until when, and how each of them ended.

A lease ends by the reader's word, by ours, or by its deadline. Reads are one-sided and can't be
stopped by us, so a deadline is safe only because every reader asks, after the read, whether the
lease was held all along; the answer stays the same however often it is asked.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from mooncake_engine.kv_transfer.protocol import LeaseStatus

NOBODY = ""
REMEMBERED_ENDINGS = 65_536


class LeaseTable:
    """Leases by request id. Pure: the clock is an argument.

    Args:
        duration_s: how long a lease lasts without a renewal.
    """

    def __init__(self, duration_s: float) -> None:
        self.duration_s = duration_s
        self._deadlines: OrderedDict[str, float] = OrderedDict()  # soonest first
        self._endings: OrderedDict[str, tuple[LeaseStatus, str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._deadlines)

    def grant(self, request_id: str, now: float) -> None:
        """Begin to hold a request's KV."""
        self._deadlines[request_id] = now + self.duration_s

    def renew(self, request_ids: Iterable[str], now: float) -> tuple[str, ...]:
        """Extend leases; returns those that are not held."""
        lost = []
        for request_id in request_ids:
            if request_id in self._deadlines:
                self._deadlines[request_id] = now + self.duration_s
                self._deadlines.move_to_end(request_id)
            else:
                lost.append(request_id)
        return tuple(lost)

    def end(self, request_id: str, ending: LeaseStatus, reader: str = NOBODY) -> LeaseStatus:
        """End a lease by somebody's word; returns how it ended, now or back then.

        One that a reader released is EXPIRED for every other: it may have read later.
        """
        if self._deadlines.pop(request_id, None) is not None:
            self._remember(request_id, ending, reader)
            return ending
        status, by = self._endings.get(request_id, (LeaseStatus.UNKNOWN, NOBODY))
        return LeaseStatus.EXPIRED if status is LeaseStatus.RELEASED and by != reader else status

    def is_held(self, request_id: str) -> bool:
        """Whether the lease is running."""
        return request_id in self._deadlines

    def expire(self, now: float) -> list[str]:
        """End the leases whose deadline has passed; returns them."""
        expired = []
        while self._deadlines:
            request_id, deadline = next(iter(self._deadlines.items()))
            if deadline > now:
                break
            self.end(request_id, LeaseStatus.EXPIRED)
            expired.append(request_id)
        return expired

    def _remember(self, request_id: str, ending: LeaseStatus, reader: str) -> None:
        self._endings[request_id] = ending, reader
        if len(self._endings) > REMEMBERED_ENDINGS:
            self._endings.popitem(last=False)
