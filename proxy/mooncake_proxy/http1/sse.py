"""Server-sent events: cutting a byte stream at event ends, and reading an event's data.

Network chunks and events have nothing to do with each other: one chunk may hold two events, one
event may come in many. `EventFramer` gives whole events, byte for byte, so that what follows a
broken stream (an error event) never lands inside a half-written one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

# Longest event that is waited for; a stream without event ends must not eat the memory.
MAX_EVENT_BYTES = 16 * 1024 * 1024
_EVENT_END = re.compile(rb"\n\r?\n")


class EventTooLong(ValueError):
    """No event end within MAX_EVENT_BYTES."""


class EventFramer:
    """Collects bytes and gives back whole events."""

    __slots__ = ("_tail",)

    def __init__(self) -> None:
        self._tail = b""

    def feed(self, data: bytes) -> bytes:
        """All events that are complete with `data`, unchanged; b"" when none is."""
        if not self._tail:
            if data.endswith(b"\n\n"):
                return data
        else:
            data = self._tail + data
        end = _last_event_end(data)
        self._tail = data[end:]
        if len(self._tail) > MAX_EVENT_BYTES:
            raise EventTooLong(f"no event end in {len(self._tail)} bytes")
        return data[:end]

    @property
    def tail(self) -> bytes:
        """The beginning of an event that is not whole yet."""
        return self._tail


def _last_event_end(data: bytes) -> int:
    """Offset behind the last blank line, 0 when there is none. Lines end in LF or CRLF."""
    plain = data.rfind(b"\n\n")
    crlf = data.rfind(b"\n\r\n")
    return max(plain + 2 if plain >= 0 else 0, crlf + 3 if crlf >= 0 else 0)


def split_events(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """(the event as it came, its data) for each whole event of a block."""
    start = 0
    while start < len(block):
        end = _first_event_end(block, start)
        event = block[start:end]
        yield event, event_data(event)
        start = end


def _first_event_end(block: bytes, start: int) -> int:
    found = _EVENT_END.search(block, start)
    return len(block) if found is None else found.end()


def event_data(event: bytes) -> bytes:
    """The joined `data:` lines of one event; comments and other fields are skipped."""
    lines = []
    for line in event.splitlines():
        if line.startswith(b"data:"):
            value = line[5:]
            lines.append(value[1:] if value.startswith(b" ") else value)
    return b"\n".join(lines)
