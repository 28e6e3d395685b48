"""Decode steps as captured graphs: one replay in place of hundreds of launches.

A graph runs on fixed addresses, with a fixed number of sequences. So a step's inputs are copied to
buffers, and there is a graph for each of a few sizes: a step takes the smallest that holds it.
What is missing writes to blocks that no request ever has, and nobody reads what comes of it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from mooncake_engine.config import EngineConfig, Role
from mooncake_engine.errors import ConfigError
from mooncake_engine.execution.kv_pool import KVPool
from mooncake_engine.execution.model_stage import Stage
from mooncake_engine.models.context import ForwardContext
from mooncake_hal.backend import AttentionBatch, Backend, Graph, Runtime
from mooncake_hal.errors import CapabilityError

logger = logging.getLogger(__name__)

_MOST_ON_HOST = 32
"""Sequences in a graph on a CPU: its graphs share no memory, and in larger steps Python's part is
small."""


def uses_graphs(config: EngineConfig, backend: Backend) -> bool:
    """Whether decode steps are captured: where the backend can, of models in one stage, on
    instances that decode."""
    is_decoding = config.role is not Role.PREFILL and config.pp_size == 1
    return backend.capabilities.graphs and is_decoding and not config.enforce_eager


def largest_graph(config: EngineConfig, backend: Backend) -> int:
    """Sequences in the largest step that is captured; larger ones are launched."""
    is_host = backend.runtime.device(config.device).type == "cpu"
    return min(config.max_num_seqs, _MOST_ON_HOST) if is_host else config.max_num_seqs


def scratch_blocks(config: EngineConfig, backend: Backend, block_size: int) -> int:
    """Blocks with a slot for each sequence that a step may be short of."""
    if not uses_graphs(config, backend):
        return 0
    return -(-largest_graph(config, backend) // block_size)


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Sequences per graph, rising: close together where a step is short."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, max_num_seqs, 32)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


@dataclass(frozen=True, slots=True, eq=False)
class _Buffers:
    """The inputs of a step of decodes, at fixed addresses.

    Args:
        token_ids, positions, slots: [size] int64.
        scratch_slots: [size] int64, one for each sequence that is missing.
        context_lens: [size] int32.
        query_start: [size + 1] int32, one token after the other.
        block_tables: [size, max_blocks] int32.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    scratch_slots: Tensor
    context_lens: Tensor
    query_start: Tensor
    block_tables: Tensor

    @classmethod
    def of(cls, size: int, max_blocks: int, pool: KVPool) -> _Buffers:
        """For that many sequences, all of them missing; the pool ends with scratch blocks."""
        device = pool.device
        token_ids, positions = torch.zeros(2, size, dtype=torch.int64, device=device)
        end = pool.layout.num_blocks * pool.block_size
        scratch = torch.arange(end - size, end, device=device)
        lens = torch.ones(size, dtype=torch.int32, device=device)
        start = torch.arange(size + 1, dtype=torch.int32, device=device)
        tables = torch.zeros(size, max_blocks, dtype=torch.int32, device=device)
        return cls(token_ids, positions, scratch.clone(), scratch, lens, start, tables)

    def fill(self, token_ids: Tensor, positions: Tensor, batch: AttentionBatch) -> None:
        """Take a step's inputs over."""
        count, width = batch.block_tables.shape
        self.token_ids[:count].copy_(token_ids)
        self.positions[:count].copy_(positions)
        self.slots[:count].copy_(batch.slot_mapping)
        self.context_lens[:count].copy_(batch.context_lens)
        self.block_tables[:count, :width].copy_(batch.block_tables)

    def pad(self, start: int, stop: int) -> None:
        """Make up sequences of one token that goes to a scratch slot."""
        if start < stop:
            self.slots[start:stop].copy_(self.scratch_slots[start:stop])
            self.context_lens[start:stop].fill_(1)


class DecodeGraphs:
    """A stage whose steps of nothing but decodes are replayed.

    Args:
        stage: the whole model.
        pool: its KV, with ``scratch_blocks`` at the end.
        runtime: captures.
        max_num_seqs: of the largest graph.
        max_blocks: of the longest sequence.
    """

    def __init__(
        self, stage: Stage, pool: KVPool, runtime: Runtime, max_num_seqs: int, max_blocks: int
    ) -> None:
        self._stage = stage
        self._runtime = runtime
        self._kv = pool.layers
        self._block_size = pool.block_size
        self._buffers = _Buffers.of(max_num_seqs, max_blocks, pool)
        self._sizes = graph_sizes(max_num_seqs)
        self._graphs: dict[int, tuple[Graph, Tensor]] = {}

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture all sizes now, the largest first: the others fit into its memory. Without this a
        size is captured when it is first wanted.

        Raises:
            ConfigError: a step can't be captured, for a reason that the backend did not foresee.
        """
        for size in reversed(self._sizes):
            self._graph(size)
        if self._graphs:
            logger.info("captured decode steps of %s sequences", self._sizes)

    def forward(
        self, token_ids: Tensor, positions: Tensor, context: ForwardContext
    ) -> Tensor | None:
        """See ``Stage``. What a replay returns is good until the next one."""
        batch, count = context.batch, len(token_ids)
        size = self._fitting(count) if batch.num_decodes == count else None
        if size is None or context.layer_done is not None:
            return self._stage.forward(token_ids, positions, context)
        self._buffers.fill(token_ids, positions, batch)
        self._buffers.pad(count, size)
        captured = self._graph(size)
        if captured is None:
            return self._stage.forward(token_ids, positions, context)
        graph, hidden = captured
        graph.replay(batch.host_context_lens + (1,) * (size - count))
        return hidden[:count]

    def logits(self, hidden: Tensor) -> Tensor:
        """See ``Stage``."""
        return self._stage.logits(hidden)

    def _fitting(self, count: int) -> int | None:
        return next((size for size in self._sizes if size >= count), None)

    def _graph(self, size: int) -> tuple[Graph, Tensor] | None:
        """The graph of a size; None if this model's steps can't be captured here."""
        if size in self._graphs or not self._sizes:
            return self._graphs.get(size)
        try:
            self._graphs[size] = self._captured(size)
        except CapabilityError as exc:
            logger.warning("decode steps run without graphs: %s", exc)
            self._sizes = []
            return None
        except RuntimeError as exc:
            raise ConfigError(
                f"a step of {size} decodes can't be captured as a graph: {exc}; run without "
                "graphs: --enforce-eager"
            ) from exc
        return self._graphs[size]

    def _captured(self, size: int) -> tuple[Graph, Tensor]:
        """A graph of that many decodes, and where it leaves its hidden rows."""
        buffers = self._buffers
        ones = (1,) * size
        batch = AttentionBatch(
            num_decodes=size,
            query_start=buffers.query_start[: size + 1],
            context_lens=buffers.context_lens[:size],
            block_tables=buffers.block_tables[:size],
            slot_mapping=buffers.slots[:size],
            block_size=self._block_size,
            host_query_lens=ones,
            host_context_lens=ones,
        )
        context = ForwardContext(batch, self._kv)
        rows: list[Tensor] = []

        def run() -> None:
            hidden = self._stage.forward(
                buffers.token_ids[:size], buffers.positions[:size], context
            )
            assert hidden is not None, "the whole model is in one stage"
            rows[:] = [hidden]

        graph = self._runtime.capture(run)
        return graph, rows[0]
