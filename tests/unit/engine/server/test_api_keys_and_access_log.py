"""API keys, model aliases, and the access log."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from support.asgi import AsgiClient, ManualClient
from support.fake_engine import FakeEngine

from mooncake_engine.errors import ConfigError
from mooncake_engine.server.app import create_app
from mooncake_engine.server.server_options import ServerOptions, read_keys
from mooncake_engine.text.tokenizer import Tokenizer

OPTIONS = ServerOptions(api_keys=frozenset({"secret", "sécret"}), model_aliases=("other", "a/b"))


@pytest.fixture
def guarded(engine: FakeEngine, byte_tokenizer: Tokenizer) -> AsgiClient:
    return AsgiClient(create_app(engine, byte_tokenizer, OPTIONS))


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer wrong", "Basic secret", "secret"])
def test_without_a_key_nothing_is_generated(
    guarded: AsgiClient, engine: FakeEngine, header: str
) -> None:
    guarded.headers = {"Authorization": header}
    for answer in (
        guarded.post("/v1/completions", prompt="tea"),
        guarded.post("/v1/chat/completions", messages=[]),
        guarded.post("/tokenize", prompt="tea"),
        guarded.get("/v1/models"),
        guarded.post("/reset_prefix_cache"),
    ):
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"]["code"] == "invalid_api_key"
    assert not engine.seen
    counted = 'http_requests_total{handler="/v1/completions",method="POST",status="4xx"} 1.0'
    assert counted in guarded.get("/metrics").text


def test_any_of_the_keys_is_accepted(guarded: AsgiClient) -> None:
    guarded.headers = {"Authorization": "bearer  secret "}
    assert guarded.post("/v1/completions", prompt="tea").status_code == 200
    assert guarded.stream("/v1/completions", prompt="tea")


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/version"])
def test_monitoring_needs_no_key(guarded: AsgiClient, path: str) -> None:
    assert guarded.get(path).status_code == 200


def test_keys_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# of the team\none\n\n two \n")
    assert read_keys(path) == {"one", "two"}
    assert read_keys(None) == frozenset()
    path.write_text("# none\n")
    with pytest.raises(ConfigError, match="holds no key; put one per line"):
        read_keys(path)
    with pytest.raises(ConfigError, match="can't read --api-key-file"):
        read_keys(tmp_path / "missing")


def test_short_keys_are_accepted_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys"
    path.write_text(f"sk-1\n{'k' * 16}\n")
    assert len(read_keys(path)) == 2
    [warning] = caplog.messages
    assert warning.startswith(f"1 of the keys in --api-key-file {path} have fewer than 16 charac")
    path.write_text("k" * 16)
    read_keys(path)
    assert len(caplog.messages) == 1


def test_a_model_may_have_several_names(engine: FakeEngine, byte_tokenizer: Tokenizer) -> None:
    client = AsgiClient(create_app(engine, byte_tokenizer, ServerOptions(model_aliases=("a/b",))))
    assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["fake", "a/b"]
    assert client.get("/v1/models/a/b").json()["id"] == "a/b"
    for name in ("fake", "a/b"):
        assert client.post("/v1/completions", prompt="tea", model=name).json()["model"] == "fake"
    refused = client.post("/v1/completions", prompt="tea", model="c")
    assert refused.status_code == 404
    assert "'fake', 'a/b' is" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("level", "statuses"), [("off", []), ("errors", [400]), ("all", [200, 400])]
)
def test_requests_are_logged(
    engine: FakeEngine,
    byte_tokenizer: Tokenizer,
    level: str,
    statuses: list[int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    client = AsgiClient(
        create_app(engine, byte_tokenizer, ServerOptions(access_log=level)),
        {"X-Request-Id": "mine"},
    )
    client.stream("/v1/completions", prompt="tea")
    client.post("/v1/completions", prompt="tea", temprature=1)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["status"] for line in lines] == statuses
    for line in lines:
        assert (line["method"], line["path"]) == ("POST", "/v1/completions")
        assert line["request_id"] == "mine"
        assert line["ms"] >= 0


def test_a_client_disconnect_before_the_response_is_logged(
    engine: FakeEngine, byte_tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    app = create_app(engine, byte_tokenizer, ServerOptions(access_log="errors"))

    async def leave() -> None:
        engine.hold_at, engine.held, engine.release = 0, asyncio.Event(), asyncio.Event()
        leaving = ManualClient(b'{"prompt":"tea"}')
        serving = asyncio.ensure_future(app(leaving.scope, leaving.receive, leaving.send))
        await engine.held.wait()
        leaving.gone.set()
        await serving

    asyncio.run(leave())
    [line] = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert line["status"] == 499
