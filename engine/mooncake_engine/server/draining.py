"""The end of an instance: it takes no new requests, and lets those end that run."""

from __future__ import annotations

import logging
from collections.abc import Callable

from mooncake_engine.server.request_ids import LiveRequests
from mooncake_engine.stop_signals import StopSignals

log = logging.getLogger(__name__)


class Draining:
    """Says when an instance that was told to stop may end.

    Args:
        timeout_s: how long answers may go on.
        live: the requests whose clients wait.
        num_held: how many finished prefills wait for a peer to fetch their KV.
    """

    def __init__(self, timeout_s: float, live: LiveRequests, num_held: Callable[[], int]) -> None:
        self._timeout_s = timeout_s
        self._live = live
        self._num_held = num_held
        self._signals = StopSignals()
        self._is_told = False
        self._was_idle = False

    def stop(self, now: float) -> None:
        """A signal came at ``now`` (``time.monotonic``): a second one wants the end at once. To be
        called from a signal handler."""
        if self._signals.note(now):
            self._live.close()

    def is_over(self, now: float) -> bool:
        """Whether there is nothing left to wait for, or no time left. What still runs is ended
        with an error then; its clients have yet to be told. To be asked again and again."""
        asked_at = self._signals.asked_at
        if asked_at is None:
            return False
        num_live, num_held = len(self._live), self._num_held()
        # Another thread notes the KV of a finished prefill, maybe after its answer: look twice.
        was_idle, self._was_idle = self._was_idle, not num_live and not num_held
        if self._was_idle:
            return was_idle
        if not self._is_told:
            self._is_told = True
            log.info(
                "no new requests: %d run, peers have yet to fetch the KV of %d; at most %g s",
                *(num_live, num_held, self._timeout_s),
            )
        if not self._signals.is_hurried and now - asked_at < self._timeout_s:
            return False
        log.warning("%d requests are cut off, the KV of %d is given up", num_live, num_held)
        self._live.cut_off()
        return True
