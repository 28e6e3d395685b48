"""Which prompts are so short that a decode instance computes them itself, without a hand-over.

Splitting a request costs a hand-over: P's answer, D's pull, one more exchange. Not splitting it
costs the requests on D the time of a step with that prompt in it. A prompt is short if the second
is not more than the first, which is learnt from requests that were split, or up to a length that
was set. Pure: no clock, no sockets.
"""

from __future__ import annotations

from collections import deque

# Of the latest requests that were split.
NUM_SAMPLES = 64
# Below so many samples nothing is learnt yet.
MIN_SAMPLES = 8
# A learnt length stays below this, however slow the hand-over.
MAX_LEARNT_TOKENS = 2048
# So many short prompts of the longest kind may be computed on each D at once; beyond, P has room.
PROMPTS_AT_ONCE = 4


class ShortPrompts:
    """Decides per request, by uncached prompt tokens and what D's compute already.

    `limit`: the most tokens of a short prompt; 0: none is short; None: learnt.
    """

    def __init__(self, limit: int | None) -> None:
        self._fixed = limit
        self.is_learnt = limit is None
        # None: there are newer samples.
        self._learnt: int | None = 0
        self._seconds_per_token: deque[float] = deque(maxlen=NUM_SAMPLES)
        self._handover_s: deque[float] = deque(maxlen=NUM_SAMPLES)
        # Uncached tokens of short prompts that D's compute now.
        self.num_tokens_in_flight = 0

    @property
    def limit(self) -> int:
        """The most uncached tokens of a short prompt."""
        if self._fixed is not None:
            return self._fixed
        if self._learnt is None:
            self._learnt = self._learn()
        return self._learnt

    def _learn(self) -> int:
        if min(len(self._seconds_per_token), len(self._handover_s)) < MIN_SAMPLES:
            return 0
        from statistics import median  # slow to import, and nothing is learnt when a proxy starts

        tokens = median(self._handover_s) / median(self._seconds_per_token)
        return min(int(tokens), MAX_LEARNT_TOKENS)

    def is_short(self, num_uncached: int, num_decodes: int) -> bool:
        """Whether one of so many live D's should compute this prompt."""
        limit = self.limit
        if num_uncached > limit:
            return False
        room = limit * PROMPTS_AT_ONCE * num_decodes
        return self.num_tokens_in_flight + num_uncached <= room

    def note_prefill(self, num_uncached: int, seconds: float) -> None:
        """An otherwise idle P took so long for so many tokens."""
        if num_uncached > 0:
            self._seconds_per_token.append(seconds / num_uncached)
            self._learnt = None

    def note_handover(self, seconds: float) -> None:
        """D took so long from the request to its first event, the pull included."""
        self._handover_s.append(seconds)
        self._learnt = None
