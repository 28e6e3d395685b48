"""Requests of web pages of other origins (CORS)."""

from __future__ import annotations

import pytest
from support.asgi import AsgiClient
from support.fake_engine import FakeEngine

from mooncake_engine.errors import ConfigError
from mooncake_engine.server.app import create_app
from mooncake_engine.server.server_options import ServerOptions
from mooncake_engine.text.tokenizer import Tokenizer

PAGE = "https://chat.example.com"
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


def client_of(engine: FakeEngine, tokenizer: Tokenizer, *origins: str) -> AsgiClient:
    options = ServerOptions(api_keys=frozenset({"secret"}), allowed_origins=origins)
    return AsgiClient(create_app(engine, tokenizer, options))


@pytest.mark.parametrize(("origins", "allowed"), [((PAGE,), PAGE), (("*",), "*")])
def test_pages_of_allowed_origins_use_the_api(
    engine: FakeEngine, byte_tokenizer: Tokenizer, origins: tuple[str, ...], allowed: str
) -> None:
    client = client_of(engine, byte_tokenizer, *origins)
    client.headers = PREFLIGHT
    preflight = client.request("OPTIONS", "/v1/completions")  # without the key
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == allowed
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    client.headers = {"Origin": PAGE}
    refused = client.post("/v1/completions", prompt="tea")
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == allowed  # the page can read why
    client.headers = {"Origin": PAGE, "Authorization": "Bearer secret"}
    for is_streamed in (False, True):
        answer = client.post("/v1/completions", prompt="tea", stream=is_streamed)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == allowed
        assert "X-Request-Id" in answer.headers["access-control-expose-headers"]


@pytest.mark.parametrize("origins", [(), ("https://other.example.com",)])
def test_pages_of_other_origins_do_not(
    engine: FakeEngine, byte_tokenizer: Tokenizer, origins: tuple[str, ...]
) -> None:
    client = client_of(engine, byte_tokenizer, *origins)
    client.headers = PREFLIGHT
    assert client.request("OPTIONS", "/v1/completions").status_code >= 400
    client.headers = {"Origin": PAGE, "Authorization": "Bearer secret"}
    answer = client.post("/v1/completions", prompt="tea")
    assert "access-control-allow-origin" not in answer.headers


def test_origin_with_a_path_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--allowed-origins must be \* or origins of web pages"):
        ServerOptions(allowed_origins=("https://chat.example.com/app",))
