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
LOOKS = (Tensor.tolist, Tensor.item, Tensor.__bool__, Tensor.__index__)


class OnDevice(Tensor):
    """Counts how often the host looks at what comes of it."""

    num_looks = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.num_looks += func in LOOKS
        return super().__torch_function__(func, types, args, kwargs or {})


class CountingModel:
    """Says that each token is followed by the next number; behind a 6, nothing finite."""

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
    """Drafts of so many tokens for each of the prompts."""
    table = RequestTable(4, 4, VOCAB, CPU)
    for index, (name, prompt) in enumerate(PROMPTS.items()):
        table.admit([NewRequest(name, prompt, len(prompt), params, 7, (2 * index, 2 * index + 1))])
    model = CountingModel()
    proposer = DraftModelProposer(cast(DraftModel, model), table.tables, Sampler(()))
    OnDevice.num_looks = 0
    wanted = [DraftRequest(table[name], count) for name, count in num_tokens.items()]
    return proposer.propose(wanted), model


def known(drafts: StepDrafts) -> dict[str, list[int]]:
    return {name: draft.token_ids for name, draft in drafts.by_request.items()}


@pytest.mark.parametrize("temperature", [0.0, 0.1])
def test_the_host_looks_once_at_a_steps_drafts(temperature: float) -> None:
    params = SamplingParams(temperature=temperature)
    drafts, model = propose({"a": 3, "b": 1, "c": 2}, params)
    unknown = {"a": [NO_TOKEN] * 3, "b": [NO_TOKEN], "c": [NO_TOKEN] * 2}
    assert (known(drafts), OnDevice.num_looks) == (unknown, 0)
    assert model.positions[1:] == [[3, 1], [4]]  # of those that are not done
    drafts.copy_to_host()
    assert (known(drafts)["a"], known(drafts)["c"]) == ([4, 5, 6], [10, 0])
    assert OnDevice.num_looks == 1


def test_a_row_without_finite_logits_yields_no_token() -> None:
    drafts, _ = propose({"a": 1, "b": 3})
    drafts.copy_to_host()
    assert known(drafts) == {"a": [4], "b": [NO_TOKEN, 1, 2]}


def test_penalties_have_to_know_each_token() -> None:
    drafts, _ = propose({"a": 3, "b": 3}, SamplingParams(temperature=0.0, presence_penalty=0.5))
    assert OnDevice.num_looks == 3
    assert known(drafts) == {"a": [4, 5, 6]}  # b's ended where there was none
    drafts.copy_to_host()
    assert known(drafts) == {"a": [4, 5, 6]}


def test_only_tokens_for_rejection_sampling_have_a_distribution() -> None:
    tested, _ = propose({"a": 2}, SamplingParams(temperature=0.5))
    [draft] = tested.by_request.values()
    assert [each is not None and float(each.sum()) for each in draft.distributions] == [1.0, 1.0]
    seeded, _ = propose({"a": 2}, SamplingParams(temperature=0.5, seed=3))
    [draft] = seeded.by_request.values()
    assert draft.distributions == [None, None]
