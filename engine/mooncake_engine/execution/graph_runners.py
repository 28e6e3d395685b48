"""Graph runners: replay a captured graph of a step in place of hundreds of kernel launches.

A graph runs on fixed addresses and for a fixed number of tokens. So a step's inputs are copied to
buffers, and graphs are captured for a few sizes: a step uses the smallest size that it fits into,
and is padded to it. Padding writes its KV to scratch blocks, which are never given to a request.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from mooncake_engine.errors import ConfigError
from mooncake_engine.execution.parallel_state import StageRunner
from mooncake_engine.kv_cache.kv_cache_memory import KVCacheMemory
from mooncake_engine.models.catalog import Model
from mooncake_engine.models.decoder import IntermediateTensors
from mooncake_engine.models.layers import ParallelContext
from mooncake_engine.models.parallel_context import ForwardContext
from mooncake_hal.backend import AttentionBatch, Graph, Runtime
from mooncake_hal.errors import CapabilityError


@dataclass(frozen=True, slots=True, eq=False)
class GraphInputs:
    """The input buffers of graphs: the tokens of a step and the slots of their KV.

    Args:
        token_ids, positions, slot_mapping: [size] int64.
        scratch_slots: [any] int64, slots of the scratch blocks, for padding.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    scratch_slots: Tensor

    @classmethod
    def of(cls, size: int, pool: KVCacheMemory) -> GraphInputs:
        """Buffers for ``size`` tokens, filled with padding. The pool must have scratch blocks."""
        device, end = pool.device, pool.layout.num_blocks * pool.block_size
        token_ids, positions = torch.zeros(2, size, dtype=torch.int64, device=device)
        scratch = torch.arange(pool.num_blocks * pool.block_size, end, device=device)
        slots = scratch.repeat(-(-size // len(scratch)))[:size]
        return cls(token_ids, positions, slots, scratch)

    def fill(self, token_ids: Tensor, positions: Tensor, slots: Tensor, size: int) -> None:
        """Copy a step's tokens in, and pad them to ``size``."""
        count = len(token_ids)
        self.token_ids[:count].copy_(token_ids)
        self.positions[:count].copy_(positions)
        self.slot_mapping[:count].copy_(slots)
        if count < size:
            self.slot_mapping[count:size].copy_(self.scratch_slots[: size - count])


logger = logging.getLogger(__name__)

Captured = TypeVar("Captured")


class GraphRunner(ABC, Generic[Captured]):
    """A StageRunner that replays some steps, and passes all others to the StageRunner it wraps.

    Args:
        stage: the wrapped StageRunner.
        pool: the KV cache, which ends with a scratch slot for each padding token of a step.
        runtime: captures the graphs.
        sizes: tokens per graph, ascending.
    """

    name: ClassVar[str]
    """The kind of steps that are replayed, for messages."""

    remedy: ClassVar[str]
    """The option that turns these graphs off."""

    def __init__(
        self, stage: StageRunner, pool: KVCacheMemory, runtime: Runtime, sizes: Sequence[int]
    ) -> None:
        self._stage = stage
        self._runtime = runtime
        self._kv = pool.layers
        self._inputs = GraphInputs.of(sizes[-1], pool)
        self._sizes = sizes
        self._captured: dict[int, Captured] = {}

    @torch.inference_mode()
    def capture(self, max_sizes: int | None = None) -> int:
        """Capture the graphs now, the largest sizes first, as the others fit into their memory.
        Without this call, a size is captured when a step first needs it.

        Args:
            max_sizes: the maximum number of sizes to capture; None captures all of them.

        Returns:
            The number of sizes that are not captured yet.

        Raises:
            ConfigError: a step can't be captured, for a reason that the backend does not report as
                CapabilityError.
        """
        for size in tuple(reversed(self._sizes))[:max_sizes]:
            self._graphs_of(size)
        if self._captured and max_sizes is None:
            logger.info("captured %s in sizes %s", self.name, list(self._sizes))
        return len(self._sizes) - len(self._captured) if self._sizes else 0

    def forward(
        self, token_ids: Tensor, positions: Tensor, context: ForwardContext
    ) -> Tensor | None:
        """See ``StageRunner``. The result of a replay is valid until the next replay."""
        count = len(token_ids)
        size = self._fitting_size(count) if self._can_replay(count, context) else None
        if size is not None:
            self._fill(token_ids, positions, context.batch, size)
            captured = self._graphs_of(size)
            if captured is not None:
                return self._replay(captured, size, count, context)
        return self._stage.forward(token_ids, positions, context)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._stage.logits(hidden)

    @abstractmethod
    def _can_replay(self, count: int, context: ForwardContext) -> bool:
        """Whether a step of ``count`` tokens is of the kind that this runner replays."""

    def _fill(self, token_ids: Tensor, positions: Tensor, batch: AttentionBatch, size: int) -> None:
        """Copy a step to the buffers that the graphs of a size read."""
        self._inputs.fill(token_ids, positions, batch.slot_mapping, size)

    @abstractmethod
    def _capture(self, size: int) -> Captured:
        """Capture the graphs of a size; raises what ``Runtime.capture`` does."""

    @abstractmethod
    def _replay(self, captured: Captured, size: int, count: int, context: ForwardContext) -> Tensor:
        """Run the step that ``_fill`` has copied; returns its hidden rows, [count, hidden]."""

    def _fitting_size(self, count: int) -> int | None:
        return next((size for size in self._sizes if size >= count), None)

    def _graphs_of(self, size: int) -> Captured | None:
        """The graphs of a size, captured if needed; None if the backend can't capture the model's
        steps."""
        if size in self._captured or not self._sizes:
            return self._captured.get(size)
        try:
            self._captured[size] = self._capture(size)
        except CapabilityError as exc:
            logger.warning("%s run without graphs: %s", self.name, exc)
            self._sizes = ()
            return None
        except RuntimeError as exc:
            raise ConfigError(
                f"{self.name} can't be captured in size {size}: {exc}; run them without graphs: "
                f"{self.remedy}"
            ) from exc
        return self._captured[size]


@dataclass(frozen=True, slots=True, eq=False)
class _DecodeBatch:
    """The buffers of the attention batch that graphs of decodes read, at fixed addresses.

    Args:
        context_lens: [size] int32.
        query_start: [size + 1] int32: 0, 1, 2, and so on, as each sequence has one token.
        block_tables: [size, max_blocks] int32.
    """

    context_lens: Tensor
    query_start: Tensor
    block_tables: Tensor

    @classmethod
    def of(cls, size: int, max_blocks: int, device: torch.device) -> _DecodeBatch:
        """Buffers for ``size`` sequences, filled with padding."""
        lens = torch.ones(size, dtype=torch.int32, device=device)
        start = torch.arange(size + 1, dtype=torch.int32, device=device)
        return cls(lens, start, torch.zeros(size, max_blocks, dtype=torch.int32, device=device))

    def fill(self, batch: AttentionBatch, size: int) -> None:
        """Copy a step's batch, and pad it to ``size`` with sequences of one token."""
        count, width = batch.block_tables.shape
        self.context_lens[:count].copy_(batch.context_lens)
        self.block_tables[:count, :width].copy_(batch.block_tables)
        if count < size:
            self.context_lens[count:size].fill_(1)

    def captured(self, size: int, slots: Tensor, block_size: int) -> AttentionBatch:
        """The attention batch of a graph of ``size`` sequences."""
        ones = (1,) * size
        return AttentionBatch(
            num_decodes=size,
            query_start=self.query_start[: size + 1],
            context_lens=self.context_lens[:size],
            block_tables=self.block_tables[:size],
            slot_mapping=slots,
            block_size=block_size,
            host_query_lens=ones,
            host_context_lens=ones,
        )


class DecodeGraphRunner(GraphRunner[tuple[Graph, Tensor]]):
    """Replays steps that contain only decodes.

    Args:
        stage: runs the whole model.
        pool: the model's KV cache, which ends with a scratch slot for each sequence of the largest
            graph.
        runtime: captures the graphs.
        sizes: sequences per graph, ascending.
        max_blocks: blocks of the longest sequence.
    """

    name = "steps of decodes"
    remedy = "--enforce-eager"

    def __init__(
        self,
        stage: StageRunner,
        pool: KVCacheMemory,
        runtime: Runtime,
        sizes: Sequence[int],
        max_blocks: int,
    ) -> None:
        super().__init__(stage, pool, runtime, sizes)
        self._block_size = pool.block_size
        self._batch = _DecodeBatch.of(sizes[-1], max_blocks, pool.device)

    def _can_replay(self, count: int, context: ForwardContext) -> bool:
        return context.batch.num_decodes == count and context.layer_done is None

    def _fill(self, token_ids: Tensor, positions: Tensor, batch: AttentionBatch, size: int) -> None:
        super()._fill(token_ids, positions, batch, size)
        self._batch.fill(batch, size)

    def _capture(self, size: int) -> tuple[Graph, Tensor]:
        """Capture a graph of ``size`` decodes; returns it and the tensor of its hidden rows."""
        inputs = self._inputs
        batch = self._batch.captured(size, inputs.slot_mapping[:size], self._block_size)
        context = ForwardContext(batch, self._kv)
        rows: list[Tensor] = []

        def run() -> None:
            hidden = self._stage.forward(inputs.token_ids[:size], inputs.positions[:size], context)
            assert hidden is not None, "the whole model is in one stage"
            rows[:] = [hidden]

        graph = self._runtime.capture(run)
        return graph, rows[0]

    def _replay(
        self, captured: tuple[Graph, Tensor], size: int, count: int, context: ForwardContext
    ) -> Tensor:
        graph, hidden = captured
        graph.replay(context.batch.host_context_lens + (1,) * (size - count))
        return hidden[:count]


class _Segments(NamedTuple):
    """A step captured piecewise.

    Args:
        graphs: one that ends at each layer's attention, and one after the last attention.
        hidden: [tokens, hidden], the output of the last graph.
    """

    graphs: list[Graph]
    hidden: Tensor


class PiecewiseGraphRunner(GraphRunner[_Segments]):
    """Replays piecewise the steps that contain prompts or have a layer hook.

    The work of a layer other than attention depends only on the number of tokens. So there are
    graphs for a few numbers of tokens, each from one layer's attention to the next, and attention
    is launched between the graphs, over the actual (unpadded) tokens, as with vLLM's piecewise CUDA
    graphs. Between graphs the host can run code for each layer, such as the layer hook of a push
    connector. If a layer's experts are divided over ranks, the rest of the layer after its
    attention is launched too, and steps of decodes are replayed piecewise as well.

    Queries and attention outputs pass between graphs and attention in buffers of this runner: the
    memory of a graph's own results may be reused by other graphs before they are read.

    Args:
        stage: runs all other steps.
        model: the whole model, in which the graphs are captured.
        parallel: the model's parallel context.
        pool: the model's KV cache, which ends with a scratch slot for each padding token of a step.
        runtime: captures the graphs.
        sizes: tokens per graph, ascending.
        hidden_size: hidden size of the model.
    """

    name = "steps with prompts"
    remedy = "--piecewise-graph-max-tokens 0"

    def __init__(  # stage and model are the same model: run as a whole, and layer by layer
        self,
        stage: StageRunner,
        model: Model,
        parallel: ParallelContext,
        pool: KVCacheMemory,
        runtime: Runtime,
        *,
        sizes: Sequence[int],
        hidden_size: int,
    ) -> None:
        super().__init__(stage, pool, runtime, sizes)
        self._model = model
        most, widths = sizes[-1], model.attention_widths
        self._query = parallel.zeros(most, widths.heads, widths.query)
        self._attended = parallel.zeros(most, widths.heads, widths.value)
        self._is_split = [model.is_split(index) for index in range(model.num_held_layers)]
        self._has_split_layers = any(self._is_split)
        if self._has_split_layers:
            self._output, self._residual = parallel.zeros(2, most, hidden_size)

    def _can_replay(self, count: int, context: ForwardContext) -> bool:
        if self._has_split_layers:
            return True
        return context.batch.num_decodes < count or context.layer_done is not None

    def _replay(
        self, captured: _Segments, size: int, count: int, context: ForwardContext
    ) -> Tensor:
        query, attended = self._query[:count], self._attended[:count]
        first, *others = captured.graphs
        first.replay()
        for index, graph in enumerate(others):
            found = self._model.attend(index, query, context)
            if self._is_split[index]:
                output, residual = self._output[:count], self._residual[:count]
                finished = self._model.finish_layer(index, found, residual, context.expert_round)
                output.copy_(finished[0])
                residual.copy_(finished[1])
            else:
                attended.copy_(found)
            graph.replay()
        return captured.hidden[:count]

    def _capture(self, size: int) -> _Segments:
        """Capture the segments of a step of ``size`` tokens.

        Each is captured while the residual that it continues from is still referenced, so that the
        graphs' memory pool does not reuse the residual's memory.
        """
        model, inputs = self._model, self._inputs
        query, attended = self._query[:size], self._attended[:size]
        tokens = model.token_slots(inputs.positions[:size], inputs.slot_mapping[:size], self._kv)
        graph, between = self._segment(
            partial(model.run_to_first_attention, inputs.token_ids[:size], tokens), query
        )
        graphs, last = [graph], model.num_held_layers - 1
        for index in range(model.num_held_layers):
            if self._is_split[index]:
                rows = self._output[:size], self._residual[:size]
                run = partial(model.run_to_next_attention, index, *rows, tokens)
            else:
                rows = attended, between.residual
                run = partial(model.run_between_attention, index, *rows, tokens)
            graph, between = self._segment(run, None if index == last else query)
            graphs.append(graph)
        return _Segments(graphs, between.rows)

    def _segment(
        self, run: Callable[[], IntermediateTensors], query: Tensor | None
    ) -> tuple[Graph, IntermediateTensors]:
        """Capture ``run``. Returns the graph and its outputs: the queries in ``query``, and, if
        experts run outside the graphs, the residual in the buffer that they read."""
        left: list[IntermediateTensors] = []

        def keep() -> None:
            between = run()
            if query is not None:
                between = between._replace(rows=query.copy_(between.rows))
                if self._has_split_layers:
                    kept = self._residual[: len(query)].copy_(between.residual)
                    between = between._replace(residual=kept)
            left[:] = [between]

        graph = self._runtime.capture(keep)
        return graph, left[0]
