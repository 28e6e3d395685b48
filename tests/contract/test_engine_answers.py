"""An instance's answers, compared field by field with golden files, which define the contract.

The proxy reads these answers and writes these requests; a change here affects it, other proxies and
every client. The engine behind the server generates ``é!``: its first token is half a character, so
its text is held back.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.asgi import AsgiClient, Json, events
from support.byte_tokenizer import write_byte_tokenizer
from support.fake_engine import FakeEngine, text_script

from mooncake_engine.server.app import create_app
from mooncake_engine.text.tokenizer import Tokenizer
from mooncake_proxy.api.openai_bodies import (
    OpenAIEndpoint,
    answer_decoder,
    first_token_events,
    kv_transfer_params_decoder,
    parse_request,
)

GOLDEN = Path(__file__).parent / "engine"
EXCHANGES = sorted(path.stem for path in GOLDEN.glob("*.json"))
VOLATILE = ("created", "tokenizer_fingerprint")
HALVES = ["completion", "chat", "completion_logprobs", "completion_n2"]


def load(name: str) -> Json:
    exchange: Json = json.loads((GOLDEN / f"{name}.json").read_text())
    return exchange


def without_volatile(value: Any) -> Any:
    """The value with times and fingerprints replaced by 0."""
    if isinstance(value, list):
        return [without_volatile(element) for element in value]
    if isinstance(value, dict):
        return {
            key: 0 if key in VOLATILE else without_volatile(element)
            for key, element in value.items()
        }
    return value


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> AsgiClient:
    tokenizer = Tokenizer.load(write_byte_tokenizer(tmp_path_factory.mktemp("byte-level")))
    engine = FakeEngine(text_script("é!"), num_cached_tokens=1)
    return AsgiClient(create_app(engine, tokenizer), {"X-Request-Id": "req-1"})


@pytest.mark.parametrize("name", EXCHANGES)
def test_answer_equals_golden_file(client: AsgiClient, name: str) -> None:
    exchange = load(name)
    response = client.post(exchange["path"], **exchange["request"])
    assert response.status_code == exchange["status"]
    assert response.headers["x-request-id" if "v1" in exchange["path"] else "content-type"]
    if "events" in exchange:
        assert without_volatile(events(response.text)) == exchange["events"]
    else:
        assert without_volatile(response.json()) == exchange["answer"]


@pytest.mark.parametrize("half", HALVES)
def test_proxy_parses_prefill_answer(half: str) -> None:
    exchange = load(f"prefill_{half}")
    answer = answer_decoder.decode(json.dumps(exchange["answer"]))
    handed_over = kv_transfer_params_decoder.decode(answer.kv_transfer_params)
    assert handed_over is not None
    assert handed_over.do_remote_prefill
    assert (
        handed_over.remote_request_id
        == exchange["answer"]["kv_transfer_params"]["remote_request_id"]
    )


@pytest.mark.parametrize("half", HALVES)
def test_first_token_of_proxy_and_decode_stream_are_seamless(half: str) -> None:
    """The client sees the same events as from a single instance."""
    prefill, decode, whole = (load(f"{kind}_{half}") for kind in ("prefill", "decode", "whole"))
    endpoint = OpenAIEndpoint.CHAT if "chat" in prefill["path"] else OpenAIEndpoint.COMPLETION
    parsed, _ = parse_request(json.dumps(whole["request"]).encode())
    answer = answer_decoder.decode(json.dumps(prefill["answer"]))
    first = first_token_events(endpoint, answer, parsed).decode()
    joined = [*events(first + "data: [DONE]\n\n"), *decode["events"]]
    assert shown(joined) == shown(whole["events"])
    assert joined[-1]["usage"] == whole["events"][-1]["usage"]


def shown(chunks: list[Json]) -> dict[int, Json]:
    """Per choice, everything that a client assembles from its chunks."""
    answers: dict[int, Json] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        seen = answers.setdefault(
            choice["index"], {"text": "", "roles": [], "tokens": [], "offsets": [], "finish": []}
        )
        delta = choice.get("delta", {})
        seen["text"] += choice.get("text", "") + delta.get("content", "")
        seen["roles"] += [delta["role"]] if "role" in delta else []
        logprobs = choice["logprobs"] or {}
        seen["tokens"] += logprobs.get("tokens", [])
        seen["offsets"] += logprobs.get("text_offset", [])
        seen["finish"] += [choice["finish_reason"]] if choice["finish_reason"] else []
    return answers
