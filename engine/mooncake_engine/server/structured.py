"""What a request says of its answer's structure, as a grammar."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from mooncake_engine.errors import InvalidRequest
from mooncake_engine.messages import EngineFacts
from mooncake_engine.sampling_params import Grammar, GrammarKind
from mooncake_engine.server.protocol import (
    GenerationFields,
    JsonObjectFormat,
    JsonSchemaFormat,
    StructuredOutputs,
)
from mooncake_engine.text.grammars import choice_grammar, json_schema_grammar, vocabulary_of
from mooncake_engine.text.tokenizer import Tokenizer

_MAX_CHARACTERS = 512 << 10


def grammar_of(request: GenerationFields) -> Grammar | None:
    """The grammar that ``response_format`` or ``structured_outputs`` ask for.

    Raises:
        InvalidRequest: both are given, or more than one structure.
    """
    found = [_of_format(request), _of_structure(request.structured_outputs)]
    grammars = [grammar for grammar in found if grammar is not None]
    if len(grammars) > 1:
        raise InvalidRequest(
            "response_format and structured_outputs exclude each other", param="response_format"
        )
    return grammars[0] if grammars else None


async def check_grammar(
    grammar: Grammar, field: str, tokenizer: Tokenizer, facts: EngineFacts
) -> None:
    """Compile a grammar, on another thread; the engine will find it compiled.

    Args:
        field: of the request, which asked for it.

    Raises:
        InvalidRequest: it is wrong or too large, or the library is not installed.
    """
    if len(grammar.source) > _MAX_CHARACTERS:
        raise InvalidRequest(
            f"the {grammar.kind.value} has {len(grammar.source)} characters, more than "
            f"{_MAX_CHARACTERS}",
            param=field,
        )

    def compile_grammar() -> None:
        vocabulary = vocabulary_of(tokenizer, facts.vocab_size, facts.eos_token_ids)
        vocabulary.matcher(grammar)

    try:
        await asyncio.to_thread(compile_grammar)
    except InvalidRequest as exc:
        raise InvalidRequest(str(exc), param=field) from exc


def structure_field(request: GenerationFields) -> str:
    """Which field says what the answer looks like, where one does."""
    return "response_format" if request.structured_outputs is None else "structured_outputs"


def _of_format(request: GenerationFields) -> Grammar | None:
    wanted = request.response_format
    if isinstance(wanted, JsonObjectFormat):
        return json_schema_grammar({"type": "object"})
    if isinstance(wanted, JsonSchemaFormat):
        schema = wanted.json_schema.schema
        return json_schema_grammar({} if schema is None else schema)
    return None


def _of_structure(wanted: StructuredOutputs | None) -> Grammar | None:
    if wanted is None:
        return None
    given = [name for name in wanted.__struct_fields__ if getattr(wanted, name) is not None]
    if len(given) != 1:
        raise InvalidRequest(
            f"structured_outputs must hold one of json, regex, choice and grammar, got {given}",
            param="structured_outputs",
        )
    if wanted.json is not None:
        return json_schema_grammar(_schema(wanted.json))
    if wanted.choice is not None:
        return choice_grammar(_some(wanted.choice))
    if wanted.regex is not None:
        return Grammar(GrammarKind.REGEX, wanted.regex)
    return Grammar(GrammarKind.LARK, wanted.grammar or "")


def _schema(given: str | dict[str, object] | bool) -> object:
    if not isinstance(given, str):
        return given
    try:
        return msgspec.json.decode(given)
    except msgspec.DecodeError as exc:
        raise InvalidRequest(
            f"structured_outputs.json is no JSON: {exc}", param="structured_outputs"
        ) from exc


def _some(choices: Sequence[str]) -> Sequence[str]:
    if not choices:
        raise InvalidRequest(
            "structured_outputs.choice must hold at least one text", param="structured_outputs"
        )
    return choices
