"""Forwards D's event stream to the client: whole events, unchanged, checked for errors and the end.

`plain_flow.generate` uses one forwarder per streamed attempt.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Raw, Struct

from mooncake_proxy.api.openai_bodies import ABSENT, is_null
from mooncake_proxy.api.proxied_request import RequestContext
from mooncake_proxy.errors import (
    DECODE_ERRORS,
    ConnectionLost,
    FailedStream,
    MalformedResponse,
    Recomputed,
)
from mooncake_proxy.http1.sse import EventFramer, EventTooLong, split_events
from mooncake_proxy.http1.upstream_connection import UpstreamConnection


class ChoiceFields(Struct):
    """Fields of a choice that the proxy reads."""

    stop_reason: Any = None


class ErrorFields(Struct):
    """The `code` of an error object, which some servers set to the HTTP status."""

    code: Any = None


class EventFields(Struct):
    """Fields of an event that the proxy reads."""

    id: str = ""
    created: int = 0
    error: Raw = ABSENT
    choices: list[ChoiceFields] = []  # msgspec copies list defaults


_ID_FIELD = re.compile(rb'"id": ?"[^"\\]*"')
_event_decoder = msgspec.json.Decoder(EventFields)


class StreamForwarder:
    """Forwards events as they arrive. The first one commits the request to this instance.

    For speed, events are parsed only if they contain a word that may end the stream; all others are
    forwarded as bytes.
    """

    __slots__ = (
        "_context",
        "_framer",
        "_instance",
        "_on_start",
        "_rename",
        "is_finished",
        "on_tokens",
    )

    def __init__(
        self, context: RequestContext, instance: str, on_start: Callable[[], None]
    ) -> None:
        self._context = context
        self._instance = instance
        self._on_start = on_start
        # Called for every block of events that is forwarded, except the first of an answer.
        self.on_tokens: Callable[[], None] = _ignore
        self._framer = EventFramer()
        # (D's id field, the client's) if the client has already seen another id of this answer.
        self._rename: tuple[bytes, bytes] | None = None
        self.is_finished = False

    def feed(self, data: bytes) -> None:
        """Process bytes of D's stream: forward the events that they complete."""
        try:
            block = self._framer.feed(data)
        except EventTooLong as exc:
            raise MalformedResponse(self._instance, str(exc)) from exc
        if not block:
            return
        if b'"error"' in block or b"[DONE]" in block or b'"recomputed"' in block:
            self._inspect(block)
        else:
            self._forward(block)

    def check_end(self) -> None:
        """Raise ConnectionLost if the body ended before the stream was complete."""
        if not self.is_finished:
            raise ConnectionLost(self._instance, "the stream ended without [DONE]")

    def _forward(self, block: bytes) -> None:
        context = self._context
        if context.tenant is not None:
            context.num_events += block.count(b"data: {")
        if not context.is_committed:
            context.is_committed = True
            self._on_start()
            if not context.request.has_started:
                context.request.start_stream("text/event-stream", context.reply_headers, block)
                return
            self._rename = _rename_for(block, context.answer_id)
        self.on_tokens()
        if self._rename is not None:
            block = block.replace(*self._rename)
        context.request.write(block)

    def _inspect(self, block: bytes) -> None:
        """Forward all events up to an error or recomputation event, then raise that."""
        good = b""
        for event, data in split_events(block):
            problem = self._problem_of(event, data)
            if problem is not None:
                # While the client has seen nothing of this stream, another D can still take over,
                # so events before an error are dropped.
                is_recomputed = isinstance(problem, Recomputed)
                if good and (self._context.is_committed or is_recomputed):
                    self._forward(good)
                if is_recomputed:
                    self._forward_last(data)
                raise problem
            good += event
        self._forward(good)

    def _problem_of(self, event: bytes, data: bytes) -> FailedStream | Recomputed | None:
        if data == b"[DONE]":
            self.is_finished = True
            return None
        if b'"error"' not in data and b'"recomputed"' not in data:
            return None
        try:
            facts = _event_decoder.decode(data)
        except DECODE_ERRORS:
            return None  # forwarded unchanged
        if not is_null(facts.error):
            return FailedStream(self._instance, event, bytes(facts.error), _status_in(facts.error))
        if any(choice.stop_reason == "recomputed" for choice in facts.choices):
            return Recomputed(self._instance, "gave the request back for recomputation")
        return None

    def _forward_last(self, data: bytes) -> None:
        """Forward the content of the event that returns a request for recomputation.

        Does nothing here: without a token record the request can't be continued, and the client
        gets an error. `RecordingForwarder` overrides this.
        """


def _ignore() -> None:
    """Default of `on_tokens`: no timing is measured."""


def _rename_for(block: bytes, delivered_id: str | None) -> tuple[bytes, bytes] | None:
    """The (old, new) id field, so that D's events carry the id that the client has already seen.

    None if there is nothing to replace.
    """
    if delivered_id is None:
        return None
    ours = b'"id":"%b"' % delivered_id.encode()
    if ours in block:
        return None
    found = _ID_FIELD.search(block)
    return None if found is None else (found.group(), ours)


_STATUS_BY_CODE = {"aborted": 409, "grammar_failed": 400, "deadline_exceeded": 504}
"""The statuses of mooncake-engine's errors that end a request for good."""


def _status_in(error: Raw) -> int:
    """The HTTP status that an error object's `code` is or stands for, or 502."""
    try:
        code = msgspec.json.decode(error, type=ErrorFields).code
    except DECODE_ERRORS:
        return 502
    if isinstance(code, str):
        return _STATUS_BY_CODE.get(code, 502)
    return code if isinstance(code, int) and 400 <= code <= 599 else 502


def check_streams(answer: UpstreamConnection) -> None:
    """Raise MalformedResponse unless the response is an event stream."""
    kind = answer.headers.get(b"content-type", b"")
    if not kind.startswith(b"text/event-stream"):
        raise MalformedResponse(
            answer.name, f"wanted text/event-stream, got {kind.decode('latin-1') or 'no type'}"
        )
