"""Shows the progress of long operations, such as loading weights."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

logger = logging.getLogger(__name__)

_WIDTH = 30
_STEP = 0.25
"""Fraction between two log lines, without a terminal."""


class ProgressBar:
    """A progress bar on a terminal, log lines otherwise.

    Args:
        stream: stream to draw on; None for standard error.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._is_live = self._stream.isatty()
        self._stage = ""
        self._shown = 0.0

    def __call__(self, stage: str, fraction: float) -> None:
        """Show that ``stage`` is done to ``fraction``, 0 to 1."""
        if stage != self._stage:
            self._stage, self._shown = stage, -1.0
        if self._is_live:
            self._draw(stage, fraction)
        elif fraction >= 1.0 or fraction - self._shown >= _STEP:
            self._shown = fraction
            logger.info("%s: %.0f %%", stage, 100 * fraction)

    def _draw(self, stage: str, fraction: float) -> None:
        filled = round(_WIDTH * min(max(fraction, 0.0), 1.0))
        bar = "█" * filled + "·" * (_WIDTH - filled)
        end = "\n" if fraction >= 1.0 else ""
        self._stream.write(f"\r\x1b[K{bar} {100 * fraction:3.0f} % {stage}{end}")
        self._stream.flush()
