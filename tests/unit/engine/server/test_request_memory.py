"""A finished request's memory is freed at once, without the garbage collector."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.asgi import AsgiClient

from mooncake_engine.server.openai_protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

BODIES = (ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest)
USER = {"role": "user", "content": "hi"}


@pytest.fixture
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def num_bodies() -> int:
    return sum(type(found) in BODIES for found in gc.get_objects())


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", {"messages": [USER] * 5000}, 400),
        ("/v1/chat/completions", {"messages": [USER], "max_tokens": 2}, 200),
        ("/v1/completions", {"prompt": "a", "stop_token_ids": [5] * 2000}, 400),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"100000": 1}}, 400),
        ("/v1/completions", {"prompt": "a", "structured_outputs": {"regex": "("}}, 400),
        ("/v1/completions", {"prompt": "a", "max_tokens": 2}, 200),
        ("/v1/completions", {"prompt": "a", "n": 3, "max_tokens": 2}, 200),
        ("/tokenize", {"prompt": "x" * 70_000}, 400),
        ("/tokenize", {"prompt": "a"}, 200),
        ("/detokenize", {"tokens": [65] * 2_000_000}, 400),
    ],
)
def test_a_finished_request_leaves_no_garbage(
    client: AsgiClient, path: str, body: dict[str, Any], status: int
) -> None:
    before = num_bodies()
    for _ in range(3):
        assert client.post(path, **body).status_code == status
    deadline = time.monotonic() + 5.0
    while num_bodies() != before:  # a worker thread may still hold a reference
        assert time.monotonic() < deadline
        time.sleep(0.001)
