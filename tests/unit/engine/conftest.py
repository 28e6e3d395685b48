from __future__ import annotations

import pytest
from support.asgi import AsgiClient
from support.byte_tokenizer import write_byte_tokenizer, write_fallback_tokenizer
from support.fake_engine import FakeEngine

from mooncake_engine.server.app import create_app
from mooncake_engine.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_byte_tokenizer(tmp_path_factory.mktemp("byte-level")))


@pytest.fixture(scope="session")
def fallback_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_fallback_tokenizer(tmp_path_factory.mktemp("byte-fallback")))


@pytest.fixture
def engine() -> FakeEngine:
    """An engine that answers with the prompt in capitals."""
    return FakeEngine()


@pytest.fixture
def client(engine: FakeEngine, byte_tokenizer: Tokenizer) -> AsgiClient:
    return AsgiClient(create_app(engine, byte_tokenizer), {"X-Request-Id": "req-1"})
