"""No op between the model and its tokens makes a step wait for the NPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.npu_waits import watched
from torch import Tensor

from mooncake_engine.execution.request_table import CachedRequest, RequestTable, add_placeholders
from mooncake_engine.execution.sampler import Sampler
from mooncake_engine.kv_cache.block_copier import BlockCopier
from mooncake_engine.kv_cache.kv_cache_memory import KVCacheMemory, KVCacheSize
from mooncake_engine.sampling_params import Grammar, GrammarKind, SamplingParams
from mooncake_engine.scheduling.step_plan import NewRequest, StepPlan
from mooncake_hal.backend_parts import CopyThread, to_device
from mooncake_hal.kv.geometry import AttentionKind, KVGeometry, shard_of
from mooncake_hal.testing.backends import load_backend

VOCAB, EOS = 50, 3
NPU = torch.device("npu", 0)
NEEDS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "bias": {"logit_bias": ((7, 9.0), (8, -9.0))},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4},
    "no end yet": {"min_tokens": 2, "stop_token_ids": (11,)},
    "log probabilities": {"logprobs": 3},
    "allowed tokens": {"allowed_token_ids": (7, 8, 9)},
    "bad words": {"bad_words_token_ids": ((7,), (8, 9), (9, 9))},
    "grammar": {"grammar": Grammar(GrammarKind.REGEX, "")},
    "filters": {"top_k": 7, "min_p": 0.1},
}


class Evens:
    """A vocabulary and a matcher with a grammar that allows even token ids."""

    is_too_slow = False

    def matcher(self, grammar: Grammar) -> Any:
        return self

    def accept(self, token_id: int) -> None:
        pass

    def allowed(self) -> bytes:
        return b"\x55" * 7


def admitted(table: RequestTable, name: str, params: SamplingParams) -> CachedRequest:
    table.admit([NewRequest(name, (1, 2, 4), 2, params, 5, ())])
    return table[name]


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "random"])
@pytest.mark.parametrize("need", NEEDS)
def test_sampling_does_not_wait(need: str, temperature: float) -> None:
    """Neither for a stable batch nor for a joining request; the CPU samples the same tokens."""
    params = SamplingParams(temperature=temperature, **NEEDS[need])
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    chosen = []
    for device in (NPU, torch.device("cpu")):
        table: Any = RequestTable(4, 4, VOCAB, device, Evens)  # type: ignore[arg-type]  # stands in
        sampler = Sampler((EOS,))
        states = [admitted(table, "first", params)]
        on_device = logits.to(device)
        tokens = []
        sampler.choose(on_device[:1].clone(), states)
        with watched() as waits:
            states = [*states, admitted(table, "second", params)]
            for _ in range(3):
                found = sampler.choose(on_device.clone(), states)
                table.count_sampled(states, found.token_ids)
                add_placeholders(states)
                tokens.append(found.token_ids)
        assert waits == []
        chosen.append([each.tolist() for each in tokens])
    assert chosen[0] == chosen[1]
    if need == "grammar":
        assert not any(token_id % 2 for row in chosen[0] for token_id in row)


def test_copies_on_write_do_not_wait() -> None:
    backend = load_backend("ascend")
    geometry = KVGeometry(AttentionKind.GQA, 1, 1, (64, 64), "bfloat16", 4)
    pool = KVCacheMemory(
        backend, 0, geometry, shard_of(geometry, 1, 0), KVCacheSize(4, 128), layout_name="LPBTH"
    )
    stream = CopyThread("npu")
    copier = BlockCopier(pool, 0, backend.ops, pool.device, stream)
    try:
        planes = pool.layer(0)
        for plane in planes:
            plane.zero_()
            plane[1] = 1.0
        with watched() as waits:
            copier.copy(StepPlan(0, block_copies=((1, 2),)))
        assert waits == []
        for plane in planes:
            assert [float(block.float().mean()) for block in plane] == [0, 1, 1, 0]
    finally:
        copier.close()
        pool.close()


WAITS: list[Callable[[Tensor], object]] = [
    lambda x: x[0, [1, 2]],
    lambda x: x.new_tensor([1.0, 2.0]),
    lambda x: torch.ones(3).to(NPU, non_blocking=True),
    lambda x: torch.ones(3).pin_memory().to(NPU),
    lambda x: x.cpu(),
    lambda x: bool(x.any()),
    lambda x: x[torch.tensor([1])],
]


@pytest.mark.parametrize("wait", WAITS, ids=range(len(WAITS)))
def test_a_wait_is_detected(wait: Callable[[Tensor], object]) -> None:
    """Validates the tests above."""
    with watched() as waits:
        wait(torch.zeros(2, 3, device=NPU))
    assert len(waits) == 1


def test_calls_that_do_not_wait_are_not_reported() -> None:
    with watched() as waits:
        x, indexes = to_device(NPU, [np.ones((2, 3)), np.array([1, 0])])
        x[indexes] += x[0] * 2
        torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
    assert waits == []
