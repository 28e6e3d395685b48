"""Grammars that outputs follow, through llguidance (an extra: ``mooncake-engine[structured]``).

A ``Vocabulary`` knows the bytes of every token; it is built once per tokenizer and process, which
takes a second for 150,000 tokens. Compiled grammars are kept, and copied for each request. Both
release the interpreter lock, so that they may be built on any thread.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from mooncake_engine.errors import InvalidRequest, RequestFailed
from mooncake_engine.sampling_params import Grammar, GrammarKind
from mooncake_engine.text.tokenizer import Tokenizer, tokenizer_fingerprint

_PARAM = "response_format"
_NUM_KEPT = 64
JSON_STYLE = {"whitespace_pattern": r"[ \t\n]{0,20}"}
"""Room for indentation, and an end: a model may otherwise write spaces until its limit."""


class GrammarMatcher:
    """The position of one output in its grammar."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def accept(self, token_id: int) -> None:
        """The output continues with this token."""
        if not self._matcher.is_stopped():  # afterwards only an end may come
            self._matcher.consume_token(token_id)

    def copy(self) -> GrammarMatcher:
        """An independent matcher at the same position."""
        return GrammarMatcher(self._matcher.deep_copy())

    def allowed(self) -> bytes:
        """Which tokens may come next: one bit per token id, the lowest bit first.

        Raises:
            RequestFailed: the grammar is too complex to go on, or a token contradicts it.
        """
        mask: bytes = b"" if self._matcher.is_error() else self._matcher.compute_bitmask()
        if self._matcher.is_error():
            words = _first_line(self._matcher.get_error())
            raise RequestFailed(f"the grammar can't go on: {words}")
        return mask


class Vocabulary:
    """The tokens that grammars choose from.

    Args:
        tokenizer: the model's.
        size: of the model's vocabulary.
        eos_token_ids: tokens that may end an output whose grammar is complete.

    Raises:
        InvalidRequest: llguidance is not installed.
    """

    def __init__(self, tokenizer: Tokenizer, size: int, eos_token_ids: Sequence[int]) -> None:
        self._library = _library()
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Grammar, Any] = OrderedDict()
        wrapper = self._library.TokenizerWrapper(_Tokens(tokenizer, size, eos_token_ids))
        self._tokens = self._library.LLTokenizer(
            wrapper, n_vocab=size, eos_token=list(eos_token_ids)
        )

    def matcher(self, grammar: Grammar) -> GrammarMatcher:
        """A matcher at the beginning of an output.

        Raises:
            InvalidRequest: the grammar is wrong, or too complex.
        """
        with self._lock:
            compiled = self._compiled.get(grammar)
            if compiled is not None:
                self._compiled.move_to_end(grammar)
                return GrammarMatcher(compiled.deep_copy())
        compiled = self._compile(grammar)
        with self._lock:
            self._compiled[grammar] = compiled
            if len(self._compiled) > _NUM_KEPT:
                self._compiled.popitem(last=False)
            return GrammarMatcher(compiled.deep_copy())

    def _compile(self, grammar: Grammar) -> Any:
        kind = self._library.LLMatcher
        try:
            if grammar.kind is GrammarKind.JSON_SCHEMA:
                text = kind.grammar_from_json_schema(grammar.source, overrides=JSON_STYLE)
            elif grammar.kind is GrammarKind.REGEX:
                text = kind.grammar_from_regex(grammar.source)
            else:
                text = kind.grammar_from_lark(grammar.source)
            matcher = kind(self._tokens, text, log_level=0)
        except ValueError as exc:  # a schema that is no JSON
            raise InvalidRequest(f"the grammar is wrong: {exc}", param=_PARAM) from exc
        if matcher.is_error():
            words = _first_line(matcher.get_error())
            raise InvalidRequest(f"the {grammar.kind.value} is refused: {words}", param=_PARAM)
        return matcher


class _Tokens:
    """A tokenizer as llguidance wants it."""

    def __init__(self, tokenizer: Tokenizer, size: int, eos_token_ids: Sequence[int]) -> None:
        if not eos_token_ids:
            raise InvalidRequest(
                "the model has no end-of-sequence token: an answer in a grammar could not end",
                param=_PARAM,
            )
        self._tokenizer = tokenizer
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = None
        self.special_token_ids = sorted(id for id in tokenizer.special_ids if id < size)
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(size)]

    def __call__(self, text: bytes | str) -> list[int]:
        decoded = text if isinstance(text, str) else text.decode()
        return list(self._tokenizer.encode(decoded, add_special_tokens=False))


_vocabularies: dict[tuple[str, int, tuple[int, ...]], Vocabulary] = {}
_lock = threading.Lock()


def vocabulary_of(tokenizer: Tokenizer, size: int, eos_token_ids: Sequence[int]) -> Vocabulary:
    """The process's vocabulary for a tokenizer; arguments and errors of ``Vocabulary``."""
    key = (tokenizer.fingerprint, size, tuple(eos_token_ids))
    with _lock:
        if key not in _vocabularies:
            _vocabularies[key] = Vocabulary(tokenizer, size, eos_token_ids)
        return _vocabularies[key]


@lru_cache(maxsize=8)
def vocabulary_in(directory: Path, size: int, eos_token_ids: tuple[int, ...]) -> Vocabulary:
    """The same for a model directory, whose tokenizer is not read if it is known already."""
    key = (tokenizer_fingerprint(directory), size, eos_token_ids)
    with _lock:
        known = _vocabularies.get(key)
    return known or vocabulary_of(Tokenizer.load(directory), size, eos_token_ids)


def json_schema_grammar(schema: Any) -> Grammar:
    """A grammar for the JSON values that a schema (as JSON data) describes."""
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema, sort_keys=False))


def choice_grammar(choices: Sequence[str]) -> Grammar:
    """A grammar for one of these texts and nothing else."""
    options = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    return Grammar(GrammarKind.LARK, f"start: {options}")


def _library() -> ModuleType:
    try:
        import llguidance
    except ModuleNotFoundError as exc:
        if exc.name != "llguidance":
            raise
        raise InvalidRequest(
            "structured outputs need llguidance, which is not installed on the server: "
            "pip install 'mooncake-engine[structured]'",
            param=_PARAM,
        ) from exc
    module: ModuleType = llguidance
    return module


def _first_line(words: str) -> str:
    return words.strip().split("\n", 1)[0][:500]
