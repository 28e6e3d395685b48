"""A vLLM instance without vLLM: the connector's two sides, memory, and requests."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from support.vllm_caches import Caches

from mooncake_hal.deployment import Hardware
from mooncake_kv.config import KVTransferConfig
from mooncake_kv.model_fingerprint import ModelFingerprint
from mooncake_vllm.vllm_scheduler_base import Instance
from mooncake_vllm.vllm_scheduler_side import SchedulerSide
from mooncake_vllm.vllm_worker_side import Device, StepWait, WorkerSide

HOST = Device(
    "cpu",
    Hardware("cpu", "test"),
    lambda: SimpleNamespace(record=int, query=bool, synchronize=int),  # type: ignore[arg-type]
    lambda: None,
)
MODEL = ModelFingerprint("weights", {"dtype": "float32"})
DEADLINE_S = 60.0
Tables = list[int] | tuple[list[int], ...]
"""A request's block table: of the only KV-cache group, or one for each group."""
NO_TOKENS: Any = SimpleNamespace(
    scheduled_new_reqs=[],
    scheduled_cached_reqs=SimpleNamespace(
        req_ids=[], resumed_req_ids=set(), new_block_ids=[], num_computed_tokens=[]
    ),
    num_scheduled_tokens={},
)
"""A step in which nothing is computed."""


def each_table(blocks: Tables) -> tuple[list[int], ...]:
    """In vLLM's form: one block table for each KV-cache group."""
    return blocks if isinstance(blocks, tuple) else (blocks,)


@dataclass
class FakeRequest:
    """The fields of vLLM's Request that the connector reads."""

    request_id: str
    prompt_token_ids: list[int] | None
    kv_transfer_params: dict[str, Any] | None = None
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    num_preemptions: int = 0
    output_token_ids: Sequence[int] = ()
    status: Any = field(default_factory=lambda: SimpleNamespace(name="WAITING"))
    prompt_embeds: Any = None
    mm_features: Sequence[Any] = field(default_factory=list)
    lora_request: Any = None
    abort_immediately: bool = False
    cache_salt: str | None = None
    skip_reading_prefix_cache: bool = False


def picture(offset: int) -> Any:
    """A picture whose tokens begin at this position of a request's prompt."""
    return SimpleNamespace(mm_position=SimpleNamespace(offset=offset))


@dataclass
class RankReports:
    """The ranks' reports to vLLM: each request id with the ranks that reported it."""

    sent: dict[str, set[int]] = field(default_factory=dict)
    received: dict[str, set[int]] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)


class FakeVllm:
    """Steps an instance's connector as vLLM does; fails if a rank reports an id twice.

    Args:
        scheduler, workers: the connector's sides.
        caches: the ranks' memory.
    """

    def __init__(
        self, scheduler: SchedulerSide, workers: list[WorkerSide], caches: list[Caches]
    ) -> None:
        self.scheduler, self.workers, self.caches = scheduler, workers, caches
        self.reports = RankReports()
        self._held: list[str] = []

    def step(self, output: Any = NO_TOKENS, *, names_layers: bool = True) -> None:
        """Run one step: with a ``SchedulerOutput``, or without tokens.

        Args:
            output: the tokens to compute.
            names_layers: whether the per-layer hooks are called, as in eager mode; a captured graph
                calls none.
        """
        started, pushes = self.scheduler.take_started(), self.scheduler.push_steps(output)
        held, self._held = self._held, []
        for rank, worker in enumerate(self.workers):
            worker.begin_step(pushes, held)
            worker.release_loads(started)
            if names_layers and pushes:
                for name in self.caches[rank].layers:
                    worker.layer_done(name)
            worker.end_step()
            results = worker.take_results()
            for ids, ranks in (
                (results.finished_sending, self.reports.sent),
                (results.finished_recving, self.reports.received),
            ):
                for name in ids:
                    assert rank not in ranks.setdefault(name, set()), f"{name} was reported twice"
                    ranks[name].add(rank)
            self.reports.failed |= results.failed_recving
            assert results.failed_recving <= results.finished_recving
        self.scheduler.take_events()

    def step_until(self, reported: dict[str, set[int]], request_id: str) -> None:
        """Step until every rank has reported a request."""
        deadline = time.monotonic() + DEADLINE_S
        while len(reported.get(request_id, ())) < len(self.workers):
            assert time.monotonic() < deadline, f"{request_id} was never reported: {self.reports}"
            self.step()
            time.sleep(0.001)  # vLLM's own pause between empty steps

    def finish(self, request: FakeRequest, blocks: Tables) -> tuple[bool, dict[str, Any] | None]:
        """Finish a request; if its blocks are held, the next step names it."""
        is_held, params = self.scheduler.request_finished(request, each_table(blocks))
        if is_held:
            self._held.append(request.request_id)
        return is_held, params

    def compute(
        self,
        request: FakeRequest,
        blocks: Tables,
        chunks: Sequence[int],
        *,
        num_cached: int = 0,
        names_layers: bool = True,
    ) -> tuple[bool, dict[str, Any] | None]:
        """Compute a prompt in chunks that end before these tokens, and finish it."""
        self.run(request, blocks, chunks, num_cached=num_cached, names_layers=names_layers)
        request.num_computed_tokens, request.output_token_ids = chunks[-1], [7]
        request.status = SimpleNamespace(name="FINISHED_LENGTH_CAPPED")
        return self.finish(request, blocks)

    def run(
        self,
        request: FakeRequest,
        blocks: Tables,
        chunks: Sequence[int],
        *,
        num_cached: int = 0,
        names_layers: bool = True,
    ) -> None:
        """Run the steps that compute these chunks of a prompt, from its first step on."""
        done = num_cached
        for number, stop in enumerate(chunks):
            new = SimpleNamespace(
                req_id=request.request_id, block_ids=each_table(blocks), num_computed_tokens=done
            )
            known = SimpleNamespace(
                req_ids=[request.request_id],
                resumed_req_ids=set(),
                new_block_ids=[None],
                num_computed_tokens=[done],
            )
            output = SimpleNamespace(
                scheduled_new_reqs=[] if number else [new],
                scheduled_cached_reqs=known if number else NO_TOKENS.scheduled_cached_reqs,
                num_scheduled_tokens={request.request_id: stop - done},
            )
            self.step(output, names_layers=names_layers)
            done = stop

    def prefill(self, request: FakeRequest, blocks: Tables) -> dict[str, Any]:
        """Finish a prefill; returns the params in its answer."""
        self.scheduler.on_new_request(request)
        assert request.prompt_token_ids is not None
        request.num_computed_tokens = len(request.prompt_token_ids)
        request.output_token_ids = [7]
        request.status = SimpleNamespace(name="FINISHED_LENGTH_CAPPED")
        is_kept, params = self.finish(request, blocks)
        assert is_kept
        assert params is not None
        return params

    def admit(self, request: FakeRequest, blocks: Tables, num_computed: int = 0) -> int | None:
        """Look up and allocate, as vLLM's scheduler does; returns the number of tokens to load."""
        count = self.scheduler.get_num_new_matched_tokens(request, num_computed)
        if count is not None:
            table = SimpleNamespace(get_block_ids=lambda: each_table(blocks))
            self.scheduler.update_state_after_alloc(request, table, count)
        return count


@contextmanager
def running(
    name: str,
    folder: Path,
    caches: list[Caches],
    config: KVTransferConfig,
    step_timeout_s: float = 300.0,
    max_model_len: int = 4096,
    device: Device = HOST,
) -> Iterator[FakeVllm]:
    """An instance with one rank for each of those caches."""
    paths = [folder / f"{name}-{rank}" for rank in range(len(caches))]
    workers: list[WorkerSide] = []
    scheduler = None
    try:
        for rank, (path, cache) in enumerate(zip(paths, caches, strict=True)):
            workers.append(WorkerSide(config, rank, path, cache.view, device, wait=StepWait(1)))
        instance = Instance(
            f"{name}-epoch",
            MODEL,
            len(caches),
            max_model_len,
            sends=True,
            loads=True,
            step_timeout_s=step_timeout_s,
        )
        scheduler = SchedulerSide(config, instance, paths)
        yield FakeVllm(scheduler, workers, caches)
    finally:
        for side in (scheduler, *workers):
            if side is not None:
                side.close()
