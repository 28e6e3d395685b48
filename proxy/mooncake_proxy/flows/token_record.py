"""Records the token ids and text of a request across its passes, and joins them to one answer.

`migration.py` continues a request on another instance with the tokens so far as its prompt. It uses
token ids because they are exactly what the model has seen: text could be tokenized differently, and
would have to pass through the chat template a second time. The client sees one answer with one id,
one usage and one finish reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from mooncake_proxy.api.openai_bodies import DONE, CompletionResponse, OpenAIEndpoint, encode
from mooncake_proxy.api.proxied_request import RequestContext
from mooncake_proxy.errors import DECODE_ERRORS, MalformedResponse, Recomputed
from mooncake_proxy.flows.stream_forwarder import StreamForwarder
from mooncake_proxy.http1.sse import split_events

REPLACEMENT_CHARACTER = "\ufffd"
# Limit of events held back until their text is whole characters. A character needs far less; more
# means that the tokens have no text (special tokens), or that an instance withholds the text
# because a stop string may have started.
MAX_HELD_BYTES = 64 * 1024
# Token ids in a chunk of ours. Can't occur within a string, whose quotes are escaped.
_TOKEN_IDS = re.compile(rb',"token_ids":\[(\d+(?:,\d+)*)\]')
# Raised by code that reads an answer, if that is no OpenAI answer.
ANSWER_ERRORS = (*DECODE_ERRORS, TypeError, AttributeError, LookupError)


class TokenRecord:
    """Token ids and text of one request across all its passes.

    Args:
        endpoint: the endpoint that the client called; later passes may be completions.
        shows_ids: the client asked for token ids; otherwise they are removed from its events.
        may_migrate: the stream may be migrated if its decode instance is lost.
        continues_answer: later passes are the client's request with the tokens so far, whose text
            the instances don't send again. They decide what text a token completes, so that no
            event need be held back.
    """

    def __init__(
        self,
        endpoint: OpenAIEndpoint,
        *,
        shows_ids: bool,
        may_migrate: bool = False,
        continues_answer: bool = False,
    ) -> None:
        self.endpoint = endpoint
        self.shows_ids = shows_ids
        self.may_migrate = may_migrate
        self.continues_answer = continues_answer
        self.prompt: list[int] = []
        self.generated: list[int] = []
        # Whether some of the answer is the output of a parser (reasoning, tool calls), which can't
        # be continued from the text so far.
        self.is_parsed = False
        # How many leading tokens of `generated` the client has, or whose text is whole characters.
        # The tokens after them are part of an incomplete character or have no text: the next pass
        # generates them again, so that no character is split.
        self.num_shown = 0
        # Whether the answer's last token has been delivered to the client.
        self.has_finished = False
        # Token ids of P's token that D repeats at the start of its stream, without text.
        self._num_repeated = 0
        # Text and logprobs of non-streamed answers that were returned for recomputation.
        self._text = ""
        self._logprobs: dict[str, Any] = {}
        # Characters of the answer so far, those of the first `num_shown` tokens, and those of
        # earlier passes. An instance counts text offsets from the start of its own output.
        self._num_chars = self._num_chars_shown = self._num_chars_before = 0
        # How chunks begin that the first pass may forward without parsing them; empty for none.
        self._plain_opening = b""
        # Events held back because their tokens are not whole characters yet.
        self._held = b""
        # Fields that are the same in every chunk of the answer; empty before the first one.
        self.chunk_head: dict[str, Any] = {}
        self.num_passes = 0
        # Whether several instances have generated parts of it: then no instance's usage is right.
        self.is_joined = False
        # The client's limits of new tokens, across all passes.
        self.limit: int | None = None
        self.min_tokens = 0

    @property
    def answer_id(self) -> str | None:
        """The answer's id in all passes; None until the first chunk."""
        return self.chunk_head.get("id")

    def note_prefill(self, answer: CompletionResponse) -> None:
        """Note the prompt's token ids from the first pass's P or D."""
        if not self.prompt and answer.choices:
            self.prompt = answer.prompt_token_ids or answer.choices[0].prompt_token_ids or []

    def record_first_token(
        self, answer: CompletionResponse, events: bytes, *, is_prompt: bool
    ) -> bytes:
        """Record P's token, which goes to the client before D is asked.

        Args:
            answer: P's answer.
            events: the events of that answer.
            is_prompt: D gets the token as the end of its prompt, and does not repeat it.

        Returns:
            The events for the client.
        """
        token_ids = answer.choices[0].token_ids or []
        self.generated += token_ids
        self._num_repeated = 0 if is_prompt else len(token_ids)
        self.is_joined |= is_prompt
        return b"".join(self.record_event(data) for _, data in split_events(events))

    def record_final_answer(self, events: bytes) -> bytes:
        """Record P's answer if its token is the last one.

        Args:
            events: a complete stream, with token ids.

        Returns:
            The events for the client.
        """
        return b"".join(
            event if data == b"[DONE]" else self.record_event(data)
            for event, data in split_events(events)
        )

    def record_event(self, data: bytes, *, may_hold: bool = False) -> bytes:
        """Record the token ids of a chunk.

        Args:
            data: the chunk, as JSON.
            may_hold: hold an event back while its tokens are an incomplete character. The next pass
                would generate those tokens again, and the client would see them twice.

        Returns:
            The events for the client; empty if they are held back, or only repeat the role.
        """
        if (plain := self._record_plain(data)) is not None:
            return plain
        chunk = msgspec.json.decode(data)
        if self.chunk_head and chunk.get("choices") and is_role_only(chunk["choices"][0]):
            return b""
        if not self.chunk_head:
            self.chunk_head = {
                name: chunk.get(name) for name in ("id", "object", "created", "model")
            }
            if self.continues_answer:
                self._plain_opening = b'{"id":%b,' % encode(self.answer_id)
        is_held = False
        may_hold &= len(self._held) < MAX_HELD_BYTES
        for choice in chunk.get("choices", ()):
            is_held |= self._record_chunk_choice(chunk, choice) and may_hold
            if not is_held and (self.shows_ids or choice.get("logprobs")):
                self._note_shown()
        self._normalize(chunk, "chat.completion.chunk")
        self._held += b"data: %b\n\n" % encode(chunk)
        return b"" if is_held else self.release()

    def _record_plain(self, data: bytes) -> bytes | None:
        """Record a chunk that only goes on, as almost all do, without parsing it.

        Returns:
            The event for the client; None if the chunk has to be parsed.
        """
        opening = self._plain_opening
        is_plain = opening and data.startswith(opening) and b'"finish_reason":null' in data
        if not is_plain or self._num_repeated or b'"prompt_token_ids"' in data:
            return None
        found = _TOKEN_IDS.search(data)
        if found is None:
            return None
        self.generated += map(int, found[1].split(b","))
        self._note_shown()
        if not self.shows_ids:
            data = data[: found.start()] + data[found.end() :]
        return b"data: %b\n\n" % data

    def release(self) -> bytes:
        """Return the events held back, if no later event and no later pass will replace them."""
        events, self._held = self._held, b""
        return events

    def _record_chunk_choice(self, chunk: dict[str, Any], choice: dict[str, Any]) -> bool:
        """Record a choice of a chunk.

        Returns:
            True if its text is an incomplete character and the answer continues: the event should
            be held back.
        """
        num_before = len(self.generated)
        self._record_choice(chunk, choice)
        delta = choice.get("delta") or {}
        is_whole = self._note_text(choice.get("text") or delta.get("content") or "")
        is_parsed = _has_parsed_fields(delta)
        self.is_parsed |= is_parsed
        self.may_migrate &= self.continues_answer or not is_parsed
        is_recomputed = choice.get("stop_reason") == "recomputed"
        if is_recomputed:  # the answer continues elsewhere
            choice["finish_reason"] = choice["stop_reason"] = None
        has_ended = choice.get("finish_reason") is not None
        self.has_finished |= has_ended
        if self.continues_answer:
            self._note_shown()
            return False
        is_empty = len(self.generated) == num_before and not is_recomputed
        return not (is_whole or is_parsed or has_ended or is_empty)

    def record_answer(self, body: bytes, instance: str) -> bytes:
        """Record a non-streamed answer.

        Returns:
            The whole answer for the client, across all passes.

        Raises:
            Recomputed: D returned the request for recomputation.
        """
        try:
            answer = msgspec.json.decode(body)
            [choice] = answer["choices"]
            is_chat_shaped = "message" in choice
            piece = choice["message"].get("content") if is_chat_shaped else choice.get("text")
            answer.pop("kv_transfer_params", None)
            self.chunk_head = self.chunk_head or {"id": answer.get("id")}
            is_recomputed = choice.get("stop_reason") == "recomputed"
            self._record_choice(answer, choice)
        except ANSWER_ERRORS as exc:
            raise MalformedResponse(instance, f"no answer with one choice: {exc}") from exc
        if is_recomputed:
            self.is_parsed |= is_chat_shaped and _has_parsed_fields(choice["message"])
            if self._note_text(piece or ""):
                self._text += piece
                self._logprobs = choice.get("logprobs") or {}
            raise Recomputed(instance, "gave the request back for recomputation")
        if self._logprobs and not choice.get("logprobs"):
            choice["logprobs"] = self._logprobs  # the last pass generated no tokens
        text = self._text + (piece or "")
        if self.endpoint is OpenAIEndpoint.CHAT:
            choice.pop("text", None)
            choice["message"] = choice.get("message", {"role": "assistant"}) | {"content": text}
        else:
            choice["text"] = text
        if self.shows_ids:
            choice["token_ids"] = self.generated
        self._normalize(answer, "chat.completion")
        return encode(answer)

    def begin_next_pass(self) -> None:
        """Drop the tokens that the client has not seen: the next pass generates them again."""
        self.num_passes += 1
        self.is_joined = True
        self._plain_opening = b""
        self._num_repeated = 0
        self._held = b""
        self._num_chars = self._num_chars_before = self._num_chars_shown
        del self.generated[self.num_shown :]

    def reset_answer(self) -> None:
        """Forget the answer so far, which the client has not seen: the next pass is the first."""
        self.generated, self.num_shown = [], 0
        self._text, self._logprobs = "", {}
        self._num_chars = self._num_chars_before = self._num_chars_shown = 0
        self.is_joined = self.is_parsed = False

    def closing_events(self, *, includes_usage: bool) -> bytes:
        """The events that end a stream whose last token has been delivered."""
        if not includes_usage:
            return DONE
        usage: dict[str, Any] = {}
        chunk = self.chunk_head | {"choices": [], "usage": usage}
        self._count_usage(usage)
        return b"data: %b\n\n%b" % (encode(chunk), DONE)

    def _record_choice(self, answer: dict[str, Any], choice: dict[str, Any]) -> None:
        if not self.prompt:
            whole = answer.get("prompt_token_ids") or choice.get("prompt_token_ids")
            self.prompt = whole or []
        token_ids = choice.get("token_ids") or []
        num_repeated = min(self._num_repeated, len(token_ids))
        self._num_repeated -= num_repeated
        self.generated += token_ids[num_repeated:]
        if not self.shows_ids:
            choice.pop("token_ids", None)
        if self.num_passes and not self.continues_answer and choice.get("logprobs"):
            self._join_logprobs(choice["logprobs"])
        for part in (answer, choice):
            # the prompt of a later pass includes tokens generated before
            if part.pop("prompt_token_ids", None) and self.shows_ids:
                part["prompt_token_ids"] = self.prompt

    def _note_text(self, piece: str) -> bool:
        """Whether `piece` ends with a whole character; if so, all tokens so far count as shown."""
        self._num_chars += len(piece)
        is_whole = bool(piece) and not piece.endswith(REPLACEMENT_CHARACTER)
        if is_whole:
            self._note_shown()
        return is_whole

    def _note_shown(self) -> None:
        self.num_shown, self._num_chars_shown = len(self.generated), self._num_chars

    def _join_logprobs(self, logprobs: dict[str, Any]) -> None:
        """Append the logprobs of a completion's later pass to those of earlier passes, with text
        offsets relative to the whole answer."""
        num_chars = self._num_chars_before
        offsets = logprobs.get("text_offset") or []
        logprobs["text_offset"] = [num_chars + offset for offset in offsets]
        for name, earlier in self._logprobs.items():
            if earlier and name in logprobs:
                logprobs[name] = earlier + logprobs[name]

    def _normalize(self, answer: dict[str, Any], chat_object: str) -> None:
        """Make all passes look like one answer.

        Chunks and answers get the first pass's id, the format of the client's endpoint and the
        total usage.
        """
        answer["id"] = self.answer_id
        if (created := self.chunk_head.get("created")) is not None:
            answer["created"] = created
        if self.endpoint is OpenAIEndpoint.CHAT and answer.get("object") == "text_completion":
            answer["object"] = chat_object
            for choice in answer["choices"]:
                if "text" in choice:
                    choice["delta"] = {"content": choice.pop("text")}
        usage = answer.get("usage")
        if usage and self.is_joined and self.prompt:
            self._count_usage(usage)

    def _count_usage(self, usage: dict[str, Any]) -> None:
        usage["prompt_tokens"] = len(self.prompt)
        usage["completion_tokens"] = len(self.generated)
        usage["total_tokens"] = len(self.prompt) + len(self.generated)


def _has_parsed_fields(message: dict[str, Any]) -> bool:
    return any(value for name, value in message.items() if name not in ("role", "content"))


class RecordingForwarder(StreamForwarder):
    """Records the token ids of every event. Used only for requests that may have several passes."""

    __slots__ = ("_record",)

    def __init__(
        self,
        context: RequestContext,
        instance: str,
        on_start: Callable[[], None],
        record: TokenRecord,
    ) -> None:
        super().__init__(context, instance, on_start)
        self._record = record

    def _forward(self, block: bytes) -> None:
        events = [self._recorded(event, data) for event, data in split_events(block)]
        if joined := b"".join(events):
            super()._forward(joined)

    def _recorded(self, event: bytes, data: bytes) -> bytes:
        if data == b"[DONE]":
            return self._record.release() + event
        if not data:
            return event
        try:
            # The event that commits the request is never held back: another D could take over.
            return self._record.record_event(data, may_hold=self._context.is_committed)
        except ANSWER_ERRORS as exc:
            raise MalformedResponse(self._instance, f"no OpenAI chunk: {exc}") from exc

    def _forward_last(self, data: bytes) -> None:
        """Forward the last event: it may still carry text and tokens."""
        try:
            event = self._record.record_event(data, may_hold=True)
        except ANSWER_ERRORS as exc:
            raise MalformedResponse(self._instance, f"no OpenAI chunk: {exc}") from exc
        if event:
            super()._forward(event)


def is_role_only(choice: dict[str, Any]) -> bool:
    """Whether a chat chunk carries nothing but the role."""
    delta = choice.get("delta") or {}
    has_content = any(value for name, value in delta.items() if name != "role")
    has_more = has_content or choice.get("finish_reason") or choice.get("token_ids")
    return "role" in delta and not has_more
