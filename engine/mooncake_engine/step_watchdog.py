"""Detects a step that hangs: because of a hung device, a stopped rank, or a peer of a collective
that vanished silently.

Nothing else would detect it: the requests' own timeouts are checked between steps, and the
connector's I/O continues without the core. Loading, compiling and capturing graphs precede the
first step and are not watched; neither are callers of ``LLMEngine``, which step when they like.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from mmap import mmap

STATE_BYTES = 16
"""Size of the memory in which processes share a ``StepWatch``."""

STALLED_SHARE = 0.5
"""Fraction of the step timeout after which the instance accepts no requests and stops renewing
leases and reservations of its peers."""

CHECKS_PER_TIMEOUT = 20
"""Number of checks within the timeout."""
MAX_PAUSE_S = 1.0
"""Maximum time between two checks, in seconds."""


class StepWatch:
    """Measures how long the current step has been running, by periodic checks. The core's thread
    begins and ends steps, one other thread checks (``check``), and any thread may read.

    Time during which the whole process was stopped (by a debugger, in a frozen container) does not
    count: a check adds at most two pauses, however long ago the last one was.

    Args:
        timeout_s: timeout of a step, in seconds; 0 for none.
        state: ``STATE_BYTES`` zero bytes, in shared memory if another process checks or reads; None
            allocates them.

    Attributes:
        pause_s: seconds between two checks.
    """

    def __init__(self, timeout_s: float, state: mmap | None = None) -> None:
        # the number of steps begun so far, and whether one is running
        self._state = memoryview(bytearray(STATE_BYTES) if state is None else state).cast("Q")
        self.timeout_s = timeout_s
        self.pause_s = min(timeout_s / CHECKS_PER_TIMEOUT, MAX_PAUSE_S)
        self._seen = 0
        self._last_check = 0.0
        self._watched_s = 0.0

    def begin(self) -> None:
        """Record that a step begins."""
        self._state[0] += 1
        self._state[1] = True

    def end(self) -> None:
        """Record that the step has returned."""
        self._state[1] = False

    def check(self, now: float) -> bool:
        """Check the current step; returns whether it has timed out.

        Args:
            now: reading of a monotonic clock, in seconds.
        """
        passed_s, self._last_check = now - self._last_check, now
        if self._is_seen_to_run:
            self._watched_s += min(passed_s, 2 * self.pause_s)
        else:
            self._seen, self._watched_s = self._state[0], 0.0
        return bool(self.timeout_s) and self._watched_s > self.timeout_s

    @property
    def watched_s(self) -> float:
        """Seconds for which the current step is known to have been running."""
        return self._watched_s if self._is_seen_to_run else 0.0

    @property
    def _is_seen_to_run(self) -> bool:
        """Whether the step that the last check found is still running."""
        return bool(self._state[1]) and self._state[0] == self._seen

    def has_stalled(self) -> bool:
        """Whether the step takes so long that requests should go elsewhere. Any thread."""
        return bool(self.timeout_s) and self.watched_s > self.timeout_s * STALLED_SHARE

    def timeout_message(self) -> str:
        """Returns the error message for a step that has timed out."""
        return f"a step did not return within {self.timeout_s:g} s (--step-timeout-seconds)"


class StepWatchdog:
    """A thread that checks a ``StepWatch`` periodically; none is started if there is no timeout.

    Args:
        watch: the state to check.
        on_timeout: called once, on the watchdog's thread, when a step has timed out.
    """

    def __init__(self, watch: StepWatch, on_timeout: Callable[[], None]) -> None:
        self._watch = watch
        self._on_timeout = on_timeout
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="step-watchdog", daemon=True)
        if watch.timeout_s:
            self._thread.start()

    def close(self) -> None:
        """Stop the checks. Idempotent; any thread."""
        self._closing.set()

    def _run(self) -> None:
        while not self._closing.wait(self._watch.pause_s):
            if self._watch.check(time.monotonic()):
                self._on_timeout()
                return
