"""Data-parallel ranks in one instance: the tokens of one rank, idle ranks, and failures."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NoReturn

import pytest
from support.checkpoints import random_model, write_checkpoint
from support.core_runs import random_prompt, run_load, serve_all
from support.event_requests import FROM_THE_START, request_events

from mooncake_conductor.index.kv_event_messages import (
    BlocksStored,
    EventBatch,
)
from mooncake_engine.assembly import build_engine
from mooncake_engine.config import EngineConfig
from mooncake_engine.core_messages import AbortRequest, AddRequest
from mooncake_engine.data_parallel_core import DataParallelCore
from mooncake_engine.errors import ConfigError, EngineDead
from mooncake_engine.execution.process_executor import ProcessExecutor
from mooncake_engine.messages import EngineRequest
from mooncake_engine.node_config import NodeConfig
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.speculative_config import SpeculativeConfig
from mooncake_engine.step_watchdog import StepWatch, StepWatchdog
from mooncake_kv.kv_events_config import KVEventsConfig
from mooncake_kv.pool.pool_config import KVPoolConfig

LOOPBACK = "tcp://127.0.0.1:*"
EVERY_STEP, PROMPTS = 1, 20
"""Minimum tokens of a rank in a round that uses dispatch; below it, tokens go to every rank."""
LENGTHS = (3, 90, 25, 41, 7)
"""Prompt lengths: some run in chunks; their number is odd, so that ranks are idle at the end."""
ANSWERS = (12, 3, 20, 1, 9)
MOE = ("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3")
OPTIONS: dict[str, Any] = {"num_kv_blocks": 32, "max_num_batched_tokens": 40, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        family: write_checkpoint(random_model(family), tmp_path_factory.mktemp(family))
        for family in ("llama", *MOE)
    }


def requests(*, dp_size: int = 1) -> list[EngineRequest]:
    """Each request names its rank: choices by load would depend on the order of answers."""
    return [
        EngineRequest(
            f"r{number}",
            random_prompt(number, length),
            SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True),
            data_parallel_rank=number % dp_size,
        )
        for number, (length, most) in enumerate(zip(LENGTHS, ANSWERS, strict=True))
    ]


QUICK = (
    ("qwen3_moe", 2, 1, 2),
    ("deepseek_v3", 2, 2, 4),
)
"""Runs in `make test`; `make test-slow` runs all others."""


def divisions() -> Iterator[Any]:
    """Family, dp_size, tp_size and ep_size of every division with experts, and of one without."""
    yield "llama", 2, 1, 1
    for family, dp_size, tp_size, ep_size in product(MOE, (1, 2, 4), (1, 2), (1, 2, 4)):
        if dp_size * tp_size > 1 and dp_size * tp_size % ep_size == 0:
            division = family, dp_size, tp_size, ep_size
            marks = () if division in QUICK else (pytest.mark.slow,)
            yield pytest.param(*division, marks=marks)


@pytest.mark.parametrize(("family", "dp_size", "tp_size", "ep_size"), list(divisions()))
def test_ranks_give_tokens_of_one_rank(
    family: str, dp_size: int, tp_size: int, ep_size: int, checkpoints: dict[str, Path]
) -> None:
    """The unit tests compare logits, division by division."""
    expected = run_load(checkpoints[family], requests(), **OPTIONS).answers
    found = run_load(
        checkpoints[family],
        requests(dp_size=dp_size),
        dp_size=dp_size,
        tp_size=tp_size,
        ep_size=ep_size,
        ep_dispatch_min_tokens=PROMPTS if ep_size == 4 else EVERY_STEP,
        **OPTIONS,
    )
    assert found.answers == expected


def test_stages_of_data_parallel_ranks_share_and_move_the_experts_of_their_layers(
    checkpoints: dict[str, Path],
) -> None:
    expected = run_load(checkpoints["qwen3_moe"], requests(), **OPTIONS).answers
    found = run_load(
        checkpoints["qwen3_moe"],
        requests(dp_size=2),
        dp_size=2,
        pp_size=2,
        ep_size=2,
        eplb_step_interval=4,
        ep_dispatch_min_tokens=PROMPTS,
        **OPTIONS,
    )
    assert found.answers == expected


NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=3)


@pytest.mark.parametrize(
    ("options", "counted"),
    [
        ({"speculative_config": NGRAM}, "speculation"),
        ({"num_kv_blocks": 9}, "num_preemptions"),
        ({"async_scheduling": True}, "num_running"),
        ({"speculative_config": NGRAM, "async_scheduling": True}, "speculation"),
    ],
)
def test_drafts_preemption_and_async_scheduling_are_per_rank(
    checkpoints: dict[str, Path], options: dict[str, Any], counted: str
) -> None:
    def load(dp_size: int) -> list[EngineRequest]:
        sampling = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
        prompt = (7, 8, 9, 10) * 10
        return [
            EngineRequest(f"r{number}", prompt, sampling, data_parallel_rank=number % dp_size)
            for number in range(4)
        ]

    common: dict[str, Any] = {"num_kv_blocks": 64, "prefix_caching": False}
    expected = run_load(checkpoints["qwen3_moe"], load(1), **common).answers
    divided = {"dp_size": 2, "ep_size": 2, "ep_dispatch_min_tokens": PROMPTS}
    found = run_load(checkpoints["qwen3_moe"], load(2), **{**common, **divided, **options})
    assert found.answers == expected
    assert bool(getattr(found.stats, counted)) == (counted != "num_running")


@pytest.fixture(scope="module")
def core(checkpoints: dict[str, Path]) -> Iterator[DataParallelCore]:
    """Two data-parallel ranks that share experts."""
    built = build_engine(
        EngineConfig(
            checkpoints["qwen3_moe"],
            dp_size=2,
            ep_size=2,
            ep_dispatch_min_tokens=PROMPTS,
            threads=1,
            dtype="float32",
            swap_space_bytes=4 << 20,
            kv_events=KVEventsConfig(True, endpoint=LOOPBACK, replay_endpoint=LOOPBACK),
            eplb_step_interval=5,
            **OPTIONS,
        )
    ).core
    assert isinstance(built, DataParallelCore)
    yield built
    built.close()


def test_request_goes_to_rank_with_its_prefix(core: DataParallelCore) -> None:
    prompt = random_prompt(100, 64)
    request = EngineRequest("first", prompt, SamplingParams(max_tokens=2, ignore_eos=True))
    serve_all(core, [replace(request, data_parallel_rank=1)])
    hits = [part.prefix_cache_hits for part in core.report().stats.by_dp_rank]
    serve_all(core, [replace(request, request_id="second")])
    found = [part.prefix_cache_hits for part in core.report().stats.by_dp_rank]
    assert found == [hits[0], hits[1] + 48]  # three blocks of 16 before the last token


def test_each_rank_publishes_its_own_blocks(core: DataParallelCore) -> None:
    endpoints = core.report().kv_event_endpoints
    assert endpoints is not None
    prompts = [random_prompt(300 + rank, 64) for rank in range(2)]
    sampling = SamplingParams(max_tokens=1, ignore_eos=True)
    for rank, prompt in enumerate(prompts):
        serve_all(core, [EngineRequest(f"e{rank}", prompt, sampling, data_parallel_rank=rank)])
    for rank, each in enumerate((endpoints, *endpoints.other_dp_ranks)):
        batches = replayed(each.replay_endpoint, until=prompts[rank][:16])
        assert {batch.data_parallel_rank for batch in batches} == {rank}
        stored = [event.token_ids[:16] for batch in batches for event in batch.events]
        assert prompts[1 - rank][:16] not in stored


def replayed(endpoint: str | None, until: tuple[int, ...]) -> list[EventBatch]:
    """The events of a publisher, once it has published a prompt with this prefix."""
    for _ in range(100):
        batches = [batch for _, batch in request_events(endpoint, FROM_THE_START)]
        stored = [event for batch in batches for event in batch.events]
        if any(isinstance(e, BlocksStored) and e.token_ids[:16] == until for e in stored):
            return [batch for batch in batches if batch.events]
    raise AssertionError("the prompt was not published")


def test_requests_are_spread_and_choices_of_one_prompt_stay_together(
    core: DataParallelCore,
) -> None:
    before = [part.prompt_tokens for part in core.report().stats.by_dp_rank]
    sampling = SamplingParams(temperature=1.0, max_tokens=4, ignore_eos=True)
    pair = [
        EngineRequest(f"n{index}", random_prompt(200), replace(sampling, seed=index), group="n")
        for index in range(2)
    ]
    others = [EngineRequest(f"o{n}", random_prompt(201 + n), sampling) for n in range(3)]
    serve_all(core, [pair[0], others[0], pair[1], *others[1:]])
    after = [part.prompt_tokens for part in core.report().stats.by_dp_rank]
    assert [a - b for a, b in zip(after, before, strict=True)] == [3 * 37, 2 * 37]


def test_abort_ends_request_on_any_rank(core: DataParallelCore) -> None:
    endless = SamplingParams(max_tokens=400, ignore_eos=True)
    for rank in range(2):
        request = EngineRequest(f"endless{rank}", (5, 9), endless, data_parallel_rank=rank)
        core.post(AddRequest(request))
    core.step()
    assert [part.num_running for part in core.report().stats.by_dp_rank] == [1, 1]
    core.post(AbortRequest("endless1"))
    core.step()
    assert [part.num_running for part in core.report().stats.by_dp_rank] == [1, 0]
    core.post(AbortRequest("endless0"))
    core.step()
    core.step()  # the ranks drop them
    assert core.report().stats.num_running == 0
    assert core.report().stats.kv_cache_usage == 0
    core.check_integrity()


def test_every_rank_counts_expert_choices_of_all_ranks(core: DataParallelCore) -> None:
    serve_all(core, [replace(request, data_parallel_rank=0) for request in requests()[:2]])
    load = core.report().stats.experts
    assert load is not None
    assert load.num_tokens % 3 == 0  # choices
    assert load.num_sent_rows > 0


def run_on(core: DataParallelCore) -> NoReturn:
    while True:
        core.step()


def test_rebalanced_experts_change_no_tokens(core: DataParallelCore) -> None:
    """Both ranks rebalance in the same round, whichever of them has tokens."""
    asked = requests(dp_size=2)
    expected = serve_all(core, asked).answers
    deadline = time.monotonic() + 60
    while not (load := core.report().stats.experts) or not (load.num_placements and load.num_moved):
        assert time.monotonic() < deadline, load
        assert serve_all(core, asked).answers == expected
    assert serve_all(core, asked).answers == expected


def test_slow_rank_only_delays_the_others(core: DataParallelCore) -> None:
    """The slow rank is idle, but the others need its experts; they report how long they waited."""
    asked = [replace(request, data_parallel_rank=0) for request in requests()[:2]]
    expected = serve_all(core, asked).answers
    assert core.reset_prefix_cache()
    slow = ranks_of(core, 1)[0]
    os.kill(slow, signal.SIGSTOP)
    waking = threading.Timer(1.0, os.kill, (slow, signal.SIGCONT))
    waking.start()
    started = time.monotonic()
    assert serve_all(core, asked).answers == expected
    assert time.monotonic() - started > 0.9
    waking.join()
    while (
        not (parts := core.report().stats.by_dp_rank)[0].waited_s[0]["experts"]["all_to_all"] > 0.5
    ):
        assert time.monotonic() - started < 60, parts[0].waited_s
        serve_all(core, asked[1:])  # ranks report it with a step, once a second


def ranks_of(core: DataParallelCore, dp_rank: int) -> tuple[int, ...]:
    """The processes of a data-parallel rank."""
    executor = core._cores[dp_rank]._executor
    assert isinstance(executor, ProcessExecutor)
    return executor.rank_pids


@pytest.mark.parametrize("ep_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_frozen_rank_ends_instance_with_reason(checkpoints: dict[str, Path], ep_size: int) -> None:
    config = EngineConfig(checkpoints["mixtral"], dp_size=2, ep_size=ep_size, **OPTIONS)
    watch = StepWatch(2.0)
    core = build_engine(config, watch=watch).core
    assert isinstance(core, DataParallelCore)
    watchdog = StepWatchdog(watch, core.abandon_step)
    try:
        for request in requests(dp_size=2)[:2]:
            core.post(AddRequest(request))
        core.step()
        os.kill(ranks_of(core, 1)[0], signal.SIGSTOP)
        with pytest.raises(EngineDead, match=r"did not return within 2 s .* rank 1 is stopped"):
            run_on(core)
    finally:
        watchdog.close()
        core.close()


@pytest.mark.parametrize("ep_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_killed_rank_ends_instance_with_reason(checkpoints: dict[str, Path], ep_size: int) -> None:
    config = EngineConfig(checkpoints["mixtral"], dp_size=2, ep_size=ep_size, **OPTIONS)
    core = build_engine(config).core
    assert isinstance(core, DataParallelCore)
    try:
        core.post(AddRequest(requests()[1]))
        core.step()
        os.kill(ranks_of(core, 1)[0], signal.SIGKILL)
        with pytest.raises(EngineDead, match=r"rank 1 of 2 died: .*SIGKILL"):
            run_on(core)
    finally:
        core.close()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dp_size": 2, "ep_size": 3}, r"ep_size 3 was asked for with dp_size 2 and tp_size 1"),
        ({"dp_size": 0}, "dp_size must be at least 1"),
        (
            {"dp_size": 2, "tp_size": 3, "nodes": NodeConfig(nnodes=3, secret="s")},
            "parts of two data-parallel ranks would be on one node",
        ),
        ({"eplb_step_interval": 9}, "they need an ep_size above 1"),
        (
            {"dp_size": 2, "kv_events": KVEventsConfig(True, replay_endpoint="tcp://*:5558")},
            "keep them 2 apart",
        ),
        (
            {
                "kv_events": KVEventsConfig(True, replay_endpoint="tcp://*:5558"),
                "kv_pool": KVPoolConfig(dram_bytes=1 << 20),
            },
            "keep them 2 apart",
        ),
    ],
)
def test_unsupported_combinations_are_rejected(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        EngineConfig(Path("m"), **options)
