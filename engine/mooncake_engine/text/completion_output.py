"""Text of one choice: the engine's token updates turned into text updates, and collected."""

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
"""Takes a request's updates in its event loop; the last one has ``finish``, or is what the engine
died of."""


class EngineClient(Protocol):
    """What the front end needs of an engine; ``AsyncEngine`` is one."""

    @property
    def config(self) -> EngineConfig:
        """How it was set up."""

    @property
    def info(self) -> EngineInfo:
        """What is known since it was loaded."""

    async def submit(self, request: EngineRequest, on_update: OnUpdate) -> str:
        """Begin to serve a request; its updates come by direct calls, no task is woken for each.

        Args:
            request: what to serve.
            on_update: never called before this returns; must not raise.

        Returns:
            The name under which the engine has it.

        Raises:
            InvalidRequest, Overloaded, EngineDead, EngineStalled: it is not served.
        """

    def leave(self, name: str) -> None:
        """No update is wanted any more: the request is aborted unless it has ended. Idempotent.

        Args:
            name: as ``submit`` returned it.
        """

    def check_room(self, num_requests: int) -> None:
        """Raises Overloaded unless so many may run or wait beside those that do, and InvalidRequest
        for more than there is ever room for."""

    def abort(self, request_id: str) -> None:
        """End a live request, or release the KV that a finished prefill holds for a peer.
        Unknown ids are normal."""

    async def reset_prefix_cache(self) -> bool:
        """Forget the KV of finished prompts; False if it is refused because some is in use."""

    async def refresh(self) -> None:
        """Have ``stats`` show what is so now, if its figures lag."""

    def stats(self) -> EngineStats:
        """A snapshot for metrics."""

    def pairing(self) -> CompatibilityReport | None:
        """Whom it can't exchange KV with; None if it works alone."""

    def kv_event_endpoints(self) -> KVEventEndpoints | None:
        """Where it publishes which blocks it holds; None if it does not."""

    def topology(self) -> Topology | None:
        """Where peers reach this instance; None if it works alone."""

    def check_health(self) -> None:
        """Raises EngineDead with the first cause."""

    def check_ready(self) -> None:
        """Raises EngineDead as ``check_health``, and EngineStalled if requests should go elsewhere
        because a step takes too long."""

    def close(self) -> None:
        """End every request and free everything; idempotent."""


class TextUpdate(msgspec.Struct, frozen=True, gc=False):
    """What became certain about one choice. A Struct, because there is one per streamed token.

    Args:
        text: to append to what came before; may be empty.
        token_ids: the tokens behind it; text that is held back comes later than its token.
        logprobs: one per token, if asked for.
        text_offsets: per token, how many characters had been decoded before it.
        finish: set on the last update, and only there.
        stop_reason: the client's stop string or stop token that ended it; None for EOS.
        num_cached_tokens: prompt tokens that needed no computing.
        kv_transfer_params: for the peer, if it continues there.
        calls: pieces of tool calls, where they are looked for; they are no part of ``text``.
        ends_with_calls: on the last update, whether the output calls tools.
        reasoning: to append to what came before, where it is looked for; no part of ``text``.
        prompt_logprobs: of the next prompt tokens, from the second one on.
        times: how the request came on; with the engine's last update.
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
    """Turns one request's token updates into text updates; pure.

    Args:
        tokenizer, sampling: what the text depends on.
        parser: finds reasoning and tool calls in it; None leaves them in the text.
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
        """Whether nothing is looked for in the text, as in most answers."""
        self.push_token = self._detokenizer.push_token
        """The text that one more token makes certain; only where ``is_plain``."""

    def advance(self, update: TokenUpdate) -> TextUpdate:
        """The text that an update makes certain.

        Raises:
            RequestFailed: the engine could not finish the request.
            DeadlineExceeded: not in time.
            GrammarFailed: its grammar can't be followed any further.
        """
        if update.finish is FinishReason.ERROR:
            raise RequestFailed(update.error or "the engine failed the request without saying why")
        if update.finish is FinishReason.GRAMMAR:
            raise GrammarFailed(update.error or "the grammar can't be followed any further")
        if update.finish is FinishReason.TIMEOUT:
            raise DeadlineExceeded(update.error or "the request's time is up")
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
        # A stop token that the client asked for; as in vLLM, EOS needs no mention.
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
        """Certain text, and an offset per token up to the one that completes a stop string.
        A stop token has no text, unless it is asked for."""
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
    """One choice on the engine: its text is handed on as it becomes certain.

    Args:
        engine: serves it.
        request: what it gets.
        processor: makes text of its tokens.
        on_text: called in the event loop with each update; the last one has ``finish``.
        on_error: called once instead of the last update: RequestFailed, DeadlineExceeded,
            GrammarFailed, EngineDead, or whatever else went wrong with this choice.
        is_first_delivered: the client already has the first token's text and log probabilities,
            from a prefill instance: they are left out here.
        on_plain_token: called in place of ``on_text`` with a token's id, where an update says
            nothing else and is not the first with tokens: as there is one per token and stream, it
            takes a shorter way. Only where the processor ``is_plain``.
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
        self._take_plain_token: Callable[[int], None] | None = None  # from the first tokens on
        self._name: str | None = None
        self._is_over = False

    async def start(self) -> None:
        """Submit it; raises what ``EngineClient.submit`` raises."""
        self._name = await self._engine.submit(self._request, self._take)

    def close(self) -> None:
        """Nothing comes after this; what still runs is aborted. Idempotent."""
        self._is_over = True
        if self._name is not None:
            self._engine.leave(self._name)

    def _take(self, update: TokenUpdate | EngineDead) -> None:
        if self._is_over:
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
        except Exception as exc:  # noqa: BLE001  the door of a request: others get their updates
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
    """An update less what the client has from a prefill instance."""
    return replace(update, text="", calls=(), reasoning="", logprobs=(), text_offsets=())


def _split_first_token(update: TokenUpdate) -> tuple[TokenUpdate, TokenUpdate]:
    logprobs = update.logprobs
    first = TokenUpdate(
        update.request_id,
        update.token_ids[:1],
        logprobs and logprobs[:1],
        num_cached_tokens=update.num_cached_tokens,
    )
    rest = replace(update, token_ids=update.token_ids[1:], logprobs=logprobs and logprobs[1:])
    return first, rest


def _release_kept_kv(engine: EngineClient, update: TokenUpdate) -> None:
    """A stop string ended the choice after the engine had kept its KV for a peer."""
    if continues_at_peer(update):
        assert update.kv_transfer_params is not None
        engine.abort(update.kv_transfer_params.get("remote_request_id", update.request_id))


@dataclass(slots=True)
class ChoiceOutput:
    """All updates of one choice together; the fields are those of ``TextUpdate``."""

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
        """Of all its tokens together."""
        return sum(entry.logprob for entry in self.logprobs)

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.texts)

    @property
    def reasoning(self) -> str:
        """All of it."""
        return "".join(self.reasonings)

    def add(self, update: TextUpdate) -> None:
        """Take an update in."""
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
    """The ``n`` most probable of a prompt's choices, the best first; all, as they are, where no
    more were generated. Log probabilities that only served the ranking are dropped."""
    if not sampling.is_ranked:
        return list(candidates)
    ranked = sorted(candidates, key=lambda output: output.cumulative_logprob, reverse=True)
    best = ranked[: sampling.n]
    if sampling.logprobs is None:
        for output in best:
            output.logprobs = []
    return best
