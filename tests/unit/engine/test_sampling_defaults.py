"""Sampling defaults from ``generation_config.json``: applied as in vLLM, overridden, rejected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mooncake_engine.config import EngineConfig, read_chat_template
from mooncake_engine.errors import CheckpointError, ConfigError
from mooncake_engine.messages import EngineInfo
from mooncake_engine.sampling_defaults import (
    NO_DEFAULTS,
    SamplingDefaults,
    read_sampling_defaults,
)
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.server.openai_protocol import ChatMessage, ChatRequest, CompletionRequest
from mooncake_engine.server.sampling_fields import chat_sampling, completion_sampling
from mooncake_engine.text.tokenizer import Tokenizer
from mooncake_engine.text.tokenizer_files import tokenizer_fingerprint

INFO = EngineInfo(512, 300, (2,), 8, 16, "engine")
TINY = Path("examples/tiny-llama")
QWEN3 = {"do_sample": True, "eos_token_id": 2, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
HELLO = [ChatMessage(role="user", content="hi")]


def write(directory: Path, values: dict[str, Any]) -> EngineConfig:
    (directory / "generation_config.json").write_text(json.dumps(values))
    return EngineConfig(model=directory)


def test_requests_without_parameters_use_the_models_defaults(tmp_path: Path) -> None:
    defaults = read_sampling_defaults(write(tmp_path, QWEN3))
    found = chat_sampling(ChatRequest(messages=HELLO), INFO, defaults)
    assert (found.temperature, found.top_k, found.top_p, found.min_p) == (0.6, 20, 0.95, 0.0)
    assert str(defaults) == "temperature 0.6, top_p 0.95, top_k 20"


def test_request_parameters_override_the_defaults(tmp_path: Path) -> None:
    defaults = read_sampling_defaults(write(tmp_path, QWEN3))
    request = CompletionRequest(prompt="hi", temperature=0.0, top_k=0)
    found = completion_sampling(request, INFO, defaults)
    assert (found.temperature, found.top_k, found.top_p) == (0.0, 0, 0.95)


def test_max_new_tokens_limits_every_request(tmp_path: Path) -> None:
    defaults = read_sampling_defaults(write(tmp_path, {"max_new_tokens": 10}))
    lengths = [
        chat_sampling(ChatRequest(messages=HELLO, max_tokens=wanted), INFO, defaults).max_tokens
        for wanted in (None, 5, 50)
    ]
    assert lengths == [10, 5, 10]


@pytest.mark.parametrize(
    ("wanted", "num_generated", "left"), [(None, 4, 6), (8, 4, 6), (2, 4, 2), (None, 99, 1)]
)
def test_max_new_tokens_counts_output_of_other_instances(
    wanted: int | None, num_generated: int, left: int
) -> None:
    assert SamplingDefaults({}, 10).limit(wanted, num_generated) == left
    assert SamplingDefaults({}).limit(wanted, num_generated) == wanted


@pytest.mark.parametrize("choice", ["none", "vllm"])
def test_generation_config_option_disables_the_defaults(tmp_path: Path, choice: str) -> None:
    write(tmp_path, QWEN3)
    config = EngineConfig(model=tmp_path, generation_config=choice)
    assert read_sampling_defaults(config) is NO_DEFAULTS


def test_defaults_may_come_from_another_directory(tmp_path: Path) -> None:
    write(tmp_path, QWEN3)
    config = EngineConfig(model=Path("no/model"), generation_config=str(tmp_path))
    assert read_sampling_defaults(config).params().top_k == 20
    with pytest.raises(ConfigError, match="--generation-config must be auto, none, or a dir"):
        read_sampling_defaults(EngineConfig(model=tmp_path, generation_config="no/such"))


def test_model_without_defaults_uses_the_engines() -> None:
    assert read_sampling_defaults(EngineConfig(model=TINY)).params() == SamplingParams()
    assert read_sampling_defaults(EngineConfig(model=Path("no/model"))) is NO_DEFAULTS


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"temperature": "warm"}, "temperature must be a number, found 'warm'"),
        ({"top_k": 1.5}, "top_k must be a number, found 1.5"),
        ({"top_p": 0}, r"top_p must be in \(0.0, 1.0\], got 0"),
        ({"max_new_tokens": 0}, "max_tokens must be in"),
    ],
)
def test_invalid_values_are_named(tmp_path: Path, values: dict[str, Any], reason: str) -> None:
    with pytest.raises(CheckpointError, match=f"generation_config.json: {reason}"):
        read_sampling_defaults(write(tmp_path, values))


def test_invalid_json_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"generation_config.json can't be read"):
        read_sampling_defaults(EngineConfig(model=tmp_path))


def test_chat_template_option_replaces_the_models(tmp_path: Path) -> None:
    template = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
    (tmp_path / "t.jinja").write_text(template)
    assert read_chat_template(str(tmp_path / "t.jinja")) == template
    assert read_chat_template(template) == template
    assert read_chat_template(None) is None
    with pytest.raises(ConfigError, match="--chat-template no/file can't be read"):
        read_chat_template("no/file")
    tokenizer = Tokenizer.load(TINY, template)
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "[hi]"
    assert tokenizer.fingerprint != Tokenizer.load(TINY).fingerprint
    assert tokenizer.fingerprint == tokenizer_fingerprint(TINY, template)
