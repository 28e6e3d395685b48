"""Draft tokens stay on the device: when the host reads them, and in which order."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from mooncake_engine.execution.input_batch import ForwardInputs
from mooncake_engine.execution.request_table import RequestTable
from mooncake_engine.execution.sampler import NO_TOKEN, Sampler
from mooncake_engine.execution.speculation.draft_model import DraftModel, DraftModelProposer
from mooncake_engine.execution.speculation.drafts import DraftRequest, StepDrafts
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.scheduling.step_plan import NewRequest

VOCAB = 11
CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)
PROMPTS = {"a": (1, 2, 3), "b": (5, 6), "c": (9,)}
READS = (Tensor.tolist, Tensor.item, Tensor.__bool__, Tensor.__index__)


class OnDevice(Tensor):
    """A tensor that counts how often the host reads it or its results."""

    num_reads = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.num_reads += func in READS
        return super().__torch_function__(func, types, args, kwargs or {})


class CountingModel:
    """A model that predicts the next number after each token, and no finite logits after a 6."""

    def __init__(self) -> None:
        self.pool = SimpleNamespace(block_size=4, device=CPU)
        self.max_tokens = self.max_positions = 64
        self.positions: list[list[int]] = []

    def run(self, inputs: ForwardInputs, rows: Sequence[int] | None = None) -> Tensor:
        self.positions.append(inputs.positions.tolist())
        tokens = inputs.token_ids.as_subclass(Tensor)
        tokens = tokens if rows is None else tokens[list(rows)]
        logits = torch.full((len(tokens), VOCAB), -9.0)
        logits.scatter_(1, ((tokens + 1) % VOCAB).unsqueeze(1), 9.0)
        logits[tokens == 6] = torch.nan
        return logits.as_subclass(OnDevice)


def propose(
    num_tokens: dict[str, int], params: SamplingParams = GREEDY
) -> tuple[StepDrafts, CountingModel]:
    """Return drafts of ``num_tokens`` tokens for each prompt."""
    table = RequestTable(4, 4, VOCAB, CPU)
    for index, (name, prompt) in enumerate(PROMPTS.items()):
        table.admit([NewRequest(name, prompt, len(prompt), params, 7, (2 * index, 2 * index + 1))])
    model = CountingModel()
    proposer = DraftModelProposer(cast(DraftModel, model), table.tables, Sampler(()))
    OnDevice.num_reads = 0
    wanted = [DraftRequest(table[name], count) for name, count in num_tokens.items()]
    return proposer.propose(wanted), model


def known(drafts: StepDrafts) -> dict[str, list[int]]:
    return {name: draft.token_ids for name, draft in drafts.by_request.items()}


@pytest.mark.parametrize("temperature", [0.0, 0.1])
def test_host_reads_the_drafts_of_a_step_once(temperature: float) -> None:
    params = SamplingParams(temperature=temperature)
    drafts, model = propose({"a": 3, "b": 1, "c": 2}, params)
    unknown = {"a": [NO_TOKEN] * 3, "b": [NO_TOKEN], "c": [NO_TOKEN] * 2}
    assert (known(drafts), OnDevice.num_reads) == (unknown, 0)
    assert model.positions[1:] == [[3, 1], [4]]  # only requests with tokens left to draft
    drafts.copy_to_host()
    assert (known(drafts)["a"], known(drafts)["c"]) == ([4, 5, 6], [10, 0])
    assert OnDevice.num_reads == 1


def test_row_without_finite_logits_yields_no_token() -> None:
    drafts, _ = propose({"a": 1, "b": 3})
    drafts.copy_to_host()
    assert known(drafts) == {"a": [4], "b": [NO_TOKEN, 1, 2]}


def test_penalties_read_each_draft_token() -> None:
    drafts, _ = propose({"a": 3, "b": 3}, SamplingParams(temperature=0.0, presence_penalty=0.5))
    assert OnDevice.num_reads == 3
    assert known(drafts) == {"a": [4, 5, 6]}  # b's draft ended at a row without finite logits
    drafts.copy_to_host()
    assert known(drafts) == {"a": [4, 5, 6]}


def test_only_tokens_for_rejection_sampling_have_a_distribution() -> None:
    tested, _ = propose({"a": 2}, SamplingParams(temperature=0.5))
    [draft] = tested.by_request.values()
    assert [each is not None and float(each.sum()) for each in draft.distributions] == [1.0, 1.0]
    seeded, _ = propose({"a": 2}, SamplingParams(temperature=0.5, seed=3))
    [draft] = seeded.by_request.values()
    assert draft.distributions == [None, None]
