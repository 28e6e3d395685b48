"""What a request has said so far, in token ids and in text, over all its passes.

A request that can't end where it began goes on elsewhere with everything so far as its prompt: as
token ids, which are what the model saw. Text would be tokenised anew, differently, and would have
to be squeezed through the chat template a second time. The client sees one answer: one id, one
usage, no finish between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from mooncake_proxy.api.openai_bodies import DONE, CompletionResponse, OpenAIEndpoint, encode
from mooncake_proxy.api.proxied_request import RequestContext
from mooncake_proxy.errors import UNREADABLE, MalformedAnswer, Recomputed
from mooncake_proxy.flows.stream_forwarder import StreamForwarder
from mooncake_proxy.http1.sse import split_events

HALF_A_CHARACTER = "\ufffd"
# Of events that wait for a whole character. Many more than one needs: then these tokens have no
# text at all, as special ones, or a stop string may have begun.
MAX_HELD_BYTES = 64 * 1024
# What reading an answer raises that is no OpenAI answer.
NO_ANSWER = (*UNREADABLE, TypeError, AttributeError, LookupError)


class TokenRecord:
    """Token ids and text of one request over all its passes.

    Args:
        endpoint: that the client has asked, whatever later passes ask instances for.
        shows_ids: whether the client itself asked for token ids; else they are taken out again.
        may_migrate: whether its stream goes on elsewhere where a decode instance is lost.
    """

    def __init__(
        self, endpoint: OpenAIEndpoint, *, shows_ids: bool, may_migrate: bool = False
    ) -> None:
        self.endpoint = endpoint
        self.shows_ids = shows_ids
        self.may_migrate = may_migrate
        self.prompt: list[int] = []
        self.generated: list[int] = []
        # The leading ones of `generated` that the client has, or whose text is whole. Behind them
        # is half a character, or nothing that is shown: made again, they lose nothing, and a
        # character stays whole.
        self.num_shown = 0
        # Whether its last token has been given to the client.
        self.has_finished = False
        # Of P's token, which a D that is told of it begins with, without its text.
        self._num_repeated = 0
        # Of whole answers that were given back.
        self._text = ""
        self._logprobs: dict[str, Any] = {}
        # Characters of the answer so far, of those the ones that go with `num_shown`, and those of
        # earlier passes: an instance counts the offsets of its tokens from its own beginning.
        self._num_chars = self._num_chars_shown = self._num_chars_before = 0
        # Events whose tokens are no whole characters yet.
        self._held = b""
        # What every chunk of the answer begins with; empty before the first one.
        self.chunk_head: dict[str, Any] = {}
        self.num_passes = 0
        # Whether instances have each given a part of it: then no usage of theirs is the whole's.
        self.is_joined = False
        # The client's limits of new tokens over all passes.
        self.limit: int | None = None
        self.min_tokens = 0

    @property
    def answer_id(self) -> str | None:
        """The one id of all passes, once there is one."""
        return self.chunk_head.get("id")

    def note_prefill(self, answer: CompletionResponse) -> None:
        """Note the prompt's token ids from the first pass's P or D."""
        if not self.prompt and answer.choices:
            self.prompt = answer.prompt_token_ids or answer.choices[0].prompt_token_ids or []

    def take_first_token(
        self, answer: CompletionResponse, events: bytes, *, is_prompt: bool
    ) -> bytes:
        """Note P's token, which goes to the client before D is asked; returns its events.

        Args:
            answer: of P.
            events: what they are without a record.
            is_prompt: D gets the token as the end of its prompt, and does not begin with it.
        """
        token_ids = answer.choices[0].token_ids or []
        self.generated += token_ids
        self._num_repeated = 0 if is_prompt else len(token_ids)
        self.is_joined |= is_prompt
        return b"".join(self.take_event(data) for _, data in split_events(events))

    def take_final_answer(self, events: bytes) -> bytes:
        """Note P's token where it is the last one; returns the events of its answer, a whole
        stream with token ids."""
        return b"".join(
            event if data == b"[DONE]" else self.take_event(data)
            for event, data in split_events(events)
        )

    def take_event(self, data: bytes, *, may_hold: bool = False) -> bytes:
        """Note the token ids of a chunk; returns the event for the client, nothing if it has heard
        that.

        Args:
            may_hold: keep an event whose tokens are half a character until that is whole: the next
                pass would make those tokens again, and the client would see them twice.
        """
        chunk = msgspec.json.decode(data)
        if self.chunk_head and chunk.get("choices") and only_begins(chunk["choices"][0]):
            return b""
        if not self.chunk_head:
            self.chunk_head = {
                name: chunk.get(name) for name in ("id", "object", "created", "model")
            }
        is_held = False
        may_hold &= len(self._held) < MAX_HELD_BYTES
        for choice in chunk.get("choices", ()):
            is_held |= self._take_chunk_choice(chunk, choice) and may_hold
            if not is_held and (self.shows_ids or choice.get("logprobs")):
                self._note_shown()
        self._normalize(chunk, "chat.completion.chunk")
        self._held += b"data: %b\n\n" % encode(chunk)
        return b"" if is_held else self.release()

    def release(self) -> bytes:
        """What was kept, where no more comes and no next pass makes it again."""
        events, self._held = self._held, b""
        return events

    def _take_chunk_choice(self, chunk: dict[str, Any], choice: dict[str, Any]) -> bool:
        """Note what it says; whether that is no whole character, and the answer goes on."""
        num_before = len(self.generated)
        self._take_choice(chunk, choice)
        delta = choice.get("delta") or {}
        is_whole = self._note_text(choice.get("text") or delta.get("content") or "")
        # what a parser has made of the text can't be told from the text's beginning
        is_parsed = any(v for k, v in delta.items() if k not in ("role", "content"))
        self.may_migrate &= not is_parsed
        is_given_back = choice.get("stop_reason") == "recomputed"
        if is_given_back:  # the answer goes on elsewhere
            choice["finish_reason"] = choice["stop_reason"] = None
        has_ended = choice.get("finish_reason") is not None
        self.has_finished |= has_ended
        says_nothing = len(self.generated) == num_before and not is_given_back
        return not (is_whole or is_parsed or has_ended or says_nothing)

    def take_answer(self, body: bytes, instance: str) -> bytes:
        """The same for a whole answer; Recomputed when D gave the request back."""
        try:
            answer = msgspec.json.decode(body)
            [choice] = answer["choices"]
            is_chat_shaped = "message" in choice
            piece = choice["message"].get("content") if is_chat_shaped else choice.get("text")
            answer.pop("kv_transfer_params", None)
            self.chunk_head = self.chunk_head or {"id": answer.get("id")}
            is_given_back = choice.get("stop_reason") == "recomputed"
            self._take_choice(answer, choice)
        except NO_ANSWER as exc:
            raise MalformedAnswer(instance, f"no answer with one choice: {exc}") from exc
        if is_given_back:
            if self._note_text(piece or ""):
                self._text += piece
                self._logprobs = choice.get("logprobs") or {}
            raise Recomputed(instance, "gave the request back for recomputation")
        if self._logprobs and not choice.get("logprobs"):
            choice["logprobs"] = self._logprobs  # the last pass had no token to say
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
        """Forget the tokens that are not shown: the next pass makes them again."""
        self.num_passes += 1
        self.is_joined = True
        self._num_repeated = 0
        self._held = b""
        self._num_chars = self._num_chars_before = self._num_chars_shown
        del self.generated[self.num_shown :]

    def closing_events(self, *, includes_usage: bool) -> bytes:
        """The end of a stream whose last token is out."""
        if not includes_usage:
            return DONE
        usage: dict[str, Any] = {}
        chunk = self.chunk_head | {"choices": [], "usage": usage}
        self._count_usage(usage)
        return b"data: %b\n\n%b" % (encode(chunk), DONE)

    def _take_choice(self, answer: dict[str, Any], choice: dict[str, Any]) -> None:
        if not self.prompt:
            whole = answer.get("prompt_token_ids") or choice.get("prompt_token_ids")
            self.prompt = whole or []
        token_ids = choice.get("token_ids") or []
        num_repeated = min(self._num_repeated, len(token_ids))
        self._num_repeated -= num_repeated
        self.generated += token_ids[num_repeated:]
        if not self.shows_ids:
            choice.pop("token_ids", None)
        if self.num_passes and choice.get("logprobs"):
            self._join_logprobs(choice["logprobs"])
        for part in (answer, choice):
            # a later pass has what was generated before in its prompt
            if part.pop("prompt_token_ids", None) and self.shows_ids:
                part["prompt_token_ids"] = self.prompt

    def _note_text(self, piece: str) -> bool:
        """Whether it ends with a whole character, and all tokens so far are shown with it."""
        self._num_chars += len(piece)
        is_whole = bool(piece) and not piece.endswith(HALF_A_CHARACTER)
        if is_whole:
            self._note_shown()
        return is_whole

    def _note_shown(self) -> None:
        self.num_shown, self._num_chars_shown = len(self.generated), self._num_chars

    def _join_logprobs(self, logprobs: dict[str, Any]) -> None:
        """Of a later pass of a completion: behind those of the answers that were given back, with
        offsets in the whole text."""
        num_chars = self._num_chars_before
        offsets = logprobs.get("text_offset") or []
        logprobs["text_offset"] = [num_chars + offset for offset in offsets]
        for name, earlier in self._logprobs.items():
            if earlier and name in logprobs:
                logprobs[name] = earlier + logprobs[name]

    def _normalize(self, answer: dict[str, Any], chat_object: str) -> None:
        """Make all passes one answer: the first id, the endpoint's own form, the total usage."""
        answer["id"] = self.answer_id
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


class RecordingForwarder(StreamForwarder):
    """Reads every event for its token ids; only for requests that may have several passes."""

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
            # One that commits the request to an instance goes out: until then another may begin.
            return self._record.take_event(data, may_hold=self._context.is_committed)
        except NO_ANSWER as exc:
            raise MalformedAnswer(self._instance, f"no OpenAI chunk: {exc}") from exc

    def _forward_last(self, data: bytes) -> None:
        """It may still carry text, and tokens."""
        try:
            event = self._record.take_event(data, may_hold=True)
        except NO_ANSWER as exc:
            raise MalformedAnswer(self._instance, f"no OpenAI chunk: {exc}") from exc
        if event:
            super()._forward(event)


def only_begins(choice: dict[str, Any]) -> bool:
    """Whether a chat chunk only says who speaks."""
    delta = choice.get("delta") or {}
    says_more = any(value for name, value in delta.items() if name != "role")
    is_more = says_more or choice.get("finish_reason") or choice.get("token_ids")
    return "role" in delta and not is_more
