"""No body, however malformed, causes a server error."""

from __future__ import annotations

from typing import Any

from hypothesis import example, given, settings, strategies as st
from support.asgi import AsgiClient
from support.fake_engine import FakeEngine

from mooncake_engine.server.app import create_app
from mooncake_engine.server.openai_protocol import ChatRequest, CompletionRequest
from mooncake_engine.text.tokenizer import Tokenizer

ODD: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(alphabet="a0é🍵\x00 ", max_size=4)
    | st.sampled_from(["user", "assistant", "text", "do_remote_prefill"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "7"]), inner)
        | st.dictionaries(
            st.sampled_from(
                ["do_remote_decode", "do_remote_prefill", "choices", "created", "finished_update"]
            ),
            inner,
        )
    ),
    max_leaves=6,
)
MESSAGES = st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": st.text()}))


def bodies(fields: tuple[str, ...]) -> st.SearchStrategy[dict[str, Any]]:
    odd = st.dictionaries(st.sampled_from([*fields, "nonsense"]), ODD, max_size=4)
    fine = st.fixed_dictionaries({"prompt": st.text(max_size=5)} if "prompt" in fields else {})
    chat = st.fixed_dictionaries({"messages": MESSAGES} if "messages" in fields else {})
    return st.builds(
        lambda *parts: {k: v for part in parts for k, v in part.items()}, fine, chat, odd
    )


def status(tokenizer: Tokenizer, path: str, body: dict[str, Any]) -> int:
    return AsgiClient(create_app(FakeEngine(), tokenizer)).post(path, **body).status_code


@settings(max_examples=150)
@example(body={"prompt": "0", "ignore_eos": True})
@given(body=bodies(CompletionRequest.__struct_fields__))
def test_completions(byte_tokenizer: Tokenizer, body: dict[str, Any]) -> None:
    assert status(byte_tokenizer, "/v1/completions", body) in (200, 400, 404)


@settings(max_examples=150)
@given(body=bodies(ChatRequest.__struct_fields__))
def test_chat(byte_tokenizer: Tokenizer, body: dict[str, Any]) -> None:
    assert status(byte_tokenizer, "/v1/chat/completions", body) in (200, 400, 404)
