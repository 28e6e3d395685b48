"""Decides which prompts are so short that the decode instance prefills them itself.

Splitting a request costs a handover: P's answer, D's pull and one more exchange. Not splitting it
delays the other requests on D by a step that includes the prompt. A prompt is short if the delay is
not longer than the handover. The break-even length is configured, or learnt from requests that were
split. Pure: no clock, no sockets.
"""

from __future__ import annotations

from collections import deque

# How many of the latest split requests to learn from.
NUM_SAMPLES = 64
# With fewer samples than this no prompt counts as short.
MIN_SAMPLES = 8
# Upper bound of the learnt length, however slow handovers are.
MAX_LEARNT_TOKENS = 2048
# Bound of the short prompts in flight on each D, in prompts of the longest kind; beyond it, prompts
# go to P.
MAX_PROMPTS_IN_FLIGHT = 4


class ShortPrompts:
    """Decides per request, by its uncached tokens and the short prompts already in flight on D.

    Args:
        limit: longest short prompt in tokens; 0: none is short; None: learnt.
    """

    def __init__(self, limit: int | None) -> None:
        self._fixed = limit
        self.is_learnt = limit is None
        # Cached result; None after new samples.
        self._learnt: int | None = 0
        self._seconds_per_token: deque[float] = deque(maxlen=NUM_SAMPLES)
        self._handover_s: deque[float] = deque(maxlen=NUM_SAMPLES)
        # Uncached tokens of the short prompts in flight on decode instances.
        self.num_tokens_in_flight = 0

    @property
    def limit(self) -> int:
        """Most uncached tokens of a short prompt."""
        if self._fixed is not None:
            return self._fixed
        if self._learnt is None:
            self._learnt = self._learn()
        return self._learnt

    def _learn(self) -> int:
        if min(len(self._seconds_per_token), len(self._handover_s)) < MIN_SAMPLES:
            return 0
        from statistics import median  # slow to import, and not needed at startup

        tokens = median(self._handover_s) / median(self._seconds_per_token)
        return min(int(tokens), MAX_LEARNT_TOKENS)

    def is_short(self, num_uncached: int, num_decodes: int) -> bool:
        """Whether one of `num_decodes` live decode instances should compute this prompt."""
        limit = self.limit
        if num_uncached > limit:
            return False
        room = limit * MAX_PROMPTS_IN_FLIGHT * num_decodes
        return self.num_tokens_in_flight + num_uncached <= room

    def note_prefill(self, num_uncached: int, seconds: float) -> None:
        """Record how long an otherwise idle P took for a prefill of `num_uncached` tokens."""
        if num_uncached > 0:
            self._seconds_per_token.append(seconds / num_uncached)
            self._learnt = None

    def note_handover(self, seconds: float) -> None:
        """Record the time from the request to D until its first event, including the pull."""
        self._handover_s.append(seconds)
        self._learnt = None
