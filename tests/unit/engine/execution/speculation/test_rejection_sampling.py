"""Rejection sampling keeps the target distribution exactly, for any target and any proposal."""

from __future__ import annotations

import math
from collections import Counter

import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from mooncake_engine.execution.request_table import RequestTable, SamplingState
from mooncake_engine.execution.sampler import NO_TOKEN, Sampler
from mooncake_engine.execution.speculation.drafts import (
    Draft,
    StepDrafts,
    advance,
    verify_drafts,
)
from mooncake_engine.execution.speculation.rejection_sampling import (
    SampledDrafts,
    count_accepted,
    rejection_weights,
)
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.scheduling.step_plan import NewRequest

VOCAB = 6
CPU = torch.device("cpu")
weights = st.lists(st.integers(0, 20), min_size=VOCAB, max_size=VOCAB).filter(any)


def normal(values: list[int] | Tensor) -> Tensor:
    row = torch.as_tensor(values, dtype=torch.float32)
    return row / row.sum()


def drawn(token_id: int, distribution: Tensor) -> SampledDrafts:
    return SampledDrafts([0], torch.tensor([token_id]), distribution.unsqueeze(0))


def chance_of_keeping(target: Tensor, token_id: int, proposed: Tensor) -> float:
    """Return the largest random number for which the draft token is kept, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        kept = rejection_weights(target.unsqueeze(0), drawn(token_id, proposed), [middle])[0]
        is_kept = kept[token_id] > 0 and kept.count_nonzero() == 1
        low, high = (middle, high) if is_kept else (low, middle)
    return high


@settings(max_examples=60)
@given(weights, weights)
def test_acceptance_and_replacement_follow_the_target(
    target: list[int], num_drafted: list[int]
) -> None:
    """Summed over all draft tokens, each accepted or replaced."""
    p, q = normal(target), normal(num_drafted)
    total = torch.zeros(VOCAB)
    for token_id in q.nonzero().flatten().tolist():
        kept = chance_of_keeping(p, token_id, q)
        total[token_id] += q[token_id] * kept
        if kept < 1 - 1e-6:
            rest = normal(rejection_weights(p.unsqueeze(0), drawn(token_id, q), [1 - 1e-12])[0])
            total += q[token_id] * (1 - kept) * rest
    assert torch.allclose(total, p, atol=1e-5)


@given(weights)
def test_draft_token_from_the_target_is_always_accepted(target: list[int]) -> None:
    p = normal(target)
    for token_id in p.nonzero().flatten().tolist():
        almost_one = 0.9999  # the rest is a rounding margin
        kept = rejection_weights(3 * p.unsqueeze(0), drawn(token_id, p), [almost_one])
        assert kept[0].argmax().item() == token_id
        assert kept[0].count_nonzero() == 1


@given(st.lists(st.integers(0, 3), max_size=6), st.lists(st.integers(0, 3), min_size=7))
def test_drafts_are_accepted_up_to_the_first_mismatch(
    num_drafted: list[int], chosen: list[int]
) -> None:
    count = count_accepted(num_drafted, chosen)
    assert num_drafted[:count] == chosen[:count]
    assert count == len(num_drafted) or num_drafted[count] != chosen[count]


def test_missing_draft_token_is_never_accepted() -> None:
    assert count_accepted([4, NO_TOKEN, 5], [4, NO_TOKEN, 5, 6]) == 1


def test_overflowed_draft_distribution_falls_back_to_the_model() -> None:
    weights = torch.tensor([[1.0, 0.0, 2.0]])
    left = rejection_weights(weights, drawn(NO_TOKEN, torch.full((3,), math.nan)), [0.5])
    assert torch.allclose(left, weights / 3)


def test_two_steps_of_drafts_follow_the_models_distribution() -> None:
    """Pairs of tokens from a bigram model, drafted by another one: a chi-square test over fixed
    seeds."""
    generator = torch.Generator().manual_seed(5)
    target, other = (torch.randn(VOCAB, VOCAB, generator=generator) * 1.5 for _ in range(2))
    params = SamplingParams(temperature=0.9, top_k=5, presence_penalty=0.4)
    table, sampler, num_runs = RequestTable(1, 4, VOCAB, CPU), Sampler(()), 2500
    pairs: Counter[tuple[int, ...]] = Counter()
    num_accepted = 0
    for seed in range(num_runs):
        table.admit([NewRequest("r", (0,), 1, params, seed, ())])
        state = table["r"]
        states: list[SamplingState] = [state]
        token_ids: list[int] = []
        distributions: list[Tensor] = []
        for _ in range(2):
            last = token_ids[-1] if token_ids else 0
            found = sampler.draft(other[last : last + 1].clone(), states[-1:])
            token_ids += found.token_ids.tolist()
            distributions.append(found.distributions[0])
            following = advance(states[-1], token_ids[-1])
            assert following is not None
            states.append(following)
        logits = target[[0, *token_ids]]
        draft = Draft(states, [NO_TOKEN, NO_TOKEN], distributions)
        drafts = StepDrafts({"r": draft}, torch.tensor(token_ids))
        tokens = verify_drafts(sampler, logits, [state], drafts).tokens()["r"]
        num_accepted += len(tokens) - 1
        found = [token.token_id for token in tokens]
        while len(found) < 2:  # as the engine would: another step
            for token_id in found[state.num_output_tokens :]:
                state.append(token_id)
            found.append(sampler.sample(target[found[-1:]].clone(), [state])[0].token_id)
        pairs[tuple(found[:2])] += 1
    assert 0.3 * num_runs < num_accepted < 2 * num_runs
    expected = pair_probabilities(target, params)
    assert set(pairs) <= set(expected)
    rare = {pair for pair, probability in expected.items() if num_runs * probability < 5}
    cells = [(pairs[pair], expected[pair]) for pair in expected if pair not in rare]
    cells.append((sum(pairs[pair] for pair in rare), sum(expected[pair] for pair in rare)))
    chi_square = sum((n - num_runs * p) ** 2 / (num_runs * p) for n, p in cells)
    degrees = len(cells) - 1
    assert chi_square < degrees + 4 * math.sqrt(2 * degrees), "far from the model's distribution"


def pair_probabilities(logits: Tensor, params: SamplingParams) -> dict[tuple[int, int], float]:
    """Return the probabilities of the first two tokens, by the definitions of the parameters."""

    def choose(last: int, seen: tuple[int, ...]) -> Tensor:
        row = logits[last].clone()
        row[list(seen)] -= params.presence_penalty
        row /= params.temperature
        row[row < row.topk(params.top_k).values[-1]] = -math.inf
        return row.softmax(-1)

    first = choose(0, ())
    return {
        (a, b): float(first[a] * second)
        for a in range(VOCAB)
        if first[a] > 0
        for b, second in enumerate(choose(a, (a,)))
        if second > 0
    }
