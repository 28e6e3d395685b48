"""SamplingParams: how a request's tokens are sampled, and when it ends."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from mooncake_engine.errors import InvalidRequest


class GrammarKind(str, Enum):
    """The language of a grammar."""

    JSON_SCHEMA = "JSON schema"
    REGEX = "regular expression"
    LARK = "Lark grammar"


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that an output must match; see ``text.grammars``.

    Args:
        kind: the language of ``source``.
        source: a JSON schema, a regular expression, or a context-free grammar.
    """

    kind: GrammarKind
    source: str


class _Checked(tuple[Any, ...]):
    """A tuple whose elements have the right types. The parameters of a request's choices share it,
    so that what is long is checked once."""

    __slots__ = ()


def whole_number(name: str, given: Any) -> int:
    """A parameter as an ``int``; also of NumPy's integers, and 1 for True.

    Raises:
        InvalidRequest: it is something else, such as 1.0.
    """
    try:
        return operator.index(given)
    except TypeError:
        raise _wrong_type(name, "a whole number", given) from None


def real_number(name: str, given: Any) -> float:
    """A parameter as a ``float``; raises InvalidRequest for other types."""
    try:
        if not isinstance(given, str | bytes):
            return float(given)
    except (TypeError, ValueError, OverflowError):
        pass
    raise _wrong_type(name, "a number", given)


def _wrong_type(name: str, wanted: str, given: Any) -> InvalidRequest:
    return InvalidRequest(
        f"{name}: wanted {wanted}, got {given!r:.100} of type {type(given).__name__}", param=name
    )


def _text(name: str, given: Any) -> str:
    if not isinstance(given, str):
        raise _wrong_type(name, "text", given)
    return given


def _bias(name: str, given: Any) -> tuple[int, float]:
    pair = tuple(_elements(name, given))
    if len(pair) != 2:
        raise _wrong_type(name, "pairs of a token id and a value", given)
    return whole_number(name, pair[0]), real_number(name, pair[1])


def _token_ids(name: str, given: Any) -> tuple[int, ...]:
    return _Checked(whole_number(name, one) for one in _elements(name, given))


def _elements(name: str, given: Any) -> Iterable[Any]:
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise _wrong_type(name, "a list", given)
    return given.items() if isinstance(given, Mapping) else given


_Read = Callable[[str, Any], Any]
_NUMBERS: tuple[tuple[str, type, _Read], ...] = (
    *((name, int, whole_number) for name in ("n", "best_of", "top_k", "seed", "max_tokens")),
    *((name, int, whole_number) for name in ("min_tokens", "logprobs", "prompt_logprobs")),
    *((name, float, real_number) for name in ("temperature", "top_p", "min_p")),
    *((name, float, real_number) for name in ("repetition_penalty", "presence_penalty")),
    ("frequency_penalty", float, real_number),
)
_MAY_BE_NONE = frozenset({"best_of", "seed", "max_tokens", "logprobs", "prompt_logprobs"})
_LISTS: tuple[tuple[str, _Read], ...] = (
    ("stop", _text),
    ("stop_token_ids", whole_number),
    ("logit_bias", _bias),
    ("bad_words", _text),
    ("bad_words_token_ids", _token_ids),
)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling and stopping, with the names and meanings of vLLM's and OpenAI's APIs. Values of
    other types are converted as vLLM does: one stop string, None for an empty list, a dict of
    biases.

    Args:
        n: number of choices per prompt.
        best_of: number of choices to generate, of which the ``n`` with the highest cumulative log
            probability are returned; None generates ``n``.
        temperature: 0 is greedy.
        top_p: cumulative probability of the most probable tokens to sample from; 1 is off.
        top_k: number of most probable tokens to sample from; 0 is off.
        min_p: minimum probability of a token, relative to that of the most probable one; 0 is off.
        seed: makes the output reproducible, whatever else runs and on whichever instance the
            request continues. None, or -1, is random.
        repetition_penalty: > 1 makes tokens of prompt and output less likely (Keskar et al. 2019).
        presence_penalty, frequency_penalty: OpenAI's penalties, over the output's tokens.
        stop: strings that end the output and are left out of it.
        stop_token_ids: tokens that end the output.
        ignore_eos: whether to continue after the end-of-sequence token.
        max_tokens: maximum length of the output; None means up to the end of the context.
        min_tokens: EOS and stop tokens are ignored until this many tokens have been generated.
        logprobs: None is off; k returns log probabilities of the chosen and the k most probable
            tokens.
        prompt_logprobs: the same for every prompt token except the first. Such a prompt does not
            use the prefix cache, because cached KV has no probabilities.
        skip_special_tokens: whether to leave special tokens out of the text.
        include_stop_str_in_output: whether to keep the stop string in the text.
        logit_bias: ``(token id, value)`` pairs; the values are added to the tokens' logits.
        allowed_token_ids: the only tokens that may be sampled, at least one; None allows all. With
            a grammar, its end-of-sequence tokens are allowed, too.
        bad_words: texts that the output must not contain. The core ignores them: the front end sets
            ``bad_words_token_ids``, see ``text.bad_words``.
        bad_words_token_ids: sequences of tokens that the output must not contain.
        grammar: grammar that the output must match; it decides when the output may end, and when
            it must.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        self._convert()
        _check_range("n", self.n, 1, 128)
        if self.best_of is not None:
            _check_range("best_of", self.best_of, self.n, 128)
        _check_range("temperature", self.temperature, 0.0, 100.0)
        _check_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_range("top_k", self.top_k, -1, 2**31)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        # Logits are divided by the penalty, and the quotient must stay finite in float32.
        _check_range("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_range("min_tokens", self.min_tokens, 0, 2**31)
        if self.max_tokens is not None:
            _check_range("max_tokens", self.max_tokens, 1, 2**31)
            if self.min_tokens > self.max_tokens:
                raise InvalidRequest(
                    f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}",
                    param="min_tokens",
                )
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None:
                _check_range(name, count, 0, 128)
        if self.seed is not None:
            _check_range("seed", self.seed, -(2**63), 2**64 - 1)
        self._check_constraints()

    def _convert(self) -> None:
        """Convert values to the types that the fields declare: a step would fail with others, and
        all requests of the engine with it."""
        for name, kind, read in _NUMBERS:
            value = getattr(self, name)
            if type(value) is not kind and not (value is None and name in _MAY_BE_NONE):
                object.__setattr__(self, name, read(name, value))
        if self.seed == -1:
            object.__setattr__(self, "seed", None)
        for name, read in _LISTS:
            self._convert_list(name, getattr(self, name), read)
        if self.allowed_token_ids is not None:
            self._convert_list("allowed_token_ids", self.allowed_token_ids, whole_number)
        if not isinstance(self.grammar, Grammar | None):
            raise _wrong_type("grammar", "a Grammar", self.grammar)

    def _convert_list(self, name: str, given: Any, read: _Read) -> None:
        if type(given) is _Checked or (type(given) is tuple and not given):
            return
        if given is None:
            given = ()
        elif isinstance(given, str) and read is _text:
            given = (given,)
        checked = _Checked(read(name, one) for one in _elements(name, given))
        object.__setattr__(self, name, checked)

    def _check_constraints(self) -> None:
        for name in ("stop", "bad_words"):
            if not all(getattr(self, name)):
                raise InvalidRequest(f"{name} contains an empty string; leave it out", param=name)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequest(
                "allowed_token_ids is empty, so no token could be sampled; leave it out to allow "
                "all tokens",
                param="allowed_token_ids",
            )
        if self.grammar is not None and (self.min_tokens or self.ignore_eos):
            raise InvalidRequest(
                "a structured output ends when its grammar is complete: it can't be combined with "
                "min_tokens or ignore_eos",
                param="min_tokens" if self.min_tokens else "ignore_eos",
            )

    @property
    def num_candidates(self) -> int:
        """Choices to generate per prompt."""
        return self.n if self.best_of is None else self.best_of

    @property
    def is_ranked(self) -> bool:
        """Whether more choices are generated than returned."""
        return self.num_candidates > self.n

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is always chosen."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


def _check_range(
    name: str, value: float, low: float, high: float, *, open_low: bool = False
) -> None:
    below = value <= low if open_low else value < low
    if math.isnan(value) or below or value > high:
        bracket = "(" if open_low else "["
        raise InvalidRequest(f"{name} must be in {bracket}{low}, {high}], got {value}", param=name)
