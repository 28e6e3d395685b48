"""The limit on concurrent requests, and the errors beyond it."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from support.scripted_core import ScriptedExecutor, scripted_engine

from mooncake_engine import LLM, async_engine
from mooncake_engine.async_engine import AsyncEngine
from mooncake_engine.config import EngineConfig
from mooncake_engine.errors import ConfigError, InvalidRequest, Overloaded
from mooncake_engine.messages import EngineRequest
from mooncake_engine.sampling_params import SamplingParams


def test_request_beyond_total_capacity_is_invalid_not_overload() -> None:
    config = EngineConfig(Path("model"), max_num_seqs=2, max_queued_requests=3)
    request = EngineRequest("a", (1, 2, 3), SamplingParams(max_tokens=4))

    async def check(engine: AsyncEngine) -> None:
        engine.check_capacity(5)
        with pytest.raises(InvalidRequest, match=r"6 choices were requested at once.* at most 5"):
            engine.check_capacity(6)
        name = await engine.submit(request, lambda _: None)
        with pytest.raises(Overloaded, match="1 requests are running or waiting already"):
            engine.check_capacity(5)
        # Clients repeat their ids; two live requests of one name would be one.
        assert re.fullmatch("a-[0-9a-f]{16}", name)
        engine.unsubscribe(name)

    built = scripted_engine(ScriptedExecutor())
    engine = AsyncEngine(built.core, built.info, config)
    try:
        asyncio.run(check(engine))
    finally:
        engine.close()


def test_choices_of_a_prompt_check_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest and largest token of a long prompt take milliseconds to find."""
    checked: list[tuple[int, ...]] = []
    monkeypatch.setattr(async_engine, "check_prompt", lambda ids, *_, **__: checked.append(ids))
    config = EngineConfig(Path("model"), max_num_seqs=9)
    sampling = SamplingParams(max_tokens=4)
    groups = ["a", "a", "b", "b", None, None]
    requests = [EngineRequest("r", (1, 2), sampling, group=group) for group in groups]

    async def submit(engine: AsyncEngine) -> None:
        for request in requests:
            engine.unsubscribe(await engine.submit(request, lambda _: None))

    built = scripted_engine(ScriptedExecutor())
    engine = AsyncEngine(built.core, built.info, config)
    try:
        asyncio.run(submit(engine))
    finally:
        engine.close()
    assert len(checked) == 4


def test_negative_capacity_is_rejected() -> None:
    """It would reject every request."""
    with pytest.raises(ConfigError, match="max_queued_requests must not be negative, got -1"):
        EngineConfig(Path("model"), max_queued_requests=-1)


def test_too_many_sequences_for_the_memory_of_the_host_are_a_configuration_error() -> None:
    model = Path(__file__).resolve().parents[3] / "examples" / "tiny-llama"
    with pytest.raises(ConfigError, match=r"does not have the memory.*lower --max-num-seqs"):
        LLM(model, threads=1, num_kv_blocks=24, max_num_seqs=1 << 40)
