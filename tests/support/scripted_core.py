"""A real core and scheduler over an executor that returns scripted tokens without a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from support.fake_engine import EOS, Script, upper_case

from mooncake_engine.assembly import RunningEngine
from mooncake_engine.core import EngineCore
from mooncake_engine.errors import EngineDead
from mooncake_engine.execution.model_runner import CompletedStep
from mooncake_engine.kv_cache.block_manager import BlockManager
from mooncake_engine.messages import EngineInfo, EngineRequest, TokenLogprobs
from mooncake_engine.scheduling.scheduler import Scheduler
from mooncake_engine.scheduling.scheduler_interface import SchedulerLimits
from mooncake_engine.scheduling.step_plan import NewRequest, SampledToken, StepPlan, StepResult

FACTS = EngineInfo(256, 258, (EOS,), 64, 16, "scripted")


@dataclass
class ScriptedExecutor:
    """Returns ``script(request)``, one token per step.

    Args:
        script: token ids of the answer, EOS included.
        die_at: the step in which it fails.
    """

    script: Script = upper_case
    die_at: int | None = None
    compiles_grammars: bool = False
    expert_load: None = None
    waited_s: tuple[()] = ()
    step_connections: tuple[Connection, ...] = ()
    live: dict[str, tuple[NewRequest, list[int]]] = field(default_factory=dict)
    seen: list[NewRequest] = field(default_factory=list)
    is_closed: bool = False

    def warm_up(self) -> None:
        """Nothing to warm up."""

    def execute_model(self, plan: StepPlan) -> CompletedStep:
        """A token for every sequence that samples."""
        if plan.step == self.die_at:
            raise EngineDead("rank 0 failed: out of luck")
        for request_id in plan.removed:
            self.live.pop(request_id, None)
        for new_request in plan.new_requests:
            spec = EngineRequest(
                new_request.request_id, new_request.token_ids, new_request.sampling
            )
            self.live[new_request.request_id] = (new_request, list(self.script(spec)))
            self.seen.append(new_request)
        sequences = [s for s in plan.sequences if s.is_sampling]
        sampling = [name for s in sequences for name in (s.request_id, *s.siblings)]
        said = {name: (self._say(name),) for name in sampling}
        return CompletedStep(StepResult(plan.step, said))

    def _say(self, request_id: str) -> SampledToken:
        new_request, words = self.live[request_id]
        token_id = words.pop(0)
        asked = new_request.sampling.logprobs is not None
        return SampledToken(token_id, TokenLogprobs(token_id, -0.5) if asked else None)

    def send(self, message: bytes, rank: int | None = None) -> None:
        """Ignored."""

    def check(self) -> None:
        """Never fails."""

    def abandon(self, reason: str) -> EngineDead:
        """Let its steps return."""
        return EngineDead(reason)

    def close(self) -> None:
        """Nothing to free."""
        self.is_closed = True


def scripted_engine(
    executor: ScriptedExecutor, *, max_num_seqs: int = 8, **core_options: Any
) -> RunningEngine:
    """An engine over the executor, as ``build_engine`` makes it, with options of ``EngineCore``."""
    limits = SchedulerLimits(max_num_seqs, 64, FACTS.max_model_len, frozenset({EOS}))
    blocks = BlockManager(FACTS.num_kv_blocks, FACTS.block_size, prefix_caching=True)
    core = EngineCore(Scheduler(limits, blocks), executor, **core_options)  # type: ignore[arg-type]
    return RunningEngine(core, FACTS)
