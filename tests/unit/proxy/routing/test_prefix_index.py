"""Prompts as token ids: one prompt is the same in every format of a request."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, strategies as st

from mooncake_proxy.api.openai_bodies import OpenAIEndpoint, ParsedRequest, parse_request
from mooncake_proxy.config import ProxyConfig
from mooncake_proxy.errors import (
    ConfigError,
)
from mooncake_proxy.routing import prefix_index
from mooncake_proxy.routing.prefix_index import (
    BLOCK_BYTES,
    MAX_CHARACTERS,
    TOKENS_PER_BLOCK,
    PrefixIndex,
    load_tokenizer,
    prompt_bytes,
    prompt_root,
    prompt_text,
    text_hashes,
    token_hashes,
    token_ids_of,
)

MODEL = Path(__file__).parents[4] / "examples" / "tiny-llama"
TOKENS = st.lists(st.integers(0, 2**31), max_size=400)


def text_in(body: dict[str, Any]) -> str | None:
    parsed, _ = parse_request(json.dumps(body).encode())
    return prompt_text(
        OpenAIEndpoint.CHAT if "messages" in body else OpenAIEndpoint.COMPLETION, parsed
    )


def test_messages_beyond_the_characters_that_count_are_not_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decode = Mock(wraps=prefix_index._text)
    monkeypatch.setattr(prefix_index, "_text", decode)
    long = {"role": "user", "content": "x" * (MAX_CHARACTERS // 2)}
    text = text_in({"messages": [long] * 10})
    assert text is not None
    assert (text[:7], len(text)) == ("user\nxx", MAX_CHARACTERS)
    assert decode.call_count == 4  # role and content of two messages


def test_inline_media_count_by_a_hash_in_prompts() -> None:
    def chat(image: str) -> dict[str, Any]:
        parts = [
            {"type": "text", "text": "What is it?"},
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}},
        ]
        return {"messages": [{"role": "user", "content": parts}]}

    found = []
    for image in ("A" * 1_000_000, "A" * 999_999 + "B", "A" * 1_000_000):
        parsed, _ = parse_request(json.dumps(chat(image)).encode())
        prompt, text = prompt_bytes(OpenAIEndpoint.CHAT, parsed), text_in(chat(image))
        assert text is not None
        assert len(prompt) < 200
        assert len(text) < 200
        assert "What is it?" in text
        found.append((prompt, text))
    assert found[0] == found[2]
    assert found[0][0] != found[1][0]
    assert found[0][1] != found[1][1]


@given(TOKENS, TOKENS, TOKENS)
def test_prompts_share_exactly_their_common_blocks(
    head: list[int], one: list[int], two: list[int]
) -> None:
    num_common = len(head) // TOKENS_PER_BLOCK
    first, second = token_hashes(head + one), token_hashes(head + two)
    assert first[:num_common] == second[:num_common]
    assert len(first) == len(head + one) // TOKENS_PER_BLOCK


def test_token_ids_differ_from_text_of_same_bytes() -> None:
    assert token_hashes([0] * 64) != text_hashes(bytes(256))


def test_text_and_its_ids_are_same_prompt() -> None:
    tokenize = load_tokenizer(str(MODEL)).encode
    text = text_in({"prompt": "Once upon a time " * 20})
    assert text is not None
    ids = list(tokenize(text))
    parsed, _ = parse_request(json.dumps({"prompt": ids}).encode())
    assert token_ids_of(parsed) == ids
    assert len(token_hashes(ids)) == len(ids) // TOKENS_PER_BLOCK > 0


def test_next_turn_of_chat_keeps_its_prefix() -> None:
    turn = {"role": "user", "content": "Hello!"}
    parts = {"role": "assistant", "content": [{"type": "text", "text": "Hi"}]}
    short, longer = text_in({"messages": [turn]}), text_in({"messages": [turn, parts]})
    assert short == "user\nHello!\n"
    assert longer is not None
    assert longer.startswith(short)


@pytest.mark.parametrize("prompt", [["a", "b"], [[1], [2]], None, 3])
def test_multiple_prompts_have_no_ids(prompt: object) -> None:
    parsed, _ = parse_request(json.dumps({"prompt": prompt}).encode())
    assert token_ids_of(parsed) is None
    assert text_in({"prompt": prompt}) is None


def test_missing_tokenizer_error_names_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"wanted a folder with a tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"--tokenizer .*tokenizer\.json: "):
        load_tokenizer(str(tmp_path))


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "tokenizers":
            raise ModuleNotFoundError(name, name=name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match="--tokenizer wants: pip install tokenizers"):
        load_tokenizer(str(MODEL))


def test_unused_tokenizer_option_is_rejected() -> None:
    with pytest.raises(ConfigError, match="add --policy cost, --policy prefix"):
        ProxyConfig(tokenizers={"": str(MODEL)})


@given(st.binary(max_size=2000), st.binary(max_size=2000), st.binary(max_size=2000))
def test_texts_share_exactly_their_common_blocks(head: bytes, one: bytes, two: bytes) -> None:
    first, second = text_hashes(head + one), text_hashes(head + two)
    num_common = len(head) // BLOCK_BYTES
    assert first[:num_common] == second[:num_common]
    assert len(first) == len(head + one) // BLOCK_BYTES


def test_index_finds_holders_of_prefix() -> None:
    index = PrefixIndex(capacity=100)
    prompt = bytes(range(256)) * 4
    hashes = text_hashes(prompt)
    index.record(hashes, "a")
    index.record(hashes[:2], "b")
    assert index.cached_tokens(hashes) == {"a": 256, "b": 128}
    index.forget({"a"})
    assert index.cached_tokens(hashes) == {"b": 128}
    index.record(tuple(range(100)), "c")
    assert len(index) == 100
    assert index.cached_tokens(hashes) == {}


@pytest.mark.parametrize("hashes", [text_hashes, token_hashes])
@pytest.mark.parametrize(
    "other",
    [ParsedRequest(model="m", cache_salt="b"), ParsedRequest(model="adapter", cache_salt="a")],
    ids=["tenant", "adapter"],
)
def test_prefix_of_other_tenant_or_adapter_is_no_hit(
    hashes: Callable[[bytes, int], tuple[int, ...]], other: ParsedRequest
) -> None:
    index, prompt = PrefixIndex(), bytes(1024)
    own = hashes(prompt, prompt_root(ParsedRequest(model="m", cache_salt="a"), "m"))
    index.record(own, "p")
    assert index.cached_tokens(own)["p"] > 0
    assert not index.cached_tokens(hashes(prompt, prompt_root(other, "m")))


def test_pool_name_and_missing_model_name_share_cache() -> None:
    assert prompt_root(ParsedRequest(model="m"), "m") == prompt_root(ParsedRequest(), "") == 0
