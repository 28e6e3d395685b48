"""Token counts for penalties: one table for all requests, counted on host or device."""

from __future__ import annotations

import random

import torch

from mooncake_engine.execution.penalties import (
    PenalisedRow,
    Penalties,
    TokenCounts,
    TokenCountTable,
)
from mooncake_engine.execution.request_table import RequestTable
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.scheduling.step_plan import NewRequest

VOCAB = 11
CPU = torch.device("cpu")
PENALTIES = SamplingParams(repetition_penalty=1.5, frequency_penalty=0.25, presence_penalty=0.5)


def occurrences(counts: TokenCounts) -> tuple[list[float], list[bool]]:
    return counts.table.output[counts.row].tolist(), counts.table.is_seen[counts.row].tolist()


def expected(prompt: list[int], output: list[int]) -> tuple[list[float], list[bool]]:
    seen = {*prompt, *output}
    return [float(output.count(i)) for i in range(VOCAB)], [i in seen for i in range(VOCAB)]


def test_counts_are_right_for_any_order_of_requests() -> None:
    """The table grows, and a reused row keeps no counts of its previous owner."""
    chance, table = random.Random(3), TokenCountTable(VOCAB, CPU)
    assert len(table.output) == 0
    live: list[tuple[TokenCounts, list[int], list[int]]] = []
    for _ in range(400):
        if live and chance.random() < 0.4:
            table.free(live.pop(chance.randrange(len(live)))[0])
        else:
            prompt = chance.choices(range(VOCAB), k=3)
            output = chance.choices(range(VOCAB), k=chance.randrange(3))
            live.append((table.add_request(prompt, output), prompt, output))
        taking = chance.sample(live, len(live) // 2)
        if taking:
            tokens = chance.choices(range(VOCAB), k=len(taking))
            rows = torch.tensor([counts.row for counts, _, _ in taking])
            table.add_tokens(rows, torch.tensor(tokens))
            for (_, _, output), token in zip(taking, tokens, strict=True):
                output.append(token)
        for counts, prompt, output in live:
            assert occurrences(counts) == expected(prompt, output)
    assert len(table.output) > 8


def test_counts_after_a_token_are_independent() -> None:
    counts = TokenCountTable(VOCAB, CPU).add_request((1, 2), (2,))
    later = counts.after(5)
    assert occurrences(later) == expected([1, 2], [2, 5])
    later.add(5)
    assert occurrences(counts) == expected([1, 2], [2])
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0))
    together, alone = logits.clone(), logits.clone()
    rows = [PenalisedRow(0, counts, PENALTIES), PenalisedRow(1, later, PENALTIES)]
    Penalties(rows, CPU).apply(together)
    for row in rows:
        Penalties([row], CPU).apply(alone)
    assert torch.equal(together, alone)
    assert not torch.equal(together, logits)


def test_sampled_tokens_are_counted_on_the_device() -> None:
    """Only for requests with penalties; a batch without any is not processed."""
    table = RequestTable(4, 4, VOCAB, CPU)
    plain = NewRequest("plain", (1, 2), 2, SamplingParams(), 0, ())
    table.admit([plain])
    states = table.find(["plain"])
    table.count_sampled(states, torch.tensor([3]))
    table.admit([NewRequest("penalised", (1, 2), 2, PENALTIES, 0, ())])
    states = table.find(["plain", "penalised"])
    assert not any(state.is_host_bound for state in states)
    table.count_sampled(states, torch.tensor([3, 4]))
    table.count_sampled(states[:1], torch.tensor([3]))
    counts = states[1].counts
    assert counts is not None
    assert occurrences(counts) == expected([1, 2], [4])
    table.remove(["penalised"])
    table.count_sampled(states[:1], torch.tensor([3]))
