"""Structural tags: free text in which a trigger begins one of several tags with JSON in them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from mooncake_engine.text.grammars import Vocabulary, structural_tag_grammar, vocabulary_of
from mooncake_engine.text.reasoning import ReasoningState, after_reasoning
from mooncake_engine.text.tokenizer import Tokenizer

MODEL = Path(__file__).resolve().parents[4] / "examples" / "tiny-llama"
EOS, IM_START, IM_END = 257, 258, 259
CUPS = {
    "type": "object",
    "properties": {"cups": {"type": "integer"}},
    "required": ["cups"],
    "additionalProperties": False,
}
TAGS = [("<fn=tea>", CUPS, "</fn>"), ("<fn=count>", {"type": "integer"}, "</fn>")]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(MODEL)


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    return vocabulary_of(tokenizer, 272, (EOS,))


def allows(mask: bytes, token_id: int) -> bool:
    return bool(mask[token_id // 8] >> token_id % 8 & 1)


def outcome(matcher: object, tokens: Sequence[int]) -> str:
    """``refused`` if a token is not allowed, else whether the output may end: ``end``, ``open``."""
    for token in tokens:
        if not allows(matcher.allowed(), token):  # type: ignore[attr-defined]
            return "refused"
        matcher.accept(token)  # type: ignore[attr-defined]
    return "end" if allows(matcher.allowed(), EOS) else "open"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "end"),
        ("no tag at all, a < b <f", "end"),
        ('one <fn=tea>{"cups": 2}</fn> and <fn=count>5</fn>.\nDone', "end"),
        ("<fn=tea>", "open"),
        ('<fn=tea>{"cups": 2}', "open"),
        ("<fn=milk>", "refused"),
        ('<fn=tea>{"milk"', "refused"),
        ("<fn=count>five", "refused"),
        ('<fn=tea>{"cups": 2}</fnord>', "refused"),
        (f'<fn=tea>{{{" " * 30}"cups"', "refused"),
    ],
)
def test_text_is_free_until_a_trigger(
    tokenizer: Tokenizer, vocabulary: Vocabulary, text: str, expected: str
) -> None:
    grammar = structural_tag_grammar(TAGS, ["<fn="], tokenizer)
    assert outcome(vocabulary.matcher(grammar), text.encode()) == expected


def test_special_tokens_are_triggers_and_ends(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    tags = [("<|im_start|>n=", {"type": "integer"}, "<|im_end|>")]
    grammar = structural_tag_grammar(tags, ["<|im_start|>"], tokenizer)
    whole = [*b"so ", IM_START, *b"n=12", IM_END, *b" done"]
    assert outcome(vocabulary.matcher(grammar), whole) == "end"
    assert outcome(vocabulary.matcher(grammar), [IM_START, *b"m"]) == "refused"
    assert outcome(vocabulary.matcher(grammar), [IM_START, *b"n=12"]) == "open"


def test_reasoning_precedes_the_tags(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    grammar = structural_tag_grammar(TAGS, ["<fn="], tokenizer)
    matcher = vocabulary.matcher(after_reasoning(grammar, ReasoningState.OPEN, tokenizer))
    assert outcome(matcher, b"try <fn=milk>?</think>then <fn=count>5</fn>") == "end"
    assert outcome(matcher, b"<fn=m") == "refused"
