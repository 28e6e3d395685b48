"""Non-blocking standard error, and the log format.

Logging must neither block nor end the proxy if a disk is full or a log reader stops reading. A
thread writes from a bounded queue; what does not fit or can't be written is dropped and counted.
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
# Seconds to write queued lines when the process ends.
DRAIN_S = 1.0


class JsonLogLines(logging.Formatter):
    """Formats a record as a line of JSON, with the same fields as instances.

    They are `time` in seconds since 1970, `level`, `logger`, `message` and, if there is a
    traceback, `exception`.
    """

    def format(self, record: logging.LogRecord) -> str:
        import json  # imported late to start faster

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
    """Set up logging to standard error. With JSON, Python's warnings are logged as JSON too."""
    handler = logging.StreamHandler(sys.stderr)
    is_json = log_format == "json"
    handler.setFormatter(JsonLogLines() if is_json else logging.Formatter(_TEXT_LINE))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    if is_json:
        logging.captureWarnings(True)


class BackgroundStderr(io.TextIOBase):
    """A text stream whose writes don't block. `flush` does nothing; `drain` waits."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._queue: deque[bytes] = deque()
        self._num_bytes = 0
        self._is_closed = False
        self._changed = threading.Condition()
        # Lines dropped since the latest successful write.
        self.num_dropped = 0
        self._thread = threading.Thread(target=self._run, name="stderr", daemon=True)
        self._thread.start()

    def write(self, text: str) -> int:
        """Queue `text`, or drop it if the queue is full."""
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
        """The descriptor of standard error."""
        return self._fd

    def drain(self, timeout_s: float) -> None:
        """Wait until everything is written, at most `timeout_s`, and end the thread."""
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
    """Replace `sys.stderr` and the logging handlers' streams by one while the block runs."""
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
