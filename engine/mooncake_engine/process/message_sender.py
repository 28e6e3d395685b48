"""Sends messages on a ``multiprocessing`` connection without ever blocking the caller."""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
from collections import deque
from contextlib import suppress
from multiprocessing.connection import Connection


class MessageSender:
    """The sending end of a connection. Data that the other process does not accept at once is sent
    by a background thread, in order.

    Args:
        connection: connection to the other process, which reads it with ``recv_bytes``.
    """

    def __init__(self, connection: Connection) -> None:
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))
        self._lock = threading.Lock()
        self._unsent: deque[memoryview] = deque()  # messages; the first may be sent in part
        self._num_queued_bytes = 0  # of the messages behind the first
        self._is_gone = False

    def send_bytes(self, *parts: bytes) -> None:
        """Send a message in the framing of ``Connection.send_bytes``; drop it if the other process
        has closed the connection. Any thread.

        Args:
            parts: the message, cut anywhere.
        """
        frame = b"".join((struct.pack("!i", sum(map(len, parts))), *parts))
        with self._lock:
            if self._is_gone:
                return
            if not self._unsent:
                num_sent = self._send_now(frame)
                if num_sent < len(frame):
                    self._unsent.append(memoryview(frame)[num_sent:])
                    threading.Thread(target=self._flush, name="unsent", daemon=True).start()
                return
            self._unsent.append(memoryview(frame))
            self._num_queued_bytes += len(frame)

    def close(self) -> None:
        """Shut the connection down for both processes, and drop what is unsent. Idempotent."""
        with self._lock:
            self._is_gone = True
            with suppress(OSError):  # closed, or the other process has closed its end
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()

    def _send_now(self, data: bytes | memoryview) -> int:
        """Send what the socket accepts without blocking; returns the number of bytes."""
        if self._is_gone:
            return len(data)
        try:
            return self._socket.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:  # the thread that reads from this connection handles its end
            self._is_gone = True
            return len(data)

    def _flush(self) -> None:
        """Thread main: send the queued messages until none is left."""
        writable = select.poll()
        writable.register(self._socket.fileno(), select.POLLOUT)
        while True:
            writable.poll()
            with self._lock:
                first = self._unsent[0]
                first = self._unsent[0] = first[self._send_now(first) :]
                if first:
                    continue
                self._unsent.popleft()
                if not self._unsent:
                    return
                self._num_queued_bytes -= len(self._unsent[0])
