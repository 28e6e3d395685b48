from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from support.asgi_server import serving_app
from support.byte_tokenizer import write_byte_tokenizer
from support.fake_engine import FakeEngine
from support.programs import TINY_LLAMA, running, serving

from mooncake_engine.server.app import create_app
from mooncake_engine.text.tokenizer import Tokenizer


@dataclass
class Served:
    """A fake engine behind a real server."""

    url: str
    engine: FakeEngine


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_byte_tokenizer(tmp_path_factory.mktemp("byte-level")))


@pytest.fixture
def served(byte_tokenizer: Tokenizer) -> Iterator[Served]:
    engine = FakeEngine()
    with serving_app(create_app(engine, byte_tokenizer)) as url:
        yield Served(url, engine)


@pytest.fixture(scope="session")
def tiny_llama_url() -> Iterator[str]:
    """One instance of the real engine with both roles; tool calls use the Hermes format."""
    with serving("--tool-call-parser", "hermes") as (url, _):
        yield url


@pytest.fixture(scope="session")
def tiny_llama_pair_url() -> Iterator[str]:
    """The same as a prefill and a decode instance behind a proxy."""
    argv = ["up", "--model", str(TINY_LLAMA), "--port", "0", "--num-kv-blocks", "1024"]
    with running("mooncake_engine.cli", *argv, "--tool-call-parser", "hermes") as program:
        yield program.wait_for("curl -N ").split()[2].removesuffix("/v1/chat/completions")


@pytest.fixture(params=["one instance", "pair"])
def either_url(request: pytest.FixtureRequest) -> str:
    """One instance, and a pair behind a proxy: both must serve the same."""
    name = "tiny_llama_url" if request.param == "one instance" else "tiny_llama_pair_url"
    return str(request.getfixturevalue(name))
