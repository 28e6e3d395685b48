from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import uvicorn
from support.byte_tokenizer import write_byte_tokenizer
from support.fake_engine import FakeEngine
from support.programs import serving

from mooncake_engine.server.api_server import bind
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
    listener = bind("127.0.0.1", 0)
    config = uvicorn.Config(
        create_app(engine, byte_tokenizer), loop="uvloop", http="httptools", log_config=None
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    deadline = time.monotonic() + 10
    while not server.started:
        assert time.monotonic() < deadline, "the server did not start"
        time.sleep(0.01)
    yield Served(f"http://127.0.0.1:{listener.getsockname()[1]}", engine)
    server.should_exit = True
    thread.join()
    listener.close()


@pytest.fixture(scope="session")
def tiny_llama_url() -> Iterator[str]:
    """One instance, both roles, of the real engine; tools are called in Hermes' form."""
    with serving("--tool-call-parser", "hermes") as (url, _):
        yield url
