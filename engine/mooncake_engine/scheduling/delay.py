"""How long prompts wait for company."""

from __future__ import annotations


class AdmissionDelay:
    """Holds prompts back for a multiple of what the last ones took (vLLM's scheduler delay factor).

    With many prompts coming in, fewer steps are disturbed by prefills, at the cost of time to
    the first token.

    Args:
        factor: 0 never holds back.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._last_step = 0.0
        self._latency = 0.0
        self._has_admitted = False

    def begin_step(self, now: float) -> None:
        """A step is planned; the one before it is over."""
        if self._has_admitted:
            self._latency = now - self._last_step
        self._last_step, self._has_admitted = now, False

    def note_admission(self) -> None:
        """The step runs a new prompt."""
        self._has_admitted = True

    def has_passed(self, arrival: float) -> bool:
        """Whether a prompt that came at ``arrival`` has waited long enough."""
        return not self._factor or self._last_step - arrival > self._factor * self._latency
