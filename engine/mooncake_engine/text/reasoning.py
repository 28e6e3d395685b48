"""Reasoning in generated text, told from the answer while it arrives, before tool calls are.

Qwen3, DeepSeek-R1 and their kin think between ``<think>`` and ``</think>``; a chat template may
have written the opening tag at the prompt's end. Text is passed on as it is, as vLLM's parsers do:
no white space is taken away. Grammars bind what comes after.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol

from mooncake_engine.sampling_params import Grammar, GrammarKind
from mooncake_engine.text.tool_call_parsers import ParsedText

if TYPE_CHECKING:
    from mooncake_engine.text.tokenizer import Tokenizer

OPENING, CLOSING = "<think>", "</think>"
REASONING_PARSERS = ("qwen3", "deepseek_r1")
"""vLLM's names; both read the same tags."""
_TAIL_TOKENS = 16
_SPACE = r"/\s{0,20}/"
"""Between reasoning and answer: as much as JSON may have, an end to it all the same."""
_LITERAL_CHARACTER = re.compile(r"\\?\n|\\.|/")
_WRITTEN_OTHERWISE = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}


class ReasoningState(Enum):
    """Where a prompt leaves a model that may reason."""

    OPEN = auto()
    """Within reasoning: the template has written the opening tag."""
    CLOSED = auto()
    """Behind it: the template has written both, and the model answers at once."""
    UNDECIDED = auto()
    """The model begins with the opening tag if it reasons."""


class OutputParser(Protocol):
    """Takes generated text apart."""

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """That it has to see in the text."""

    @property
    def num_calls(self) -> int:
        """Tool calls so far."""

    def push(self, text: str) -> ParsedText:
        """Read on; what is certain now."""

    def finish(self) -> ParsedText:
        """The text is complete; what was held back."""


class ReasoningParser:
    """Tells reasoning from the rest.

    Args:
        is_open: whether the prompt ends within reasoning.
        rest: reads what comes after; None passes it on.
    """

    def __init__(self, *, is_open: bool, rest: OutputParser | None = None) -> None:
        self._rest = rest
        self._held = ""
        self._is_decided = self._is_inside = is_open

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """That have to be in the text."""
        return () if self._rest is None else self._rest.special_tokens

    @property
    def num_calls(self) -> int:
        """Tool calls so far."""
        return 0 if self._rest is None else self._rest.num_calls

    def push(self, text: str) -> ParsedText:
        """Read on; what is certain now."""
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
        """The text is complete; what was held back."""
        held = self._take(len(self._held))
        if self._is_inside:
            return ParsedText(reasoning=held)
        found = self._answer(held)
        if self._rest is None:
            return found
        last = self._rest.finish()
        return ParsedText(found.content + last.content, found.calls + last.calls)

    def _decide(self) -> bool:
        """Whether it is known if the output begins with reasoning; white space may come first."""
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
    """How many characters at the end may be the beginning of the closing tag."""
    longest = min(len(CLOSING) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if CLOSING.startswith(text[-n:])), 0)


def detect_reasoning(template: str | None) -> bool:
    """Whether a chat template knows reasoning between these tags."""
    return template is not None and CLOSING in template


def reasoning_state(tokenizer: Tokenizer, prompt: Sequence[int]) -> ReasoningState:
    """Where a prompt ends; white space may follow its last tag."""
    tail = tokenizer.decode(prompt[-_TAIL_TOKENS:], skip_special_tokens=False).rstrip()
    if tail.endswith(OPENING):
        return ReasoningState.OPEN
    return ReasoningState.CLOSED if tail.endswith(CLOSING) else ReasoningState.UNDECIDED


def after_reasoning(grammar: Grammar, state: ReasoningState) -> Grammar:
    """A grammar that binds what comes after reasoning."""
    if state is ReasoningState.CLOSED:
        return grammar
    if grammar.kind is GrammarKind.LARK:
        # a grammar within: its rules, ``start`` among them, have names of their own
        answer = f"%lark {{\n{grammar.source}\n}}"
    elif grammar.kind is GrammarKind.JSON_SCHEMA:
        answer = f"%json {grammar.source}"
    else:
        answer = _regex_literal(grammar.source)
    thought = r'thought[suffix="</think>"]: /(?s:.*)/'
    before = "thought" if state is ReasoningState.OPEN else '("<think>" thought)?'
    rules = (f"start: {before} {_SPACE} answer", thought, f"answer: {answer}", "")
    return Grammar(GrammarKind.LARK, "\n".join(rules))


def _regex_literal(regex: str) -> str:
    """A regular expression as Lark writes it: between slashes, so that those within are escaped if
    they are not yet."""

    def written(found: re.Match[str]) -> str:
        return _WRITTEN_OTHERWISE.get(found[0], found[0])

    return f"/{_LITERAL_CHARACTER.sub(written, regex)}/"
