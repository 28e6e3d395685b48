from __future__ import annotations

import random
import time

import pytest

from mooncake_engine.errors import GrammarFailed, InvalidRequest
from mooncake_engine.execution.request_table import GrammarState
from mooncake_engine.sampling_params import Grammar, GrammarKind, SamplingParams
from mooncake_engine.scheduling.step_plan import NewRequest
from mooncake_engine.text import grammar_compiler
from mooncake_engine.text.grammar_compiler import GrammarCompiler, TokenTable
from mooncake_engine.text.grammars import GrammarMatcher, Vocabulary, json_schema_grammar
from mooncake_engine.text.tokenizer import Tokenizer

EOS = 256
FIELDS = {f"field_{i}": {"type": "string", "maxLength": 1000 + i} for i in range(10)}
LONG_STRINGS = json_schema_grammar(
    {
        "type": "object",
        "properties": FIELDS,
        "required": list(FIELDS),
        "additionalProperties": False,
    }
)
AMBIGUOUS = Grammar(
    GrammarKind.LARK, "start: e\ne: A | e e | e e e | e e e e | e e e e e\nA: /[a-z ]/"
)


@pytest.fixture
def vocabulary(byte_tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary(byte_tokenizer, 258, (EOS,))


def write(matcher: GrammarMatcher, num_tokens: int, seed: int) -> list[bytes]:
    """Follow a random output; returns its masks."""
    rng, masks = random.Random(seed), []
    for _ in range(num_tokens):
        mask = matcher.allowed()
        masks.append(mask)
        allowed = [i for i in range(EOS) if mask[i // 8] >> i % 8 & 1]
        matcher.accept(rng.choice(allowed))
    return masks


def test_requests_of_one_grammar_outlive_its_lexer(
    vocabulary: Vocabulary, byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies of a compiled grammar share a lexer, which the outputs before them have filled."""
    roomy = [write(vocabulary.matcher(LONG_STRINGS), 400, seed) for seed in range(40)]
    monkeypatch.setattr(grammar_compiler, "_MAX_LEXER_STATES", 3000)
    small = Vocabulary(byte_tokenizer, 258, (EOS,))
    waiting = small.matcher(LONG_STRINGS)
    compiled = waiting._compiled
    assert [write(small.matcher(LONG_STRINGS), 400, seed) for seed in range(40)] == roomy
    assert small.matcher(LONG_STRINGS)._compiled is not compiled, "the lexer was not filled"
    assert write(waiting, 400, 0) == roomy[0]


def test_a_grammar_that_fills_its_lexer_at_once_fails(
    byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_compiler, "_MAX_LEXER_STATES", 200)
    vocabulary = Vocabulary(byte_tokenizer, 258, (EOS,))
    matcher = vocabulary.matcher(LONG_STRINGS)
    compiled = matcher._compiled
    with pytest.raises(GrammarFailed, match="can't be followed any further"):
        write(matcher, 400, 0)
    assert vocabulary.matcher(LONG_STRINGS)._compiled is compiled, "compiled again in a step"


def test_a_request_fails_that_steps_wait_for(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(time, "thread_time", lambda: next(clock) * 0.03)
    sampling = SamplingParams(max_tokens=9, grammar=Grammar(GrammarKind.REGEX, "[ab]+"))
    request = NewRequest("a", (1,), 1, sampling, seed=0, block_ids=())
    state = GrammarState(lambda: vocabulary, request)
    state.accept(ord("a"))  # a mask or token takes 30 ms; 10 ms are allowed, and 100 ms once
    draft = state.after(ord("b"))
    assert draft is not None
    assert state.failure is draft.failure is None
    state.accept(ord("a"))
    assert state.allowed() is not None, "other ranks mask this step as well"
    assert state.failure is not None
    assert "too much processor time" in state.failure


def test_an_ambiguous_grammar_is_rejected() -> None:
    """Its mask would take half a second, and each of a request's choices needs one in each step."""
    table = TokenTable((b"</s>", *(b"a" * length for length in range(1, 100))), (0,), (0,))
    compiler = GrammarCompiler(table)
    with pytest.raises(InvalidRequest, match="Too many items \\(limit 20000"):
        compiler.compile(AMBIGUOUS)
