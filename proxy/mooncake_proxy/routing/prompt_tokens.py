"""Token ids of prompts: made once by the proxy, and sent to instances that would make the same.

A proxy with a `--tokenizer` needs a prompt's ids to find its prefix. An instance gets them in place
of a completion's text, if it has shown that it reads text as the proxy does: it is asked once, on
`/tokenize`, about a text in which tokenizers differ. Chats are sent as they came, as their template
is the instance's; there the prefill instance tells its ids to the decode instance.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from msgspec import Raw, Struct

from mooncake_proxy.api.openai_bodies import OpenAIEndpoint, encode, is_null
from mooncake_proxy.api.proxied_request import RequestContext
from mooncake_proxy.errors import UNREADABLE, UpstreamError
from mooncake_proxy.http1.upstream_connection import ClientContext
from mooncake_proxy.pool.instances import Instance, InstancePool
from mooncake_proxy.routing.prefix_index import Tokenizer

logger = logging.getLogger(__name__)
PROBE = " Two  spaces, 3.14, naïve 東京 \U0001f600\n\tif x:\r\n</s><|endoftext|> end"
"""Where it begins and ends, spaces, digits, scripts, and what looks like a special token."""
ASK_TIMEOUT_S = 5.0
# Fields that are about the text, or whose answers repeat it.
TEXT_FIELDS = ("echo", "suffix", "truncate_prompt_tokens")
Spawn = Callable[[Coroutine[Any, Any, None]], object]


class _Tokens(Struct):
    tokens: list[int]


class PromptTokens:
    """Whether this pool's instances take the proxy's ids, and requests in that form."""

    def __init__(
        self, tokenizer: Tokenizer, pool: InstancePool, client: ClientContext, spawn: Spawn
    ) -> None:
        self._tokenizer = tokenizer
        self._pool = pool
        self._client = client
        self._spawn = spawn
        # Of the pool when its instances were looked at last.
        self._version = -1
        # Whether they read the probe as the proxy does; None: asked.
        self._agrees: dict[Instance, bool | None] = {}

    @property
    def are_taken(self) -> bool:
        """Whether every live instance reads text as the proxy does. Asks those that are new."""
        if self._version != self._pool.version:
            self._version = self._pool.version
            self._look_around()
        return bool(self._agrees) and all(self._agrees.values())

    def put(self, context: RequestContext, ids: list[int]) -> None:
        """The request, with ids in place of its text."""
        raw = Raw(encode(ids))
        context.fields["prompt"] = context.parsed.prompt = raw
        context.request.body = encode(context.fields)

    def encode(self, context: RequestContext, text: str) -> list[int]:
        """The text's ids; with special tokens as a completion has it, a chat's template writes them
        itself."""
        given = context.fields.get("add_special_tokens")
        adds_special = context.endpoint is OpenAIEndpoint.COMPLETION and (
            given is None or bytes(given).strip() != b"false"
        )
        return self._tokenizer.encode(text, add_special_tokens=adds_special)

    def can_put(self, context: RequestContext) -> bool:
        """Whether ids say all that its text does."""
        if context.endpoint is not OpenAIEndpoint.COMPLETION or not self.are_taken:
            return False
        fields = context.fields
        return all(name not in fields or is_null(fields[name]) for name in TEXT_FIELDS)

    def _look_around(self) -> None:
        live = {i for i in self._pool if i.is_up and not i.is_draining}
        self._agrees = {i: agrees for i, agrees in self._agrees.items() if i in live}
        for instance in live - self._agrees.keys():
            self._agrees[instance] = None
            self._spawn(self._ask(instance))

    async def _ask(self, instance: Instance) -> None:
        """Whether it reads the probe as the proxy does."""
        body = encode({"prompt": PROBE, "add_special_tokens": True})
        payload = instance.build_post("/tokenize", "tokenizer-probe", b"", body)
        deadline = self._client.loop.time() + ASK_TIMEOUT_S
        theirs: list[int] | None = None
        try:
            answer = await instance.connections.fetch(payload, deadline)
            theirs = msgspec.json.decode(answer, type=_Tokens).tokens
        except (UpstreamError, *UNREADABLE) as exc:
            instance.warn_once("tokenizer", f"is sent text, not token ids: /tokenize: {exc}")
        ours = self._tokenizer.encode(PROBE, add_special_tokens=True)
        if theirs is not None and theirs != ours:
            instance.warn_once(
                "tokenizer", "is sent text, not token ids: it reads text otherwise than --tokenizer"
            )
        if instance in self._agrees:
            self._agrees[instance] = theirs == ours
