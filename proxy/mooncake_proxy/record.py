"""Token ids and text of a request that a decode instance may give back in the middle."""

from __future__ import annotations

from typing import Any

import msgspec

from mooncake_proxy.errors import Recomputed
from mooncake_proxy.openai import Answer, Endpoint, encode


class Record:
    """Token ids and text of one request over all its passes."""

    def __init__(self, endpoint: Endpoint, *, shows_ids: bool) -> None:
        self.endpoint = endpoint
        # Whether the client itself asked for token ids; otherwise they are taken out again.
        self.shows_ids = shows_ids
        self.prompt: list[int] = []
        self.generated: list[int] = []
        self.text = ""
        self.answer_id: str | None = None
        self.num_passes = 0
        # The client's limit of new tokens over all passes.
        self.limit: int | None = None

    def note_prefill(self, answer: Answer) -> None:
        """The prompt's ids, as the first pass's P or D says them."""
        if not self.prompt and answer.choices:
            self.prompt = answer.prompt_token_ids or answer.choices[0].prompt_token_ids or []

    def take_event(self, data: bytes) -> bytes:
        """Note the ids of a chunk; gives it back as the client shall see it."""
        chunk = msgspec.json.decode(data)
        self.answer_id = self.answer_id or chunk.get("id")
        for choice in chunk.get("choices", ()):
            self._take_choice(chunk, choice)
        self._dress(chunk, "chat.completion.chunk")
        return encode(chunk)

    def take_answer(self, body: bytes, instance: str) -> bytes:
        """The same for a whole answer; Recomputed when it is none yet."""
        answer = msgspec.json.decode(body)
        [choice] = answer["choices"]
        is_chat_shaped = "message" in choice
        piece = choice["message"].get("content") if is_chat_shaped else choice.get("text")
        self.text += piece or ""
        self.answer_id = self.answer_id or answer.get("id")
        is_given_back = choice.get("stop_reason") == "recomputed"
        self._take_choice(answer, choice)
        if is_given_back:
            raise Recomputed(instance, "gave the request back for recomputation")
        if self.endpoint is Endpoint.CHAT:
            choice.pop("text", None)
            choice["message"] = choice.get("message", {"role": "assistant"}) | {
                "content": self.text
            }
        else:
            choice["text"] = self.text
        self._dress(answer, "chat.completion")
        return encode(answer)

    def _take_choice(self, answer: dict[str, Any], choice: dict[str, Any]) -> None:
        if not self.prompt:
            whole = answer.get("prompt_token_ids") or choice.get("prompt_token_ids")
            self.prompt = whole or []
        self.generated += choice.get("token_ids") or []
        if not self.shows_ids:
            choice.pop("token_ids", None)
            choice.pop("prompt_token_ids", None)

    def _dress(self, answer: dict[str, Any], chat_object: str) -> None:
        """One answer over all passes: the first id, the endpoint's own form, the whole usage."""
        if not self.shows_ids:
            answer.pop("prompt_token_ids", None)
        answer["id"] = self.answer_id
        if self.endpoint is Endpoint.CHAT and answer.get("object") == "text_completion":
            answer["object"] = chat_object
            for choice in answer["choices"]:
                if "text" in choice:
                    choice["delta"] = {"content": choice.pop("text")}
        usage = answer.get("usage")
        if usage and self.num_passes and self.prompt:
            usage["prompt_tokens"] = len(self.prompt)
            usage["completion_tokens"] = len(self.generated)
            usage["total_tokens"] = len(self.prompt) + len(self.generated)
