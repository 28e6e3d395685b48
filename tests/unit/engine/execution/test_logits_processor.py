"""Changes of requests to their logits, checked cell by cell against plain definitions."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from mooncake_engine.execution import logits_processor
from mooncake_engine.execution.logits_processor import LogitsProcessor
from mooncake_engine.execution.penalties import TokenCounts
from mooncake_engine.execution.request_table import BiasedTokens, biased_tokens, token_mask
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.text.bad_words import BadWordState
from mooncake_hal.backend_parts import to_device

CPU = torch.device("cpu")
EOS = (2,)


class Allowing:
    """A grammar that allows these tokens, or any if ``token_ids`` is None."""

    def __init__(self, token_ids: set[int] | None, num_bytes: int) -> None:
        self._token_ids = token_ids
        self._num_bytes = num_bytes

    def allowed(self) -> bytes | None:
        if self._token_ids is None:
            return None
        bits = sum(1 << token_id for token_id in self._token_ids)
        return bits.to_bytes(self._num_bytes, "little")


@dataclass(eq=False)
class State:
    sampling: SamplingParams = field(default_factory=SamplingParams)
    num_output_tokens: int = 0
    grammar: Any = None
    counts: TokenCounts | None = None
    row: int = 0
    seed: int = 0
    bias: BiasedTokens | None = field(init=False)
    allowed: bytes | None = field(init=False)
    bad_words: BadWordState | None = field(init=False)

    def __post_init__(self) -> None:
        self.bias = biased_tokens(self.sampling.logit_bias)
        allowed = self.sampling.allowed_token_ids
        self.allowed = None if allowed is None else token_mask(allowed)
        self.bad_words = BadWordState.of(self.sampling.bad_words_token_ids, ())


def changed(states: list[State], vocab_size: int) -> torch.Tensor:
    logits = torch.zeros(len(states), vocab_size)
    LogitsProcessor(states, EOS, CPU).apply(logits)
    return logits


@pytest.mark.parametrize(("vocab_size", "num_bytes"), [(64, 8), (50, 7), (50, 8), (50, 5), (3, 1)])
def test_grammar_masks_all_but_the_allowed_tokens(vocab_size: int, num_bytes: int) -> None:
    """For masks as long as the vocabulary, longer and shorter."""
    odd = {id for id in range(8 * num_bytes) if id % 3 == 1}
    states = [
        State(),
        State(grammar=Allowing(odd, num_bytes)),
        State(grammar=Allowing(None, num_bytes)),
        State(grammar=Allowing({0, 8 * num_bytes - 1}, num_bytes)),
    ]
    expected = torch.zeros(4, vocab_size)
    for token_id in range(vocab_size):
        expected[1, token_id] = 0.0 if token_id in odd else -math.inf
        expected[3, token_id] = 0.0 if token_id in (0, 8 * num_bytes - 1) else -math.inf
    assert torch.equal(changed(states, vocab_size), expected)


def test_biases_and_masked_end_tokens_change_only_their_cells() -> None:
    biased = State(SamplingParams(logit_bias=((1, 2.5), (4, -1.0))))
    both = State(SamplingParams(logit_bias=((2, 9.0),), min_tokens=1, stop_token_ids=(3,)))
    endless = State(SamplingParams(min_tokens=4, ignore_eos=True))
    expected = torch.zeros(4, 6)
    expected[0, 1], expected[0, 4] = 2.5, -1.0
    expected[2, 2] = expected[2, 3] = -math.inf
    assert torch.equal(changed([biased, State(), both, endless], 6), expected)


def test_all_but_allowed_token_ids_are_masked() -> None:
    """After the biases and beside a grammar of another request."""
    allowing = State(SamplingParams(allowed_token_ids=(0, 9, 4), logit_bias=((1, 9.0), (4, 2.5))))
    last = State(SamplingParams(allowed_token_ids=(18,)))
    states = [State(), allowing, State(grammar=Allowing({3}, 3)), last]
    expected = torch.zeros(4, 19)
    expected[1:] = -math.inf
    expected[1, [0, 9]], expected[1, 4] = 0.0, 2.5
    expected[2, 3] = expected[3, 18] = 0.0
    assert torch.equal(changed(states, 19), expected)


def test_constant_parameters_are_copied_to_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masked end tokens are copied again when a row has reached its min_tokens."""
    copies: list[int] = []

    def counting(device: torch.device, arrays: Any) -> Any:
        copies.append(len(arrays))
        return to_device(device, arrays)

    monkeypatch.setattr(logits_processor, "to_device", counting)
    states = [
        State(SamplingParams(logit_bias=((1, 2.5),))),
        State(SamplingParams(min_tokens=2)),
        State(SamplingParams(min_tokens=3)),
        State(SamplingParams(allowed_token_ids=(1, 2))),
    ]
    processor = LogitsProcessor(states, EOS, CPU)
    may_end, num_copies = [], []
    for _ in range(4):
        logits = torch.zeros(4, 6)
        processor.apply(logits)
        assert logits[0].tolist() == [0, 2.5, 0, 0, 0, 0]
        assert (logits[3] == 0).tolist() == [False, True, True, False, False, False]
        may_end.append((logits[1:3, 2] == 0).tolist())
        num_copies.append(len(copies))
        assert processor.has_effect()
        for state in states:
            state.num_output_tokens += 1
    assert may_end == [[False, False], [False, False], [True, False], [True, True]]
    assert num_copies == [3, 3, 4, 4]


def test_bad_words_are_copied_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[int] = []

    def counting(device: torch.device, arrays: Any) -> Any:
        copies.append(len(arrays))
        return to_device(device, arrays)

    monkeypatch.setattr(logits_processor, "to_device", counting)
    fixed = State(SamplingParams(bad_words_token_ids=((1,), (4,))))
    growing = State(SamplingParams(bad_words_token_ids=((2, 3), (2, 2, 0))))
    processor = LogitsProcessor([State(), growing, fixed], EOS, CPU)
    forbidden, num_copies = [], []
    for token_id in (5, 2, 2, 1, 0):
        logits = torch.zeros(3, 6)
        assert processor.has_effect()
        processor.apply(logits)
        assert not logits[0].any()
        assert logits[2].isinf().nonzero().flatten().tolist() == [1, 4]
        forbidden.append(logits[1].isinf().nonzero().flatten().tolist())
        num_copies.append(len(copies))
        assert growing.bad_words is not None
        growing.bad_words = growing.bad_words.after(token_id)
    assert forbidden == [[], [], [3], [0, 3], []]
    assert num_copies == [1, 1, 2, 3, 4]


def test_logit_bias_is_parsed_once_per_request() -> None:
    """A batch changes whenever a request joins or ends, and a request may have a thousand biases
    and a hundred choices: they are not processed again for each batch."""
    biased = State(SamplingParams(logit_bias=((1, 2.5), (4, -1.0))))
    biased.sampling = SamplingParams()
    assert changed([State(), biased], 6)[1].tolist() == [0, 2.5, 0, 0, -1, 0]


def test_batch_without_changes_is_not_modified() -> None:
    growing = State(SamplingParams(min_tokens=1))
    processor = LogitsProcessor([State(), growing], EOS, CPU)
    assert processor.has_effect()
    growing.num_output_tokens = 1
    assert not processor.has_effect()
    logits = torch.randn(2, 6)
    before = logits.clone()
    processor.apply(logits)
    assert torch.equal(logits, before)
