"""Models with experts divided over ranks have the logits of one rank. The ranks are threads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.checkpoints import random_model, write_checkpoint
from support.forward_steps import STEPS, batches, make_kv, run
from support.live_memory import PeakBytes
from support.thread_ranks import on_data_parallel_ranks, on_ranks
from torch import Tensor

from mooncake_engine.execution.weight_loader import load_weights
from mooncake_engine.models.catalog import Model, build_model, read_model_config
from mooncake_engine.models.expert_placement import ExpertRanks, place_experts
from mooncake_engine.models.layers import ParallelContext, share_of
from mooncake_engine.models.mlp import ExpertCounts
from mooncake_engine.models.parallel_context import ForwardContext
from mooncake_engine.scheduling.step_plan import ExpertRound
from mooncake_hal.backend import Communicator
from mooncake_hal_cpu.torch_ops import TorchOps

FAMILIES = ["mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3"]
DIVISIONS = [(2, 2, 1), (2, 2, 1000), (3, 3, 1), (4, 4, 1), (4, 2, 1), (4, 2, 1000), (4, 4, 10)]
"""tp_size, ep_size, and the minimum tokens of a dispatched step. With 1, decodes are dispatched, so
that some ranks have no tokens; with 10, chunks of prompts are dispatched and decodes are not."""
ALONE = ParallelContext(TorchOps(), torch.device("cpu"), torch.float32)


def divided(group: Communicator, ep_size: int, least: int) -> ParallelContext:
    return replace(ALONE, communicator=group, ep_size=ep_size, ep_dispatch_min_tokens=least)


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(random_model(request.param), tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[Tensor]:
    return run(checkpoint, ALONE)[0]


@pytest.mark.parametrize(("tp_size", "ep_size", "least"), DIVISIONS)
def test_every_rank_has_the_logits_of_a_single_rank(
    tp_size: int, ep_size: int, least: int, checkpoint: Path, expected: list[Tensor]
) -> None:
    def rank(group: Communicator) -> list[Tensor]:
        return run(checkpoint, divided(group, ep_size, least))[0]

    for found in on_ranks(tp_size, rank):
        compare(found, expected)


def compare(found: list[Tensor], expected: list[Tensor]) -> None:
    for step, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(step, wanted, atol=2e-4, rtol=2e-4)
        assert torch.equal(step.argmax(-1), wanted.argmax(-1))


@pytest.mark.parametrize("least", [1, 1000])
def test_replicas_of_busy_experts_change_no_logits(
    least: int, checkpoint: Path, expected: list[Tensor]
) -> None:
    config = read_model_config(checkpoint)
    assert config.moe is not None
    loads = [7 if expert in (1, 4) else 1 for expert in range(config.moe.routing.num_experts)]
    num_slots = len(loads) + 4 + len(loads) % 4
    slots = (place_experts(loads, num_slots, ExpertRanks(4)),) * config.num_layers

    def rank(group: Communicator) -> tuple[list[Tensor], Model]:
        return run(checkpoint, replace(divided(group, 4, least), expert_slots=slots))

    tokens = sum(len(sequence) for step in STEPS for sequence in step.tokens)
    for found, model in on_ranks(4, rank):
        compare(found, expected)
        sparse = set(range(config.num_layers)) - config.moe.dense_layers
        assert set(model.expert_counts) == sparse
        for counts in model.expert_counts.values():
            assert sum(counts.tokens) == tokens * config.moe.routing.experts_per_token
            assert (counts.num_sent_rows > 0) == (least == 1)


@pytest.mark.parametrize(("tp_size", "ep_size", "least"), [(2, 2, 1), (4, 2, 1000), (4, 4, 1)])
def test_moving_experts_changes_no_logits(
    tp_size: int, ep_size: int, least: int, checkpoint: Path, expected: list[Tensor]
) -> None:
    """They move after two of the steps, to slots that held other experts before."""
    config = read_model_config(checkpoint)
    assert config.moe is not None
    num_experts = config.moe.routing.num_experts
    num_slots = num_experts + ep_size + -num_experts % ep_size
    loads = [9 if expert in (0, 3) else 1 for expert in range(num_experts)]
    before = place_experts(loads, num_slots, ExpertRanks(ep_size))
    size = num_slots // ep_size
    after = (*before[size:], *before[:size])  # each part gets its neighbour's experts

    def rank(group: Communicator) -> tuple[list[Tensor], int]:
        parallel = replace(
            divided(group, ep_size, least), expert_slots=(before,) * config.num_layers
        )
        logits, model = run(checkpoint, parallel, after)
        assert all(counts.slots == after for counts in model.expert_counts.values())
        return logits, sum(counts.num_moved for counts in model.expert_counts.values())

    ranks = on_ranks(tp_size, rank)
    assert sum(num_moved for _, num_moved in ranks) > 0
    for found, _ in ranks:
        compare(found, expected)


@pytest.mark.parametrize(
    ("dp_size", "tp_size", "ep_size", "is_dispatched"),
    [(2, 1, 2, True), (2, 1, 2, False), (2, 2, 4, True), (2, 2, 2, False), (4, 1, 2, True)],
)
def test_data_parallel_ranks_have_the_logits_of_a_single_rank(
    dp_size: int,
    tp_size: int,
    ep_size: int,
    is_dispatched: bool,
    checkpoint: Path,
    expected: list[Tensor],
) -> None:
    """Each rank starts one round after the previous one, and serves the others while it has no
    tokens."""
    config = read_model_config(checkpoint)
    sizes = [sum(len(tokens) for tokens in step.tokens) for step in STEPS]
    num_rounds = len(STEPS) + dp_size - 1

    def step_of(dp_rank: int, number: int) -> int | None:
        step = number - dp_rank
        return step if 0 <= step < len(STEPS) else None

    def rank(
        dp_rank: int, stage: Communicator | None, everyone: Communicator
    ) -> tuple[list[Tensor], Model]:
        parallel = replace(ALONE, communicator=stage, expert_communicator=everyone, ep_size=ep_size)
        model = build_model(config, parallel, 64)
        load_weights(model, checkpoint)
        kv = make_kv(config, parallel.tp_size, parallel.tp_rank)
        logits, steps = [], list(batches())
        for number in range(num_rounds):
            running = [step_of(one, number) for one in range(dp_size)]
            counts = tuple(0 if step is None else sizes[step] for step in running)
            expert_round = ExpertRound(counts, is_dispatched)
            if (step := running[dp_rank]) is None:
                model.serve_experts(expert_round)
                continue
            ids, positions, batch = steps[step]
            context = ForwardContext(batch, kv, expert_round=expert_round)
            logits.append(model.logits(model.forward(ids, positions, context)))
        return logits, model

    assert config.moe is not None
    choices = dp_size * sum(sizes) * config.moe.routing.experts_per_token
    for found, model in on_data_parallel_ranks(dp_size, tp_size, rank):
        compare(found, expected)
        for counts in model.expert_counts.values():
            assert sum(counts.tokens) == choices


@pytest.fixture(scope="module")
def one_sided(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in which all tokens choose the last three of twelve experts."""
    model = random_model("deepseek_v3", n_group=1, topk_group=1)
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            buffer.data[-3:] += 100.0
    return write_checkpoint(model, tmp_path_factory.mktemp("one_sided"))


def peak(model: Model, kv: dict[int, tuple[Tensor, ...]], expert_round: ExpertRound | None) -> int:
    """Return the peak memory of the largest step, in bytes."""
    ids, positions, batch = next(batches())
    with PeakBytes() as memory:
        model.forward(ids, positions, ForwardContext(batch, kv, expert_round=expert_round))
    return memory.most


@pytest.mark.parametrize(
    ("dp_size", "tp_size", "ep_size", "least"),
    [(1, 4, 4, 1), (1, 4, 2, 1), (1, 4, 4, 1000), (4, 1, 4, 1), (2, 2, 2, 1), (2, 2, 4, 1000)],
)
def test_profiled_routing_has_the_highest_memory_peak(
    dp_size: int, tp_size: int, ep_size: int, least: int, one_sided: Path
) -> None:
    config = read_model_config(one_sided)

    def rank(
        dp_rank: int, stage: Communicator | None, everyone: Communicator
    ) -> tuple[int, int, bool]:
        parallel = replace(ALONE, communicator=stage, ep_size=ep_size, ep_dispatch_min_tokens=least)
        expert_round = None
        if dp_size > 1:
            parallel = replace(parallel, expert_communicator=everyone)
            expert_round = ExpertRound((23,) * dp_size, least == 1)
        model = build_model(config, parallel, 64)
        load_weights(model, one_sided)
        kv = make_kv(config, parallel.tp_size, parallel.tp_rank)
        with model.worst_routing():
            profiled = peak(model, kv, expert_round)
        assert all(sum(counts.tokens) == 0 for counts in model.expert_counts.values())
        found = peak(model, kv, expert_round)
        assert all(sum(counts.tokens[-3:]) > 0 for counts in model.expert_counts.values())
        return profiled, found, parallel.expert_share(12).stop == 12

    for profiled, found, has_them in on_data_parallel_ranks(dp_size, tp_size, rank):
        assert found <= profiled
        assert (found > 0.75 * profiled) == has_them


class GatheringExperts:
    """``FusedExperts`` on the CPU: each rank gathers all rows, and returns the results of its
    own."""

    def __init__(self, group: Communicator, num_slots: int) -> None:
        self._group = group
        self._held = share_of(num_slots, group.rank, group.world_size)
        self.max_tokens = 20
        self.calls: list[int] = []

    def run(
        self,
        x: Tensor,
        gate_up: tuple[Tensor, ...],
        down: tuple[Tensor, ...],
        slots: Tensor,
        weights: Tensor,
        *,
        max_tokens: int,
    ) -> Tensor:
        assert len(x) <= max_tokens
        self.calls.append(max_tokens)
        send, recv = [len(x)] * self._group.world_size, self._rows(len(x))
        parts = [
            self._group.start_all_to_all(each.repeat(len(send), 1), send, recv).wait()
            for each in (x, slots, weights)
        ]
        rows, ids, scores = parts
        is_held = (ids >= self._held.start) & (ids < self._held.stop)
        local = torch.where(is_held, ids - self._held.start, 0)
        made = ALONE.ops.moe(rows, gate_up, down, local, scores * is_held)
        returned = self._group.start_all_to_all(made, recv, send).wait()
        return returned.view(len(send), len(x), x.shape[1]).sum(0)

    def close(self) -> None: ...

    def _rows(self, own: int) -> list[int]:
        mine = torch.tensor([own])
        return [int(count) for count in self._group.all_gather(mine)]


@pytest.mark.parametrize(("dp_size", "tp_size"), [(1, 2), (2, 1), (2, 2)])
def test_fused_expert_ops_get_at_most_max_tokens(
    dp_size: int, tp_size: int, checkpoint: Path, expected: list[Tensor]
) -> None:
    """The second data-parallel rank has no tokens; the first step's 23 exceed ``max_tokens``."""
    config = read_model_config(checkpoint)
    assert config.moe is not None
    num_experts = config.moe.routing.num_experts
    ranks = dp_size * tp_size
    num_slots = num_experts + -num_experts % ranks
    slots = (tuple(slot % num_experts for slot in range(num_slots)),) * config.num_layers

    def rank(
        dp_rank: int, stage: Communicator | None, everyone: Communicator
    ) -> tuple[list[Tensor], list[int], dict[int, ExpertCounts]]:
        fused = GatheringExperts(everyone, num_slots)
        parallel = replace(
            ALONE,
            communicator=stage,
            expert_communicator=everyone if dp_size > 1 else None,
            ep_size=ranks,
            expert_slots=slots,
            fused_experts=fused,
            fused_max_tokens=fused.max_tokens,
        )
        model = build_model(config, parallel, 64)
        load_weights(model, checkpoint)
        kv, logits = make_kv(config, parallel.tp_size, parallel.tp_rank), []
        for ids, positions, batch in batches():
            expert_round = ExpertRound((len(ids), *[0] * (dp_size - 1)), len(ids) > 10)
            if dp_rank:
                model.serve_experts(expert_round)
                continue
            context = ForwardContext(batch, kv, expert_round=expert_round if dp_size > 1 else None)
            logits.append(model.logits(model.forward(ids, positions, context)))
        return logits, fused.calls, dict(model.expert_counts)

    tokens = sum(len(sequence) for step in STEPS for sequence in step.tokens)
    for found, calls, counts in on_data_parallel_ranks(dp_size, tp_size, rank):
        if found:
            compare(found, expected)
        fitting = [12, 6, 1, 1] if tp_size == 2 else [11, 2, 1]
        assert calls == [most for most in fitting for _ in counts]
        for of_layer in counts.values():
            assert sum(of_layer.tokens) == tokens * config.moe.routing.experts_per_token
