"""Requests that change or report their logits, on a GPU: their outputs, and the waits of steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.changed_logits import check_changed_logits
from support.cuda_waits import watched
from support.decoding import Decoder
from support.pd import prompt_of, write_model

from mooncake_engine.config import EngineConfig
from mooncake_engine.execution.engine_plan import make_plan
from mooncake_engine.execution.executor import InProcessExecutor
from mooncake_engine.sampling_params import Grammar, GrammarKind, SamplingParams
from mooncake_hal.backend import Backend

pytestmark = pytest.mark.cuda
NEEDS: dict[str, dict[str, Any]] = {
    "bias": {"logit_bias": ((7, 9.0), (8, -9.0))},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4},
    "no end yet": {"min_tokens": 10_000, "max_tokens": None, "stop_token_ids": (11,)},
    "log probabilities": {"logprobs": 3},
    "allowed tokens": {"allowed_token_ids": (7, 8, 9)},
    "bad words": {"bad_words_token_ids": ((7,), (8, 9), (9, 9))},
    "grammar": {"grammar": Grammar(GrammarKind.REGEX, "[a-z]*")},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def executor(cuda: Backend, model: Path) -> Iterator[InProcessExecutor]:
    config = EngineConfig(model, dtype="bfloat16", num_kv_blocks=256, max_num_seqs=4)
    with closing(InProcessExecutor(make_plan(config, cuda), cuda)) as loaded:
        loaded.warm_up()
        yield loaded


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "random"])
@pytest.mark.parametrize("need", NEEDS)
def test_a_step_waits_once_with_any_sampling_parameters(
    executor: InProcessExecutor, need: str, temperature: float
) -> None:
    """For its tokens; with a grammar also for the previous step's, which are ready by then."""
    sampling = SamplingParams(temperature=temperature, **NEEDS[need])
    prompts, steps = [prompt_of(40, row) for row in range(4)], 20
    with closing(Decoder(executor, prompts, 128, sampling=sampling)) as made:
        for _ in range(3):
            made.step()
        with watched() as waits:
            for _ in range(steps):
                made.step()
    assert len(waits) <= steps, waits[0]


def test_logits_are_changed_with_async_scheduling(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"backend": "cuda", "dtype": "float32"}
    check_changed_logits(model, monkeypatch, options, tolerance=1e-3)
