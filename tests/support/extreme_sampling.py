"""Sampling parameters at the limits of their ranges and beyond."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

VALUES: dict[str, list[Any]] = {
    "temperature": [0, 5e-324, 1e-38, 1e-6, 100, 100.1, -1, 1e308],
    "top_p": [5e-324, 1e-10, 1, 0, 1.1],
    "top_k": [-1, 0, 1, 2**31, 2**31 + 1, -2],
    "min_p": [0, 1, 1.1, -0.1],
    "repetition_penalty": [0.01, 100, 1e-40, 5e-324, 0, 101],
    "presence_penalty": [-2, 2, 2.1],
    "frequency_penalty": [-2, 2, -2.1],
    "seed": [-(2**63), 2**64 - 1, 2**64],
    "n": [1, 3, 129],
    "min_tokens": [0, 3, 4],
    "logprobs": [0, 128, 129],
    "stop": ["x", "y" * 8192, "z" * 8193],
    "stop_token_ids": [[], list(range(1024)), list(range(1025)), [-1], [10**6]],
    "logit_bias": [{}, {str(i): -100 for i in range(256)}, {"5": 100}, {"5": 101}, {"-1": 0}],
    "allowed_token_ids": [[], [0], list(range(272)), list(range(273)), [-1], [272]],
    "bad_words": [
        [],
        [""],
        [" "],
        ["x"],
        ["y" * 900],
        ["z" * 8193],
        [chr(33 + i) for i in range(128)],
    ],
    "ignore_eos": [True, False],
}
BODY = {"prompt": "hello world", "max_tokens": 3, "temperature": 0}
DEADLY: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1e-40, "max_tokens": 4},
    {"repetition_penalty": 5e-324, "max_tokens": 4},
    {"min_tokens": 3, "stop_token_ids": list(range(272))},
    {"min_tokens": 3, "stop_token_ids": list(range(272)), "logprobs": 5},
)
"""Each of these once killed an instance with a vocabulary of 272 tokens."""


def each_value() -> Iterator[dict[str, Any]]:
    """A request for every value, and one for every deadly combination."""
    for fields in DEADLY:
        yield {**BODY, "temperature": 1, **fields}
    for name, values in VALUES.items():
        for value in values:
            yield {**BODY, "temperature": 1, name: value}


def some_values(numbers: random.Random) -> dict[str, Any]:
    """A request with several random values."""
    names = numbers.sample(list(VALUES), numbers.randrange(1, 6))
    return {**BODY, **{name: numbers.choice(VALUES[name]) for name in names}}
