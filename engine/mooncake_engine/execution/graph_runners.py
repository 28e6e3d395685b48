"""Steps as captured graphs: one replay in place of hundreds of launches.

A graph runs on fixed addresses and for a fixed number of tokens. So a step's inputs are copied to
buffers, and there is a graph for each of a few sizes: a step takes the smallest that it fits into,
and is padded to it. Padding writes to scratch blocks, which no request ever has.
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
from mooncake_engine.kv_cache.kv_pool import KVPool
from mooncake_engine.models.catalog import Model
from mooncake_engine.models.decoder import IntermediateTensors
from mooncake_engine.models.layers import ParallelContext
from mooncake_engine.models.parallel_context import ForwardContext
from mooncake_hal.backend import AttentionBatch, Graph, Runtime
from mooncake_hal.errors import CapabilityError


@dataclass(frozen=True, slots=True, eq=False)
class GraphInputs:
    """The tokens of a step, and where their KV goes.

    Args:
        token_ids, positions, slot_mapping: [size] int64.
        scratch_slots: [any] int64, of blocks that no request ever has: for padding.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    scratch_slots: Tensor

    @classmethod
    def of(cls, size: int, pool: KVPool) -> GraphInputs:
        """For that many tokens, all of them padding; the pool ends with scratch blocks."""
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
    """A StageRunner in front of another one, which runs what is not replayed.

    Args:
        stage: the other one.
        pool: KV, which ends with a scratch slot for each token that a step may be short of.
        runtime: captures.
        sizes: tokens per step, rising.
    """

    name: ClassVar[str]
    """What is replayed, for messages."""

    remedy: ClassVar[str]
    """The option that leaves such steps as they are."""

    def __init__(
        self, stage: StageRunner, pool: KVPool, runtime: Runtime, sizes: Sequence[int]
    ) -> None:
        self._stage = stage
        self._runtime = runtime
        self._kv = pool.layers
        self._inputs = GraphInputs.of(sizes[-1], pool)
        self._sizes = sizes
        self._captured: dict[int, Captured] = {}

    @torch.inference_mode()
    def capture(self, most: int | None = None) -> int:
        """Capture now, the largest sizes first: the others fit into their memory. Without this a
        size is captured when it is first wanted.

        Args:
            most: how many sizes; None is all of them.

        Returns:
            How many sizes are still to be captured.

        Raises:
            ConfigError: a step can't be captured, for a reason that the backend did not foresee.
        """
        for size in tuple(reversed(self._sizes))[:most]:
            self._of(size)
        if self._captured and most is None:
            logger.info("captured %s in sizes %s", self.name, list(self._sizes))
        return len(self._sizes) - len(self._captured) if self._sizes else 0

    def forward(
        self, token_ids: Tensor, positions: Tensor, context: ForwardContext
    ) -> Tensor | None:
        """What a replay returns is valid until the next one."""
        count = len(token_ids)
        size = self._fitting(count) if self._takes(count, context) else None
        if size is not None:
            self._fill(token_ids, positions, context.batch, size)
            captured = self._of(size)
            if captured is not None:
                return self._replay(captured, size, count, context)
        return self._stage.forward(token_ids, positions, context)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._stage.logits(hidden)

    @abstractmethod
    def _takes(self, count: int, context: ForwardContext) -> bool:
        """Whether a step of that many tokens is of the kind that is replayed."""

    def _fill(self, token_ids: Tensor, positions: Tensor, batch: AttentionBatch, size: int) -> None:
        """Bring a step to where the graphs of a size read it."""
        self._inputs.fill(token_ids, positions, batch.slot_mapping, size)

    @abstractmethod
    def _capture(self, size: int) -> Captured:
        """The graphs of a size; raises what ``Runtime.capture`` does."""

    @abstractmethod
    def _replay(self, captured: Captured, size: int, count: int, context: ForwardContext) -> Tensor:
        """Run a step that was filled in; its hidden rows, [count, hidden]."""

    def _fitting(self, count: int) -> int | None:
        return next((size for size in self._sizes if size >= count), None)

    def _of(self, size: int) -> Captured | None:
        """The graphs of a size; None if this model's steps can't be captured here."""
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
class _Batch:
    """Who attends to what in a step of decodes, at fixed addresses.

    Args:
        context_lens: [size] int32.
        query_start: [size + 1] int32, one token after the other.
        block_tables: [size, max_blocks] int32.
    """

    context_lens: Tensor
    query_start: Tensor
    block_tables: Tensor

    @classmethod
    def of(cls, size: int, max_blocks: int, device: torch.device) -> _Batch:
        """For that many sequences, all of them padding."""
        lens = torch.ones(size, dtype=torch.int32, device=device)
        start = torch.arange(size + 1, dtype=torch.int32, device=device)
        return cls(lens, start, torch.zeros(size, max_blocks, dtype=torch.int32, device=device))

    def fill(self, batch: AttentionBatch, size: int) -> None:
        """Copy a step's batch in, and pad it with sequences of one token."""
        count, width = batch.block_tables.shape
        self.context_lens[:count].copy_(batch.context_lens)
        self.block_tables[:count, :width].copy_(batch.block_tables)
        if count < size:
            self.context_lens[count:size].fill_(1)

    def captured(self, size: int, slots: Tensor, block_size: int) -> AttentionBatch:
        """What a graph of that many sequences attends by."""
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
    """A stage whose steps of nothing but decodes are replayed.

    Args:
        stage: the whole model.
        pool: its KV, with a scratch slot for each sequence of the largest graph at the end.
        runtime: captures.
        sizes: sequences per graph, rising.
        max_blocks: of the longest sequence.
    """

    name = "steps of decodes"
    remedy = "--enforce-eager"

    def __init__(
        self,
        stage: StageRunner,
        pool: KVPool,
        runtime: Runtime,
        sizes: Sequence[int],
        max_blocks: int,
    ) -> None:
        super().__init__(stage, pool, runtime, sizes)
        self._block_size = pool.block_size
        self._batch = _Batch.of(sizes[-1], max_blocks, pool.device)

    def _takes(self, count: int, context: ForwardContext) -> bool:
        return context.batch.num_decodes == count and context.layer_done is None

    def _fill(self, token_ids: Tensor, positions: Tensor, batch: AttentionBatch, size: int) -> None:
        super()._fill(token_ids, positions, batch, size)
        self._batch.fill(batch, size)

    def _capture(self, size: int) -> tuple[Graph, Tensor]:
        """A graph of that many decodes, and where it leaves its hidden rows."""
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
    """A captured step: a graph before each layer's attention and one behind the last, which leaves
    its [tokens, hidden] in ``hidden``."""

    graphs: list[Graph]
    hidden: Tensor


class PiecewiseGraphRunner(GraphRunner[_Segments]):
    """Replays steps with prompts piecewise, and steps with a layer hook.

    What a layer does besides attention depends on the number of tokens alone. So there are graphs
    for a few numbers of tokens, one from each layer's attention to the next one's, and attention is
    launched between them, over the actual (unpadded) tokens, as vLLM's piecewise CUDA graphs do.
    There the host has its say in each layer: the layer hook of a push connector works. Where a
    layer's experts are divided over ranks, all that it does behind its attention is launched, too,
    and decodes are replayed in pieces as well.

    Queries and what they attended to cross from graphs to attention and back in buffers: the memory
    of a graph's own results is another graph's by then.

    Args:
        stage: runs all other steps.
        model: the whole model, which the pieces are of.
        parallel: the model's.
        pool: its KV, which ends with a scratch slot for each token that a step may be short of.
        runtime: captures.
        sizes: tokens per step, rising.
        hidden_size: of the model.
    """

    name = "steps with prompts"
    remedy = "--piecewise-graph-max-tokens 0"

    def __init__(  # the model twice: whole, and what it is made of
        self,
        stage: StageRunner,
        model: Model,
        parallel: ParallelContext,
        pool: KVPool,
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
        self._is_cut = [model.is_cut(index) for index in range(model.num_held_layers)]
        self._has_cuts = any(self._is_cut)
        if self._has_cuts:
            self._output, self._residual = parallel.zeros(2, most, hidden_size)

    def _takes(self, count: int, context: ForwardContext) -> bool:
        if self._has_cuts:
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
            if self._is_cut[index]:
                output, residual = self._output[:count], self._residual[:count]
                finished = self._model.finish_layer(index, found, residual, context.expert_round)
                output.copy_(finished[0])
                residual.copy_(finished[1])
            else:
                attended.copy_(found)
            graph.replay()
        return captured.hidden[:count]

    def _capture(self, size: int) -> _Segments:
        """The segments of a step of that many tokens.

        Each is captured while the residual that it continues from is still held, and so has memory
        of its own in the graphs' pool.
        """
        model, inputs = self._model, self._inputs
        query, attended = self._query[:size], self._attended[:size]
        tokens = model.token_slots(inputs.positions[:size], inputs.slot_mapping[:size], self._kv)
        graph, between = self._segment(
            partial(model.run_to_first_attention, inputs.token_ids[:size], tokens), query
        )
        graphs, last = [graph], model.num_held_layers - 1
        for index in range(model.num_held_layers):
            if self._is_cut[index]:
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
        """A graph of ``run``, and where it leaves what it returns: queries in ``query``, and the
        residual where experts that are launched find it."""
        left: list[IntermediateTensors] = []

        def keep() -> None:
            between = run()
            if query is not None:
                between = between._replace(rows=query.copy_(between.rows))
                if self._has_cuts:
                    kept = self._residual[: len(query)].copy_(between.residual)
                    between = between._replace(residual=kept)
            left[:] = [between]

        graph = self._runtime.capture(keep)
        return graph, left[0]
