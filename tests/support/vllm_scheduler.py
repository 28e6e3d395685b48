"""vLLM's own scheduler around the connector, with memory that records what it was computed from.

Only the model is simulated: a token's KV is a number derived from all tokens up to it, and the next
token is derived from the KV in the block table. So a request that reads another prompt's KV, or KV
that has not arrived yet, generates another token. Requires vLLM.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from support.vllm_caches import Caches, make_caches
from support.vllm_instance import HOST
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.plugins import load_general_plugins
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from mooncake_hal.kv.geometry import AttentionKind, KVGroup
from mooncake_vllm.transfer_stats import GAUGES
from mooncake_vllm.vllm_connectors import HalConnector, HalPoolConnector
from mooncake_vllm.vllm_instance import worker_sockets
from mooncake_vllm.vllm_memory import ModelKV
from mooncake_vllm.vllm_scheduler_side import SchedulerSide
from mooncake_vllm.vllm_worker_side import WorkerSide

MODEL = Path(__file__).parent.parent.parent / "examples" / "tiny-llama"
KV = ModelKV(AttentionKind.GQA, 2, 2, (2, 2), "float32")
BLOCK_SIZE = 4
VOCABULARY = 97
MODULUS = 1 << 20  # of the KV's numbers, so that float32 holds them with a fraction of 1/8
EXTRA = {
    "transport": ["tcp"],
    "lease_seconds": 2,
    "transfer_timeout_seconds": 5,
    "push_timeout_seconds": 2,
}
"""The extra configuration of every connector."""
PAUSE_S = 0.001  # vLLM's own pause between steps without tokens


def kv_of(tokens: Sequence[int]) -> list[int]:
    """The KV of each of these tokens, which begin at the start of the prompt."""
    chain, found = 1, []
    for token in tokens:
        chain = (chain * 31 + token + 7) % MODULUS
        found.append(chain)
    return found


def answer_to(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The answer of a model that reads the right KV."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(kv_of(tokens)[-1] % VOCABULARY)
    return tokens[len(prompt) :]


def picture(at: int) -> MultiModalFeatureSpec:
    """A picture that one token of a prompt stands for."""
    return MultiModalFeatureSpec(None, "image", "a picture", PlaceholderRange(at, 1))


class WrongKV(AssertionError):
    """A step read KV that was not computed from these tokens."""


@cache
def engine_config(
    role: str,
    connector: str,
    policy: str,
    *,
    is_async: bool,
    pool: str | None = None,
    is_pool_first: bool = False,
    is_hybrid: bool | None = False,
    has_events: bool = False,
    num_ubatches: int = 1,
) -> Any:
    """vLLM's own configuration; cached, because creating it is slow.

    Args:
        role: ``kv_role``.
        connector: its name; with a ``pool``, MultiConnector combines it with the pool's connector.
        policy: ``kv_load_failure_policy``.
        is_async: whether a step is scheduled before the previous one has ended.
        pool: address for the pool's connector.
        is_pool_first: whether MultiConnector lists the pool's connector before the other one.
        is_hybrid: whether each kind of layers has a block table of its own; None: vLLM decides.
        has_events: whether KV events are enabled.
        num_ubatches: number of overlapping microbatches per step.
    """
    transfer: dict[str, Any] = {
        "kv_connector": connector,
        "kv_role": role,
        "kv_connector_extra_config": EXTRA | ({"pool": pool} if pool else {}),
    }
    if pool is not None and connector != "HalPoolConnector":
        pooled = transfer | {"kv_connector": "HalPoolConnector", "kv_role": "kv_both"}
        alone = transfer | {"kv_connector_extra_config": EXTRA}
        both = {"connectors": [pooled, alone] if is_pool_first else [alone, pooled]}
        transfer = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": both,
        }
    args = EngineArgs(
        model=str(MODEL),
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        async_scheduling=is_async,
        disable_hybrid_kv_cache_manager=None if is_hybrid is None else not is_hybrid,
        kv_events_config={"enable_kv_cache_events": True, "publisher": "null"}
        if has_events
        else None,
        kv_transfer_config=transfer | {"kv_load_failure_policy": policy},
    )
    config = args.create_engine_config()
    config.cache_config.block_size = BLOCK_SIZE
    config.parallel_config.ubatch_size = num_ubatches
    config.scheduler_config.async_scheduling = is_async  # vLLM turns it off on a CPU
    return config


@dataclass
class KnownSequence:
    """The model runner's state of a request; one block table for each KV-cache group."""

    tokens: list[int]
    tables: list[list[int]]


@dataclass
class Answer:
    """A request's output so far.

    Args:
        tokens: in order.
        finish: why it ended; empty while it is running.
        params: ``kv_transfer_params`` of the answer.
    """

    tokens: list[int] = field(default_factory=list)
    finish: str = ""
    params: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class MadeUpLayer:
    """One layer of the simulated model.

    Args:
        memory: its KV, ``[blocks, heads, tokens, content]``.
        marks: offsets that distinguish its numbers from those of other layers and heads.
        group: index of its block table.
        window: size of its sliding window in tokens; 0: none.
    """

    memory: NDArray[np.float32]
    marks: NDArray[np.float32]
    group: int
    window: int


class MadeUpModel:
    """Writes and reads KV as a model runner does.

    Args:
        caches: the rank's memory.
        groups: the layers' KV-cache groups.
        windows: the layers' sliding windows in tokens; 0: none.
    """

    def __init__(self, caches: Caches, groups: Sequence[KVGroup], windows: Sequence[int]) -> None:
        memories = [layer.numpy() for layer in caches.layers.values()]
        heads = np.arange(KV.kv_heads)[:, None] / 4
        self._layers = [
            MadeUpLayer(memories[layer], np.float32(layer / 8) + heads, number, windows[layer])
            for number, group in enumerate(groups)
            for layer in group.layers
        ]
        self._sequences: dict[str, KnownSequence] = {}

    def run(self, step: Any) -> dict[str, list[int]]:
        """Run a step; returns the tokens that each of its requests samples."""
        for name in step.finished_req_ids:
            self._sequences.pop(name, None)
        self._take_new(step)
        starts = self._take_known(step)
        return {
            name: self._compute(name, starts[name], count)
            for name, count in step.num_scheduled_tokens.items()
        }

    def _take_new(self, step: Any) -> None:
        for new in step.scheduled_new_reqs:
            self._sequences[new.req_id] = KnownSequence(
                list(new.prompt_token_ids), [list(table) for table in new.block_ids]
            )

    def _take_known(self, step: Any) -> dict[str, int]:
        starts = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        known = step.scheduled_cached_reqs
        for at, name in enumerate(known.req_ids):
            sequence = self._sequences[name]
            if name in known.all_token_ids:
                sequence.tokens[:] = known.all_token_ids[name]
            blocks = known.new_block_ids[at]
            if name in known.resumed_req_ids:
                sequence.tables = [list(table) for table in blocks]
            elif blocks is not None:
                for table, more in zip(sequence.tables, blocks, strict=True):
                    table += more
            starts[name] = known.num_computed_tokens[at]
        return starts

    def _compute(self, name: str, start: int, count: int) -> list[int]:
        sequence, stop = self._sequences[name], start + count
        wanted = kv_of(sequence.tokens)
        for position in range(start, stop):
            index, slot = divmod(position, BLOCK_SIZE)
            for layer in self._layers:
                block = sequence.tables[layer.group][index]
                layer.memory[block, :, slot] = wanted[position] + layer.marks
        for layer in self._layers:
            first = max(0, start - layer.window + 1) if layer.window else 0
            self._check(name, sequence.tables[layer.group], layer, first, wanted[:stop])
        if stop < len(sequence.tokens):
            return []
        sequence.tokens.append(wanted[-1] % VOCABULARY)
        return sequence.tokens[-1:]

    def _check(
        self, name: str, table: list[int], layer: MadeUpLayer, first: int, wanted: list[int]
    ) -> None:
        for position in range(first, len(wanted)):
            block, slot = table[position // BLOCK_SIZE], position % BLOCK_SIZE
            if not (layer.memory[block, :, slot] == wanted[position] + layer.marks).all():
                raise WrongKV(f"{name}: KV of token {position} of {len(wanted)} in {block}")


class VllmInstance:
    """A scheduler, both halves of the connector, and a simulated model.

    Args:
        config: see ``engine_config``.
        num_blocks: of KV; a small number makes vLLM preempt.
        windows: sliding window of each of the two layers; 0: none. With the hybrid manager off,
            vLLM drops blocks only if both have the same.
        is_behind: whether the model runs a step only when its output is needed, after vLLM has
            processed the previous output; otherwise as soon as it is scheduled. vLLM does both.
    """

    def __init__(
        self,
        config: Any,
        num_blocks: int,
        windows: tuple[int, int] = (0, 0),
        *,
        is_behind: bool = False,
    ) -> None:
        load_general_plugins()
        config.kv_transfer_config.engine_id = uuid.uuid4().hex
        config.instance_id = uuid.uuid4().hex[:8]
        config.cache_config.num_gpu_blocks = self.num_blocks = num_blocks
        is_hybrid = not config.scheduler_config.disable_hybrid_kv_cache_manager
        groups: tuple[KVGroup, ...] = (KVGroup((0, 1)),)
        if windows[0] == windows[1]:
            groups = (KVGroup((0, 1), windows[0]),)
        elif is_hybrid:
            groups = (KVGroup((0,), windows[0]), KVGroup((1,), windows[1]))
        has_windows = any(group.window for group in groups)
        model = replace(KV, groups=groups if has_windows else ())
        self.caches = make_caches(model, "LBHNC", num_blocks, BLOCK_SIZE)
        self._model = MadeUpModel(self.caches, groups, windows)
        self._depth = 2 if config.scheduler_config.async_scheduling else 1
        names = list(self.caches.layers)
        specs = [
            KVCacheGroupSpec([names[layer] for layer in group.layers], attention(group.window))
            for group in groups
        ]
        memory = KVCacheConfig(num_blocks, [], specs)
        self._worker = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, memory)
        self._sides = [self._worker_side(each) for each in children(self._worker)]
        scheduler = AsyncScheduler if self._depth == 2 else Scheduler
        self.scheduler = scheduler(
            config, memory, StructuredOutputManager(config), block_size=BLOCK_SIZE, log_stats=True
        )
        for each in children(self.scheduler.connector):
            each._may_wait = False  # all steps of all instances run in one thread
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        self._in_flight: deque[tuple[Any, Any]] = deque()
        self._is_behind = is_behind
        self._num_ubatches = config.parallel_config.ubatch_size
        self.answers: dict[str, Answer] = {}
        self.published: dict[str, float] = {}  # by vLLM's own statistics: counters are added
        self.hits: Counter[str] = Counter()  # tokens that connectors loaded, by vLLM's source
        self.num_wrong = 0

    def submit(
        self,
        name: str,
        prompt: list[int],
        num_tokens: int,
        params: dict[str, Any] | None = None,
        *,
        is_refused: bool = False,
        is_session: bool = False,
        picture_at: int | None = None,
        num_prompt_logprobs: int | None = None,
    ) -> None:
        """Add a request; one that the front end has rejected is aborted at once, as in vLLM. A
        session continues with the next prompt of the same name, until its client ends it. One token
        of the prompt may stand for a picture. For log probabilities of the prompt, all of it has to
        be computed."""
        sampling = SamplingParams(
            max_tokens=num_tokens,
            temperature=0,
            ignore_eos=True,
            prompt_logprobs=num_prompt_logprobs,
            extra_args={"kv_transfer_params": params} if params else None,
        )
        sampling.all_stop_token_ids.clear()
        request = Request(
            name,
            [0] if is_refused else list(prompt),  # vLLM appends a session's next turns
            sampling,
            None,
            block_hasher=self._hasher,
            abort_immediately=is_refused,
            resumable=is_session,
            mm_features=None if picture_at is None else [picture(picture_at)],
        )
        self.answers.setdefault(name, Answer()).finish = ""
        self.scheduler.add_request(request)
        if is_refused:
            self.abort(name)

    def abort(self, name: str) -> None:
        """Abort a request, as when its client disconnects."""
        for _ in self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED):
            self.answers[name].finish = "abort"

    def step(self) -> None:
        """One iteration of EngineCore; with async scheduling, outputs come one iteration later."""
        if self.scheduler.has_requests():
            step = self.scheduler.schedule()
            self._in_flight.append((step, None if self._is_behind else self._execute(step)))
        if self._in_flight and (
            len(self._in_flight) >= self._depth or not self._in_flight[-1][0].num_scheduled_tokens
        ):
            self._take_output()

    def drain(self) -> None:
        """Process the outputs of all steps in flight."""
        while self._in_flight:
            self._take_output()

    @property
    def is_idle(self) -> bool:
        """Whether no request is running, waiting or held."""
        return not (self._in_flight or self.scheduler.has_requests())

    @property
    def num_free(self) -> int:
        """Number of free blocks; vLLM reserves one for itself."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def figures(self) -> dict[str, float]:
        """The connectors' statistics."""
        found: dict[str, float] = {"hook_errors": 0.0}
        for half in (self.scheduler.connector, self._worker):
            for each in children(half):
                found["hook_errors"] += each.num_errors
                if each._scheduler is not None:
                    found |= each._scheduler.stats()
        return found

    def leftovers(self) -> list[str]:
        """State that the connectors still keep for requests although there are none."""
        found = []
        for each, worker in zip(children(self.scheduler.connector), self._sides, strict=True):
            scheduler = each._scheduler
            kept = {
                "orders": worker._loads._held,
                "released": worker._loads._released,
                "begun": worker._loads._begun,
                "over": worker._loads._over,
                "named": worker._reports._held,
                "unnamed": worker._reports._early,
                "not named": each._held,
            }
            if isinstance(each, HalPoolConnector):
                saves = scheduler._saves
                kept |= {"prompts": scheduler._by_request, "by name": scheduler._by_name}
                kept |= {"current": saves._current}
                kept |= {"filling": saves._filling, "copies": saves._copies, "held": saves._held}
            else:
                kept |= {
                    "prompts": scheduler._prompts._by_name,
                    "members": scheduler._prompts._by_request,
                    "sending": scheduler._sending,
                    "awaited": scheduler._awaited,
                    "held": scheduler._held,
                }
            found += [f"{what}: {sorted(names)}" for what, names in kept.items() if names]
        return found

    def close(self) -> None:
        """Shut both halves down."""
        self.scheduler.connector.shutdown()
        self._worker.shutdown()

    def _worker_side(self, connector: HalConnector) -> WorkerSide:
        """A worker's side of the connector, over vLLM's memory, without rank groups."""
        [path] = worker_sockets(connector._vllm_config, type(connector).__name__)
        connector._worker = WorkerSide(
            connector._config, 0, path, self.caches.view, HOST, connector._worker_kind()
        )
        return connector._worker

    def _execute(self, step: Any) -> ModelRunnerOutput:
        """Execute a step in the order of vLLM's own model runner."""
        worker = self._worker
        worker.bind_connector_metadata(step.kv_connector_metadata)
        for _ in range(self._num_ubatches - 1):  # the last one computes for all
            self._name_layers()
            time.sleep(PAUSE_S * 20)  # time in which a premature save would send the layers
        sampled = self._model.run(step)
        self._name_layers()
        worker.start_load_kv(None)
        worker.wait_for_save()
        results = worker.get_transfer_results(step.finished_req_ids)
        worker.clear_connector_metadata()
        names = list(sampled)
        return ModelRunnerOutput(
            names,
            {name: at for at, name in enumerate(names)},
            [sampled[name] for name in names],
            kv_connector_output=KVConnectorOutput(
                finished_sending=results.finished_sending or None,
                finished_recving=results.finished_recving or None,
                failed_recving=results.failed_recving,
            ),
        )

    def _name_layers(self) -> None:
        for name in self.caches.layers:
            self._worker.save_kv_layer(name, None, None)

    def _take_output(self) -> None:
        step, output = self._in_flight.popleft()
        if output is None:
            output = self._execute(step)
        for outputs in self.scheduler.update_from_output(step, output).values():
            if outputs.scheduler_stats is not None:
                self._publish(outputs.scheduler_stats.kv_connector_stats or {})
                if (loaded := outputs.scheduler_stats.connector_prefix_cache_stats) is not None:
                    self.hits.update({s.value: n for s, n in loaded.hits_by_source.items()})
            for item in outputs.outputs:
                answer = self.answers[item.request_id]
                answer.tokens += item.new_token_ids
                answer.params = item.kv_transfer_params or answer.params
                if item.finish_reason is not None:
                    answer.finish = str(item.finish_reason)

    def _publish(self, stats: dict[str, Any]) -> None:
        for name, value in stats.items():
            if isinstance(value, dict):  # of a child of a MultiConnector
                self._publish(value)
            elif name in GAUGES:
                self.published[name] = value
            else:
                self.published[name] = self.published.get(name, 0.0) + value


def attention(window: int) -> AttentionSpec:
    """vLLM's spec for the KV of layers with that sliding window, or without one."""
    shape: dict[str, Any] = {
        "block_size": BLOCK_SIZE,
        "num_kv_heads": KV.kv_heads,
        "head_size": 2,
        "dtype": torch.float32,
    }
    if window:
        return SlidingWindowSpec(**shape, sliding_window=window)
    return FullAttentionSpec(**shape)


def children(connector: Any) -> list[Any]:
    """The connectors in a MultiConnector, or the connector itself."""
    return list(getattr(connector, "_connectors", [connector]))


@contextmanager
def vllm_instance(
    config: Any, num_blocks: int, windows: tuple[int, int] = (0, 0), *, is_behind: bool = False
) -> Iterator[VllmInstance]:
    """An instance for the duration of a block."""
    opened = VllmInstance(config, num_blocks, windows, is_behind=is_behind)
    try:
        yield opened
    finally:
        opened.close()


def settle(instances: Sequence[VllmInstance], timeout_s: float) -> None:
    """Step all instances until none has any work left.

    Raises:
        AssertionError: a request never ends.
    """
    deadline = time.monotonic() + timeout_s
    while not all(each.is_idle for each in instances):
        assert time.monotonic() < deadline, [
            {name: str(request.status) for name, request in each.scheduler.requests.items()}
            for each in instances
        ]
        for each in instances:
            each.step()
        time.sleep(PAUSE_S)
    sides = [half._scheduler for each in instances for half in children(each.scheduler.connector)]
    for side in sides:  # vLLM's hooks mark each step's start and end
        assert not isinstance(side, SchedulerSide) or side._steps._num_open == 0


logging.getLogger("vllm").setLevel(logging.WARNING)
