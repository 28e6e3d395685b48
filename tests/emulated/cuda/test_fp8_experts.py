"""Models with fp8 experts on interpreted kernels generate the reference's tokens, on one rank and
on several. The ranks are threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from support.checkpoints import random_model, write_checkpoint
from support.cuda_emulation import emulated_backend
from support.forward_steps import run
from support.fp8_checkpoints import write_fp8
from support.thread_ranks import on_ranks
from torch import Tensor

from mooncake_engine.models.catalog import read_model_config
from mooncake_engine.models.expert_placement import ExpertRanks, place_experts
from mooncake_engine.models.fp8_weights import Fp8Linears
from mooncake_engine.models.layers import ParallelContext
from mooncake_hal.backend import Communicator, Ops
from mooncake_hal.reference import ReferenceOps

FIELDS = {"hidden_size": 128, "moe_intermediate_size": 256, "num_hidden_layers": 1}
FIELDS |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128}
FIELDS |= {"num_experts": 4, "num_experts_per_tok": 2}
"""Sizes that are whole blocks, also on each of two ranks."""
LARGEST_PART = 2**-4
"""Tolerance relative to the logits' norm: values near the middle between two e4m3 values may be
rounded either way."""


@pytest.fixture(scope="module", params=["blocks", "channel"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    plain = write_checkpoint(random_model("qwen3_moe", **FIELDS), folder / "plain")
    return write_fp8(plain, folder / "model", request.param)[0]


def parallel_on(ops: Ops, model: Path) -> ParallelContext:
    quantization = read_model_config(model).quantization
    assert quantization is not None
    kept = Fp8Linears(quantization, keeps_experts=True)
    return ParallelContext(ops, torch.device("cpu"), torch.float32, quantization=kept)


def check(by_kernels: Sequence[Tensor], by_reference: Sequence[Tensor]) -> None:
    for step, wanted in zip(by_kernels, by_reference, strict=True):
        assert torch.equal(step.argmax(-1), wanted.argmax(-1))
        assert (step - wanted).norm() <= LARGEST_PART * wanted.norm()


def test_tokens_equal_the_references(model: Path) -> None:
    found, wanted = (
        run(model, parallel_on(ops, model))[0] for ops in (emulated_backend().ops, ReferenceOps())
    )
    check(found, wanted)


@pytest.mark.parametrize(
    ("ep_size", "least"), [(1, 1), (2, 1), (2, 1000)], ids=["TP 2", "EP 2, dispatched", "EP 2"]
)
def test_two_ranks_give_the_logits_of_two_reference_ranks(
    model: Path, ep_size: int, least: int
) -> None:
    """With slices of all experts or with whole experts; a slice's rows have their own scales."""

    def logits(ops: Ops, group: Communicator) -> list[Tensor]:
        sizes = {"ep_size": ep_size, "ep_dispatch_min_tokens": least}
        return run(model, replace(parallel_on(ops, model), communicator=group, **sizes))[0]

    ranks = (on_ranks(2, partial(logits, ops)) for ops in (emulated_backend().ops, ReferenceOps()))
    for found, wanted in zip(*ranks, strict=True):
        check(found, wanted)


def test_experts_move_to_another_rank_with_their_scales(model: Path) -> None:
    before = place_experts([9, 1, 1, 1], 6, ExpertRanks(2))
    after = (*before[3:], *before[:3])

    def logits(ops: Ops, group: Communicator) -> list[Tensor]:
        whole = replace(parallel_on(ops, model), communicator=group, ep_size=2)
        found, made = run(model, replace(whole, expert_slots=(before,)), after)
        assert sum(counts.num_moved for counts in made.expert_counts.values()) > 0
        return found

    ranks = (on_ranks(2, partial(logits, ops)) for ops in (emulated_backend().ops, ReferenceOps()))
    for found, wanted in zip(*ranks, strict=True):
        check(found, wanted)
