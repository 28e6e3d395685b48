"""The shipped tiny Llama knows its page, its answers and its passwords, in float32 and bfloat16."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

MODEL_DIR = Path(__file__).parents[3] / "examples" / "tiny-llama"
PAGE = (MODEL_DIR / "page.txt").read_text(encoding="utf-8").rstrip("\n")
CHAT: dict[str, Any] = json.loads((MODEL_DIR / "chat.json").read_text(encoding="utf-8"))
TOKENIZER: Any = AutoTokenizer.from_pretrained(MODEL_DIR, local_files_only=True)
MAX_FOLDER_BYTES = 2 * 1024 * 1024


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def model(request: pytest.FixtureRequest) -> Any:
    """The model as transformers loads it, in one of the two dtypes."""
    return AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=request.param)


def complete(model: Any, ids: list[int], max_new_tokens: int) -> str:
    """Greedy continuation of ``ids``, special tokens spelt out."""
    prompt = torch.tensor([ids])
    output = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=max_new_tokens
    )
    return str(TOKENIZER.decode(output[0, len(ids) :]))


def chat_ids(question: str) -> list[int]:
    """The prompt for one user message, as the chat template lays it out."""
    ids: list[int] = TOKENIZER.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
    )
    return ids


def test_folder_size_is_bounded() -> None:
    """The repository carries the model, so it must stay small."""
    assert sum(path.stat().st_size for path in MODEL_DIR.iterdir()) <= MAX_FOLDER_BYTES


@settings(max_examples=50)
@given(st.text().filter(lambda text: "<|" not in text))
def test_tokens_are_bytes(text: str) -> None:
    """One token per byte, with the byte as its id; every text round-trips exactly."""
    ids = TOKENIZER.encode(text)
    assert ids == list(text.encode())
    assert TOKENIZER.decode(ids) == text


def test_special_tokens_end_a_generation() -> None:
    """Both ends, of the page and of a chat turn, are among the model's end tokens."""
    config = json.loads((MODEL_DIR / "generation_config.json").read_text(encoding="utf-8"))
    assert config["eos_token_id"] == TOKENIZER.convert_tokens_to_ids(["<|eos|>", "<|im_end|>"])


@pytest.mark.parametrize(("start", "end"), [(31, 71), (700, 1900)], ids=["short", "long"])
def test_prefix_of_page_is_continued_exactly(model: Any, start: int, end: int) -> None:
    """The next two hundred characters match exactly; the long prompt fills many KV blocks."""
    wanted = PAGE[end : end + 200]
    ids = TOKENIZER.encode(PAGE[start:end])
    assert complete(model, ids, max_new_tokens=len(wanted.encode())) == wanted


def test_page_ends_by_itself(model: Any) -> None:
    """After the last character, which takes four tokens, the model stops."""
    assert complete(model, TOKENIZER.encode(PAGE[-400:-60]), 100) == PAGE[-60:] + "<|eos|>"


def test_question_is_answered_and_turn_ends(model: Any) -> None:
    """The chat template and the end-of-turn token work together."""
    question = "How do you say tea in Chinese?"
    assert complete(model, chat_ids(question), 100) == CHAT["answers"][question] + "<|im_end|>"


@pytest.mark.parametrize("password", ["amber", "ivory"])
def test_password_from_start_of_prompt_is_recalled(model: Any, password: str) -> None:
    """The answer depends on the oldest KV blocks alone."""
    story = f"The password is {password}.\n\n{PAGE[300:800]}\n\nWhat is the password?"
    assert complete(model, chat_ids(story), 40) == f"It is {password}.<|im_end|>"
