"""The request types of the OpenAI API, their decoding, and errors in OpenAI's format.

Clients add fields of their own to messages and tools, such as ``cache_control``: these are skipped.
Any other field that is not declared here is ignored if that changes no answer, or else rejected by
name: see ``unknown_fields``. Fields of type ``None`` exist in OpenAI's API but are not supported
here; clients may send them as null, as they do with fields that they don't use. Fields that only a
service with accounts can use (``user``, ``metadata``, ``service_tier``) are accepted and have no
effect.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec
from starlette.responses import Response

from mooncake_api import RequestRejected
from mooncake_api.request_body import (
    DECODE_ERRORS,
    decode_fields,
    explain,
    is_float_for_integer,
    path_in,
    with_integers,
)
from mooncake_engine.errors import (
    DeadlineExceeded,
    EngineDead,
    EngineStalled,
    GrammarFailed,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
)
from mooncake_engine.server.live_requests import RequestAborted, ShuttingDown
from mooncake_engine.server.unknown_fields import ignore_unknown, remove_without_effect


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``include_usage``: one last chunk with the token counts; ``continuous_usage_stats``: the
    counts so far of each chunk's choice, too. Chunks are never obfuscated."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class TextFormat(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """The output is unrestricted text."""


class JsonObjectFormat(
    msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="json_object"
):
    """The output is a JSON object."""


class JsonSchema(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A JSON schema and the fields that OpenAI's clients send with it. The output always follows
    the schema strictly, whatever ``strict`` says."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class JsonSchemaFormat(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"
):
    """The output is JSON that follows a schema."""

    json_schema: JsonSchema


class StructuralTag(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """JSON between two texts; null is any JSON."""

    begin: str
    end: str
    schema: dict[str, Any] | None = None


class StructuralTags(msgspec.Struct, kw_only=True):
    """Tags within free text: whatever follows a trigger is one of the tags that begin with it."""

    structures: list[StructuralTag]
    triggers: list[str]


class StructuralTagFormat(
    StructuralTags,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="type",
    tag="structural_tag",
):
    """vLLM's format: see ``StructuralTags``."""


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's field: the output follows a JSON schema, is any JSON object, matches a regular
    expression or a grammar, is one of several texts, or contains structural tags (as JSON)."""

    json: dict[str, Any] | bool | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: str | None = None


class GenerationFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that completions and chat completions share. null always means the default."""

    model: str | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    prompt_logprobs: int | None = None
    timeout: float | None = None
    request_id: str | None = None
    response_format: (
        TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat | None
    ) = None
    structured_outputs: StructuredOutputs | None = None
    kv_transfer_params: dict[str, Any] | None = None
    generated_token_ids: list[int] | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None


class CompletionRequest(GenerationFields, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/completions``."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    suffix: None = None


class TextPart(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    """A part of a message's content; only text is supported."""

    text: str


class RefusalPart(msgspec.Struct, kw_only=True, tag_field="type", tag="refusal"):
    """What a model of another server said instead of an answer."""

    text: str = msgspec.field(name="refusal")


class InputTextPart(TextPart, kw_only=True, tag_field="type", tag="input_text"):
    """Text as the Responses API has it; vLLM takes it in chats, too, as it does the next two."""


class OutputTextPart(TextPart, kw_only=True, tag_field="type", tag="output_text"):
    """What a model answered, as the Responses API has it."""


class ThinkingPart(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    """What a model thought, as the Messages API has it."""

    text: str = msgspec.field(name="thinking")


ContentPart = TextPart | RefusalPart | InputTextPart | OutputTextPart | ThinkingPart


class FunctionCall(msgspec.Struct, kw_only=True):
    """The function that an earlier response called; its arguments are JSON text."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    """A call in an earlier response."""

    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None


class Function(msgspec.Struct, kw_only=True):
    """A function that the model may call; its parameters are a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    """A tool; only functions are supported."""

    function: Function
    type: Literal["function"] = "function"


class FunctionName(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The name of a function in ``tools``."""

    name: str


class NamedToolChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The function that the model must call."""

    function: FunctionName
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct, kw_only=True):
    """One message of a conversation, which may have begun on another server. ``function_call`` and
    the role ``function`` are OpenAI's older form of tool calls."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[str | ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    function_call: FunctionCall | None = None
    refusal: str | None = None

    @property
    def texts(self) -> list[str]:
        """The parts of the content, or else the model's refusal."""
        content = self.refusal if self.content is None else self.content
        if isinstance(content, list):
            return [part if isinstance(part, str) else part.text for part in content]
        return [content or ""]

    @property
    def calls(self) -> list[ToolCall]:
        """The tools that the message calls."""
        if self.function_call is None:
            return self.tool_calls or []
        return [ToolCall(function=self.function_call)]


class ChatRequest(GenerationFields, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/chat/completions``."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None
    audio: None = None
    prediction: Any = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    service_tier: str | None = None
    verbosity: str | None = None
    web_search_options: None = None


class AbortBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /abort``: a client's request id, or the ``remote_request_id`` of
    ``kv_transfer_params``."""

    request_id: str


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /tokenize``: a prompt, or messages to render as for a chat request."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: list[int]


RequestType = TypeVar("RequestType", bound=msgspec.Struct)

_UNKNOWN = re.compile(r"Object contains unknown field `(?P<field>.*?)`")


def decode_request(body: bytes, request_type: type[RequestType]) -> RequestType:
    """Decode and type-check a request's body.

    Raises:
        InvalidRequest: malformed JSON, an unknown field that may change the answer (the message
            suggests the nearest known field), a missing field, a wrong type, or an OpenAI field
            that this server does not support.
    """
    try:
        try:
            return msgspec.json.decode(body, type=request_type)
        except DECODE_ERRORS as exc:
            if not (_UNKNOWN.match(str(exc)) or is_float_for_integer(exc)):
                raise explain(exc, request_type) from exc
        fields = decode_fields(with_integers(body, request_type) or body, request_type)
        return _without_unknown(fields, request_type)
    except RequestRejected as exc:
        raise InvalidRequest(str(exc), param=exc.param) from exc


def _without_unknown(body: dict[str, Any], request_type: type[RequestType]) -> RequestType:
    """Convert a body whose unknown fields can be ignored; what is in its objects has one attempt
    for each object of the type."""
    ignore_unknown(body, request_type.__struct_fields__)
    while True:
        try:
            return msgspec.convert(body, request_type, str_keys=True)
        except (msgspec.ValidationError, RecursionError) as exc:
            unknown, path = _UNKNOWN.match(str(exc)), path_in(exc)
            if unknown is None:
                raise explain(exc, request_type) from exc
            remove_without_effect(body, path, unknown["field"])


_RETRY_AFTER_S = 1
_FINAL_CODES = frozenset({"aborted", "deadline_exceeded"})
"""Errors that end a request for good. Clients of OpenAI and Anthropic repeat requests that got a
409 or 504: those that an operator has aborted, and those that were late because of the load."""


@dataclass(frozen=True, slots=True)
class ApiError:
    """An error response in OpenAI's format.

    Args:
        status: the HTTP status.
        message: what is wrong and what to do.
        type: OpenAI's error type.
        param: the request field at fault, if any.
        code: a machine-readable reason, if any.
    """

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None

    @property
    def body(self) -> bytes:
        """The encoded error object."""
        error: dict[str, Any] = {"message": self.message, "type": self.type}
        return msgspec.json.encode({"error": error | {"param": self.param, "code": self.code}})

    def response(self) -> Response:
        """The error as an HTTP response, for use before anything has been sent."""
        headers = {}
        if self.status in (429, 503):
            headers["Retry-After"] = str(_RETRY_AFTER_S)
        if self.code in _FINAL_CODES:
            headers["X-Should-Retry"] = "false"
        return Response(self.body, self.status, headers, media_type="application/json")


def to_api_error(exc: Exception) -> ApiError:
    """Map an exception to the error that the client receives. Errors that the client did not cause
    have a 5xx status."""
    if isinstance(exc, InvalidRequest):
        code = {404: "model_not_found", 413: "request_too_large"}.get(exc.status)
        if isinstance(exc, PromptTooLong):
            code = "context_length_exceeded"
        return ApiError(exc.status, str(exc), "invalid_request_error", exc.param, code)
    if isinstance(exc, Overloaded):
        return ApiError(429, str(exc), "overloaded_error", code="overloaded")
    if isinstance(exc, EngineDead):
        return ApiError(503, str(exc), "server_error", code="engine_dead")
    if isinstance(exc, EngineStalled):
        return ApiError(503, str(exc), "server_error", code="engine_stalled")
    if isinstance(exc, ShuttingDown):
        return ApiError(503, str(exc), "server_error", code="shutting_down")
    if isinstance(exc, DeadlineExceeded):
        return ApiError(504, str(exc), "timeout", code="deadline_exceeded")
    if isinstance(exc, GrammarFailed):
        return ApiError(400, str(exc), "invalid_request_error", exc.param, "grammar_failed")
    if isinstance(exc, RequestAborted):
        return ApiError(409, str(exc), "aborted_error", code="aborted")
    return ApiError(500, str(exc) or type(exc).__name__, "server_error")
