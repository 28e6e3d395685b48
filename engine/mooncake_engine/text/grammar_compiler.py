"""Compiles grammars for a vocabulary with llguidance (the extra ``structured``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import msgspec

from mooncake_engine.errors import InvalidRequest
from mooncake_engine.sampling_params import Grammar, GrammarKind

PARAM = "response_format"
JSON_STYLE = {"whitespace_pattern": r"[ \t\n]{0,20}"}
"""The white space that grammars allow between JSON tokens: enough for indentation, but bounded. A
model could otherwise write spaces until it reaches its token limit."""
_MAX_LEXER_STATES = 50_000
"""Lexer states, created on demand during generation; 50,000 have taken 18 MB."""
_MAX_STEP_ITEMS = 20_000
"""Items of the parser for one mask. An ambiguous grammar's mask takes longer than in proportion to
them: 0.1 s with this limit, 0.8 s with the library's own of 50,000. Published schemas need less
than half of it, also tools by the hundred; an object of 200 optional properties needs more."""


class TokenTable(msgspec.Struct, frozen=True):
    """A model's vocabulary as plain data, which can be sent to the compiler's process.

    Args:
        tokens: the bytes of each token, by id.
        special_ids: the special tokens, which stand for no text.
        eos_token_ids: the tokens that may end an output whose grammar is complete; at least one.
    """

    tokens: tuple[bytes, ...]
    special_ids: tuple[int, ...]
    eos_token_ids: tuple[int, ...]


class GrammarCompiler:
    """Compiles grammars for one vocabulary. Construction takes about a second for 150,000 tokens.

    Args:
        table: the vocabulary.
        encode: the tokenizer's ``encode``. Without it, compiled grammars can't be used; compiling
            only shows whether a grammar is valid.

    Raises:
        InvalidRequest: llguidance is not installed.
    """

    def __init__(
        self, table: TokenTable, encode: Callable[[str], Sequence[int]] | None = None
    ) -> None:
        self._library = find_library()
        self._limits = self._library.LLParserLimits(
            max_lexer_states=_MAX_LEXER_STATES, step_max_items=_MAX_STEP_ITEMS
        )
        wrapper = self._library.TokenizerWrapper(_Tokens(table, encode or _no_tokens))
        self._tokens = self._library.LLTokenizer(
            wrapper, n_vocab=len(table.tokens), eos_token=list(table.eos_token_ids)
        )

    def compile(self, grammar: Grammar) -> Any:
        """Compile a grammar to an llguidance matcher at the start of an output.

        Raises:
            InvalidRequest: the grammar is invalid or too complex.
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
                matcher.compute_bitmask()  # finds grammars that fail at the first token
        except ValueError as exc:  # the schema is not JSON
            raise InvalidRequest(f"the grammar is invalid: {exc}", param=PARAM) from exc
        if matcher.is_error():
            reason = short_reason(matcher.get_error())
            raise InvalidRequest(f"the {grammar.kind.value} is rejected: {reason}", param=PARAM)
        return matcher


class _Tokens:
    """A vocabulary with the interface that llguidance expects."""

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
    """Import llguidance.

    Raises:
        InvalidRequest: llguidance is not installed.
    """
    try:
        import llguidance
    except ModuleNotFoundError as exc:
        if exc.name != "llguidance":
            raise
        raise InvalidRequest(
            "structured outputs need llguidance, which is not installed on the server: "
            "pip install 'llguidance>=1.9,<2'",
            param=PARAM,
        ) from exc
    module: ModuleType = llguidance
    return module


def short_reason(reason: str) -> str:
    """A library error without the grammar that it quotes: its first line, and what is wrong with a
    regular expression, which comes after the quotation."""
    first, *others = reason.strip().split("\n")
    causes = [line.removeprefix("error: ") for line in others if line.startswith("error: ")]
    return " ".join([first, *causes[:1]])[:500]
