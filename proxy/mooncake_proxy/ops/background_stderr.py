"""Standard error that neither ends nor freezes the proxy, whatever is at its other end.

A disk may be full and a log reader may stop reading. A thread writes, from a bounded queue; what
does not fit, or cannot be written, is dropped and counted.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LOG_FORMATS = ("text", "json")
_TEXT_LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s"
MAX_QUEUED_BYTES = 1 << 20
# For what is queued when the process ends.
DRAIN_S = 1.0


class JsonLogLines(logging.Formatter):
    """A line of JSON per record, with the fields that instances log: `time` in seconds since 1970,
    `level`, `logger`, `message` and, of an error with a traceback, `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        import json  # only where lines are JSON

        line: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def begin_log(level: str, log_format: str) -> None:
    """Log to standard error from now on; Python's own warnings are lines of JSON, too."""
    handler = logging.StreamHandler(sys.stderr)
    is_json = log_format == "json"
    handler.setFormatter(JsonLogLines() if is_json else logging.Formatter(_TEXT_LINE))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    if is_json:
        logging.captureWarnings(True)


class BackgroundStderr(io.TextIOBase):
    """A text stream whose writes return at once. `flush` does nothing; `drain` waits."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._queue: deque[bytes] = deque()
        self._num_bytes = 0
        self._is_closed = False
        self._changed = threading.Condition()
        # Lines since the latest that was written.
        self.num_dropped = 0
        self._thread = threading.Thread(target=self._run, name="stderr", daemon=True)
        self._thread.start()

    def write(self, text: str) -> int:
        """Queue it, or drop it where the queue is full."""
        data = text.encode("utf-8", "backslashreplace")
        with self._changed:
            if self._num_bytes + len(data) > MAX_QUEUED_BYTES:
                self.num_dropped += data.count(b"\n")
            else:
                self._queue.append(data)
                self._num_bytes += len(data)
                self._changed.notify_all()
        return len(text)

    def fileno(self) -> int:
        """The descriptor that is written to."""
        return self._fd

    def drain(self, timeout_s: float) -> None:
        """End the thread, once all is written or after `timeout_s`."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (data := self._next()) is not None:
            try:
                while data:
                    data = data[os.write(self._fd, data) :]
            except OSError:
                with self._changed:
                    self.num_dropped += data.count(b"\n")

    def _next(self) -> bytes | None:
        with self._changed:
            while not self._queue and not self._is_closed:
                self._changed.wait()
            if not self._queue:
                return None
            data = b"".join(self._queue)
            self._queue.clear()
            self._num_bytes = 0
            if self.num_dropped:
                data += b"%d log lines were dropped\n" % self.num_dropped
                self.num_dropped = 0
            return data


@contextmanager
def background_stderr() -> Iterator[BackgroundStderr]:
    """Put one in the place of `sys.stderr`, for logging too, while the block runs."""
    plain, stream = sys.stderr, BackgroundStderr(2)
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
        stream.drain(DRAIN_S)
