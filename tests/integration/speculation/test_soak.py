"""Prompts with shared prefixes, groups, aborts and memory pressure, round after round.

The draft model is the model itself, so that every draft must be accepted: a single wrong entry in
its KV bookkeeping would show.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from support.checkpoints import random_model, write_checkpoint
from support.core_runs import random_prompt, serve_all

from mooncake_engine.assembly import build_engine
from mooncake_engine.config import EngineConfig
from mooncake_engine.core import EngineCore
from mooncake_engine.core_messages import AbortRequest, AddRequest
from mooncake_engine.messages import EngineRequest
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.speculative_config import SpeculativeConfig, SpeculativeMethod

ROUNDS = 6


def random_round(numbers: random.Random, round_number: int) -> list[EngineRequest]:
    """Some prompts from three prefixes and four suffixes, with one to three choices each."""
    requests = []
    for group in range(6):
        beginning = random_prompt(numbers.randrange(3), numbers.randrange(5, 60))
        prompt = beginning + random_prompt(100 + numbers.randrange(4), numbers.randrange(1, 9))
        size = numbers.choice([1, 1, 2, 3])
        for index in range(size):
            sampling = SamplingParams(
                temperature=numbers.choice([0.0, 0.8]),
                seed=numbers.randrange(1000),
                max_tokens=numbers.randrange(1, 30),
                ignore_eos=True,
            )
            name = f"r{round_number}-{group}"
            shared = name if size > 1 else None
            requests.append(EngineRequest(f"{name}-{index}", prompt, sampling, group=shared))
    return requests


def begin_and_abort(core: EngineCore, requests: list[EngineRequest], num_steps: int) -> None:
    """Abort requests in whatever state they are after a few steps."""
    for request in requests:
        core.post(AddRequest(request))
    for _ in range(num_steps):
        core.step()
        core.check_integrity()
    for request in requests:
        core.post(AbortRequest(request.request_id))
    core.step()


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["in turn", "ahead"])
def test_every_draft_is_accepted(tmp_path: Path, *, async_scheduling: bool) -> None:
    checkpoint = write_checkpoint(random_model("llama"), tmp_path)
    plenty = EngineConfig(checkpoint, num_kv_blocks=800, block_size=4, dtype="float32", threads=1)
    short = replace(
        plenty,
        num_kv_blocks=32,
        max_model_len=100,
        max_num_seqs=12,
        max_num_batched_tokens=48,
        swap_space_bytes=1 << 20,
        speculative_config=SpeculativeConfig(SpeculativeMethod.DRAFT, 5, checkpoint),
        async_scheduling=async_scheduling,
    )
    numbers = random.Random(3)
    alone, core = build_engine(plenty).core, build_engine(short).core
    for round_number in range(ROUNDS):
        requests = random_round(numbers, round_number)
        expected = serve_all(alone, requests).answers
        doomed = [
            replace(request, request_id=f"{request.request_id}-doomed", group=None)
            for request in numbers.sample(requests, 3)
        ]
        begin_and_abort(core, doomed, numbers.randrange(1, 6))
        assert serve_all(core, requests).answers == expected
    stats = core.report().stats
    assert stats.speculation is not None
    assert stats.speculation.num_draft_tokens > 100
    assert stats.speculation.num_accepted_tokens > 0.99 * stats.speculation.num_draft_tokens
    assert stats.num_preemptions > stats.num_swap_outs > 0
    assert stats.prefix_cache_hits > 0
    for each in (alone, core):
        each.close()
