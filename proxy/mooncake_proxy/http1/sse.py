"""Server-sent events: splits a byte stream into whole events, and extracts an event's data.

A network read may contain several events, and an event may span several reads. `EventFramer`
returns only whole events, byte for byte, so that an error event that follows a broken stream never
ends up inside a partial event.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

# Bound of an incomplete event: a stream without event ends must not exhaust the memory.
MAX_EVENT_BYTES = 16 * 1024 * 1024
_EVENT_END = re.compile(rb"\n\r?\n")


class EventTooLong(ValueError):
    """No event end within MAX_EVENT_BYTES."""


class EventFramer:
    """Buffers bytes and returns whole events."""

    __slots__ = ("_tail",)

    def __init__(self) -> None:
        self._tail = b""

    def feed(self, data: bytes) -> bytes:
        """Add `data`, and return all events that are complete now, unchanged; b"" if none is."""
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
        """The buffered part of an incomplete event."""
        return self._tail


def _last_event_end(data: bytes) -> int:
    """Offset after the last blank line, 0 if there is none. Lines end in LF or CRLF."""
    plain = data.rfind(b"\n\n")
    crlf = data.rfind(b"\n\r\n")
    return max(plain + 2 if plain >= 0 else 0, crlf + 3 if crlf >= 0 else 0)


def split_events(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield (the event's bytes, its data) for each event of a block of whole events."""
    if block.startswith(b"data: ") and block.find(b"\n") == len(block) - 2:  # one line, as usual
        yield block, block[6:-2]
        return
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
    """The joined `data:` lines of one event. Comments and other fields are skipped."""
    lines = []
    for line in event.splitlines():
        if line.startswith(b"data:"):
            value = line[5:]
            lines.append(value[1:] if value.startswith(b" ") else value)
    return b"\n".join(lines)
