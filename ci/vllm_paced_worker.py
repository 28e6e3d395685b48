"""A worker for vLLM's CPU build with a simulated device, which takes a GPU's time and computes KV.

    PYTHONPATH=ci vllm serve ... --worker-cls vllm_paced_worker.PacedWorker

Everything except the forward pass is vLLM's own model runner. A step takes ``VLLM_PACED_STEP_MS``
plus ``VLLM_PACED_TOKEN_US`` per token, on a device that runs asynchronously like a GPU: the host
enqueues steps and waits for their sampled tokens. The defaults are about the times of an 8 B model
in bf16 on an H200.

A token's KV depends on all tokens before it, separately in each layer, and the sampled token
depends on the KV of all layers that the block table refers to. An instance that reads wrong KV, or
reads KV too early, therefore generates different tokens.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    AsyncModelRunnerOutput,
    ModelRunnerOutput,
    SamplerOutput,
)
from vllm.v1.worker import cpu_worker, gpu_model_runner
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.worker_base import CompilationTimes

GROUP_S = 0.002
"""Minimum sleep in seconds: shorter work is grouped."""
FIRST_TOKEN_ID, NUM_TOKEN_IDS = 33, 90  # printable bytes, in the example's tokenizer
LAYER_SEED, TOKEN_FACTOR, POSITION_FACTOR = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35
Numbers = np.ndarray[Any, Any]


class PacedDevice:
    """Runs enqueued work in order, each item for the duration given."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[float, float, Callable[[], None]]] = SimpleQueue()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self.num_enqueued = self._num_done = 0
        threading.Thread(target=self._run, name="paced-device", daemon=True).start()

    def enqueue(self, seconds: float, work: Callable[[], None]) -> None:
        """Enqueue work that takes this many seconds, after all work enqueued before it."""
        self.num_enqueued += 1
        self._queue.put((time.perf_counter(), seconds, work))

    def is_done(self, number: int) -> bool:
        """Whether this many items of work are done."""
        return self._num_done >= number

    def wait(self, number: int) -> None:
        """Block until this many items of work are done.

        Raises:
            RuntimeError: the device has failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._num_done >= number or self._error is not None)
            if self._error is not None:
                raise RuntimeError("the paced device has failed") from self._error

    def _run(self) -> None:
        free_at = 0.0
        try:
            while True:
                enqueued_at, seconds, work = self._queue.get()
                free_at = max(enqueued_at, free_at) + seconds
                work()
                time.sleep(max(0.0, free_at - time.perf_counter()))
                with self._changed:
                    self._num_done += 1
                    self._changed.notify_all()
        except BaseException as exc:
            with self._changed:
                self._error = exc
                self._changed.notify_all()
            raise


class PacedEvent:
    """The simulated device's counterpart of ``torch.Event``."""

    def __init__(self, device: PacedDevice) -> None:
        self._device, self._number = device, 0

    def record(self) -> None:
        self._number = self._device.num_enqueued

    def query(self) -> bool:
        return self._device.is_done(self._number)

    def synchronize(self) -> None:
        self._device.wait(self._number)


class PacedOutput(AsyncModelRunnerOutput):
    """A step's output, available once the device has sampled; vLLM's own copies with CUDA."""

    def __init__(
        self,
        device: PacedDevice,
        *,
        model_runner_output: ModelRunnerOutput,
        sampled_token_ids: torch.Tensor,  # [requests, 1]
        invalid_req_indices: list[int],
        **unused: Any,
    ) -> None:
        self._output, self._invalid = model_runner_output, invalid_req_indices
        self.sampled_token_ids_cpu = sampled_token_ids
        self.async_copy_ready_event = PacedEvent(device)
        self.async_copy_ready_event.record()

    def get_output(self) -> ModelRunnerOutput:
        self.async_copy_ready_event.synchronize()
        self._output.sampled_token_ids = self.sampled_token_ids_cpu.tolist()
        for index in self._invalid:
            self._output.sampled_token_ids[index].clear()
        return self._output


class SignedKV:
    """Locations of signatures in the KV memory of all layers: a token has one at the start of its
    row in the first head, and one at the end of its row in the last head.

    Args:
        caches: KV of each layer, [blocks, heads, tokens, content], in one allocation.
    """

    def __init__(self, caches: list[torch.Tensor]) -> None:
        first = caches[0]
        _, heads, self.block_size, content = first.shape
        per_number = 4 // first.element_size()
        block, head, row, _ = (stride // per_number for stride in first.stride())
        whole = torch.empty(0, dtype=torch.int32).set_(first.untyped_storage())
        self._memory: Numbers = whole.numpy().view(np.uint32)
        self._memory.fill(1)  # otherwise reads of untouched pages would be free
        self._layers = np.array([each.storage_offset() // per_number for each in caches])[:, None]
        self._block, self._row = block, row
        self._end = (heads - 1) * head + content // per_number - 1

    def begins(self, blocks: Numbers, offsets: Numbers | int) -> Numbers:
        """Indices of tokens' first signatures within a layer."""
        return blocks * self._block + offsets * self._row

    def ends(self, blocks: Numbers, offsets: Numbers | int) -> Numbers:
        """Indices of tokens' second signatures within a layer."""
        return self.begins(blocks, offsets) + self._end

    def read(self, layers: slice, places: Numbers) -> Numbers:
        """[layers, places]"""
        return self._memory[self._layers[layers] + places]

    def write(self, layers: slice, places: Numbers, values: Numbers) -> None:
        """Values: [layers, places]."""
        self._memory[self._layers[layers] + places] = values


@dataclass
class PacedStep:
    """A step's inputs, captured when it is enqueued.

    Args:
        kv: KV of all layers.
        requests: the model runner's request states, which keep the last sampled token.
        tokens: token ids, [tokens]; -1 stands for the last sampled token.
        positions: positions within the requests, [tokens].
        bounds: start of each request's tokens, [requests + 1].
        blocks: block table, [requests, columns].
        sampled: receives the step's output, [requests, 1].
    """

    kv: SignedKV
    requests: list[Any]
    tokens: Numbers
    positions: Numbers
    bounds: Numbers
    blocks: Numbers
    sampled: Numbers

    def begin(self) -> None:
        """Compute everything that is the same in all layers."""
        kv, size = self.kv, self.kv.block_size
        owners = np.repeat(np.arange(len(self.requests)), np.diff(self.bounds))
        for at in np.flatnonzero(self.tokens < 0):
            self.tokens[at] = self.requests[owners[at]].last_sampled
        mixed = (self.tokens + 1).astype(np.uint32) * np.uint32(TOKEN_FACTOR)
        mixed ^= self.positions.astype(np.uint32) * np.uint32(POSITION_FACTOR)
        sums = np.cumsum(mixed, dtype=np.uint32)
        firsts, lasts = self.bounds[:-1], self.bounds[1:] - 1
        self._chain = sums - (sums[firsts] - mixed[firsts])[owners]
        self._owners = owners
        blocks = self.blocks[owners, self.positions // size]
        offsets = self.positions % size
        self._begins = kv.begins(blocks, offsets)
        has_end = offsets == size - 1
        has_end[lasts] = True
        self._with_end = np.flatnonzero(has_end)
        self._ends = kv.ends(blocks, offsets)[self._with_end]
        before = self.positions[firsts] - 1
        self._is_first = before < 0
        rows = np.arange(len(firsts))
        self._before = kv.begins(self.blocks[rows, before // size], before % size)
        self._attend(self.positions[lasts] + 1, lasts)
        self._state = np.zeros(len(firsts), np.uint32)

    def _attend(self, lengths: Numbers, lasts: Numbers) -> None:
        """Choose the KV that is read of each request: both ends of its blocks, and its last
        token."""
        size, columns = self.kv.block_size, np.arange(self.blocks.shape[1])
        begun = np.nonzero(columns * size < lengths[:, None])
        full = np.nonzero((columns + 1) * size <= lengths[:, None])
        places = (
            self.kv.begins(self.blocks[begun], 0),
            self.kv.ends(self.blocks[full], size - 1),
            self._begins[lasts],
            self._ends[np.searchsorted(self._with_end, lasts)],
        )
        rows = np.arange(len(lasts))
        self._read = np.concatenate(places)
        self._readers = np.concatenate((begun[0], full[0], rows, rows))

    def run(self, layers: slice) -> None:
        """Compute some layers."""
        if layers.start == 0:
            self.begin()
        numbers = np.arange(layers.start, layers.stop, dtype=np.uint32)[:, None]
        before = self.kv.read(layers, np.where(self._is_first, 0, self._before))
        before = np.where(self._is_first, (numbers + 1) * np.uint32(LAYER_SEED), before)
        values = before[:, self._owners] + self._chain
        self.kv.write(layers, self._begins, values)
        self.kv.write(layers, self._ends, values[:, self._with_end])
        found = self.kv.read(layers, self._read) * (2 * numbers + 1)
        np.add.at(self._state, self._readers, found.sum(0, dtype=np.uint32))

    def sample(self) -> None:
        """Sample, after all layers are computed."""
        self.sampled[:, 0] = FIRST_TOKEN_ID + self._state % NUM_TOKEN_IDS
        for request, token in zip(self.requests, self.sampled[:, 0], strict=True):
            request.last_sampled = int(token)


class PacedModelRunner(CPUModelRunner):
    """vLLM's own model runner with a simulated forward pass."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self._step_s = float(os.environ.get("VLLM_PACED_STEP_MS", "5")) / 1e3
        self._token_s = float(os.environ.get("VLLM_PACED_TOKEN_US", "30")) / 1e6
        self._paced = PacedDevice()
        width = self.model_config.get_hidden_size()
        self._hidden = torch.zeros(self.max_num_tokens, width, dtype=self.dtype)
        gpu_model_runner.AsyncGPUModelRunnerOutput = partial(PacedOutput, self._paced)

    def warming_up_model(self) -> None:
        """Nothing to do: there is nothing to compile."""

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        if has_kv_transfer_group():
            self._give_events()
        super().initialize_kv_cache(*args, **kwargs)
        [group] = self.kv_cache_config.kv_cache_groups
        self._layers = sorted(group.layer_names, key=extract_layer_index)
        self._kv = SignedKV(self.kv_caches)

    def _give_events(self) -> None:
        """Give our connector device events, with which it waits for layers and which CPUs lack."""
        from mooncake_vllm import vllm_connectors

        describe = vllm_connectors.describe_device
        make_event = partial(PacedEvent, self._paced)
        vllm_connectors.describe_device = lambda *args: replace(
            describe(*args), make_event=make_event
        )

    def _prepare_input_ids(self, *args: Any) -> None:
        """Tokens that the previous step samples are still on the device: -1 stands for them."""

    def _model_forward(self, input_ids: Any, positions: Any, *args: Any, **kwargs: Any) -> Any:
        num_reqs = self.input_batch.num_reqs
        bounds = self.query_start_loc.np[: num_reqs + 1].astype(np.int64)
        count, table = int(bounds[-1]), self.input_batch.block_table[0]
        self._sampled = np.zeros((num_reqs, 1), np.int32)
        step = PacedStep(
            self._kv,
            [self.requests[name] for name in self.input_batch.req_ids],
            input_ids[:count].numpy().astype(np.int64),
            positions[:count].numpy().astype(np.int64),
            bounds,
            table.get_numpy_array()[:num_reqs].astype(np.int64),
            self._sampled,
        )
        self._enqueue(step, self._step_s + self._token_s * count)
        return self._hidden[: len(input_ids)]

    def _enqueue(self, step: PacedStep, seconds: float) -> None:
        """Enqueue a step layer by layer, with the hooks that vLLM's attention layers call."""
        metadata, total = get_forward_context().attn_metadata, len(self._layers)
        connector = get_kv_transfer_group() if has_kv_transfer_group() else None
        num_groups = max(1, min(total, int(seconds / GROUP_S)))
        ends = [total * (group + 1) // num_groups for group in range(num_groups)]
        for start, stop in zip([0, *ends], ends, strict=False):
            for name in self._layers[start:stop] if connector else ():
                connector.wait_for_layer_load(name)
            self._paced.enqueue(
                seconds * (stop - start) / total, partial(step.run, slice(start, stop))
            )
            for index in range(start, stop) if connector else ():
                name = self._layers[index]
                connector.save_kv_layer(name, self.kv_caches[index], metadata[name])
        self._paced.enqueue(0.0, step.sample)

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> SamplerOutput:
        if not self.use_async_scheduling:
            self._paced.wait(self._paced.num_enqueued)
        return SamplerOutput(torch.from_numpy(self._sampled), None)

    def _get_or_create_async_output_copy_stream(self) -> None:
        """Nothing to do: nothing is copied."""


class PacedWorker(cpu_worker.CPUWorker):
    """Loads the model as usual, and never runs it."""

    def init_device(self) -> None:
        cpu_worker.CPUModelRunner = PacedModelRunner
        super().init_device()


class SchedulingWorker(cpu_worker.CPUWorker):
    """A paced worker that also skips the model runner, so that only vLLM's scheduler, API and
    detokenization use the host: its minimum cost. Prompts must fit into one step; there is no KV
    and no connector."""

    _scheduled: list[str]

    def compile_or_warm_up_model(self) -> CompilationTimes:
        self._step_s = float(os.environ["VLLM_PACED_STEP_MS"]) / 1e3
        self._free_at = 0.0
        return super().compile_or_warm_up_model()

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        self._scheduled = [*scheduler_output.num_scheduled_tokens]
        if not self._scheduled:
            return EMPTY_MODEL_RUNNER_OUTPUT
        self._free_at = max(time.perf_counter(), self._free_at) + self._step_s
        return None

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        time.sleep(max(0.0, self._free_at - time.perf_counter()))
        return ModelRunnerOutput(
            req_ids=self._scheduled,
            req_id_to_index={name: index for index, name in enumerate(self._scheduled)},
            sampled_token_ids=[[FIRST_TOKEN_ID]] * len(self._scheduled),
        )
