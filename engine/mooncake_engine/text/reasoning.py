"""Separates reasoning from the answer while text is generated; runs before the tool call parsers.

Qwen3, DeepSeek-R1 and similar models reason between ``<think>`` and ``</think>``. The chat template
may already have written the opening tag at the end of the prompt. Text is passed through unchanged,
including white space, as vLLM's parsers do. A grammar constrains only the text after the reasoning.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol

from mooncake_engine.sampling_params import Grammar, GrammarKind
from mooncake_engine.text.grammars import lark_literal
from mooncake_engine.text.tool_call_parsers import ParsedText

if TYPE_CHECKING:
    from mooncake_engine.text.tokenizer import Tokenizer

OPENING, CLOSING = "<think>", "</think>"
REASONING_PARSERS = ("qwen3", "deepseek_r1")
"""The parsers' names in vLLM; both read the same tags."""
_TAIL_TOKENS = 16
_SPACE = r"/\s{0,20}/"
"""White space between reasoning and answer in a grammar: bounded, as within JSON."""
_LITERAL_CHARACTER = re.compile(r"\\?\n|\\.|/")
_ESCAPES = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}


class ReasoningState(Enum):
    """Where a model that may reason continues at the end of a prompt."""

    OPEN = auto()
    """Inside the reasoning: the template has written the opening tag."""
    CLOSED = auto()
    """After the reasoning: the template has written both tags, and the model answers at once."""
    UNDECIDED = auto()
    """The template has written neither tag; a model that reasons starts with the opening tag."""


class OutputParser(Protocol):
    """Splits generated text into content, reasoning and tool calls while it arrives."""

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Special tokens that must be kept in the text for the parser."""

    @property
    def num_calls(self) -> int:
        """The number of tool calls so far."""

    def push(self, text: str) -> ParsedText:
        """Parse more text; returns the parts that are now final."""

    def finish(self) -> ParsedText:
        """End the text; returns the parts that were held back."""


class ReasoningParser:
    """Separates the reasoning from the rest of the text.

    Args:
        is_open: whether the prompt ends inside the reasoning.
        rest: parses the text after the reasoning; None passes it through as content.
    """

    def __init__(self, *, is_open: bool, rest: OutputParser | None = None) -> None:
        self._rest = rest
        self._held = ""
        self._is_decided = self._is_inside = is_open

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Special tokens that must be kept in the text for this parser and that of the rest."""
        return (OPENING, CLOSING, *(() if self._rest is None else self._rest.special_tokens))

    @property
    def num_calls(self) -> int:
        """The number of tool calls so far."""
        return 0 if self._rest is None else self._rest.num_calls

    def push(self, text: str) -> ParsedText:
        """Parse more text; returns the parts that are now final."""
        self._held += text
        if not self._is_decided and not self._decide():
            return ParsedText()
        if not self._is_inside:
            return self._answer(self._take(len(self._held)))
        end = self._held.find(CLOSING)
        if end < 0:
            return ParsedText(reasoning=self._take(len(self._held) - _partial(self._held)))
        reasoning = self._take(end)
        self._take(len(CLOSING))
        self._is_inside = False
        after = self._answer(self._take(len(self._held)))
        return ParsedText(after.content, after.calls, reasoning)

    def finish(self) -> ParsedText:
        """End the text; returns the parts that were held back."""
        held = self._take(len(self._held))
        if self._is_inside:
            return ParsedText(reasoning=held)
        found = self._answer(held)
        if self._rest is None:
            return found
        last = self._rest.finish()
        return ParsedText(found.content + last.content, found.calls + last.calls)

    def _decide(self) -> bool:
        """Decide whether the output starts with reasoning, possibly after white space. Returns
        whether enough text has arrived to decide."""
        begun = self._held.lstrip()
        if OPENING.startswith(begun) and begun != OPENING:
            return False
        self._is_decided = True
        self._is_inside = begun.startswith(OPENING)
        if self._is_inside:
            self._held = begun[len(OPENING) :]
        return True

    def _answer(self, text: str) -> ParsedText:
        return ParsedText(text) if self._rest is None else self._rest.push(text)

    def _take(self, num_characters: int) -> str:
        taken, self._held = self._held[:num_characters], self._held[num_characters:]
        return taken


def _partial(text: str) -> int:
    """The number of characters at the end that may be the start of the closing tag."""
    longest = min(len(CLOSING) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if CLOSING.startswith(text[-n:])), 0)


def detect_reasoning(template: str | None) -> bool:
    """Whether a chat template contains the reasoning tags."""
    return template is not None and CLOSING in template


def reasoning_state(tokenizer: Tokenizer, prompt: Sequence[int]) -> ReasoningState:
    """The reasoning state at the end of a prompt; white space may follow its last tag."""
    tail = tokenizer.decode(prompt[-_TAIL_TOKENS:], skip_special_tokens=False).rstrip()
    if tail.endswith(OPENING):
        return ReasoningState.OPEN
    return ReasoningState.CLOSED if tail.endswith(CLOSING) else ReasoningState.UNDECIDED


def after_reasoning(grammar: Grammar, state: ReasoningState, tokenizer: Tokenizer) -> Grammar:
    """A grammar that allows any reasoning, and then constrains the answer to ``grammar``. The tags
    may be special tokens of the model."""
    if state is ReasoningState.CLOSED:
        return grammar
    if grammar.kind is GrammarKind.LARK:
        # A nested grammar has its own namespace, so that its ``start`` does not clash.
        answer = f"%lark {{\n{grammar.source}\n}}"
    elif grammar.kind is GrammarKind.JSON_SCHEMA:
        answer = f"%json {grammar.source}"
    else:
        answer = _regex_literal(grammar.source)
    opening, closing = lark_literal(OPENING, tokenizer), lark_literal(CLOSING, tokenizer)
    thought = rf"thought[suffix={closing}]: /(?s:.*)/"
    if not closing.startswith('"'):
        thought = rf"thought: /(?s:.*)/ {closing}"
    before = "thought" if state is ReasoningState.OPEN else f"({opening} thought)?"
    rules = (f"start: {before} {_SPACE} answer", thought, f"answer: {answer}", "")
    return Grammar(GrammarKind.LARK, "\n".join(rules))


def _regex_literal(regex: str) -> str:
    """A regular expression as a Lark literal: between slashes, with unescaped slashes and line
    breaks inside it escaped."""

    def escaped(found: re.Match[str]) -> str:
        return _ESCAPES.get(found[0], found[0])

    return f"/{_LITERAL_CHARACTER.sub(escaped, regex)}/"
