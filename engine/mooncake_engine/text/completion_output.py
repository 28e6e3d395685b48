"""Turns the engine's token updates of one choice into text updates, and collects them.

Also declares ``EngineClient``, the interface through which server and ``LLM`` use an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from msgspec.structs import replace

from mooncake_engine.config import EngineConfig
from mooncake_engine.errors import DeadlineExceeded, EngineDead, GrammarFailed, RequestFailed
from mooncake_engine.messages import (
    EngineInfo,
    EngineRequest,
    EngineStats,
    FinishReason,
    RequestTimes,
    TokenLogprobs,
    TokenUpdate,
)
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.text.detokenizer import IncrementalDetokenizer
from mooncake_engine.text.reasoning import OutputParser
from mooncake_engine.text.tokenizer import Tokenizer
from mooncake_engine.text.tool_call_parsers import CallDelta, ParsedText
from mooncake_kv.connector import CompatibilityReport, Topology
from mooncake_kv.kv_events import KVEventEndpoints
from mooncake_kv.params import KVTransferDict

OnUpdate = Callable[[TokenUpdate | EngineDead], None]
"""Receives a request's updates in the request's event loop. The last update has ``finish``, or is
the error that the engine died of."""


class EngineClient(Protocol):
    """The interface of an engine to its front end; ``AsyncEngine`` implements it."""

    @property
    def config(self) -> EngineConfig:
        """The engine's configuration."""

    @property
    def info(self) -> EngineInfo:
        """The properties of the loaded engine: context length, vocabulary, KV blocks, …"""

    async def submit(self, request: EngineRequest, on_update: OnUpdate) -> str:
        """Submit a request. Its updates are delivered by direct calls, without waking a task for
        each.

        Args:
            request: the request.
            on_update: the callback for updates. It is never called before this returns, and must
                not raise.

        Returns:
            The name under which the engine tracks the request.

        Raises:
            InvalidRequest, Overloaded, EngineDead, EngineStalled: the engine rejects the request.
        """

    def unsubscribe(self, name: str) -> None:
        """Stop receiving updates; aborts the request unless it has finished. Idempotent.

        Args:
            name: the name that ``submit`` returned.
        """

    def check_capacity(self, num_requests: int) -> None:
        """Check that the engine can accept ``num_requests`` more.

        Raises:
            Overloaded: it can't beside the requests that it has.
            InvalidRequest: it never can, as they exceed the limit by themselves.
        """

    def abort(self, request_id: str) -> None:
        """Abort a live request, or release the KV that a finished prefill holds for a peer. An
        unknown id is not an error."""

    async def reset_prefix_cache(self) -> bool:
        """Evict the whole prefix cache. Returns False, and evicts nothing, while requests use KV
        blocks."""

    async def refresh(self) -> None:
        """Update the snapshot that ``stats`` returns, if it is stale."""

    def stats(self) -> EngineStats:
        """A snapshot of the engine's statistics."""

    def compatibility(self) -> CompatibilityReport | None:
        """The peers with which it can't exchange KV; None without a KV connector."""

    def kv_event_endpoints(self) -> KVEventEndpoints | None:
        """The endpoints at which it publishes KV events; None if it publishes none."""

    def topology(self) -> Topology | None:
        """The addresses at which peers reach this instance; None without a KV connector."""

    def check_health(self) -> None:
        """Raises EngineDead, with the first cause, if the engine has died."""

    def check_ready(self) -> None:
        """Raises EngineDead as ``check_health`` does, and EngineStalled while a step takes too
        long, so that requests should go to other instances."""

    def close(self) -> None:
        """Fail every request and free all resources; idempotent."""


class TextUpdate(msgspec.Struct, frozen=True, gc=False):
    """New output of one choice. A msgspec Struct, because one is created per streamed token.

    Args:
        text: the text to append to the choice's text; may be empty.
        token_ids: the new tokens. The text of a token may come in a later update.
        logprobs: one entry per token, if requested.
        text_offsets: for each token, the number of characters decoded before it.
        finish: the finish reason; set on the last update only.
        stop_reason: the client's stop string or stop token that ended the choice; None for EOS.
        num_cached_tokens: prompt tokens whose KV was cached.
        kv_transfer_params: the parameters for the peer that continues the choice, if one does.
        calls: new parts of tool calls, where the output is parsed for them; not part of ``text``.
        ends_with_calls: on the last update, whether the output calls tools.
        reasoning: the reasoning to append, where the output is parsed for it; not part of ``text``.
        prompt_logprobs: log probabilities of the next prompt tokens, starting with the second token
            of the prompt.
        times: the timestamps of the request's phases; set on the engine's last update.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    text_offsets: tuple[int, ...] = ()
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    num_cached_tokens: int = 0
    kv_transfer_params: KVTransferDict | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    times: RequestTimes | None = None
    calls: tuple[CallDelta, ...] = ()
    ends_with_calls: bool = False
    reasoning: str = ""


class TextOutputProcessor:
    """Turns the token updates of one choice into text updates.

    Args:
        tokenizer: the model's tokenizer.
        sampling: the choice's sampling parameters: stop strings, special tokens.
        parser: finds reasoning and tool calls; None leaves them in the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        parser: OutputParser | None = None,
    ) -> None:
        shown = () if parser is None else parser.special_tokens
        self._detokenizer = IncrementalDetokenizer(tokenizer, sampling, shown)
        self._is_stop_kept = sampling.include_stop_str_in_output
        self._stop_token_ids = frozenset(sampling.stop_token_ids)
        self._parser = parser
        self.is_plain = parser is None and not sampling.stop
        """Whether the text is searched for nothing, neither stop strings nor calls nor reasoning:
        true for most answers."""
        self.push_token = self._detokenizer.push_token
        """Add one token; returns the text that is now final. Only where ``is_plain``."""

    def advance(self, update: TokenUpdate) -> TextUpdate:
        """Process a token update; returns the text that is now final.

        Raises:
            RequestFailed: the engine could not finish the request.
            DeadlineExceeded: the request's timeout has passed.
            GrammarFailed: the request's grammar allows no further token.
        """
        if update.finish is FinishReason.ERROR:
            raise RequestFailed(update.error or "the engine failed the request without a reason")
        if update.finish is FinishReason.GRAMMAR:
            raise GrammarFailed(update.error or "the grammar can't be followed any further")
        if update.finish is FinishReason.TIMEOUT:
            raise DeadlineExceeded(update.error or "the request has timed out")
        if self.is_plain and update.finish is None and len(update.token_ids) == 1:
            offset = self._detokenizer.num_characters
            return TextUpdate(
                self._detokenizer.push(update.token_ids),
                update.token_ids,
                update.logprobs or (),
                (offset,),
                num_cached_tokens=update.num_cached_tokens,
                times=update.times,
            )
        text, offsets = self._push(update)
        stop_string = self._detokenizer.stop_string
        if stop_string is None and update.finish is not None and not continues_at_peer(update):
            text += self._detokenizer.finish()
        ends_here = stop_string is not None
        is_last = ends_here or (update.finish is not None and not continues_at_peer(update))
        parsed = self._parse(text, is_last=is_last)
        # Reports only stop tokens of the client; as in vLLM, EOS is no stop reason.
        stop_token = update.stop_token_id if update.stop_token_id in self._stop_token_ids else None
        return TextUpdate(
            text=parsed.content,
            token_ids=update.token_ids[: len(offsets)],
            logprobs=(update.logprobs or ())[: len(offsets)],
            text_offsets=offsets,
            finish=FinishReason.STOP if ends_here else update.finish,
            stop_reason=stop_string if ends_here else stop_token,
            num_cached_tokens=update.num_cached_tokens,
            kv_transfer_params=update.kv_transfer_params,
            prompt_logprobs=update.prompt_logprobs,
            times=update.times,
            calls=parsed.calls,
            ends_with_calls=is_last and self._parser is not None and self._parser.num_calls > 0,
            reasoning=parsed.reasoning,
        )

    def replay(self, token_ids: Sequence[int]) -> None:
        """Process the first tokens of an answer that continues here, before any update. The client
        has received their text."""
        text = self._detokenizer.replay(token_ids)
        if self._parser is not None:
            self._parser.push(text)

    def _parse(self, text: str, *, is_last: bool) -> ParsedText:
        if self._parser is None:
            return ParsedText(text)
        parsed = self._parser.push(text)
        if not is_last:
            return parsed
        rest = self._parser.finish()
        return ParsedText(
            parsed.content + rest.content,
            parsed.calls + rest.calls,
            parsed.reasoning + rest.reasoning,
        )

    def _push(self, update: TokenUpdate) -> tuple[str, tuple[int, ...]]:
        """The text that is now final, and the offset of each token up to the one that completes a
        stop string. A stop token has no text, unless the client asks for it."""
        detokenizer = self._detokenizer
        is_last_silent = update.stop_token_id is not None and not self._is_stop_kept
        num_shown = len(update.token_ids) - is_last_silent
        text, offsets = "", []
        for token_id in update.token_ids[:num_shown]:
            offsets.append(detokenizer.num_characters)
            text += detokenizer.push((token_id,))
            if detokenizer.stop_string is not None:
                return text, tuple(offsets)
        if is_last_silent:
            offsets.append(detokenizer.num_characters)
        return text, tuple(offsets)


def continues_at_peer(update: TokenUpdate) -> bool:
    """Whether a peer continues the choice after this last update."""
    params = update.kv_transfer_params
    return params is not None and bool(params.get("do_remote_prefill"))


class ChoiceStream:
    """Runs one choice on the engine, and delivers its text as soon as it is final.

    Args:
        engine: the engine client.
        request: the choice's request to the engine.
        processor: turns the choice's tokens into text.
        on_text: called in the event loop with each update; the last one has ``finish``.
        on_error: called once, instead of the last update, with RequestFailed, DeadlineExceeded,
            GrammarFailed, EngineDead, or any other error of this choice.
        is_first_delivered: whether the client has already received the first token's text and log
            probabilities from a prefill instance, so that they are omitted here.
        on_plain_token: a faster callback, called with the token id in place of ``on_text`` for an
            update that holds one token and nothing else and is not the first with tokens. Only
            used where the processor ``is_plain``.
    """

    __slots__ = (
        "_engine",
        "_is_first_delivered",
        "_is_over",
        "_name",
        "_on_error",
        "_on_plain_token",
        "_on_text",
        "_processor",
        "_request",
        "_take_plain_token",
    )

    def __init__(
        self,
        engine: EngineClient,
        request: EngineRequest,
        processor: TextOutputProcessor,
        *,
        on_text: Callable[[TextUpdate], None],
        on_error: Callable[[Exception], None],
        is_first_delivered: bool = False,
        on_plain_token: Callable[[int], None] | None = None,
    ) -> None:
        self._engine = engine
        self._request = request
        self._processor = processor
        self._on_text = on_text
        self._on_error = on_error
        self._is_first_delivered = is_first_delivered
        self._on_plain_token = on_plain_token
        # Set to on_plain_token once the first tokens have been delivered.
        self._take_plain_token: Callable[[int], None] | None = None
        self._name: str | None = None
        self._is_over = False

    async def start(self) -> None:
        """Submit the request; raises the errors of ``EngineClient.submit``."""
        self._name = await self._engine.submit(self._request, self._take)

    def close(self) -> None:
        """Stop delivering; aborts the choice unless it has finished. Idempotent."""
        self._is_over = True
        if self._name is not None:
            self._engine.unsubscribe(self._name)

    def _take(self, update: TokenUpdate | EngineDead) -> None:
        if self._is_over:
            # The engine had ended the choice before it heard that nobody takes it.
            if not isinstance(update, EngineDead) and update.finish is not None:
                _release_kept_kv(self._engine, update)
            return
        try:
            if isinstance(update, EngineDead):
                raise type(update)(str(update)) from update.__cause__
            take_plain_token = self._take_plain_token
            if (
                take_plain_token is None
                or update.finish is not None
                or update.times is not None
                or update.logprobs
                or update.prompt_logprobs
                or len(update.token_ids) != 1
            ):
                self._advance(update)
            else:
                take_plain_token(update.token_ids[0])
        except Exception as exc:  # noqa: BLE001  top of a request: others must get their updates
            self.close()
            self._on_error(exc)

    def _advance(self, update: TokenUpdate) -> None:
        if self._is_first_delivered and update.token_ids:
            self._is_first_delivered = False
            first, update = _split_first_token(update)
            self._on_text(without_shown(self._processor.advance(first)))
            if not update.token_ids and update.finish is None:
                return
        text_update = self._processor.advance(update)
        if update.token_ids:
            self._take_plain_token = self._on_plain_token
        if text_update.finish is not None:
            if update.finish is not text_update.finish:
                _release_kept_kv(self._engine, update)
                text_update = replace(text_update, kv_transfer_params=None)
            self.close()
        self._on_text(text_update)


def without_shown(update: TextUpdate) -> TextUpdate:
    """An update without the output that the client has received from a prefill instance."""
    return replace(update, text="", calls=(), reasoning="", logprobs=(), text_offsets=())


def _split_first_token(update: TokenUpdate) -> tuple[TokenUpdate, TokenUpdate]:
    logprobs = update.logprobs
    first = TokenUpdate(
        update.request_id,
        update.token_ids[:1],
        logprobs and logprobs[:1],
        num_cached_tokens=update.num_cached_tokens,
        times=update.times,
    )
    rest = replace(update, token_ids=update.token_ids[1:], logprobs=logprobs and logprobs[1:])
    return first, rest


def _release_kept_kv(engine: EngineClient, update: TokenUpdate) -> None:
    """Release the KV that the engine has kept for a peer, because the choice ended here."""
    if continues_at_peer(update):
        assert update.kv_transfer_params is not None
        engine.abort(update.kv_transfer_params.get("remote_request_id", update.request_id))


@dataclass(slots=True)
class ChoiceOutput:
    """The accumulated updates of one choice; the fields are those of ``TextUpdate``."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    text_offsets: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    num_cached_tokens: int = 0
    kv_transfer_params: KVTransferDict | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    calls: list[CallDelta] = field(default_factory=list)
    ends_with_calls: bool = False
    reasonings: list[str] = field(default_factory=list)

    @property
    def cumulative_logprob(self) -> float:
        """The log probability of the whole output."""
        return sum(entry.logprob for entry in self.logprobs)

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.texts)

    @property
    def reasoning(self) -> str:
        """The whole reasoning."""
        return "".join(self.reasonings)

    def add(self, update: TextUpdate) -> None:
        """Append an update."""
        self.texts.append(update.text)
        self.reasonings.append(update.reasoning)
        self.token_ids.extend(update.token_ids)
        self.logprobs.extend(update.logprobs)
        self.text_offsets.extend(update.text_offsets)
        self.finish = update.finish
        self.stop_reason = update.stop_reason
        self.num_cached_tokens = max(self.num_cached_tokens, update.num_cached_tokens)
        self.kv_transfer_params = update.kv_transfer_params
        self.prompt_logprobs.extend(update.prompt_logprobs)
        self.calls.extend(update.calls)
        self.ends_with_calls = update.ends_with_calls


def best_choices(
    candidates: Sequence[ChoiceOutput], sampling: SamplingParams
) -> list[ChoiceOutput]:
    """The ``n`` most probable of a prompt's choices, the best first. If no more than ``n`` were
    generated, all of them in their order. Log probabilities that served only the ranking are
    dropped."""
    if not sampling.is_ranked:
        return list(candidates)
    ranked = sorted(candidates, key=lambda output: output.cumulative_logprob, reverse=True)
    best = ranked[: sampling.n]
    if sampling.logprobs is None:
        for output in best:
            output.logprobs = []
    return best
