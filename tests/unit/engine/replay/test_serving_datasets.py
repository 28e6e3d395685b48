"""The prompts of ``bench serve``."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from support.byte_tokenizer import write_byte_tokenizer
from support.programs import TINY_LLAMA

from mooncake_engine.errors import ConfigError
from mooncake_engine.replay.prompt_tokenizer import PromptTokenizer
from mooncake_engine.replay.serving_datasets import Dataset

LINES = [f"the {word} line of a poem\n" for word in ("first", "second", "third", "fourth")]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PromptTokenizer:
    """A tokenizer with one token per byte."""
    return PromptTokenizer.load(str(write_byte_tokenizer(tmp_path_factory.mktemp("bytes"))))


@pytest.fixture(scope="module")
def merging() -> PromptTokenizer:
    """A tokenizer that encodes a decoded text to different tokens."""
    return PromptTokenizer.load(str(TINY_LLAMA))


def of_random(**changes: object) -> Dataset:
    return replace(Dataset("random", None, 20, 64, 16), **changes)  # type: ignore[arg-type]


def test_random_prompts_have_the_length_and_differ(merging: PromptTokenizer) -> None:
    found = of_random().requests(merging)
    assert [request.num_input for request in found] == [64] * 20
    assert {request.num_output for request in found} == {16}
    assert len({request.text for request in found}) == 20


def test_random_lengths_are_within_the_range(merging: PromptTokenizer) -> None:
    found = of_random(num_prompts=200, range_ratio=0.5).requests(merging)
    lengths = [request.num_input for request in found]
    assert 32 <= min(lengths) < 36
    assert 92 < max(lengths) <= 96
    answers = [request.num_output for request in found]
    assert (min(answers), max(answers)) == (8, 24)


def test_random_prompts_share_their_prefix(merging: PromptTokenizer) -> None:
    found = of_random(num_prefix=32, num_prompts=2).requests(merging)
    first, second = (request.text or "" for request in found)
    common = next(i for i, pair in enumerate(zip(first, second, strict=False)) if len({*pair}) > 1)
    assert merging.count(first[:common]) >= 31


def test_a_seed_gives_the_same_prompts(merging: PromptTokenizer) -> None:
    assert of_random().requests(merging) == of_random().requests(merging)
    assert of_random().requests(merging) != of_random(seed=1).requests(merging)


def conversation(*texts: str) -> dict[str, object]:
    return {"conversations": [{"from": "human", "value": text} for text in texts]}


def test_short_long_and_unanswered_conversations_are_skipped(
    tokenizer: PromptTokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "sharegpt.json"
    taken = conversation("a question", "an answer", "more")
    left = [
        conversation("hi", "an answer"),
        conversation("a question", "ok"),
        conversation("x" * 1025, "an answer"),
        conversation("x" * 1024, "y" * 1025),
        conversation("alone"),
        {"id": "no turns"},
    ]
    path.write_text(json.dumps([*left, taken]))
    dataset = Dataset("sharegpt", path, 3, 0, None)
    found = dataset.requests(tokenizer)
    assert [(r.text, r.num_input, r.num_output) for r in found] == [("a question", 10, 9)] * 3
    assert len(replace(dataset, repeats=False).requests(tokenizer)) == 1
    asked = replace(dataset, num_output=5, repeats=False).requests(tokenizer)
    assert [r.num_output for r in asked] == [5] * 3, "num_output overrides the answers' lengths"


def test_sonnet_prompts_fill_the_length_and_share_a_prefix(
    tokenizer: PromptTokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "sonnet.txt"
    path.write_text("".join(LINES))
    dataset = Dataset("sonnet", path, 5, 400, 7, num_prefix=150)
    found = dataset.requests(tokenizer)
    assert len(found) == 5
    for request in found:
        assert request.text is not None
        assert request.text.startswith("<|user|>Pick as many lines as you can")
        assert request.text.split(":\n")[1].startswith("".join(LINES[:3]))
        assert 360 < request.num_input <= 400
    as_chat = replace(dataset, is_chat=True).requests(tokenizer)
    assert all((request.text or "").startswith("Pick") for request in as_chat)
    with pytest.raises(ConfigError, match="--sonnet-input-len 40 is too short"):
        replace(dataset, num_input=40).requests(tokenizer)


def test_custom_prompts_are_rendered_by_default(tokenizer: PromptTokenizer, tmp_path: Path) -> None:
    path = tmp_path / "custom.jsonl"
    path.write_text('{"prompt": "one", "output_tokens": 3}\n\n{"prompt": "two", "more": 1}\n')
    dataset = Dataset("custom", path, 2, 0, 9, is_shuffled=False)
    texts = [request.text for request in dataset.requests(tokenizer)]
    assert texts == ["<|user|>one\n<|assistant|>", "<|user|>two\n<|assistant|>"]
    plain = replace(dataset, has_template=False).requests(tokenizer)
    assert [(r.text, r.num_output) for r in plain] == [("one", 9), ("two", 9)]
    assert {r.text for r in replace(dataset, is_shuffled=True, is_chat=True).requests(tokenizer)}
    with pytest.raises(
        ConfigError, match="--custom-output-len -1 needs output_tokens in every line"
    ):
        replace(dataset, num_output=-1).requests(tokenizer)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("custom", '{"text": "one"}', "must contain JSON lines with a string 'prompt'"),
        ("custom", "", "contains no usable request"),
        ("sharegpt", "{}", "must contain a list of conversations"),
        ("sharegpt", "nothing", "is not valid JSON"),
        ("sharegpt", '[{"conversations": [{"value": 1}, {"value": "x"}]}]', "has no text in"),
        ("sonnet", "", "contains no lines"),
    ],
)
def test_files_in_another_format_are_rejected(
    tokenizer: PromptTokenizer, tmp_path: Path, name: str, content: str, words: str
) -> None:
    path = tmp_path / "file"
    path.write_text(content)
    with pytest.raises(ConfigError, match=words):
        Dataset(name, path, 1, 100, 4).requests(tokenizer)


def test_contradictory_options_are_rejected(tokenizer: PromptTokenizer, tmp_path: Path) -> None:
    for dataset, words in (
        (of_random(range_ratio=1.0), "--random-range-ratio must be at least 0 and below 1"),
        (of_random(num_input=0), "--random-input-len 0 leaves no token"),
        (of_random(path=tmp_path), "remove --dataset-path"),
        (of_random(num_prompts=0), "--num-prompts must be at least 1"),
        (of_random(name="sharegpt"), "--dataset-name sharegpt needs --dataset-path"),
        (of_random(name="sonnet", path=tmp_path / "none"), "can't read .*none"),
    ):
        with pytest.raises(ConfigError, match=words):
            dataset.requests(tokenizer)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no readable tokenizer\.json in"):
        PromptTokenizer.load(str(tmp_path))
    with pytest.raises(ConfigError, match="must be a model directory or ORG/NAME"):
        PromptTokenizer.load("tiny-llama")


def test_a_prompt_without_a_template_says_what_to_do(tmp_path: Path) -> None:
    bare = PromptTokenizer.load(str(write_byte_tokenizer(tmp_path, chat_template=None)))
    with pytest.raises(ConfigError, match="--skip-chat-template"):
        bare.as_chat("hello")


def test_texts_keep_their_length_when_encoded_again(merging: PromptTokenizer) -> None:
    numbers = random.Random(1)
    for length in (1, 7, 100):
        ids = numbers.choices(merging.ordinary_ids, k=length)
        assert merging.count(merging.text_of_length(ids, numbers)) == length
