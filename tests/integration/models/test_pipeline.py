"""Pipeline stages as processes give the tokens of one rank, and a dead stage ends the instance with
its reason.

``pd/test_ratios.py`` adds tensor parallelism in each stage, and P and D apart.
"""

from __future__ import annotations

import os
import queue
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from support.checkpoints import random_model, write_checkpoint
from support.stage_extension import SLOW
from support.stepping import RunningRequest, Stepper

from mooncake_engine.config import EngineConfig
from mooncake_engine.core import EngineCore
from mooncake_engine.core_messages import AddRequest
from mooncake_engine.errors import ConfigError, EngineDead
from mooncake_engine.execution.engine_plan import make_plan
from mooncake_engine.execution.executor import Executor, ExecutorOptions, InProcessExecutor
from mooncake_engine.execution.process_executor import ProcessExecutor
from mooncake_engine.kv_cache.block_manager import BlockManager
from mooncake_engine.messages import EngineRequest
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.scheduling.scheduler import Scheduler
from mooncake_engine.scheduling.scheduler_interface import SchedulerLimits
from mooncake_engine.scheduling.step_plan import NewRequest, ScheduledSequence, StepPlan
from mooncake_hal.backend import Backend

SEEDED = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=8, repetition_penalty=1.2)
FAMILIES = {"llama": {"tie_word_embeddings": True}, "mixtral": {}, "deepseek_v3": {}}
Answers = dict[str, list[list[int]]]
IN_TWO_STAGES = EngineConfig(Path(), num_kv_blocks=64, pp_size=2)
CHUNK = 32
LONG_PROMPTS = {"a": tuple(range(3, 250)), "b": tuple(range(250, 20, -1))}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        family: write_checkpoint(random_model(family, **shape), tmp_path_factory.mktemp(family))
        for family, shape in FAMILIES.items()
    }


def generate(executor: InProcessExecutor | ProcessExecutor) -> list[list[int]]:
    requests = [
        RunningRequest("short", (5, 9, 2)),
        RunningRequest("long", tuple(range(100, 190))),
        RunningRequest("seeded", tuple(range(30, 60)), SEEDED, seed=11),
    ]
    return Stepper(executor, chunk=40).generate(requests)


@pytest.fixture(scope="module")
def expected(checkpoints: dict[str, Path], backend: Backend) -> Answers:
    answers: Answers = {}
    for family, checkpoint in checkpoints.items():
        with closing(
            InProcessExecutor(
                make_plan(EngineConfig(checkpoint, num_kv_blocks=32), backend), backend
            )
        ) as one:
            answers[family] = generate(one)
    return answers


@pytest.mark.parametrize(
    ("family", "pp_size"),
    [("llama", 3), ("mixtral", 2), ("deepseek_v3", 2)],
)
def test_stages_give_tokens_of_one_rank(
    family: str,
    pp_size: int,
    checkpoints: dict[str, Path],
    backend: Backend,
    expected: Answers,
) -> None:
    config = EngineConfig(checkpoints[family], num_kv_blocks=32, pp_size=pp_size)
    with closing(ProcessExecutor(make_plan(config, backend))) as executor:
        executor.warm_up()
        assert generate(executor) == expected[family]
        shards = [rank.shard for rank in executor.info.ranks]
        assert len(shards) == pp_size
        assert (shards[0].layer_start, shards[-1].layer_stop) == (0, 3)
        assert all(shard.layers < 3 for shard in shards)


@contextmanager
def slowed(checkpoint: Path, backend: Backend, how: bytes) -> Iterator[ProcessExecutor]:
    """Two stages whose ``StageExtension`` slows them down as scripted."""
    inbox: queue.Queue[bytes] = queue.Queue()
    options = ExecutorOptions("support.stage_extension:make", lambda _, message: inbox.put(message))
    config = replace(IN_TWO_STAGES, model=checkpoint)
    with closing(ProcessExecutor(make_plan(config, backend), options)) as executor:
        executor.send(how)
        assert [inbox.get(timeout=60) for _ in executor.rank_pids] == [b"ready", b"ready"]
        yield executor


def serve(executor: Executor, steps_in_flight: int) -> dict[str, list[int]]:
    """Answers to LONG_PROMPTS, scheduled as in an instance."""
    facts = executor.info
    limits = SchedulerLimits(8, CHUNK, facts.max_model_len, frozenset(facts.eos_token_ids))
    blocks = BlockManager(facts.num_blocks, facts.block_size, prefix_caching=True)
    scheduler = Scheduler(limits, blocks)
    core = EngineCore(scheduler, executor, steps_in_flight=steps_in_flight)
    sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    answers: dict[str, list[int]] = {name: [] for name in LONG_PROMPTS}
    for name, prompt in LONG_PROMPTS.items():
        core.post(AddRequest(EngineRequest(name, prompt, sampling)))
    while any(len(tokens) < 4 for tokens in answers.values()):
        for update in core.step():
            answers[update.request_id] += update.token_ids
    core.check_integrity()
    return answers


def test_stages_run_consecutive_chunks_concurrently(
    checkpoints: dict[str, Path], backend: Backend, tmp_path: Path
) -> None:
    """No chunk completes the last stage before the next chunk has started on the first."""
    alone = EngineConfig(checkpoints["llama"], num_kv_blocks=64)
    with closing(InProcessExecutor(make_plan(alone, backend), backend)) as one:
        expected = serve(one, alone.steps_in_flight)
    with slowed(checkpoints["llama"], backend, str(tmp_path).encode()) as executor:
        assert serve(executor, IN_TWO_STAGES.steps_in_flight) == expected
    num_tokens = sum(len(prompt) for prompt in LONG_PROMPTS.values())
    assert len(list(tmp_path.iterdir())) > num_tokens // CHUNK


def test_shutdown_during_steps_is_orderly(
    checkpoints: dict[str, Path], backend: Backend, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first stage, which is ahead, waits until the last has received everything."""
    with slowed(checkpoints["llama"], backend, SLOW) as executor:
        for plan in prompt_plans(executor):
            executor.execute_model(plan)
    assert "rank failed" not in capfd.readouterr().err


def prompt_plans(executor: Executor) -> list[StepPlan]:
    """Step plans of a prompt in three chunks."""
    size, blocks = executor.info.block_size, (1, 2, 3)
    prompt = tuple(range(3, 3 + 3 * size))
    sampling = SamplingParams(temperature=0.0)
    new_request = NewRequest("r", prompt, len(prompt), sampling, 0, blocks)
    chunks = [
        ScheduledSequence("r", start * size, size, is_sampling=start == 2) for start in range(3)
    ]
    return [
        StepPlan(step, new_requests=(new_request,) if step == 0 else (), sequences=(chunk,))
        for step, chunk in enumerate(chunks)
    ]


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_stage_ends_instance_with_reason(
    rank: int, checkpoints: dict[str, Path], backend: Backend
) -> None:
    config = EngineConfig(checkpoints["llama"], num_kv_blocks=32, pp_size=2)
    with closing(ProcessExecutor(make_plan(config, backend))) as executor:
        os.kill(executor.rank_pids[rank], signal.SIGKILL)
        with pytest.raises(EngineDead, match=f"rank {rank} of 2 died: killed by SIGKILL"):
            generate(executor)


def test_pool_has_blocks_of_stage_with_least_memory(
    checkpoints: dict[str, Path], backend: Backend
) -> None:
    """Stages of two layers and of one, which profile their memory by running one step together."""
    config = EngineConfig(
        checkpoints["llama"], pp_size=2, memory_utilization=0.05, max_model_len=64, threads=1
    )
    with closing(ProcessExecutor(make_plan(config, backend))) as executor:
        counts = {rank.layout.num_blocks for rank in executor.info.ranks}
        assert counts == {executor.info.num_blocks}
        assert [rank.shard.layers for rank in executor.info.ranks] == [2, 1]


def test_more_stages_than_layers_are_rejected_before_start(
    checkpoints: dict[str, Path], backend: Backend
) -> None:
    config = EngineConfig(checkpoints["llama"], num_kv_blocks=32, pp_size=4)
    with pytest.raises(ConfigError, match="pp_size 4 was requested, the model has 3 layers"):
        ProcessExecutor(make_plan(config, backend))
