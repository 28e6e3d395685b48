"""A whole model's decode step is captured, and replayed with other tokens and contexts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.npu import ON_NPU, write_family
from torch import Tensor

from mooncake_engine.config import EngineConfig
from mooncake_engine.execution.engine_plan import make_plan
from mooncake_engine.execution.weight_loader import load_weights
from mooncake_engine.kv_cache.kv_cache_memory import KVCacheMemory
from mooncake_engine.models.catalog import build_model
from mooncake_engine.models.layers import ParallelContext
from mooncake_engine.models.parallel_context import ForwardContext
from mooncake_hal.backend import AttentionBatch
from mooncake_hal.kv.geometry import shard_of
from mooncake_hal.testing.backends import load_backend

BLOCK = 128
START = (1, 4)
"""Context lengths of the two sequences, in blocks 0 and 1."""


def tensor(values: object, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype, device="npu")


def batch_of(contexts: tuple[int, ...]) -> AttentionBatch:
    slots = [row * BLOCK + context - 1 for row, context in enumerate(contexts)]
    return AttentionBatch(
        len(contexts),
        torch.arange(len(contexts) + 1, dtype=torch.int32, device="npu"),
        tensor(contexts, torch.int32),
        tensor([[row] for row in range(len(contexts))], torch.int32),
        tensor(slots),
        BLOCK,
        (1,) * len(contexts),
        contexts,
    )


class Decoder:
    """A loaded model and its KV cache, which is initially zero."""

    def __init__(self, folder: Path) -> None:
        self.backend = load_backend("ascend")
        setup = make_plan(EngineConfig(folder, **ON_NPU), self.backend)
        placement = ParallelContext(self.backend.ops, self.backend.runtime.device(0), setup.dtype)
        self.model = build_model(setup.model, placement, setup.max_model_len)
        load_weights(self.model, folder)
        shard, size = shard_of(setup.geometry, 1, 0), setup.kv_cache_size
        layout = {"layout_name": setup.layout_name}
        self.pool = KVCacheMemory(self.backend, 0, setup.geometry, shard, size, **layout)
        self.kv = {layer: self.pool.layer(layer) for layer in range(shard.layers)}

    def logits(self, tokens: Tensor, positions: Tensor, batch: AttentionBatch) -> Tensor:
        hidden = self.model.forward(tokens, positions, ForwardContext(batch, self.kv, None))
        return self.model.logits(hidden)


@torch.inference_mode()
@pytest.mark.parametrize("family", ["llama", "mixtral", "deepseek_v3"])
def test_replay_gives_the_logits_of_the_step(tmp_path: Path, family: str) -> None:
    decoder = Decoder(write_family(tmp_path, family))
    tokens, batch = tensor([5, 6]), batch_of(START)
    positions, out = batch.context_lens.long() - 1, []

    def step() -> None:
        out[:] = [decoder.logits(tokens, positions, batch)]

    graph = decoder.backend.runtime.capture(step)
    for contexts in (START, (2, 5), (40, 127)):
        now = batch_of(contexts)
        tokens.add_(1)
        positions.copy_(now.context_lens - 1)
        batch.context_lens.copy_(now.context_lens)
        batch.slot_mapping.copy_(now.slot_mapping)
        graph.replay(contexts)
        found = out[0].clone()
        assert torch.equal(found, decoder.logits(tokens, positions, now))
    decoder.pool.close()
