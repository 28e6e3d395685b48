"""Reasoning is separated however the text is split, and grammars apply after it."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import tokenizers

from mooncake_engine.messages import FinishReason, TokenUpdate
from mooncake_engine.sampling_params import Grammar, GrammarKind, SamplingParams
from mooncake_engine.text.completion_output import TextOutputProcessor
from mooncake_engine.text.grammars import choice_grammar, json_schema_grammar, vocabulary_of
from mooncake_engine.text.reasoning import (
    ReasoningParser,
    ReasoningState,
    after_reasoning,
    detect_reasoning,
    reasoning_state,
)
from mooncake_engine.text.tokenizer import Tokenizer
from mooncake_engine.text.tool_call_forms import PARSERS
from mooncake_engine.text.tool_call_parsers import CallDelta

TINY = Path("examples/tiny-llama")
OPEN, CLOSED, UNDECIDED = ReasoningState.OPEN, ReasoningState.CLOSED, ReasoningState.UNDECIDED
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
OUTPUTS = [
    # is_open, text, reasoning, content, number of calls
    (False, "<think>\nLet me see.\n</think>\n\nYes.", "\nLet me see.\n", "\n\nYes.", 0),
    (False, "\n<think>a < b </ think></think>c", "a < b </ think>", "c", 0),
    (False, "No thoughts, <think>though.", "", "No thoughts, <think>though.", 0),
    (False, "<thin air", "", "<thin air", 0),
    (False, "<think>cut </thi", "cut </thi", "", 0),
    (False, "", "", "", 0),
    (True, "Hm.</think>4", "Hm.", "4", 0),
    (True, "still at it <", "still at it <", "", 0),
    (True, f"A call of {CALL}?</think>{CALL}", f"A call of {CALL}?", "", 1),
    (False, "<think></think><think>x</think>", "", "<think>x</think>", 0),
]


def read(is_open: bool, pieces: list[str]) -> tuple[str, str, list[CallDelta]]:
    parser = ReasoningParser(is_open=is_open, rest=PARSERS["hermes"]())
    found = [*map(parser.push, pieces), parser.finish()]
    calls = [call for one in found for call in one.calls]
    return "".join(one.reasoning for one in found), "".join(one.content for one in found), calls


@pytest.mark.parametrize(("is_open", "text", "reasoning", "content", "calls"), OUTPUTS)
def test_the_message_does_not_depend_on_the_split(
    is_open: bool, text: str, reasoning: str, content: str, calls: int
) -> None:
    whole = read(is_open, [text])
    assert whole[:2] == (reasoning, content)
    assert sum(call.name is not None for call in whole[2]) == calls
    cuttings = [list(text)]
    numbers = random.Random(text)
    for _ in range(200):
        cuts = sorted(numbers.randrange(len(text) + 1) for _ in range(numbers.randrange(1, 6)))
        cuttings.append([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)])
    for pieces in cuttings:
        found = read(is_open, pieces)
        assert found[:2] == (reasoning, content), pieces
        assert "".join(c.arguments for c in found[2]) == "".join(c.arguments for c in whole[2])


def test_only_the_start_of_a_tag_is_held_back() -> None:
    parser = ReasoningParser(is_open=False)
    assert [parser.push(piece).reasoning for piece in ("<think>", "a", " b", " <", "c", "</")] == [
        *("", "a", " b", " ", "<c", "")
    ]
    assert parser.push("think>d").content == "d"
    assert parser.num_calls == 0


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(TINY)


@pytest.mark.parametrize(
    ("prompt", "state"),
    [
        ("hi <|im_start|>assistant\n", UNDECIDED),
        ("<|im_start|>assistant\n<think>\n", OPEN),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", CLOSED),
        ("", UNDECIDED),
    ],
)
def test_reasoning_state_of_a_prompt(
    tokenizer: Tokenizer, prompt: str, state: ReasoningState
) -> None:
    assert reasoning_state(tokenizer, tokenizer.encode(prompt)) is state


def test_reasoning_is_detected_from_the_template() -> None:
    assert detect_reasoning("{{ content.split('</think>')[-1] }}")
    assert not detect_reasoning("{{ content }}")
    assert not detect_reasoning(None)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
GRAMMARS = {
    "json": (json_schema_grammar({**SCHEMA, "additionalProperties": False}), '{"a": 1}'),
    "choice": (choice_grammar(["yes", "no"]), "yes"),
    "regex": (Grammar(GrammarKind.REGEX, "[a/]+"), "a/a"),
    "lark": (Grammar(GrammarKind.LARK, 'start: "x" start_of\nstart_of: "z"'), "xz"),
    "escaped slashes": (Grammar(GrammarKind.REGEX, r"https:\/\/[a-z]+/\\\\/"), r"https://tea/\\/"),
    "line breaks": (Grammar(GrammarKind.REGEX, "a\nb\\\nc"), "a\nb\nc"),
    "rule answer": (Grammar(GrammarKind.LARK, 'start: answer\nanswer: "yes" | "no"'), "no"),
    "rule thought": (Grammar(GrammarKind.LARK, 'start: thought // {\nthought: "}"'), "}"),
    "options of start": (Grammar(GrammarKind.LARK, 'start[temperature=0.5]: "a" | "b"'), "b"),
    "inlined start": (Grammar(GrammarKind.LARK, '?start: "a" | "b"'), "b"),
    "recursive start": (Grammar(GrammarKind.LARK, 'start: "(" start ")" | "x"'), "((x))"),
}


def is_allowed(tokenizer: Tokenizer, grammar: Grammar, text: str) -> bool:
    """Whether the grammar allows the text as a complete output."""
    matcher = vocabulary_of(tokenizer, 272, (257,)).matcher(grammar)
    for token_id in (*tokenizer.encode(text), 257):
        if not matcher.allowed()[token_id // 8] >> token_id % 8 & 1:
            return False
        matcher.accept(token_id)
    return True


@pytest.fixture(scope="module")
def special(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer whose reasoning tags are special tokens, as in some fine-tunes."""
    directory = shutil.copytree(TINY, tmp_path_factory.mktemp("special") / "model")
    backend = tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json"))
    backend.add_special_tokens(["<think>", "</think>"])
    backend.save(str(directory / "tokenizer.json"))
    return Tokenizer.load(directory)


@pytest.mark.parametrize("name", GRAMMARS)
def test_reasoning_may_end_in_a_special_token(special: Tokenizer, name: str) -> None:
    grammar, answer = GRAMMARS[name]
    assert special.ids_of(["</think>"]) <= special.special_ids
    opened = after_reasoning(grammar, OPEN, special)
    assert is_allowed(special, opened, f"I could.</think>\n{answer}")
    assert not is_allowed(special, opened, f"I could.</think>\n{answer}!")
    undecided = after_reasoning(grammar, UNDECIDED, special)
    assert is_allowed(special, undecided, f"<think>No.</think>{answer}")
    assert is_allowed(special, undecided, answer)
    assert not is_allowed(special, undecided, f"No.</think>{answer}")


def test_special_tags_separate_the_reasoning(special: Tokenizer) -> None:
    output = TextOutputProcessor(special, SamplingParams(), ReasoningParser(is_open=True))
    ids = special.encode("hm</think>so", add_special_tokens=False)
    found = [output.advance(TokenUpdate("r", (token_id,))) for token_id in ids]
    found.append(output.advance(TokenUpdate("r", finish=FinishReason.LENGTH)))
    assert "".join(each.reasoning for each in found) == "hm"
    assert "".join(each.text for each in found) == "so"


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_grammar_constrains_the_text_after_the_reasoning(tokenizer: Tokenizer, name: str) -> None:
    grammar, answer = GRAMMARS[name]
    thought = 'I could say {"b": [ or no.'
    opened = after_reasoning(grammar, OPEN, tokenizer)
    assert is_allowed(tokenizer, opened, f"{thought}</think>\n\n{answer}")
    assert not is_allowed(tokenizer, opened, f"{thought}</think>\n\n{answer}!")
    assert not is_allowed(tokenizer, opened, thought)
    undecided = after_reasoning(grammar, UNDECIDED, tokenizer)
    assert is_allowed(tokenizer, undecided, f"<think>{thought}</think>{answer}")
    assert is_allowed(tokenizer, undecided, answer)
    assert not is_allowed(tokenizer, undecided, f"{thought}</think>{answer}")
    assert after_reasoning(grammar, CLOSED, tokenizer) == grammar
    assert is_allowed(tokenizer, grammar, answer)


def test_a_recursive_grammar_has_no_reasoning_inside(tokenizer: Tokenizer) -> None:
    grammar, _ = GRAMMARS["recursive start"]
    behind = after_reasoning(grammar, UNDECIDED, tokenizer)
    assert is_allowed(tokenizer, behind, "<think>a</think>(x)")
    assert not is_allowed(tokenizer, behind, "(<think>a</think>x)")


@pytest.mark.parametrize("name", ["regex", "lark", "json"])
def test_white_space_after_the_reasoning_is_bounded(tokenizer: Tokenizer, name: str) -> None:
    grammar, answer = GRAMMARS[name]
    behind = after_reasoning(grammar, OPEN, tokenizer)
    assert is_allowed(tokenizer, behind, f"a</think>{20 * ' '}{answer}")
    assert not is_allowed(tokenizer, behind, f"a</think>{21 * ' '}{answer}")
