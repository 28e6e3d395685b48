"""Grammars for structured output: one ``Vocabulary`` per tokenizer and process, and the matchers
that follow an output.

Compiled grammars are cached and copied for each request. Compiling releases the GIL, so that it may
run in any thread.
"""

from __future__ import annotations

import atexit
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from copy import copy
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from mooncake_engine.errors import GrammarFailed, InvalidRequest
from mooncake_engine.sampling_params import Grammar, GrammarKind
from mooncake_engine.text.grammar_compiler import (
    JSON_STYLE,
    PARAM,
    GrammarCompiler,
    TokenTable,
    find_library,
    short_reason,
)
from mooncake_engine.text.grammar_process import GrammarProcess
from mooncake_engine.text.tokenizer import Tokenizer
from mooncake_engine.text.tokenizer_files import tokenizer_fingerprint

_MAX_COMPILED = 256
_MAX_COMPILED_CHARACTERS = 2 << 20
_MIN_MASKS = 256
"""Masks after which a grammar may be compiled again, because its lexer may be full. Compiling takes
1 s at most, and the steps wait for it."""
_START_S, _TOKEN_S = 0.1, 0.01
"""CPU time that an output's grammar may take, at the start, and more with each mask and token.
Outputs of published JSON schemas take less than 2 ms per mask on average."""


class CompiledGrammar:
    """A grammar at the start of an output. Its copies share one lexer, which keeps every state that
    an output has led to, and whose number of states is limited.

    Args:
        matcher: the library's matcher.

    Attributes:
        num_masks: masks that were computed with the lexer.
    """

    __slots__ = ("matcher", "num_masks")

    def __init__(self, matcher: Any) -> None:
        self.matcher = matcher
        self.num_masks = 0


class _Cost:
    """CPU time of one output's matcher and its copies, and what it may be."""

    __slots__ = ("allowed_s", "spent_s")

    def __init__(self) -> None:
        self.allowed_s = _START_S
        self.spent_s = 0.0


class GrammarMatcher:
    """The position of one output in its grammar.

    Args:
        compiled: the grammar.
        eos_token_ids: the tokens that may end the output.
        renew: returns the grammar with a lexer that has room, given one that may have none; None
            if there is no other.
    """

    def __init__(
        self,
        compiled: CompiledGrammar,
        eos_token_ids: Sequence[int] = (),
        renew: Callable[[CompiledGrammar], CompiledGrammar | None] = lambda _: None,
    ) -> None:
        self._compiled = compiled
        self._matcher = compiled.matcher.deep_copy()
        self._eos_token_ids = eos_token_ids
        self._renew = renew
        self._among: int | None = None
        self._token_ids: list[int] = []
        self._cost = _Cost()

    def accept(self, token_id: int) -> None:
        """Advance by the output's next token."""
        self._token_ids.append(token_id)
        self._cost.allowed_s += _TOKEN_S
        started = time.thread_time()
        self._consume(token_id)
        self._cost.spent_s += time.thread_time() - started

    def copy(self) -> GrammarMatcher:
        """An independent matcher at the same position, whose cost is this one's."""
        other = copy(self)
        other._matcher = self._matcher.deep_copy()
        other._token_ids = self._token_ids.copy()
        return other

    def restrict(self, mask: bytes) -> None:
        """Allow only the tokens of a mask, of the form of ``allowed``, and the end of the output,
        on which the grammar alone decides."""
        ends = sum(1 << token_id for token_id in set(self._eos_token_ids))
        self._among = int.from_bytes(mask, "little") | ends

    @property
    def is_too_slow(self) -> bool:
        """Whether the grammar has taken more CPU time than the output may cost. Steps wait for it,
        so that it would slow down every request."""
        return self._cost.spent_s > self._cost.allowed_s

    def allowed(self) -> bytes:
        """The mask of tokens that may come next: one bit per token id, lowest bit first.

        Raises:
            GrammarFailed: the grammar is too complex to continue, or a token contradicts it, or
                it allows no token that the request allows.
        """
        mask = self._mask()
        while self._matcher.is_error() and self._restart():
            mask = self._mask()
        if self._matcher.is_error():
            reason = short_reason(self._matcher.get_error())
            raise GrammarFailed(f"the grammar can't be followed any further: {reason}")
        if self._among is None:
            return mask
        both = int.from_bytes(mask, "little") & self._among
        if not both:
            raise GrammarFailed("the grammar allows none of allowed_token_ids here")
        return both.to_bytes(len(mask), "little")

    def _mask(self) -> bytes:
        if self._matcher.is_error():
            return b""
        self._compiled.num_masks += 1
        self._cost.allowed_s += _TOKEN_S
        started = time.thread_time()
        mask: bytes = self._matcher.compute_bitmask()
        self._cost.spent_s += time.thread_time() - started
        return mask

    def _restart(self) -> bool:
        """Follow the output again with another lexer, as the present one may be full of states that
        other outputs have led to; False if there is no other."""
        compiled = self._renew(self._compiled)
        if compiled is None:
            return False
        self._compiled, self._matcher = compiled, compiled.matcher.deep_copy()
        for token_id in self._token_ids:
            self._consume(token_id)
        return True

    def _consume(self, token_id: int) -> None:
        if not self._matcher.is_stopped():  # once stopped, only an EOS token may follow
            self._matcher.consume_token(token_id)


class Vocabulary:
    """A model's vocabulary, and the cache of grammars compiled for it.

    Args:
        tokenizer: the model's tokenizer.
        size: the size of the model's vocabulary, in tokens.
        eos_token_ids: the tokens that may end an output whose grammar is complete.

    Raises:
        InvalidRequest: llguidance is not installed, or the model has no end-of-sequence token.
    """

    def __init__(self, tokenizer: Tokenizer, size: int, eos_token_ids: Sequence[int]) -> None:
        find_library()
        if not eos_token_ids:
            raise InvalidRequest(
                "structured output needs an end-of-sequence token, and the model has none",
                param=PARAM,
            )
        table = TokenTable(
            tuple(tokenizer.token_bytes(token_id) for token_id in range(size)),
            tuple(sorted(id for id in tokenizer.special_ids if id < size)),
            tuple(eos_token_ids),
        )
        self._compiler = GrammarCompiler(table, partial(tokenizer.encode, add_special_tokens=False))
        self._process = GrammarProcess(table)
        atexit.register(self._process.close)
        self._eos_token_ids = tuple(eos_token_ids)
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()

    def has_compiled(self, grammar: Grammar) -> bool:
        """Whether the cache holds the compiled grammar."""
        with self._lock:
            return grammar in self._compiled

    def check(self, grammar: Grammar) -> None:
        """Compile a client's grammar, first in a child process and then here, so that ``matcher``
        finds it in the cache.

        Raises:
            InvalidRequest: the grammar is invalid or too expensive to compile.
            RequestFailed: the child process can't be started at the moment.
        """
        if not self.has_compiled(grammar):
            self._process.check(grammar)
            self.matcher(grammar)

    def matcher(self, grammar: Grammar) -> GrammarMatcher:
        """A matcher at the start of an output; compiles the grammar if it is not cached.

        Raises:
            InvalidRequest: the grammar is invalid or too complex.
        """
        with self._lock:
            compiled = self._compiled.get(grammar)
            if compiled is not None:
                self._compiled.move_to_end(grammar)
        if compiled is None:
            compiled = self._compile(grammar)
        return GrammarMatcher(compiled, self._eos_token_ids, partial(self._renew, grammar))

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        compiled = CompiledGrammar(self._compiler.compile(grammar))
        with self._lock:
            self._compiled[grammar] = compiled
            self._evict()
        return compiled

    def _renew(self, grammar: Grammar, full: CompiledGrammar) -> CompiledGrammar | None:
        """A grammar whose lexer is not this one, which may be full; None if this one has been used
        too little to be replaced."""
        with self._lock:
            newest = self._compiled.get(grammar)
        if newest is not None and newest is not full:
            return newest
        return self._compile(grammar) if full.num_masks >= _MIN_MASKS else None

    def _evict(self) -> None:
        """Evict the least recently used grammars. A compiled grammar takes some hundred bytes of
        memory per character of its source."""
        num_characters = sum(len(grammar.source) for grammar in self._compiled)
        while len(self._compiled) > 1 and (
            len(self._compiled) > _MAX_COMPILED or num_characters > _MAX_COMPILED_CHARACTERS
        ):
            oldest, _ = self._compiled.popitem(last=False)
            num_characters -= len(oldest.source)


_vocabularies: dict[tuple[str, int, tuple[int, ...]], Vocabulary] = {}
_lock = threading.Lock()


def vocabulary_of(tokenizer: Tokenizer, size: int, eos_token_ids: Sequence[int]) -> Vocabulary:
    """The process-wide vocabulary for a tokenizer; arguments and errors of ``Vocabulary``."""
    key = (tokenizer.fingerprint, size, tuple(eos_token_ids))
    with _lock:
        if key not in _vocabularies:
            _vocabularies[key] = Vocabulary(tokenizer, size, eos_token_ids)
        return _vocabularies[key]


def is_compiled(
    grammar: Grammar, tokenizer: Tokenizer, size: int, eos_token_ids: Sequence[int]
) -> bool:
    """Whether the process has compiled a grammar; takes no time."""
    known = _vocabularies.get((tokenizer.fingerprint, size, tuple(eos_token_ids)))
    return known is not None and known.has_compiled(grammar)


@lru_cache(maxsize=8)
def vocabulary_in(
    directory: Path, size: int, eos_token_ids: tuple[int, ...], chat_template: str | None = None
) -> Vocabulary:
    """The process-wide vocabulary for a model directory. Its tokenizer is only loaded if the
    process has no vocabulary for it yet."""
    key = (tokenizer_fingerprint(directory, chat_template), size, eos_token_ids)
    with _lock:
        known = _vocabularies.get(key)
    return known or vocabulary_of(Tokenizer.load(directory, chat_template), size, eos_token_ids)


def json_schema_grammar(schema: Any) -> Grammar:
    """The grammar of the JSON values that a schema (as JSON data) describes."""
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema, sort_keys=False))


def lark_literal(text: str, tokenizer: Tokenizer) -> str:
    """A text in a Lark grammar: as the token if it is a special one, which no text matches."""
    for token_id in tokenizer.ids_of([text]) & tokenizer.special_ids:
        return f"<[{token_id}]>"
    return json.dumps(text, ensure_ascii=False) if text else ""


def structural_tag_grammar(
    tags: Sequence[tuple[str, dict[str, Any], str]], triggers: Sequence[str], tokenizer: Tokenizer
) -> Grammar:
    """The grammar of any text in which a trigger begins one of the tags, and the tag is complete.

    Args:
        tags: begin, JSON schema and end of each tag.
        triggers: the texts that begin tags. A trigger, the rest of a begin, or an end that is a
            special token of the model is written as that token.
        tokenizer: the model's tokenizer.
    """
    written = partial(lark_literal, tokenizer=tokenizer)
    names = [f"tag_{index}" for index in range(len(tags))]
    rules = [f"start: ({' | '.join(names)})* rest", "rest: TEXT", "TEXT: /(.|\\n)*/"]
    for name, (begin, schema, end) in zip(names, tags, strict=True):
        trigger = next(trigger for trigger in triggers if begin.startswith(trigger))
        opening = f"TEXT {written(trigger)}"
        if not tokenizer.ids_of([trigger]) & tokenizer.special_ids:
            rules.append(f"{name}_trigger[lazy]: {opening}")
            opening = f"{name}_trigger"
        body = json.dumps({"x-guidance": JSON_STYLE, **schema})
        rules.append(
            f"{name}: {opening} {written(begin[len(trigger) :])} %json {body} {written(end)}"
        )
    return Grammar(GrammarKind.LARK, "\n".join(rules) + "\n")


def choice_grammar(choices: Sequence[str]) -> Grammar:
    """The grammar of exactly one of these texts."""
    options = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    return Grammar(GrammarKind.LARK, f"start: {options}")
