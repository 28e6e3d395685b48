"""The requests that the API takes: OpenAI's fields, and the extensions of vLLM that we honour.

A field that is not here is refused by name. Fields of type ``None`` are OpenAI's too, but not
supported: they may be sent as null, which is what clients do when they don't use them. What only
a service with accounts has a use for (``user``, ``metadata``, ``service_tier``) changes nothing.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``include_usage``: one last chunk with the token counts; ``continuous_usage_stats``: those so
    far in every chunk, too. Chunks are never obfuscated."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool | None = None


class TextFormat(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """Any text."""


class JsonObjectFormat(
    msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="json_object"
):
    """Some JSON object."""


class JsonSchema(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A schema and what OpenAI's clients say about it. It is always kept to the letter."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class JsonSchemaFormat(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"
):
    """JSON that a schema describes."""

    json_schema: JsonSchema


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's field: a JSON schema, a regular expression, one of several texts, or a grammar."""

    json: dict[str, Any] | bool | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class GenerationFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What completions and chat have in common. null always means the default."""

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
    return_token_ids: bool | None = None
    priority: int | None = None
    prompt_logprobs: int | None = None
    timeout: float | None = None
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    kv_transfer_params: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None


class CompletionRequest(GenerationFields, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/completions``."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    suffix: None = None


class TextPart(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="text"
):
    """A piece of a message's content; only text is served."""

    text: str


class FunctionCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What an earlier answer called, its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A call in an earlier answer."""

    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None


class Function(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A function that the model may call; its parameters are a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool; only functions are served."""

    function: Function
    type: Literal["function"] = "function"


class FunctionName(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Names one of the functions."""

    name: str


class NamedToolChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The function that has to be called."""

    function: FunctionName
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One turn. The null fields are those that clients send back from earlier answers."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    function_call: None = None
    refusal: None = None
    audio: None = None
    annotations: None = None


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
    functions: None = None
    function_call: None = None
    modalities: list[Literal["text"]] | None = None
    audio: None = None
    prediction: None = None
    reasoning_effort: None = None
    service_tier: Literal["auto", "default"] | None = None
    verbosity: None = None
    web_search_options: None = None


class AbortRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /abort``: a client's request id, or the ``remote_request_id`` of a hand-over."""

    request_id: str


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /tokenize``: a prompt, or messages to lay out as a chat request would have them."""

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
