"""Forward passes of small models, step by step, without an engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mooncake_engine.execution.weight_loader import load_weights
from mooncake_engine.models.catalog import Model, build_model, read_model_config
from mooncake_engine.models.hf_config import ModelConfig
from mooncake_engine.models.layers import ParallelContext
from mooncake_engine.models.parallel_context import ForwardContext, share_heads
from mooncake_hal.backend import AttentionBatch

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Step:
    """One forward pass: each sequence's new tokens, and its length after the pass."""

    tokens: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]


PROMPTS = (tuple(range(100, 130)), (5, 9, 2))
STEPS = (
    Step((PROMPTS[0][:20], PROMPTS[1]), (20, 3)),  # a chunk beside a short prompt
    Step(((7,), PROMPTS[0][20:]), (4, 30)),  # a decode beside the second chunk
    Step(((8,), (9,)), (5, 31)),
    Step(((3,),), (6,)),  # fewer tokens than ranks
)
ORDER = ((0, 1), (1, 0), (1, 0), (1,))
"""The index of the prompt of each of a step's sequences; decodes come first."""


def batches() -> Iterator[tuple[Tensor, Tensor, AttentionBatch]]:
    """Token ids, positions and attention batch of each step; sequence i has blocks 4i to 4i + 3."""
    for step, order in zip(STEPS, ORDER, strict=True):
        counts = [len(tokens) for tokens in step.tokens]
        places = [
            (sequence, position)
            for sequence, length, count in zip(order, step.lengths, counts, strict=True)
            for position in range(length - count, length)
        ]
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        tables = torch.tensor([[4 * one + block for block in range(4)] for one in order])
        slots = [64 * sequence + position for sequence, position in places]
        ids = [token for tokens in step.tokens for token in tokens]
        batch = AttentionBatch(
            num_decodes=sum(count == 1 for count in counts),
            query_start=starts,
            context_lens=torch.tensor(step.lengths).int(),
            block_tables=tables.int(),
            slot_mapping=torch.tensor(slots),
            block_size=BLOCK_SIZE,
            host_query_lens=tuple(counts),
            host_context_lens=step.lengths,
        )
        yield torch.tensor(ids), torch.tensor([position for _, position in places]), batch


def make_kv(config: ModelConfig, tp_size: int, rank: int) -> dict[int, tuple[Tensor, ...]]:
    """Empty planes of a rank's heads, layer by layer."""
    heads, dims = 1, (0, 0)
    if config.mla is None:
        heads = share_heads(config.num_heads, config.num_kv_heads, tp_size, rank).kv_heads
        dims = config.head_dim, config.head_dim
    else:
        dims = config.mla.latent_dim, config.mla.rope_dim
    return {
        layer: tuple(torch.zeros(8, BLOCK_SIZE, heads, dim) for dim in dims)
        for layer in range(config.num_layers)
    }


def run(
    directory: Path, parallel: ParallelContext, new_placement: Sequence[int] = ()
) -> tuple[list[Tensor], Model]:
    """Run all steps on one rank; return its logits and its model.

    Args:
        directory: of a checkpoint.
        parallel: the rank's parallel context.
        new_placement: new placement of every layer's experts after two steps; empty: unchanged.
    """
    config = read_model_config(directory)
    model = build_model(config, parallel, 64)
    load_weights(model, directory)
    kv = make_kv(config, parallel.tp_size, parallel.tp_rank)
    logits = []
    for number, (ids, positions, batch) in enumerate(batches()):
        if number == 2 and new_placement:
            model.move_experts(dict.fromkeys(model.expert_counts, new_placement))
        logits.append(model.logits(model.forward(ids, positions, ForwardContext(batch, kv))))
    return logits, model
