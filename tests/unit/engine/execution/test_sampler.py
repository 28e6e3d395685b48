"""The sampler, checked against plain definitions of each rule, row by row in numpy float64."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray
from torch import Tensor

from mooncake_engine.execution import sampler
from mooncake_engine.execution.request_table import CachedRequest, RequestTable
from mooncake_engine.execution.sampler import NO_TOKEN, Sampler, _largest
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.scheduling.step_plan import NewRequest, SampledToken
from mooncake_hal.backend import SamplingMetadata
from mooncake_hal.reference import ReferenceOps

VOCAB = 50
EOS = 3
CPU = torch.device("cpu")
Array = NDArray[np.float64]
ROWS = itertools.count()


def make_state(
    params: SamplingParams,
    *,
    seed: int = 0,
    prompt: tuple[int, ...] = (1, 2),
    output: tuple[int, ...] = (),
    vocab_size: int = VOCAB,
) -> CachedRequest:
    table = RequestTable(4, 4, vocab_size, CPU)
    table.admit([NewRequest("r", prompt + output, len(prompt), params, seed, ())])
    state = table["r"]
    state.row = next(ROWS)  # as in one table
    return state


def sample(logits: Tensor, states: list[CachedRequest]) -> list[SampledToken]:
    return Sampler((EOS,)).sample(logits.clone(), states)


def support(logits: Array, params: SamplingParams) -> set[int]:
    """The tokens that may be drawn, by the filters' definitions."""
    probability = softmax(logits / params.temperature)
    kept = probability >= params.min_p * probability.max()
    probability = np.where(kept, probability, 0.0)
    order = np.argsort(-probability, kind="stable")
    if 0 < params.top_k < len(order):
        probability[order[params.top_k :]] = 0.0
    share = np.cumsum(probability[order]) / probability.sum()
    before = np.concatenate(([0.0], share[:-1]))
    chosen = order[(before < params.top_p) & (probability[order] > 0)]
    return {int(token) for token in chosen}


def softmax(logits: Array) -> Array:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": -1},
    {"top_k": 1000},
    {"top_p": 0.05},
    {"top_p": 0.6},
    {"top_p": 0.999},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.7},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.05, "temperature": 2.5},
    {"top_p": 0.8, "temperature": 0.3},
]


def test_greedy_rows_take_the_largest_logit() -> None:
    logits = random_logits(5)
    states = [make_state(SamplingParams(temperature=0.0)) for _ in range(5)]
    found = [token.token_id for token in sample(logits, states)]
    assert found == logits.argmax(-1).tolist()


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_draws_follow_the_filtered_distribution(options: dict[str, Any]) -> None:
    params = SamplingParams(**options)
    logits = random_logits(1, seed=5)
    expected = logits[0].double().numpy() / params.temperature
    allowed = sorted(support(logits[0].double().numpy(), params))
    probability = softmax(np.array([expected[token] for token in allowed]))
    num_draws = 4000
    states = [make_state(params, seed=seed) for seed in range(num_draws)]
    tokens = Counter(t.token_id for t in sample(logits.expand(num_draws, -1), states))
    assert set(tokens) <= set(allowed)
    for token, share in zip(allowed, probability, strict=True):
        spread = 5 * math.sqrt(num_draws * share * (1 - share)) + 1
        assert abs(tokens[token] - num_draws * share) < spread


@settings(max_examples=40)
@given(st.data())
def test_row_draws_the_same_token_in_any_batch(data: st.DataObject) -> None:
    index = st.integers(0, len(FILTERS) - 1)
    choices = data.draw(st.lists(index, min_size=1, max_size=6))
    logits = random_logits(len(choices), vocab=3000, seed=data.draw(st.integers(0, 99)))
    states = [
        make_state(SamplingParams(**FILTERS[choice]), seed=row, vocab_size=3000)
        for row, choice in enumerate(choices)
    ]
    together = sample(logits, states)
    alone = [sample(logits[row : row + 1], [state])[0] for row, state in enumerate(states)]
    assert together == alone


def test_nucleus_wider_than_the_sorted_candidates_is_exact() -> None:
    logits = random_logits(1, vocab=5000, seed=2) / 30  # almost flat: 95 % needs over 4000 tokens
    params = SamplingParams(top_p=0.95)
    allowed = support(logits[0].double().numpy(), params)
    assert len(allowed) > 4000
    states = [make_state(params, seed=seed, vocab_size=5000) for seed in range(3000)]
    drawn = {t.token_id for t in sample(logits.expand(3000, -1), states)}
    # one token at the edge may differ: float32 logits against float64
    assert len(drawn - allowed) <= 1


def test_more_is_sorted_only_of_rows_that_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row's wide nucleus, or one without top-p, must not make the others sort everything."""
    sizes: list[tuple[int, int]] = []

    def note(logits: Tensor, count: int) -> Tensor:
        sizes.append((len(logits), count))
        return _largest(logits, count)

    monkeypatch.setattr(sampler, "_largest", note)
    logits = random_logits(4, vocab=5000, seed=2)
    logits[1:] *= 30
    logits[0] /= 30
    filters = ({"top_p": 0.95}, {"top_p": 0.95}, {"top_k": 5, "top_p": 0.999}, {"temperature": 2.0})
    states = [make_state(SamplingParams(**each), vocab_size=5000) for each in filters]
    sample(logits, states)
    assert sizes == [(4, 1024), (1, 5000)]


@given(st.integers(1, 400), st.integers(1, 400), st.integers(0, 9))
def test_blockwise_largest_values_equal_a_sort(vocab: int, count: int, seed: int) -> None:
    logits = random_logits(3, vocab=vocab, seed=seed).round()  # rounded: many equal values
    expected = logits.sort(dim=-1, descending=True).values[:, :count]
    assert torch.equal(_largest(logits, min(count, vocab)), expected)


def test_ties_at_the_edge_of_top_k_are_all_kept() -> None:
    logits = torch.full((1, VOCAB), -10.0)
    logits[0, [4, 9, 30]] = 1.0
    states = [make_state(SamplingParams(top_k=2), seed=seed) for seed in range(300)]
    assert {t.token_id for t in sample(logits.expand(300, -1), states)} == {4, 9, 30}


def test_draw_depends_only_on_seed_and_output_position() -> None:
    logits = random_logits(1)
    params = SamplingParams()
    grown = make_state(params, seed=9)
    for token in (5, 6, 7):
        grown.append(token)
    handed_over = make_state(params, seed=9, output=(5, 6, 7))
    assert sample(logits, [grown]) == sample(logits, [handed_over])
    fresh = [make_state(params, seed=seed) for seed in range(60)]
    later = [make_state(params, seed=seed, output=(5,)) for seed in range(60)]
    rows = logits.expand(60, -1)
    assert sample(rows, fresh) != sample(rows, later)


def test_penalties_follow_their_papers() -> None:
    params = SamplingParams(
        temperature=0.0, repetition_penalty=1.7, presence_penalty=0.4, frequency_penalty=0.3
    )
    prompt, output = (1, 2, 2), (2, 8, 8, 8)
    for seed in range(50):
        logits = random_logits(1, seed=seed)
        expected = logits[0].double().numpy().copy()
        for token in {*prompt, *output}:
            expected[token] *= 1 / 1.7 if expected[token] > 0 else 1.7
        for token, count in Counter(output).items():
            expected[token] -= 0.4 + 0.3 * count
        # two ways to the same state: all tokens at once, and token by token
        at_once = make_state(params, prompt=prompt, output=output)
        grown = make_state(params, prompt=prompt)
        for token in output:
            grown.append(token)
        for state in (at_once, grown):
            assert sample(logits, [state])[0].token_id == int(expected.argmax())


def test_logit_bias_changes_only_its_row() -> None:
    logits = random_logits(2)
    biased = make_state(SamplingParams(temperature=0.0, logit_bias=((17, 100.0), (18, -100.0))))
    plain = make_state(SamplingParams(temperature=0.0))
    tokens = sample(logits, [biased, plain])
    assert [t.token_id for t in tokens] == [17, int(logits[1].argmax())]


def test_end_tokens_are_masked_until_min_tokens() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, EOS], logits[0, 11], logits[0, 12] = 30.0, 20.0, 10.0
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(11,))
    assert sample(logits, [make_state(params, output=(5,))])[0].token_id == 12
    assert sample(logits, [make_state(params, output=(5, 5))])[0].token_id == EOS
    ignoring = SamplingParams(temperature=0.0, min_tokens=2, ignore_eos=True)
    assert sample(logits, [make_state(ignoring)])[0].token_id == EOS


def test_end_token_masks_follow_the_steps_of_a_batch() -> None:
    """The state that the sampler caches for a batch is updated when the batch changes."""
    sampler = Sampler((0,))
    state = make_state(SamplingParams(temperature=0.0, min_tokens=2))
    logits = torch.zeros(1, VOCAB)
    logits[0, 0], logits[0, 1] = 2.0, 1.0
    chosen = []
    for _ in range(3):
        token = sampler.sample(logits.clone(), [state])[0].token_id
        chosen.append(token)
        state.append(token)
    assert chosen == [1, 1, 0]
    other = make_state(SamplingParams(temperature=0.0))
    assert sampler.sample(logits.clone(), [other, state])[0].token_id == 0


def test_logprobs_are_those_of_the_unmodified_distribution() -> None:
    logits = random_logits(3)
    params = SamplingParams(temperature=0.5, top_k=1, logprobs=4, logit_bias=((17, 100.0),))
    chosen_only = SamplingParams(temperature=0.0, logprobs=0)
    states = [make_state(p) for p in (params, SamplingParams(), chosen_only)]
    biased, silent, bare = sample(logits, states)
    expected = logits.double().log_softmax(-1)
    assert biased.token_id == 17
    assert biased.logprobs is not None
    assert biased.logprobs.logprob == pytest.approx(float(expected[0, 17]), abs=1e-5)
    best = expected[0].topk(4)
    assert [token for token, _ in biased.logprobs.top] == best.indices.tolist()
    assert [value for _, value in biased.logprobs.top] == pytest.approx(
        best.values.tolist(), abs=1e-5
    )
    assert silent.logprobs is None
    assert bare.logprobs is not None
    assert bare.logprobs.top == ()


class CountingOps(ReferenceOps):
    """The reference ops, which count sampled rows, and record the types of logits."""

    def __init__(self) -> None:
        self.rows = 0
        self.dtypes: list[torch.dtype] = []

    def argmax(self, logits: Tensor) -> Tensor:
        self.dtypes.append(logits.dtype)
        return super().argmax(logits)

    def sample(self, logits: Tensor, drawing: SamplingMetadata) -> Tensor:
        self.rows += len(logits)
        return super().sample(logits, drawing)


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_device_samples_the_same_as_torch(filters: dict[str, Any]) -> None:
    """With greedy rows as well; both use the random numbers of seed and position."""
    ops, logits = CountingOps(), random_logits(40)
    drawn = SamplingParams(**{"temperature": 1.0, **filters})
    greedy = SamplingParams(temperature=0.0)
    states = [make_state(greedy if row % 8 == 0 else drawn, seed=row) for row in range(40)]
    assert Sampler((EOS,), ops).sample(logits.clone(), states) == sample(logits, states)
    assert ops.rows == 40


NEEDS: list[dict[str, Any]] = [
    {"logprobs": 2},
    {"presence_penalty": 0.5},
    {"min_tokens": 3},
    {"logit_bias": ((7, 9.0),)},
    {"allowed_token_ids": (3, 7, 20)},
    {"bad_words_token_ids": ((7,), (3, 20))},
]


@pytest.mark.parametrize("needs", NEEDS, ids=str)
def test_device_samples_from_the_processed_logits(needs: dict[str, Any]) -> None:
    """The log probabilities returned are those of the model."""
    ops, logits = CountingOps(), random_logits(2)
    states = [make_state(SamplingParams(**{"temperature": 1.0, **needs})) for _ in range(2)]
    assert Sampler((EOS,), ops).sample(logits.clone(), states) == sample(logits, states)
    assert ops.rows == 2


@pytest.mark.parametrize("logprobs", [None, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_greedy_batch_takes_the_largest_logits_in_the_models_type(
    dtype: torch.dtype, logprobs: int | None
) -> None:
    """Drafted or not, with log probabilities or without."""
    ops, logits = CountingOps(), random_logits(2).to(dtype)
    states = [make_state(SamplingParams(temperature=0.0, logprobs=logprobs)) for _ in range(2)]
    expected = sample(logits, states)
    sampler = Sampler((EOS,), ops)
    assert sampler.sample(logits.clone(), states) == expected
    drafted = sampler.draft(logits.clone(), states).token_ids.tolist()
    assert drafted == [token.token_id for token in expected]
    assert (ops.rows, ops.dtypes) == (0, [dtype, dtype])


CHANGES = [needs for needs in NEEDS if "logprobs" not in needs]


@pytest.mark.parametrize("logprobs", [None, 2])
@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_greedy_batch_takes_the_largest_of_the_processed_logits(
    change: dict[str, Any], logprobs: int | None
) -> None:
    """Processed in float32, whatever the model's type; log probabilities are the model's."""
    ops, logits = CountingOps(), random_logits(2).bfloat16()
    params = SamplingParams(temperature=0.0, logprobs=logprobs, **change)
    states = [make_state(params) for _ in range(2)]
    found = Sampler((EOS,), ops).sample(logits.clone(), states)
    assert found == sample(logits, states)
    assert ops.dtypes == [torch.float32]
    for token, expected in zip(found, logits.float().log_softmax(-1), strict=True):
        if logprobs is not None:
            assert token.logprobs is not None
            best = expected.topk(logprobs).values.tolist()
            assert [value for _, value in token.logprobs.top] == pytest.approx(best)


BROKEN = {
    "all NaN": lambda row: row.fill_(math.nan),
    "one NaN": lambda row: row[7:8].fill_(math.nan),
    "overflow": lambda row: row[7:8].fill_(math.inf),
    "nothing left": lambda row: row.fill_(-math.inf),
}
KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "random": SamplingParams(temperature=1.0),
    "filtered": SamplingParams(temperature=0.7, top_p=0.9, top_k=20, min_p=0.01),
    "penalised": SamplingParams(temperature=1.0, repetition_penalty=1.5),
    "with logprobs": SamplingParams(temperature=1.0, logprobs=2),
}


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("kind", KINDS)
def test_row_without_finite_logits_gets_no_token_and_others_do(broken: str, kind: str) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    states = [make_state(KINDS[kind], seed=seed) for seed in range(3)]
    expected = [token.token_id for token in sample(logits, states)]
    BROKEN[broken](logits[1])
    found = [token.token_id for token in sample(logits, states)]
    assert found == [expected[0], NO_TOKEN, expected[2]]


class Careless(ReferenceOps):
    """A device whose kernel returns an id beyond the vocabulary for rows without finite logits."""

    def sample(self, logits: Tensor, metadata: SamplingMetadata) -> Tensor:
        finite = logits.amax(dim=-1).isfinite()
        return torch.where(finite, logits.argmax(dim=-1), logits.shape[1])


@pytest.mark.parametrize("broken", BROKEN)
def test_device_results_of_rows_without_finite_logits_are_ignored(broken: str) -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1))
    states = [make_state(SamplingParams(temperature=1.0), seed=seed) for seed in range(2)]
    BROKEN[broken](logits[0])
    sampler = Sampler((EOS,), Careless())
    found = [token.token_id for token in sampler.sample(logits.clone(), states)]
    assert found == [NO_TOKEN, int(logits[1].argmax())]


def test_draft_row_without_finite_logits_gets_no_token() -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1))
    logits[0] = math.nan
    for params in (SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)):
        states = [make_state(params), make_state(params)]
        drafted = Sampler((EOS,)).draft(logits.clone(), states).token_ids.tolist()
        assert drafted[0] == NO_TOKEN
        assert 0 <= drafted[1] < VOCAB
