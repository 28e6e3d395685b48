"""Decode steps as captured graphs: one replay in place of hundreds of launches.

A graph runs on fixed addresses, with a fixed number of sequences. So a step's inputs are copied to
buffers, and there is a graph for each of a few sizes: a step takes the smallest that holds it.
What is missing writes to blocks that no request ever has, and nobody reads what comes of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mooncake_engine.execution.graphs.replayed_stage import ReplayedStage
from mooncake_engine.execution.kv_pool import KVPool
from mooncake_engine.execution.model_stage import Stage
from mooncake_engine.models.context import ForwardContext
from mooncake_hal.backend import AttentionBatch, Graph, Runtime


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
        """For that many sequences, all of them missing."""
        lens = torch.ones(size, dtype=torch.int32, device=device)
        start = torch.arange(size + 1, dtype=torch.int32, device=device)
        return cls(lens, start, torch.zeros(size, max_blocks, dtype=torch.int32, device=device))

    def fill(self, batch: AttentionBatch, size: int) -> None:
        """Take a step's batch over, and make up sequences of one token for what is missing."""
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


class DecodeGraphs(ReplayedStage[tuple[Graph, Tensor]]):
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
        self, stage: Stage, pool: KVPool, runtime: Runtime, sizes: Sequence[int], max_blocks: int
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
        batch = self._batch.captured(size, inputs.slots[:size], self._block_size)
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
