"""Tokenizes prompts once, in the proxy, and sends the token ids to instances that accept them.

A proxy with a `--tokenizer` needs a prompt's ids to find its cached prefix. Instances receive them
in place of a completion's text, after a probe has shown that they tokenize as the proxy does: the
proxy posts a text in which tokenizers differ to `/tokenize` once. Chats are sent unchanged, because
the instance applies the chat template; there the prefill instance sends its token ids to the decode
instance.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from msgspec import Raw, Struct

from mooncake_proxy.api.openai_bodies import OpenAIEndpoint, encode, is_null
from mooncake_proxy.api.proxied_request import RequestContext
from mooncake_proxy.errors import DECODE_ERRORS, UpstreamError
from mooncake_proxy.http1.upstream_connection import ClientContext
from mooncake_proxy.pool.instances import Instance, InstancePool
from mooncake_proxy.routing.prefix_index import Tokenizer

logger = logging.getLogger(__name__)
PROBE = " Two  spaces, 3.14, naïve 東京 \U0001f600\n\tif x:\r\n</s><|endoftext|> end"
"""A text that tokenizers treat differently: its ends, spaces, digits, scripts, special tokens."""
PROBE_TIMEOUT_S = 5.0
# Fields that refer to the prompt's text, or make the answer repeat it.
TEXT_FIELDS = ("echo", "suffix", "truncate_prompt_tokens")
Spawn = Callable[[Coroutine[Any, Any, None]], object]


class _Tokens(Struct):
    tokens: list[int]


class PromptTokens:
    """Finds out whether a pool's instances accept the proxy's token ids, and rewrites requests."""

    def __init__(
        self, tokenizer: Tokenizer, pool: InstancePool, client: ClientContext, spawn: Spawn
    ) -> None:
        self._tokenizer = tokenizer
        self._pool = pool
        self._client = client
        self._spawn = spawn
        # The pool's version when its instances were last examined.
        self._version = -1
        # Whether each instance tokenizes the probe as the proxy does; None: not answered yet.
        self._agrees: dict[Instance, bool | None] = {}

    @property
    def are_accepted(self) -> bool:
        """Whether every live instance tokenizes as the proxy does. Probes new instances."""
        if self._version != self._pool.version:
            self._version = self._pool.version
            self._probe_new_instances()
        return bool(self._agrees) and all(self._agrees.values())

    def put(self, context: RequestContext, ids: list[int]) -> None:
        """Replace the text of the request's prompt by token ids."""
        raw = Raw(encode(ids))
        context.fields["prompt"] = context.parsed.prompt = raw
        context.request.body = encode(context.fields)

    def encode(self, context: RequestContext, text: str) -> list[int]:
        """Token ids of `text`.

        Special tokens are added for completions unless the client disables that, but not for chats,
        whose template adds them.
        """
        given = context.fields.get("add_special_tokens")
        adds_special = context.endpoint is OpenAIEndpoint.COMPLETION and (
            given is None or bytes(given).strip() != b"false"
        )
        return self._tokenizer.encode(text, add_special_tokens=adds_special)

    def can_replace(self, context: RequestContext) -> bool:
        """Whether token ids can replace the prompt's text without changing the answer."""
        if context.endpoint is not OpenAIEndpoint.COMPLETION or not self.are_accepted:
            return False
        fields = context.fields
        return all(name not in fields or is_null(fields[name]) for name in TEXT_FIELDS)

    def _probe_new_instances(self) -> None:
        live = {i for i in self._pool if i.is_up and not i.is_draining}
        self._agrees = {i: agrees for i, agrees in self._agrees.items() if i in live}
        for instance in live - self._agrees.keys():
            self._agrees[instance] = None
            self._spawn(self._probe(instance))

    async def _probe(self, instance: Instance) -> None:
        """Probe an instance: compare its token ids of the probe text with the proxy's."""
        body = encode({"prompt": PROBE, "add_special_tokens": True})
        payload = instance.build_post("/tokenize", "tokenizer-probe", b"", body)
        deadline = self._client.loop.time() + PROBE_TIMEOUT_S
        theirs: list[int] | None = None
        try:
            answer = await instance.connections.fetch(payload, deadline)
            theirs = msgspec.json.decode(answer, type=_Tokens).tokens
        except (UpstreamError, *DECODE_ERRORS) as exc:
            instance.warn_once("tokenizer", f"is sent text, not token ids: /tokenize: {exc}")
        ours = self._tokenizer.encode(PROBE, add_special_tokens=True)
        if theirs is not None and theirs != ours:
            instance.warn_once(
                "tokenizer", "is sent text, not token ids: it tokenizes unlike --tokenizer"
            )
        if instance in self._agrees:
            self._agrees[instance] = theirs == ours
