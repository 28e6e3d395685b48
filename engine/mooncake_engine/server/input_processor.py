"""Turns a decoded request into a ``RequestContext``: tokenises the prompt and runs every check that
does not need the engine."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import msgspec

from mooncake_api.instance_protocol import DP_RANK_HEADER, TIMEOUT_HEADER
from mooncake_api.translation import content_of, without_billing_line
from mooncake_engine.errors import InvalidRequest
from mooncake_engine.kv_connector import read_kv_transfer_params
from mooncake_engine.messages import EngineInfo, EngineRequest
from mooncake_engine.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from mooncake_engine.sampling_params import Grammar, SamplingParams
from mooncake_engine.server.kv_transfer_requests import (
    KVTransferRequest,
    check_same_tokenizer,
    is_prefill,
    prompt_of_peer,
    read_kv_transfer_request,
)
from mooncake_engine.server.live_requests import choice_ids
from mooncake_engine.server.openai_protocol import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    GenerationFields,
    StreamOptions,
    TokenizeRequest,
)
from mooncake_engine.server.request_context import GeneratedChoice, Prompt, RequestContext
from mooncake_engine.server.sampling_fields import (
    chat_sampling,
    check_grammar,
    check_grammar_size,
    completion_sampling,
    grammar_of,
    is_prompt_only,
    structure_field,
)
from mooncake_engine.server.tool_choice import offered_tools, template_calls
from mooncake_engine.text.background_work import CHARACTERS_PER_TOKEN, BackgroundWork
from mooncake_engine.text.bad_words import with_bad_words
from mooncake_engine.text.detokenizer import text_offsets
from mooncake_engine.text.grammars import is_compiled
from mooncake_engine.text.limits import (
    Truncation,
    check_prompt,
    check_text_size,
    choice_sampling,
)
from mooncake_engine.text.reasoning import after_reasoning, reasoning_state
from mooncake_engine.text.tokenizer import Tokenizer

_MAX_TIMEOUT_S = 86_400
_MAX_RANK_DIGITS = 6
_MAX_SALT_CHARACTERS = 1024


@dataclass(frozen=True, slots=True)
class InputProcessor:
    """Creates the context of each request, for one engine and its tokenizer.

    Args:
        model_names: the names under which the model is served; responses carry the first one.
        info: the engine's limits and vocabulary.
        tokenizer: the model's tokenizer.
        tool_format: the format in which the model calls tools; None if it can't.
        defaults: sampling parameters for requests that omit them.
        has_reasoning: whether chat answers are parsed for reasoning.
        work: runs long tokenising and grammar compilation off the event loop.
    """

    model_names: tuple[str, ...]
    info: EngineInfo
    tokenizer: Tokenizer
    tool_format: str | None = None
    defaults: SamplingDefaults = NO_DEFAULTS
    has_reasoning: bool = False
    work: BackgroundWork = field(default_factory=BackgroundWork)

    async def completion(
        self, request: CompletionRequest, request_id: str, headers: Mapping[str, str]
    ) -> RequestContext:
        """Create the context of a completion request.

        Args:
            request: the decoded body.
            request_id: the client's request id, or a generated one.
            headers: the HTTP headers, by name in lower case.

        Raises:
            InvalidRequest: the request is invalid or asks for something that is not served.
            Overloaded: the request is long, and the queue of background work is full.
        """
        self.check_model(request.model)
        sampling = completion_sampling(request, self.info, self.defaults)
        sampling = with_bad_words(sampling, self.tokenizer)
        sampling = await self._structured(
            request, sampling, grammar_of(request, self.tokenizer), structure_field(request)
        )
        made = self._made_by_peer(request)
        if made is not None and isinstance(request.prompt, str):
            check_prompt(made, self.info, param="prompt")
            prompts = [Prompt(made, request.prompt)]
        else:
            prompts = await completion_prompts(request, self.tokenizer, self.info, self.work)
        if request.echo:
            num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
            echoed = partial(self._echoed, prompts, with_offsets=request.logprobs is not None)
            prompts = await self.work.on_text(CHARACTERS_PER_TOKEN * num_tokens, echoed)
        context = self._context(request, request_id, headers, sampling, prompts)
        return replace(context, echoes=bool(request.echo), is_prompt_only=is_prompt_only(request))

    async def chat(
        self, request: ChatRequest, request_id: str, headers: Mapping[str, str]
    ) -> RequestContext:
        """Create the context of a chat completion; arguments and errors as for ``completion``."""
        self.check_model(request.model)
        num_characters = check_chat_size(request, self.info)
        sampling = chat_sampling(request, self.info, self.defaults)
        sampling = with_bad_words(sampling, self.tokenizer)
        structure = grammar_of(request, self.tokenizer)
        tools = offered_tools(request, self.tool_format, structure, self.tokenizer)
        field = structure_field(request) if tools.grammar is structure else "tools"
        made = self._made_by_peer(request)
        if made is None:
            tokenise = partial(_chat_prompt, request, self.tokenizer, self.info, tools.shown)
            prompt = await self.work.on_text(num_characters, tokenise)
        else:
            prompt = Prompt(made)
        check_prompt(prompt.token_ids, self.info, param="messages")
        grammar, reasoning = tools.grammar, None
        if self.has_reasoning:
            reasoning = reasoning_state(self.tokenizer, prompt.token_ids)
            grammar = grammar and after_reasoning(grammar, reasoning, self.tokenizer)
        sampling = await self._structured(request, sampling, grammar, field)
        context = self._context(request, request_id, headers, sampling, [prompt])
        return replace(
            context,
            is_chat=True,
            tool_format=tools.tool_format,
            tool_schemas=tools.schemas,
            is_one_call=request.parallel_tool_calls is False,
            reasoning=reasoning,
            shows_reasoning=request.include_reasoning is not False,
        )

    def check_model(self, model: str | None) -> None:
        """Raises InvalidRequest (404) for a model that is not served here."""
        if model is not None and model not in self.model_names:
            served = ", ".join(map(repr, self.model_names))
            raise InvalidRequest(
                f"the model {model!r} is not served here; {served} is",
                param="model",
                status=404,
            )

    def _made_by_peer(self, request: GenerationFields) -> tuple[int, ...] | None:
        num_generated = len(request.generated_token_ids or ())
        return prompt_of_peer(request.kv_transfer_params, self.tokenizer.fingerprint, num_generated)

    async def _structured(
        self,
        request: GenerationFields,
        sampling: SamplingParams,
        grammar: Grammar | None,
        field: str,
    ) -> SamplingParams:
        if grammar is None:
            return sampling
        # Routers set min_tokens to 1 for a prefill, lest its only token end the output: here only
        # a token that completes the structure does.
        min_tokens = 0 if is_prefill(request.kv_transfer_params) else sampling.min_tokens
        structured = replace(sampling, grammar=grammar, min_tokens=min_tokens)
        info = self.info
        if not is_compiled(grammar, self.tokenizer, info.vocab_size, info.eos_token_ids):
            check_grammar_size(grammar, field)
            check = partial(check_grammar, grammar, field, self.tokenizer, info)
            await self.work.grammars.run(check)
        return structured

    def _echoed(self, prompts: Sequence[Prompt], *, with_offsets: bool) -> list[Prompt]:
        """The prompts with the text and offsets that an echo needs."""
        echoed = []
        for prompt in prompts:
            ids, text = prompt.token_ids, prompt.text
            text = self.tokenizer.decode(ids) if text is None else text
            offsets = text_offsets(self.tokenizer, ids, text) if with_offsets else ()
            echoed.append(Prompt(ids, text, offsets))
        return echoed

    def _context(
        self,
        request: GenerationFields,
        request_id: str,
        headers: Mapping[str, str],
        sampling: SamplingParams,
        prompts: Sequence[Prompt],
    ) -> RequestContext:
        is_streamed, streaming = bool(request.stream), _stream_options(request)
        includes_usage = bool(streaming.include_usage)
        num_choices = _num_choices(sampling, len(prompts))
        kv_transfer = read_kv_transfer_request(
            request.kv_transfer_params, num_choices, stream=is_streamed
        )
        check_same_tokenizer(kv_transfer, self.tokenizer.fingerprint)
        generated = tuple(request.generated_token_ids or ())
        if generated:
            _check_generated(request, num_choices, is_outgoing=kv_transfer.is_outgoing)
            check_prompt(prompts[0].token_ids + generated, self.info, param="generated_token_ids")
        common = EngineRequest(
            request_id,
            generated,
            sampling,
            priority=request.priority or 0,
            cache_salt=_cache_salt(request.cache_salt),
            timeout_s=_timeout_s(request.timeout, headers.get(TIMEOUT_HEADER.lower())),
            data_parallel_rank=_dp_rank(headers.get(DP_RANK_HEADER.lower())),
            num_generated=len(generated),
        )
        return RequestContext(
            request_id=request_id,
            created=int(time.time()) if kv_transfer.created is None else kv_transfer.created,
            model=self.model_names[0],
            prompts=tuple(prompts),
            choices=self._choices(common, prompts, kv_transfer),
            sampling=sampling,
            kv_transfer=kv_transfer,
            generated=generated,
            is_streamed=is_streamed,
            includes_usage=includes_usage,
            has_usage_in_chunks=includes_usage and bool(streaming.continuous_usage_stats),
            returns_token_ids=bool(request.return_token_ids),
            names_tokens_by_id=bool(request.return_tokens_as_token_ids),
            shows_prompt_logprobs=request.prompt_logprobs is not None,
            trace_parent=headers.get("traceparent"),
        )

    def _choices(
        self, common: EngineRequest, prompts: Sequence[Prompt], kv_transfer: KVTransferRequest
    ) -> tuple[GeneratedChoice, ...]:
        """The choices of all prompts, in the order of the prompts.

        Args:
            common: an engine request with the fields that all choices share. Its tokens follow
                each prompt.
        """
        per_prompt = common.sampling.num_candidates
        names = choice_ids(common.request_id, len(prompts) * per_prompt)
        group = secrets.token_hex(8)  # request ids come from clients and may not be unique
        choices = []
        for i, name in enumerate(names):
            number, index = divmod(i, per_prompt)
            prompt = prompts[number]
            # The choices of a prompt share its tuple: adding nothing copies nothing.
            token_ids = prompt.token_ids + common.prompt_token_ids
            params = read_kv_transfer_params(kv_transfer.params(i), token_ids, common.cache_salt)
            if params.metaserver is not None and prompt.text is not None:
                # saves the prefill instance from tokenising the prompt again
                params = replace(params, tokenizer=self.tokenizer.fingerprint)
            sampling = choice_sampling(
                common.sampling,
                index,
                len(token_ids),
                self.info,
                num_generated=common.num_generated,
            )
            if params.first_token is not None and not kv_transfer.begins_with(
                params.first_token, wants_logprobs=sampling.logprobs is not None
            ):
                params = replace(params, first_token=None)
            request = replace(
                common,
                request_id=name,
                prompt_token_ids=token_ids,
                sampling=sampling,
                kv_transfer_params=params,
                group=f"{group}-{number}" if per_prompt > 1 else None,
            )
            choices.append(GeneratedChoice(i, prompt, request))
        return tuple(choices)


def _num_choices(sampling: SamplingParams, num_prompts: int) -> int:
    """The number of a request's choices.

    Raises:
        InvalidRequest: there are too many, or they name too many tokens.
    """
    num_choices = num_prompts * sampling.num_candidates
    if num_choices > _MAX_CHOICES:
        raise InvalidRequest(
            f"a request may have at most {_MAX_CHOICES} choices, got {num_choices}: "
            f"{num_prompts} prompts with {sampling.num_candidates} each",
            param="n",
        )
    num_allowed = len(sampling.allowed_token_ids or ())
    if num_choices * num_allowed > _MAX_ALLOWED_TOKENS:
        raise InvalidRequest(
            f"allowed_token_ids times the number of choices may be at most {_MAX_ALLOWED_TOKENS}, "
            f"got {num_allowed} ids for {num_choices} choices",
            param="allowed_token_ids",
        )
    return num_choices


def _check_generated(request: GenerationFields, num_choices: int, *, is_outgoing: bool) -> None:
    """Raises InvalidRequest if the answer to a request can't be continued in its middle."""
    param = "generated_token_ids"
    if not (request.stream or is_outgoing):
        raise InvalidRequest(
            f"{param} continue an answer of which the client has the beginning: send stream: true",
            param=param,
        )
    if num_choices > 1:
        raise InvalidRequest(f"{param} continue one answer, not {num_choices}", param=param)
    is_echoed = isinstance(request, CompletionRequest) and request.echo
    if is_echoed or request.prompt_logprobs is not None:
        raise InvalidRequest(
            f"{param} can't be combined with echo or prompt_logprobs, which precede the answer",
            param=param,
        )


def _cache_salt(given: str | None) -> str:
    """Raises InvalidRequest for a salt that is empty (as vLLM does) or too long."""
    if given is not None and not 0 < len(given) <= _MAX_SALT_CHARACTERS:
        raise InvalidRequest(
            f"cache_salt must have 1 to {_MAX_SALT_CHARACTERS} characters, got {len(given)}",
            param="cache_salt",
        )
    return given or ""


def _dp_rank(given: str | None) -> int | None:
    """Raises InvalidRequest if the data-parallel rank of a request is not a number."""
    if given is None:
        return None
    if not (given.isascii() and given.isdigit() and len(given) <= _MAX_RANK_DIGITS):
        raise InvalidRequest(
            f"{DP_RANK_HEADER} must be a number from 0 on, got {given!r}", param=DP_RANK_HEADER
        )
    return int(given)


def _timeout_s(in_body: float | None, in_header: str | None) -> float | None:
    """The request's timeout in seconds: the shorter of the body's and the header's.

    Raises:
        InvalidRequest: a timeout is not a positive number of seconds, or too long.
    """
    limits = []
    for value, name in ((in_body, "timeout"), (in_header, TIMEOUT_HEADER)):
        if value is None:
            continue
        try:
            seconds = float(value)
        except ValueError:
            seconds = math.nan
        if not 0.0 < seconds <= _MAX_TIMEOUT_S:
            raise InvalidRequest(
                f"{name} must be a positive number of seconds up to {_MAX_TIMEOUT_S}, got {value}",
                param=name,
            )
        limits.append(seconds)
    return min(limits, default=None)


def _stream_options(request: GenerationFields) -> StreamOptions:
    """The request's stream options, or the defaults.

    Raises:
        InvalidRequest: the request is not streamed, or an option is not served.
    """
    if request.stream_options is None:
        return StreamOptions()
    if not request.stream:
        raise InvalidRequest("stream_options needs stream: true", param="stream_options")
    if request.stream_options.include_obfuscation:
        raise InvalidRequest(
            "chunks are not obfuscated here: leave include_obfuscation out or send false",
            param="stream_options.include_obfuscation",
        )
    return request.stream_options


_MAX_PROMPTS = 1024
_MAX_CHOICES = 4096
_MAX_ALLOWED_TOKENS = 4 << 20
"""Tokens in ``allowed_token_ids`` times choices: each choice has its own copy in the core."""
_CHARACTERS_PER_MESSAGE = 16


async def completion_prompts(
    request: CompletionRequest, tokenizer: Tokenizer, info: EngineInfo, work: BackgroundWork
) -> list[Prompt]:
    """The prompts of a completion: one per string or list of token ids.

    Raises:
        InvalidRequest: an empty or mixed list, or token ids outside the vocabulary, or they can't
            be truncated as the request asks.
        PromptTooLong: a prompt leaves no space for output tokens.
        Overloaded: the prompts are long, and the queue of background work is full.
    """
    add_special_tokens = request.add_special_tokens is not False
    separate = _separate(request.prompt)
    num_characters = sum(len(prompt) for prompt in separate if isinstance(prompt, str))
    truncation = Truncation.of(request.truncate_prompt_tokens, request.truncation_side, info)

    def tokenise() -> list[Prompt]:
        prompts = []
        for prompt in separate:
            if isinstance(prompt, str):
                check_text_size(len(prompt), info, param="prompt")
                ids = tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
                checked = _truncated(Prompt(ids, prompt), truncation, tokenizer)
            else:
                checked = _truncated(Prompt(tuple(prompt)), truncation, tokenizer)
            check_prompt(checked.token_ids, info, param="prompt")
            prompts.append(checked)
        return prompts

    return await work.on_text(num_characters, tokenise)


def check_chat_size(request: ChatRequest | TokenizeRequest, info: EngineInfo) -> int:
    """The number of characters in messages, tools and the template's variables together. Each
    message and each call counts some more for the tokens that the chat template adds to its text.

    Raises:
        PromptTooLong: the messages or tools can't fit in the context, even before the chat
            template is applied.
    """
    num_in_tools = len(msgspec.json.encode(request.tools)) if request.tools else 0
    check_text_size(num_in_tools, info, param="tools")
    variables = request.chat_template_kwargs
    num_in_variables = len(msgspec.json.encode(variables)) if variables else 0
    num_in_messages = sum(map(_num_characters, request.messages or ()))
    check_text_size(num_in_messages, info, param="messages")
    return num_in_tools + num_in_messages + num_in_variables


def _num_characters(message: ChatMessage) -> int:
    parts, calls = message.texts, message.calls
    parts += (message.name or "", message.tool_call_id or "", _reasoning_of(message) or "")
    for call in calls:
        parts += (call.id or "", call.function.name, call.function.arguments)
    return _CHARACTERS_PER_MESSAGE * (1 + len(calls)) + sum(map(len, parts))


def _reasoning_of(message: ChatMessage) -> str | None:
    """The reasoning of an earlier answer, under either of its two field names."""
    found = message.reasoning_content
    return message.reasoning if found is None else found


def render_chat(
    request: ChatRequest | TokenizeRequest,
    tokenizer: Tokenizer,
    tools: Sequence[dict[str, Any]] = (),
) -> str:
    """The conversation's text, as the chat template renders it with the offered tools.

    Raises:
        InvalidRequest: there are no messages or no template, or the template rejects the messages.
    """
    if not request.messages:
        raise InvalidRequest("messages must hold at least one message", param="messages")
    continues = bool(request.continue_final_message)
    adds_prompt = request.add_generation_prompt
    if continues and adds_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other",
            param="continue_final_message",
        )
    return tokenizer.render_chat(
        [_template_message(message) for message in request.messages],
        add_generation_prompt=not continues if adds_prompt is None else adds_prompt,
        continue_final_message=continues,
        tools=tools,
        template_kwargs=_template_kwargs(request),
    )


def _template_kwargs(request: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    """The client's variables for the chat template. As in vLLM, ``reasoning_effort`` is one of them
    and says whether the model thinks at all: most templates know only ``enable_thinking``."""
    given = dict(request.chat_template_kwargs or {})
    if isinstance(request, ChatRequest) and request.reasoning_effort is not None:
        given.setdefault("reasoning_effort", request.reasoning_effort)
        given.setdefault("enable_thinking", request.reasoning_effort != "none")
    return given


def tokenize_chat(
    request: ChatRequest | TokenizeRequest,
    tokenizer: Tokenizer,
    info: EngineInfo,
    tools: Sequence[dict[str, Any]] = (),
) -> Prompt:
    """The conversation as the chat template renders it, and its tokens.

    Raises:
        InvalidRequest: see ``render_chat``.
        PromptTooLong: the rendered text can't fit in the context.
    """
    text = render_chat(request, tokenizer, tools)
    check_text_size(len(text), info, param="messages")
    adds_special = bool(request.add_special_tokens)  # by default the template has them
    return Prompt(tokenizer.encode(text, add_special_tokens=adds_special), text)


def _chat_prompt(
    request: ChatRequest, tokenizer: Tokenizer, info: EngineInfo, tools: Sequence[dict[str, Any]]
) -> Prompt:
    """As ``tokenize_chat``, truncated as the request asks."""
    truncation = Truncation.of(request.truncate_prompt_tokens, request.truncation_side, info)
    return _truncated(tokenize_chat(request, tokenizer, info, tools), truncation, tokenizer)


def _truncated(prompt: Prompt, truncation: Truncation | None, tokenizer: Tokenizer) -> Prompt:
    """A prompt with its remaining tokens. If some are missing, its text is no longer known."""
    token_ids, text = prompt.token_ids, prompt.text
    if truncation is None or len(token_ids) <= truncation.num_tokens:
        return prompt
    if text is None:
        return Prompt(truncation.of_tokens(token_ids))
    encode_plain = partial(tokenizer.encode, text, add_special_tokens=False)
    return Prompt(truncation.of_text(token_ids, encode_plain))


def _separate(prompt: str | list[str | int | list[int]]) -> list[str] | list[list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(element) for element in prompt}
    if kinds == {int}:
        return [cast("list[int]", prompt)]
    if kinds not in ({str}, {list}):
        raise InvalidRequest(
            "prompt must be a string, strings, token ids, or lists of token ids; "
            f"got a list of {' and '.join(sorted(kind.__name__ for kind in kinds)) or 'nothing'}",
            param="prompt",
        )
    if len(prompt) > _MAX_PROMPTS:
        raise InvalidRequest(
            f"prompt must hold at most {_MAX_PROMPTS} prompts, got {len(prompt)}", param="prompt"
        )
    return cast("list[str] | list[list[int]]", prompt)


_TEMPLATE_ROLES = {"developer": "system", "function": "tool"}


def _template_message(message: ChatMessage) -> dict[str, Any]:
    """A message in the form that chat templates expect, with the role ``developer`` under its older
    name ``system``, and ``function`` under its newer one ``tool``."""
    texts, role = message.texts, _TEMPLATE_ROLES.get(message.role, message.role)
    if role == "system":
        texts = [rest for text in texts if (rest := without_billing_line(text))]
    laid_out: dict[str, Any] = {"role": role, "content": content_of(texts)}
    if message.name is not None:
        laid_out["name"] = message.name
    if (reasoning := _reasoning_of(message)) is not None:
        laid_out["reasoning_content"] = reasoning
    if message.calls:
        laid_out["tool_calls"] = template_calls(message.calls)
    if message.tool_call_id is not None:
        laid_out["tool_call_id"] = message.tool_call_id
    return laid_out
