"""Tells a first wish to stop from a second one, which wants the end at once."""

from __future__ import annotations

_SAME_STOP_S = 1.0
"""Signals so close together are one stop: terminals and service managers reach several processes,
and some of these pass on what they got."""


class StopSignals:
    """What SIGINT and SIGTERM have asked for so far."""

    def __init__(self) -> None:
        self.asked_at: float | None = None
        self.is_hurried = False

    def note(self, now: float) -> bool:
        """A signal came at ``now``, in seconds of a steady clock. Whether it is the first one."""
        if self.asked_at is None:
            self.asked_at = now
            return True
        if now - self.asked_at > _SAME_STOP_S:
            self.is_hurried = True
        return False
