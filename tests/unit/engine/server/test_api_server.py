"""The checks before an instance loads its model."""

from __future__ import annotations

from pathlib import Path

import pytest

from mooncake_engine.config import EngineConfig, Role
from mooncake_engine.errors import CheckpointError, ConfigError
from mooncake_engine.server import api_server
from mooncake_engine.server.api_server import check_before_loading, serve
from mooncake_engine.server.server_options import ServerOptions
from mooncake_kv.config import KVTransferConfig

TINY_LLAMA = Path(__file__).parents[4] / "examples" / "tiny-llama"


def test_engine_config_has_the_port_of_the_api() -> None:
    """The engine needs it to keep transports from using that port."""
    configs: list[EngineConfig] = []

    def start(config: EngineConfig) -> None:
        configs.append(config)
        raise ConfigError("the engine was started")

    config = EngineConfig(TINY_LLAMA, role=Role.DECODE, kv_transfer=KVTransferConfig())
    with pytest.raises(ConfigError, match="the engine was started"):
        serve(config, "127.0.0.1", 0, start)  # type: ignore[arg-type]  # it never returns
    [found] = configs
    assert found.kv_transfer is not None
    assert found.kv_transfer.api_port > 0


@pytest.mark.parametrize(
    ("host", "kv_transfer", "is_reported"),
    [
        ("10.0.0.1", KVTransferConfig(), True),
        ("0.0.0.0", KVTransferConfig(host="localhost"), True),
        ("prefill-0", KVTransferConfig(host="0.0.0.0", advertise_host="127.0.0.1"), True),
        ("10.0.0.1", KVTransferConfig(host="10.0.0.1"), False),
        ("10.0.0.1", KVTransferConfig(advertise_host="10.0.0.1"), False),
        ("10.0.0.1", KVTransferConfig(host="0.0.0.0"), False),
        ("127.0.0.1", KVTransferConfig(), False),
        ("localhost", KVTransferConfig(), False),
        ("10.0.0.1", None, False),
    ],
)
def test_kv_that_only_this_host_reaches_is_reported(
    host: str,
    kv_transfer: KVTransferConfig | None,
    is_reported: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    role = Role.BOTH if kv_transfer is None else Role.PREFILL
    config = EngineConfig(TINY_LLAMA, role=role, kv_transfer=kv_transfer)
    check_before_loading(config, host, ServerOptions())
    assert ("peers on other hosts can't exchange KV" in caplog.text) is is_reported


@pytest.mark.parametrize(
    ("host", "keys", "is_reported"),
    [("0.0.0.0", (), True), ("0.0.0.0", ("k" * 32,), False), ("127.0.0.1", (), False)],
)
def test_api_that_is_open_to_other_hosts_is_reported(
    host: str, keys: tuple[str, ...], is_reported: bool, caplog: pytest.LogCaptureFixture
) -> None:
    options = ServerOptions(api_keys=frozenset(keys))
    check_before_loading(EngineConfig(TINY_LLAMA), host, options)
    assert ("whoever reaches the port can send requests" in caplog.text) is is_reported


def test_key_in_vllms_environment_does_not_leave_the_api_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    check_before_loading(EngineConfig(TINY_LLAMA), "localhost", ServerOptions())
    with pytest.raises(ConfigError, match="VLLM_API_KEY is set: it is not read here"):
        check_before_loading(EngineConfig(TINY_LLAMA), "0.0.0.0", ServerOptions())


def test_model_is_loaded_while_the_tokenizer_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A core in a process of its own has started to load by then; it ends if there is no tokenizer
    for its tokens."""
    events: list[str] = []

    class Loading:
        def __init__(self, config: EngineConfig) -> None:
            events.append("the engine loads")

        def close(self) -> None:
            events.append("the engine is closed")

    class NoTokenizer:
        @staticmethod
        def load(*_: object) -> None:
            events.append("the tokenizer loads")
            raise CheckpointError("no tokenizer")

    monkeypatch.setattr(api_server, "Tokenizer", NoTokenizer)
    with pytest.raises(CheckpointError, match="no tokenizer"):
        serve(EngineConfig(TINY_LLAMA), "127.0.0.1", 0, Loading)  # type: ignore[arg-type]
    assert events == ["the engine loads", "the tokenizer loads", "the engine is closed"]
