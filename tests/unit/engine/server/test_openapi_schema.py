"""``GET /openapi.json`` describes what the application serves."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
import schemathesis
from support.asgi import AsgiClient
from support.fake_engine import FakeEngine

from mooncake_engine.server.app import create_app
from mooncake_engine.text.tokenizer import Tokenizer

Json = dict[str, Any]
BODYLESS = {"/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/reset_prefix_cache", "/ping"}


@pytest.fixture
def client(byte_tokenizer: Tokenizer) -> AsgiClient:
    return AsgiClient(create_app(FakeEngine(), byte_tokenizer))


@pytest.fixture
def schema(client: AsgiClient) -> Json:
    response = client.get("/openapi.json")
    assert response.headers["content-type"] == "application/json"
    found: Json = response.json()
    return found


def test_a_standard_reader_accepts_the_schema(schema: Json) -> None:
    loaded = schemathesis.openapi.from_dict(schema)
    loaded.validate()
    assert len(list(loaded.get_all_operations())) == sum(map(len, schema["paths"].values()))


def test_the_schema_has_every_route_and_body(schema: Json) -> None:
    posts = {path: item["post"] for path, item in schema["paths"].items() if "post" in item}
    assert {path for path, post in posts.items() if "requestBody" not in post} == BODYLESS
    assert "/v1/models/{model}" in schema["paths"]


@pytest.mark.parametrize(
    ("body", "is_good"),
    [
        ({"prompt": "a", "max_tokens": 3}, True),
        ({"prompt": ["a"], "logit_bias": {"5": 1.5}}, True),
        ({"prompt": "a", "logit_bias": {"five": 1.5}}, False),
        ({"prompt": "a", "max_token": 3}, False),
        ({"prompt": "a", "suffix": "b"}, False),
        ({"max_tokens": 3}, False),
        ({"prompt": "a", "temperature": "hot"}, False),
        ({"prompt": "a", "response_format": {"type": "json"}}, False),
    ],
)
def test_the_schema_matches_the_server(
    client: AsgiClient, schema: Json, body: Json, is_good: bool
) -> None:
    components = schema["components"]
    checker = jsonschema.Draft202012Validator(
        {"$ref": "#/components/schemas/CompletionRequest", "components": components}
    )
    assert checker.is_valid(body) is is_good
    response = client.post("/v1/completions", **body)
    assert response.status_code == (200 if is_good else 400), response.text
    if not is_good:
        error = {"$ref": "#/components/schemas/Error", "components": components}
        jsonschema.validate(json.loads(response.text), error)
