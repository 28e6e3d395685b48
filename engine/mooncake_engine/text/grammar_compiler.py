"""Compiles grammars for a vocabulary, with llguidance (the extra ``structured``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import msgspec

from mooncake_engine.errors import InvalidRequest
from mooncake_engine.sampling_params import Grammar, GrammarKind

PARAM = "response_format"
JSON_STYLE = {"whitespace_pattern": r"[ \t\n]{0,20}"}
"""Room for indentation, and an end: a model may otherwise write spaces until its limit."""
_MAX_LEXER_STATES = 50_000
"""Of 1 to 2 KB; they are made as outputs need them. The other limits are the library's: by them a
mask takes some 20 ms at most."""


class TokenTable(msgspec.Struct, frozen=True):
    """A model's vocabulary, as bytes; plain data.

    Args:
        tokens: the bytes of each token, by id.
        special_ids: tokens that are no text.
        eos_token_ids: tokens that may end an output whose grammar is complete; one or more.
    """

    tokens: tuple[bytes, ...]
    special_ids: tuple[int, ...]
    eos_token_ids: tuple[int, ...]


class GrammarCompiler:
    """Compiles grammars for one vocabulary; that takes a second of preparation for 150,000 tokens.

    Args:
        table: the vocabulary.
        encode: the tokenizer's; without one what is compiled is good for nothing but its errors.

    Raises:
        InvalidRequest: llguidance is not installed.
    """

    def __init__(
        self, table: TokenTable, encode: Callable[[str], Sequence[int]] | None = None
    ) -> None:
        self._library = find_library()
        self._limits = self._library.LLParserLimits(max_lexer_states=_MAX_LEXER_STATES)
        wrapper = self._library.TokenizerWrapper(_Tokens(table, encode or _no_tokens))
        self._tokens = self._library.LLTokenizer(
            wrapper, n_vocab=len(table.tokens), eos_token=list(table.eos_token_ids)
        )

    def compile(self, grammar: Grammar) -> Any:
        """A matcher of llguidance at the beginning of an output.

        Raises:
            InvalidRequest: the grammar is wrong, or too complex.
        """
        kind = self._library.LLMatcher
        try:
            if grammar.kind is GrammarKind.JSON_SCHEMA:
                text = kind.grammar_from_json_schema(grammar.source, overrides=JSON_STYLE)
            elif grammar.kind is GrammarKind.REGEX:
                text = kind.grammar_from_regex(grammar.source)
            else:
                text = kind.grammar_from_lark(grammar.source)
            matcher = kind(self._tokens, text, log_level=0, limits=self._limits)
            if not matcher.is_error():
                matcher.compute_bitmask()  # what fails at the first token is refused here
        except ValueError as exc:  # a schema that is no JSON
            raise InvalidRequest(f"the grammar is wrong: {exc}", param=PARAM) from exc
        if matcher.is_error():
            words = first_line(matcher.get_error())
            raise InvalidRequest(f"the {grammar.kind.value} is refused: {words}", param=PARAM)
        return matcher


class _Tokens:
    """A vocabulary as llguidance wants it."""

    def __init__(self, table: TokenTable, encode: Callable[[str], Sequence[int]]) -> None:
        self._encode = encode
        self.eos_token_id = table.eos_token_ids[0]
        self.bos_token_id = None
        self.special_token_ids = list(table.special_ids)
        self.tokens = list(table.tokens)

    def __call__(self, text: bytes | str) -> list[int]:
        return list(self._encode(text if isinstance(text, str) else text.decode()))


def _no_tokens(_: str) -> tuple[int, ...]:
    return ()


def find_library() -> ModuleType:
    """llguidance.

    Raises:
        InvalidRequest: it is not installed.
    """
    try:
        import llguidance
    except ModuleNotFoundError as exc:
        if exc.name != "llguidance":
            raise
        raise InvalidRequest(
            "structured outputs need llguidance, which is not installed on the server: "
            "pip install 'mooncake-engine[structured]'",
            param=PARAM,
        ) from exc
    module: ModuleType = llguidance
    return module


def first_line(words: str) -> str:
    """What an error of the library says, without the grammar that it quotes."""
    return words.strip().split("\n", 1)[0][:500]
