"""Non-blocking standard error: a full disk or an unread pipe behind it does not block the process.

The proxy has a copy of its own, because it can be installed without this distribution.
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
"""Maximum number of queued writes; further ones are dropped."""
MAX_WRITE_CHARACTERS = 16 << 10
"""Maximum length of one write, which is truncated beyond it. Together with ``MAX_QUEUED_WRITES``
this bounds the memory of the queue."""
_DRAIN_S = 1.0
"""Maximum time to flush the queue at exit, in seconds."""


class QueuedStderr(io.TextIOBase):
    """A text stream that a background thread writes out; writes that exceed its queue are dropped.

    Args:
        fd: file descriptor to write to.

    Attributes:
        num_dropped: writes dropped since the last one that was written out.
    """

    def __init__(self, fd: int) -> None:
        self.num_dropped = 0
        self._fd = fd
        self._texts: queue.Queue[str | None] = queue.Queue(MAX_QUEUED_WRITES)
        self._thread = threading.Thread(target=self._run, name="stderr", daemon=True)
        self._thread.start()

    def write(self, text: str) -> int:
        """Queue the text, or drop it if the queue is full."""
        try:
            self._texts.put_nowait(text[:MAX_WRITE_CHARACTERS])
        except queue.Full:
            self.num_dropped += 1
        return len(text)

    def fileno(self) -> int:
        """Returns the file descriptor that is written to."""
        return self._fd

    def isatty(self) -> bool:
        """Whether the file descriptor is a terminal."""
        return os.isatty(self._fd)

    def drain(self, timeout_s: float) -> None:
        """Flush the queue and end the thread; give up after ``timeout_s`` for each of the two."""
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
    """Replace ``sys.stderr`` by a ``QueuedStderr`` within the context, also for log handlers."""
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
