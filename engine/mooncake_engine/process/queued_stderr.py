"""Standard error whose writes return at once: a full disk or an unread pipe behind it stops nobody.

The proxy has the same in a file of its own: it installs without this distribution.
"""

from __future__ import annotations

import io
import logging
import os
import queue
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

MAX_QUEUED_WRITES = 1024
MAX_WRITE_CHARACTERS = 16 << 10
"""Longer texts are cut: with the number of writes, a bound on what waits in memory."""
_DRAIN_S = 1.0


class QueuedStderr(io.TextIOBase):
    """A text stream that a thread writes out; what does not fit into its queue is dropped.

    Args:
        fd: what to write to.
    """

    def __init__(self, fd: int) -> None:
        self.num_dropped = 0
        self._fd = fd
        self._texts: queue.Queue[str | None] = queue.Queue(MAX_QUEUED_WRITES)
        self._thread = threading.Thread(target=self._run, name="stderr", daemon=True)
        self._thread.start()

    def write(self, text: str) -> int:
        """Queue it, or drop it."""
        try:
            self._texts.put_nowait(text[:MAX_WRITE_CHARACTERS])
        except queue.Full:
            self.num_dropped += 1
        return len(text)

    def fileno(self) -> int:
        """What is written to."""
        return self._fd

    def isatty(self) -> bool:
        """Whether that is a terminal."""
        return os.isatty(self._fd)

    def drain(self, timeout_s: float) -> None:
        """End the thread once all is written, or leave it to itself after ``timeout_s``."""
        with suppress(queue.Full):
            self._texts.put(None, timeout=timeout_s)
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (text := self._texts.get()) is not None:
            num_dropped, self.num_dropped = self.num_dropped, 0
            if num_dropped:
                text = f"{num_dropped} writes to standard error were dropped\n{text}"
            data = text.encode("utf-8", "backslashreplace")
            try:
                while data:
                    data = data[os.write(self._fd, data) :]
            except OSError:
                self.num_dropped += 1 + num_dropped


@contextmanager
def queued_stderr() -> Iterator[QueuedStderr]:
    """Put one in the place of ``sys.stderr``, for logging too, while the block runs."""
    plain, stream = sys.stderr, QueuedStderr(2)
    handlers = [
        handler
        for handler in logging.getLogger().handlers
        if isinstance(handler, logging.StreamHandler) and handler.stream is plain
    ]
    sys.stderr = stream
    for handler in handlers:
        handler.stream = stream
    try:
        yield stream
    finally:
        sys.stderr = plain
        for handler in handlers:
            handler.stream = plain
        stream.drain(_DRAIN_S)
