"""Derives and validates sampling parameters and structured-output grammars from a request's fields;
used by ``InputProcessor``."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from mooncake_engine.errors import InvalidRequest
from mooncake_engine.messages import EngineInfo
from mooncake_engine.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from mooncake_engine.sampling_params import Grammar, GrammarKind, SamplingParams
from mooncake_engine.server.kv_transfer_requests import is_prefill
from mooncake_engine.server.openai_protocol import (
    ChatRequest,
    CompletionRequest,
    GenerationFields,
    JsonObjectFormat,
    JsonSchemaFormat,
    StructuralTagFormat,
    StructuralTags,
    StructuredOutputs,
)
from mooncake_engine.text.grammars import (
    choice_grammar,
    json_schema_grammar,
    structural_tag_grammar,
    vocabulary_of,
)
from mooncake_engine.text.tokenizer import Tokenizer

_SAME_NAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "ignore_eos",
    "min_tokens",
    "prompt_logprobs",
    "skip_special_tokens",
    "include_stop_str_in_output",
)
_MAX_CHOICES = 1999
"""Texts in ``structured_outputs.choice``. The grammar library tracks at most 2,000 alternatives at
once: with more texts of a common prefix, generation would fail in the middle of an output."""
_MAX_STOPS = 64
_MAX_BAD_WORDS = 128
_MAX_CHARACTERS = 8192
"""Characters in ``stop``, and in ``bad_words``."""
_MAX_STOP_TOKEN_IDS = 1024
"""Stop token ids per request; they are checked for each generated token."""
_MAX_LOGIT_BIAS = 1024
"""Tokens in ``logit_bias``: each answer of a batch has its own memory for them."""


def completion_sampling(
    request: CompletionRequest, info: EngineInfo, defaults: SamplingDefaults = NO_DEFAULTS
) -> SamplingParams:
    """The sampling parameters of a completion; ``max_tokens`` defaults to 16.

    Raises:
        InvalidRequest: a value is out of range, or a combination is not supported.
    """
    _check_ranking(request)
    max_tokens = 16 if request.max_tokens is None else request.max_tokens
    if is_prompt_only(request):
        max_tokens = 1  # the response omits this token
    sampling = _sampling(request, info, defaults, max_tokens=max_tokens, logprobs=request.logprobs)
    if request.best_of is not None:
        sampling = replace(sampling, best_of=request.best_of)
    if not request.echo or request.logprobs is None:
        return sampling
    return replace(sampling, prompt_logprobs=max(request.logprobs, request.prompt_logprobs or 0))


def _check_ranking(request: CompletionRequest) -> None:
    if request.use_beam_search:
        raise InvalidRequest(
            "beam search is not supported: best_of returns the most probable of several sampled "
            "answers, temperature 0 the greedy one",
            param="use_beam_search",
        )
    if request.stream and (request.best_of or 1) > (request.n or 1):
        raise InvalidRequest(
            f"best_of {request.best_of} with n {request.n or 1} can't be streamed, because the "
            "best answers are known only at the end: leave stream or best_of out",
            param="best_of",
        )


def is_prompt_only(request: CompletionRequest) -> bool:
    """Whether the client wants information on its prompt only: ``max_tokens`` is 0."""
    shows_prompt = request.echo or request.prompt_logprobs is not None
    return request.max_tokens == 0 and bool(shows_prompt)


def chat_sampling(
    request: ChatRequest, info: EngineInfo, defaults: SamplingDefaults = NO_DEFAULTS
) -> SamplingParams:
    """The sampling parameters of a chat completion; without a limit it may fill the context.

    Raises:
        InvalidRequest: a value is out of range, or a combination is not supported.
    """
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    limit = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    max_tokens: int | None = getattr(request, limit)
    if max_tokens is not None and max_tokens < 1:
        raise InvalidRequest(f"{limit} must be at least 1, got {max_tokens}", param=limit)
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    try:
        return _sampling(request, info, defaults, max_tokens=max_tokens, logprobs=logprobs)
    except InvalidRequest as exc:
        name = {"max_tokens": limit, "logprobs": "top_logprobs"}.get(exc.param or "")
        if name is None:
            raise
        raise InvalidRequest(str(exc).replace(str(exc.param), name, 1), param=name) from exc


def _sampling(
    request: GenerationFields,
    info: EngineInfo,
    defaults: SamplingDefaults,
    *,
    max_tokens: int | None,
    logprobs: int | None,
) -> SamplingParams:
    if request.store:
        raise InvalidRequest("answers are not stored: leave store out", param="store")
    given = {name: value for name in _SAME_NAME if (value := getattr(request, name)) is not None}
    if max_tokens is not None and is_prefill(request.kv_transfer_params):
        # Some routers set max_tokens to 1 and leave the client's min_tokens, which D will honour.
        given["min_tokens"] = min(request.min_tokens or 0, max_tokens)
    if request.prompt_logprobs is not None and request.stream:
        raise InvalidRequest(
            "prompt_logprobs can't be streamed: use stream: false, or echo with logprobs",
            param="prompt_logprobs",
        )
    stop_token_ids = tuple(request.stop_token_ids or ())
    if len(stop_token_ids) > _MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(
            f"stop_token_ids must hold at most {_MAX_STOP_TOKEN_IDS} ids, "
            f"got {len(stop_token_ids)}",
            param="stop_token_ids",
        )
    _check_token_ids("stop_token_ids", stop_token_ids, info)
    allowed_token_ids = _allowed_token_ids(request.allowed_token_ids, info)
    if request.min_tokens:
        ends = {*stop_token_ids, *(() if request.ignore_eos else info.eos_token_ids)}
        _check_may_continue(ends, allowed_token_ids, info)
    return SamplingParams(
        **{**defaults.values, **given},
        stop=_texts("stop", request.stop, _MAX_STOPS),
        stop_token_ids=stop_token_ids,
        max_tokens=defaults.limit(max_tokens, len(request.generated_token_ids or ())),
        logprobs=logprobs,
        logit_bias=_logit_bias(request.logit_bias or {}, info),
        allowed_token_ids=allowed_token_ids,
        bad_words=_texts("bad_words", request.bad_words, _MAX_BAD_WORDS),
    )


def _check_may_continue(
    ends: set[int], allowed_token_ids: tuple[int, ...] | None, info: EngineInfo
) -> None:
    """Raises InvalidRequest if every token that may be sampled would end the output."""
    if allowed_token_ids is None:
        may_continue = len(ends) < info.vocab_size
    else:
        may_continue = not ends.issuperset(allowed_token_ids)
    if not may_continue:
        raise InvalidRequest(
            "min_tokens can't be honoured, because every token would end the output",
            param="min_tokens",
        )


def _texts(name: str, given: str | list[str] | None, max_texts: int) -> tuple[str, ...]:
    texts = (given,) if isinstance(given, str) else tuple(given or ())
    if len(texts) > max_texts:
        raise InvalidRequest(
            f"{name} must hold at most {max_texts} strings, got {len(texts)}", param=name
        )
    num_characters = sum(map(len, texts))
    if num_characters > _MAX_CHARACTERS:
        raise InvalidRequest(
            f"{name} must hold at most {_MAX_CHARACTERS} characters together, got {num_characters}",
            param=name,
        )
    return texts


def _logit_bias(given: dict[int, float], info: EngineInfo) -> tuple[tuple[int, float], ...]:
    if len(given) > _MAX_LOGIT_BIAS:
        raise InvalidRequest(
            f"logit_bias must hold at most {_MAX_LOGIT_BIAS} tokens, got {len(given)}",
            param="logit_bias",
        )
    _check_token_ids("logit_bias", list(given), info)
    for token_id, bias in given.items():
        if not -100.0 <= bias <= 100.0:
            raise InvalidRequest(
                f"logit_bias must be in [-100, 100], got {bias} for token {token_id}",
                param="logit_bias",
            )
    return tuple(given.items())


def _allowed_token_ids(given: list[int] | None, info: EngineInfo) -> tuple[int, ...] | None:
    if given is None:
        return None
    if len(given) > info.vocab_size:
        raise InvalidRequest(
            f"allowed_token_ids must hold at most {info.vocab_size} ids, as many as the vocabulary "
            f"has, got {len(given)}",
            param="allowed_token_ids",
        )
    _check_token_ids("allowed_token_ids", given, info)
    return tuple(given)


def _check_token_ids(name: str, token_ids: tuple[int, ...] | list[int], info: EngineInfo) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < info.vocab_size:
            raise InvalidRequest(
                f"{name} must be token ids in [0, {info.vocab_size}), got {token_id}", param=name
            )


MAX_GRAMMAR_CHARACTERS = 512 << 10
"""The longest source of a grammar, or of the grammar of a request's tools, that is compiled."""


def grammar_of(request: GenerationFields, tokenizer: Tokenizer) -> Grammar | None:
    """The grammar that ``response_format`` or ``structured_outputs`` requests; None for neither.

    Raises:
        InvalidRequest: both fields are given, or ``structured_outputs`` holds more than one
            constraint.
    """
    found = [_of_format(request, tokenizer), _of_structure(request.structured_outputs, tokenizer)]
    grammars = [grammar for grammar in found if grammar is not None]
    if len(grammars) > 1:
        raise InvalidRequest(
            "response_format and structured_outputs exclude each other", param="response_format"
        )
    return grammars[0] if grammars else None


def check_grammar_size(grammar: Grammar, field: str) -> None:
    """Raises InvalidRequest for a grammar that is too long to compile."""
    if len(grammar.source) > MAX_GRAMMAR_CHARACTERS:
        raise InvalidRequest(
            f"the {grammar.kind.value} has {len(grammar.source)} characters, more than "
            f"{MAX_GRAMMAR_CHARACTERS}",
            param=field,
        )


def check_grammar(grammar: Grammar, field: str, tokenizer: Tokenizer, info: EngineInfo) -> None:
    """Compile a grammar, so that the engine finds it in the cache. Must not run on the event loop.

    Args:
        field: the request field that asked for the grammar.

    Raises:
        InvalidRequest: the grammar is invalid or too expensive, or the library is not installed.
        RequestFailed: the grammar can't be compiled at the moment.
    """
    try:
        vocabulary_of(tokenizer, info.vocab_size, info.eos_token_ids).check(grammar)
    except InvalidRequest as exc:
        raise InvalidRequest(str(exc), param=field) from exc


def structure_field(request: GenerationFields) -> str:
    """The name of the field that requests structured output, for error messages."""
    return "response_format" if request.structured_outputs is None else "structured_outputs"


def _of_format(request: GenerationFields, tokenizer: Tokenizer) -> Grammar | None:
    wanted = request.response_format
    if isinstance(wanted, JsonObjectFormat):
        return json_schema_grammar({"type": "object"})
    if isinstance(wanted, JsonSchemaFormat):
        schema = wanted.json_schema.schema
        return json_schema_grammar({} if schema is None else schema)
    if isinstance(wanted, StructuralTagFormat):
        return _of_tags(wanted, tokenizer, "response_format")
    return None


def _of_structure(wanted: StructuredOutputs | None, tokenizer: Tokenizer) -> Grammar | None:
    if wanted is None:
        return None
    values = {name: getattr(wanted, name) for name in wanted.__struct_fields__}
    values["json_object"] = wanted.json_object or None
    given = [name for name, value in values.items() if value is not None]
    if len(given) != 1:
        raise InvalidRequest(
            "structured_outputs must hold one of json, json_object, regex, choice, grammar and "
            f"structural_tag, got {given}",
            param="structured_outputs",
        )
    if wanted.json_object:
        return json_schema_grammar({"type": "object"})
    if wanted.json is not None:
        return json_schema_grammar(_schema(wanted.json))
    if wanted.choice is not None:
        if not 0 < len(wanted.choice) <= _MAX_CHOICES:
            raise InvalidRequest(
                "structured_outputs.choice must hold at least one text and at most "
                f"{_MAX_CHOICES}, got {len(wanted.choice)}",
                param="structured_outputs",
            )
        return choice_grammar(wanted.choice)
    if wanted.regex is not None:
        return Grammar(GrammarKind.REGEX, wanted.regex)
    if wanted.structural_tag is not None:
        try:
            tags = msgspec.json.decode(wanted.structural_tag, type=StructuralTags)
        except msgspec.DecodeError as exc:
            raise InvalidRequest(
                f"structured_outputs.structural_tag must be the JSON of structures and triggers: "
                f"{exc}",
                param="structured_outputs",
            ) from exc
        return _of_tags(tags, tokenizer, "structured_outputs")
    return Grammar(GrammarKind.LARK, wanted.grammar or "")


def _of_tags(wanted: StructuralTags, tokenizer: Tokenizer, field: str) -> Grammar:
    if not wanted.structures or not all(wanted.triggers):
        raise InvalidRequest(
            "a structural tag needs at least one structure, and no trigger may be empty",
            param=field,
        )
    for tag in wanted.structures:
        if not tag.begin.startswith(tuple(wanted.triggers)):
            raise InvalidRequest(
                f"the structure {tag.begin[:50]!r} begins with none of the triggers", param=field
            )
    tags = [(tag.begin, tag.schema or {}, tag.end) for tag in wanted.structures]
    return structural_tag_grammar(tags, wanted.triggers, tokenizer)


def _schema(given: str | dict[str, object] | bool) -> object:
    if not isinstance(given, str):
        return given
    try:
        return msgspec.json.decode(given)
    except msgspec.DecodeError as exc:
        raise InvalidRequest(
            f"structured_outputs.json is not valid JSON: {exc}", param="structured_outputs"
        ) from exc
