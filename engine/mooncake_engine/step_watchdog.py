"""Notices a step that does not return: a device that hangs, a rank that was stopped, a peer of a
collective that is gone without a word.

Nothing else does: requests' own limits are looked at between steps, and a connector's I/O goes on
without the core. Loading, compiling and capturing graphs come before the first step, and are not
watched; neither is a caller of ``LLMEngine``, who steps when it pleases.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from mmap import mmap

STATE_BYTES = 16
"""Of the memory in which processes share a ``StepWatch``."""

STALLED_SHARE = 0.5
"""Of the time that a step may take, after which the instance takes no requests, and keeps none of
its peers' KV alive."""

LOOKS_PER_TIMEOUT = 20
LONGEST_PAUSE_S = 1.0


class StepWatch:
    """How long the current step has been running, as far as anybody looked. The core's thread
    begins and ends steps, one other looks, any reads.

    Time in which the whole process stood still (a debugger, a frozen container) does not count: a
    look adds no more than two pauses, however long ago the last one was.

    Args:
        timeout_s: how long a step may take; 0 is for ever.
        state: zeros, ``STATE_BYTES`` of them; memory that processes share if one steps and
            another looks.
    """

    def __init__(self, timeout_s: float, state: mmap | None = None) -> None:
        # how many steps have begun, and whether one runs
        self._state = memoryview(bytearray(STATE_BYTES) if state is None else state).cast("Q")
        self.timeout_s = timeout_s
        self.pause_s = min(timeout_s / LOOKS_PER_TIMEOUT, LONGEST_PAUSE_S)
        self._seen = 0
        self._last_look = 0.0
        self._watched_s = 0.0

    def begin(self) -> None:
        """A step begins."""
        self._state[0] += 1
        self._state[1] = True

    def end(self) -> None:
        """It is over."""
        self._state[1] = False

    def look(self, now: float) -> bool:
        """Another look; returns whether the step has taken too long.

        Args:
            now: in seconds, monotonic.
        """
        passed_s, self._last_look = now - self._last_look, now
        if self._is_seen_to_run:
            self._watched_s += min(passed_s, 2 * self.pause_s)
        else:
            self._seen, self._watched_s = self._state[0], 0.0
        return bool(self.timeout_s) and self._watched_s > self.timeout_s

    @property
    def watched_s(self) -> float:
        """For how long the current step has been seen to run."""
        return self._watched_s if self._is_seen_to_run else 0.0

    @property
    def _is_seen_to_run(self) -> bool:
        """Whether the step that the last look found runs yet."""
        return bool(self._state[1]) and self._state[0] == self._seen

    def has_stalled(self) -> bool:
        """Whether the step takes so long that nobody should wait for this instance. Any thread."""
        return bool(self.timeout_s) and self.watched_s > self.timeout_s * STALLED_SHARE

    def why_stuck(self) -> str:
        """In words, what ``look`` found."""
        return f"a step did not return within {self.timeout_s:g} s (--step-timeout-seconds)"


class StepWatchdog:
    """A thread that looks at a ``StepWatch``.

    Args:
        watch: to look at.
        on_stuck: called once, in the watchdog's thread, when a step has taken too long.
    """

    def __init__(self, watch: StepWatch, on_stuck: Callable[[], None]) -> None:
        self._watch = watch
        self._on_stuck = on_stuck
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="step-watchdog", daemon=True)
        if watch.timeout_s:
            self._thread.start()

    def close(self) -> None:
        """Stop looking. Idempotent; any thread."""
        self._closing.set()

    def _run(self) -> None:
        while not self._closing.wait(self._watch.pause_s):
            if self._watch.look(time.monotonic()):
                self._on_stuck()
                return
